package daemon

import (
	"fmt"
	"iter"
	"net/netip"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/vishvananda/netlink"
)

// settings are the settings of the UDP path in the file.
type settings struct {
	socket  string
	entries []entry
}

// entry is one lease of the file.
type entry struct {
	offer                  broker.Offer // without Allow: names mean something only on a certain machine
	delay                  time.Duration
	rate                   uint64
	users, groups, cgroups []string
}

// parsed are the settings of files, with their positions. Positions keep the files' text in memory, so they are not
// part of the settings.
type parsed struct {
	settings
	faults *config.Faults
	marks  []marks // marks of entries
}

type marks struct {
	iface         config.Mark
	users, groups []config.Mark
}

// build makes the settings, and checks their meaning.
func build(d *document, read *config.Contents) any {
	b := &builder{read: read, parsed: &parsed{faults: &read.Faults}, names: map[string]config.Mark{}, addresses: map[string]taken{}, modes: map[string]taken{}, polls: map[string]taken{}}
	b.parsed.socket = d.Socket.Value
	if !d.UDP.Set && !d.Bad && !read.Unparsed {
		read.Faults.Errorf(d.Socket.Mark, "add udp, or remove this key", "it has no effect without the key \"udp\"")
	}
	for i := range d.UDP.Items {
		b.entry(&d.UDP.Items[i])
	}
	read.Claims(b.claims())
	return b.parsed
}

// taken is a claim by an earlier entry.
type taken struct {
	by   string
	mark config.Mark
	mode string // or another setting that entries of an interface share
}

// builder holds the settings in which entries have to agree.
type builder struct {
	read      *config.Contents
	parsed    *parsed
	names     map[string]config.Mark
	addresses map[string]taken // by interface, address and port
	modes     map[string]taken // by interface
	polls     map[string]taken // by interface: busy_poll
	claimed   []config.Claim
}

func (b *builder) fault(m config.Mark, suggestion, format string, args ...any) {
	if !m.Bad {
		b.read.Faults.Errorf(m, suggestion, format, args...)
	}
}

func (b *builder) entry(e *leaseEntry) {
	name, iface := e.Name.Value, e.Interface.Value
	if earlier, double := b.names[name]; double && name != "" {
		b.fault(e.Name.Mark, "give one of them another name", "lease %q is in the list twice, first at %s", name, earlier.At)
	}
	b.names[name] = e.Name.Mark
	if strings.ContainsAny(iface, "/:") || iface == "." || iface == ".." {
		b.fault(e.Interface.Mark, "", "%q cannot be an interface's name", iface)
		iface = ""
	}
	made := entry{
		offer: broker.Offer{Name: name, Interface: iface, Queues: b.queues(e), Addresses: b.pairs(e), Mode: xsk.Mode(e.Mode.Value),
			RingSize: xsk.RingSize(e.MaxQueueDelay.Value, float64(e.ExpectedRate.Value)), Transmit: e.TX.Value, Stamped: e.Timestamps.Value, Kill: e.Kill.Value},
		delay: e.MaxQueueDelay.Value, rate: e.ExpectedRate.Value,
	}
	made.offer.CPUs, made.offer.BusyPoll = b.cpus(e, made.offer.Queues), e.BusyPoll.Value
	made.offer.Drop, made.offer.Wait = e.OnNoSocket.Value == "drop", proto.Wait(e.Wait.Value)
	b.ring(e)
	b.mode(e)
	b.poll(e)
	m := marks{iface: e.Interface.Mark}
	made.users, m.users = accounts(e.Allow.User)
	made.groups, m.groups = accounts(e.Allow.Group)
	for _, c := range e.Allow.Cgroup.Items {
		switch {
		case !strings.HasPrefix(c.Value, "/"):
			b.fault(c.Mark, "write it as in /proc/PID/cgroup: /"+c.Value, "cgroup %q does not begin with /", c.Value)
		case len(c.Value) > 1 && strings.HasSuffix(c.Value, "/"):
			b.fault(c.Mark, "write "+strings.TrimRight(c.Value, "/"), "cgroup %q ends with /", c.Value)
		}
		made.cgroups = append(made.cgroups, c.Value)
	}
	if a := &e.Allow; a.Set && !a.Bad && !a.User.Set && !a.Group.Set && !a.Cgroup.Set {
		b.fault(a.Mark, "write for example allow: {user: feed}", "allow is empty, so no program could have the lease")
	}
	b.parsed.entries, b.parsed.marks = append(b.parsed.entries, made), append(b.parsed.marks, m)
	// The balancer may have the interface as well (internal/kernel/guest.go), so the words differ from the words of its
	// claim.
	b.claimed = append(b.claimed, config.Claim{Of: "udp interface " + iface, As: "the UDP path's", Mark: e.Interface.Mark})
}

func accounts(list config.Many[account]) (names []string, where []config.Mark) {
	for _, a := range list.Items {
		names, where = append(names, a.Value), append(where, a.Mark)
	}
	return names, where
}

// queues returns the numbers of an entry's queues; nil: all.
func (b *builder) queues(e *leaseEntry) (numbers []int) {
	for _, q := range e.Queues.Items {
		switch {
		case q.All && len(e.Queues.Items) > 1:
			b.fault(q.Mark, "write queues: all", "queues are all, or numbers")
		case q.All:
		case slices.Contains(numbers, q.Number):
			b.fault(q.Mark, "remove one of them", "queue %d is in the list twice", q.Number)
		default:
			numbers = append(numbers, q.Number)
		}
	}
	return numbers
}

// pairs combines the addresses with the ports.
func (b *builder) pairs(e *leaseEntry) (all []netip.AddrPort) {
	if n := len(e.Address.Items) * len(e.Port.Items); n > proto.AddressesMax {
		b.fault(e.Port.Mark, "split it into several entries", "this makes %d combinations of address and port, and an entry has up to %d", n, proto.AddressesMax)
		return nil
	}
	for _, address := range e.Address.Items {
		for _, port := range e.Port.Items {
			pair := netip.AddrPortFrom(address.Value, uint16(port.Value))
			key := e.Interface.Value + " " + pair.String()
			if earlier, double := b.addresses[key]; double {
				b.fault(port.Mark, "a datagram can belong to one lease only: give the leases different ports or addresses", "%s is also in lease %q, at %s", pair, earlier.by, earlier.mark.At)
				continue
			}
			b.addresses[key] = taken{by: e.Name.Value, mark: port.Mark}
			all = append(all, pair)
			b.claimed = append(b.claimed, config.Claim{Of: "udp " + address.Value.String(), Ports: value.PortRange{First: pair.Port(), Last: pair.Port()},
				Text: "udp " + pair.String(), As: fmt.Sprintf("in lease %q", e.Name.Value), Mark: port.Mark,
				Why: "a datagram can belong to one of them only", Instead: "give one of them another port or address"})
		}
	}
	return all
}

// ring reports a delay for which the ring cannot have the right size.
func (b *builder) ring(e *leaseEntry) {
	if e.MaxQueueDelay.Bad || e.ExpectedRate.Bad {
		return
	}
	wanted := e.MaxQueueDelay.Value.Seconds() * float64(e.ExpectedRate.Value)
	m := e.MaxQueueDelay.Mark
	if !m.Set {
		m = e.ExpectedRate.Mark
	}
	switch {
	case wanted < xsk.RingSizeMin:
		b.read.Faults.Warnf(m, "", "a ring has room for at least %d datagrams, which take %s at %s: longer than %s",
			xsk.RingSizeMin, lasts(xsk.RingSizeMin, e.ExpectedRate.Value), rateText(e.ExpectedRate.Value), value.DurationText(e.MaxQueueDelay.Value))
	case wanted >= 2*xsk.RingSizeMax:
		b.read.Faults.Warnf(m, "", "a ring has room for at most %d datagrams, which take %s at %s",
			xsk.RingSizeMax, lasts(xsk.RingSizeMax, e.ExpectedRate.Value), rateText(e.ExpectedRate.Value))
	}
}

func lasts(datagrams, perSecond uint64) string {
	return value.DurationText(time.Duration(float64(datagrams) / float64(perSecond) * float64(time.Second)).Round(time.Microsecond))
}

func rateText(perSecond uint64) string {
	switch {
	case perSecond%1_000_000 == 0:
		return strconv.FormatUint(perSecond/1_000_000, 10) + "M/s"
	case perSecond%1000 == 0:
		return strconv.FormatUint(perSecond/1000, 10) + "k/s"
	}
	return strconv.FormatUint(perSecond, 10) + "/s"
}

// mode requires that all entries of an interface ask for generic mode, or none, because the interface has one program.
func (b *builder) mode(e *leaseEntry) {
	mode, iface := e.Mode.Value, e.Interface.Value
	m := e.Mode.Mark
	if !m.Set {
		m = e.Interface.Mark
	}
	earlier, known := b.modes[iface]
	if known && (earlier.mode == "generic") != (mode == "generic") {
		b.fault(m, "give all leases of the interface mode generic, or none", "mode %s of lease %q on interface %s does not go with mode %s of lease %q, at %s: an interface has one program",
			mode, e.Name.Value, iface, earlier.mode, earlier.by, earlier.mark.At)
	} else if !known && iface != "" {
		b.modes[iface] = taken{by: e.Name.Value, mark: m, mode: mode}
	}
}

// cpus returns the CPUs of the queues; nil: any.
func (b *builder) cpus(e *leaseEntry, queues []int) (numbers []int) {
	for i, c := range e.CPU.Items {
		if queues != nil && i >= len(queues) {
			b.fault(c.Mark, "name one CPU for each queue, or one for all", "there are %d CPUs for %s", len(e.CPU.Items), value.Counted(len(queues), "queue"))
			break
		}
		numbers = append(numbers, int(c.Value))
	}
	return numbers
}

// poll requires that the entries of an interface agree on the time for which its interrupts are off.
func (b *builder) poll(e *leaseEntry) {
	if !e.BusyPoll.Set || e.BusyPoll.Bad {
		return
	}
	text, iface := value.DurationText(e.BusyPoll.Value), e.Interface.Value
	if e.Mode.Value == "generic" {
		b.fault(e.BusyPoll.Mark, "remove busy_poll, or use another mode", "mode generic has no queue of the driver that the program could poll")
	}
	if earlier, known := b.polls[iface]; known && earlier.mode != text {
		b.fault(e.BusyPoll.Mark, "give them the same time", "busy_poll %s of lease %q on interface %s does not go with %s of lease %q, at %s: the time is a setting of the interface", text, e.Name.Value, iface, earlier.mode, earlier.by, earlier.mark.At)
	} else if !known {
		b.polls[iface] = taken{by: e.Name.Value, mark: e.BusyPoll.Mark, mode: text}
	}
}

// claims returns the claims of interfaces, and of addresses and ports.
func (b *builder) claims() iter.Seq[config.Claim] { return slices.Values(b.claimed) }

// checkHost reports interfaces, users and groups that this machine does not have.
func (p *parsed) checkHost(how node.HostCheck) {
	severity := config.SeverityWarning
	if how.Strict {
		severity = config.SeverityError
	}
	for i, e := range p.entries {
		if _, err := netlink.LinkByName(e.offer.Interface); err != nil && e.offer.Interface != "" {
			p.faults.Add(severity, p.marks[i].iface, fmt.Sprintf("shunt cannot use this machine's interface %s: %v", e.offer.Interface, err), "`ip link` lists the interfaces; the entry is tried again until there is one of this name")
		}
		for j, name := range e.users {
			if _, err := userID(name); err != nil {
				p.faults.Add(severity, p.marks[i].users[j], fmt.Sprintf("this machine has no user %q, so the entry allows no process for it", name), "create it with `useradd --system "+name+"`")
			}
		}
		for j, name := range e.groups {
			if _, err := groupID(name); err != nil {
				p.faults.Add(severity, p.marks[i].groups[j], fmt.Sprintf("this machine has no group %q, so the entry allows no process for it", name), "create it with `groupadd --system "+name+"`")
			}
		}
	}
}

func userID(name string) (uint32, error) {
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(n), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(n), err
}

func groupID(name string) (uint32, error) {
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(n), nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(g.Gid, 10, 32)
	return uint32(n), err
}

// resolve returns the offer with rules for the names that this machine has, and lists the missing names.
func (e *entry) resolve() (offer broker.Offer, missing []string) {
	offer = e.offer
	users, groups, cgroups := []*uint32{nil}, []*uint32{nil}, []string{""}
	if e.users != nil {
		users = nil
		for _, name := range e.users {
			if id, err := userID(name); err == nil {
				users = append(users, &id)
			} else {
				missing = append(missing, "user "+name)
			}
		}
	}
	if e.groups != nil {
		groups = nil
		for _, name := range e.groups {
			if id, err := groupID(name); err == nil {
				groups = append(groups, &id)
			} else {
				missing = append(missing, "group "+name)
			}
		}
	}
	if e.cgroups != nil {
		cgroups = e.cgroups
	}
	for _, u := range users {
		for _, g := range groups {
			for _, c := range cgroups {
				offer.Allow = append(offer.Allow, broker.Rule{User: u, Group: g, Cgroup: c})
			}
		}
	}
	return offer, missing
}

// list returns all settings with their values.
func (s *settings) list() []value.Setting {
	all := []value.Setting{{Key: "udp_socket", Value: s.socket}}
	for i := range s.entries {
		all = append(all, value.Setting{Key: "udp " + s.entries[i].offer.Name, Value: s.entries[i].text()})
	}
	return all
}

func (e *entry) text() string {
	o := &e.offer
	queues := "all"
	if o.Queues != nil {
		queues = strings.Trim(strings.ReplaceAll(fmt.Sprint(o.Queues), " ", ","), "[]")
	}
	var addresses []string
	for _, a := range o.Addresses {
		addresses = append(addresses, a.String())
	}
	parts := []string{"interface " + o.Interface, "queues " + queues, strings.Join(addresses, " "), "mode " + string(o.Mode),
		fmt.Sprintf("delay %s at %s", value.DurationText(e.delay), rateText(e.rate))}
	if o.Transmit {
		parts = append(parts, "tx")
	}
	if o.Stamped {
		parts = append(parts, "timestamps")
	}
	if len(o.CPUs) > 0 {
		parts = append(parts, "on CPUs "+strings.Trim(strings.ReplaceAll(fmt.Sprint(o.CPUs), " ", ","), "[]"))
	}
	if o.BusyPoll > 0 {
		parts = append(parts, "busy polling "+value.DurationText(o.BusyPoll))
	}
	if o.Wait != "" {
		parts = append(parts, "waiting: "+string(o.Wait))
	}
	if o.Drop {
		parts = append(parts, "dropping without a socket")
	}
	if o.Kill {
		parts = append(parts, "kill")
	}
	for _, who := range []struct {
		what  string
		names []string
	}{{"users", e.users}, {"groups", e.groups}, {"cgroups", e.cgroups}} {
		if len(who.names) > 0 {
			parts = append(parts, "for "+who.what+" "+strings.Join(who.names, " "))
		}
	}
	return strings.Join(parts, ", ")
}

// describe summarises settings without faults, for `shunt check`.
func (s *settings) describe() (counts string, lines []string) {
	interfaces := map[string]bool{}
	for _, e := range s.entries {
		interfaces[e.offer.Interface] = true
		lines = append(lines, fmt.Sprintf("UDP lease %s: rings for %s each, which last at most %s at %s.", e.offer.Name,
			value.Counted(int(e.offer.RingSize), "datagram"), lasts(uint64(e.offer.RingSize), e.rate), rateText(e.rate)))
	}
	return fmt.Sprintf("%s on %s", value.Counted(len(s.entries), "UDP lease"), value.Counted(len(interfaces), "interface")), lines
}
