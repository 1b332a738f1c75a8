package file

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// HostInterface is a network interface of this machine.
type HostInterface struct {
	Name     string
	Prefixes []netip.Prefix // its addresses, with the length of their network
	Below    string         // of a macvlan: the interface that its frames come by
	MAC      net.HardwareAddr
	MTU      int // bytes
}

// Route describes how packets to an address leave the machine.
type Route struct {
	Interface string // its name
	OnLink    bool   // there is no gateway in between
	Err       error  // why there is none
}

// Host answers questions about this machine. Its methods read and change nothing.
type Host interface {
	// Interfaces lists the machine's interfaces.
	Interfaces() ([]HostInterface, error)
	// Routes returns how packets to each of the addresses leave the machine.
	Routes([]netip.Addr) map[netip.Addr]Route
	// Occupant names the XDP program that keeps shunt's program off an interface, and the command that detaches
	// it; both are empty if there is no other program. Only the command is empty if the owner cannot be found
	// out.
	Occupant(iface string) (whose, takeOff string, err error)
	// Authorities returns the reason why a file cannot be read as certificate authorities; nil: it can.
	Authorities(path string) error
	// Program returns the reason why a file cannot be run; nil: it can.
	Program(path string) error
	// Release is the kernel's, as in 6.12.117-amd64.
	Release() string
}

// need is a file that checks use.
type need struct {
	use  func(h Host, path string) error // Host.Authorities or Host.Program
	path string
	config.Mark
}

// CheckHost adds the faults that only this machine knows of to Faults: interfaces that
// do not exist or have another XDP program, files of health checks that cannot be used, backends behind an interface that is not listed, clients that
// nat-destination cannot serve, backends that dsr-l2 cannot reach, and with XDP alone backends on
// this machine. With strict, as in check --host, the first four and the last are errors; else all
// are warnings, for the file may be meant for another machine. Only with strict there is a warning
// that this machine cannot be a client with XDP alone. Backends of which there is the same to say are
// one fault, at the first of them: 60,000 behind a missing interface lack one interface.
func (p *Parsed) CheckHost(host Host, strict bool) {
	severity := config.SeverityWarning
	if strict {
		severity = config.SeverityError
	}
	h := &hostCheck{Parsed: p, host: host, severity: severity, near: map[netip.Prefix]bool{}}
	for _, n := range p.needs {
		if err := n.use(host, n.path); err != nil {
			p.faults.Add(severity, n.Mark, fmt.Sprintf("every check fails on this machine: %v", err), "put the file there, or name another one")
		}
	}
	interfaces, err := host.Interfaces()
	if err != nil {
		p.faults.Add(severity, p.list, fmt.Sprintf("cannot compare with this machine's interfaces: %v", err), "")
	} else {
		h.own, h.ownNames = interfaces, ownNames(interfaces)
		h.interfaces()
		h.uppers(strict)
		if strict {
			h.ownClients()
		}
		h.routes = host.Routes(h.elsewhere())
		for i := range p.Config.Services {
			h.service(&p.Config.Services[i], p.backends[i])
		}
		h.tellGroups()
		h.decapsulates(strict)
	}
	p.Faults = p.faults.Sorted()
}

type hostCheck struct {
	*Parsed
	host     Host
	severity config.Severity
	own      []HostInterface
	ownNames map[netip.Addr]string // of the interface that has the address
	routes   map[netip.Addr]Route
	served   map[netip.Addr]bool   // VIPs, once they were asked for
	same     []group               // few: an interface each, and a reason each
	serves   bool                  // this machine is a backend of a service with direct return
	near     map[netip.Prefix]bool // networks whose clients nat-destination cannot serve, as said
}

// alike is a remark about backends: the words before and after their addresses, for one backend and for
// several.
type alike struct{ before, one, more string }

// group is a set of backends with the same remark.
type group struct {
	alike
	severity   config.Severity
	first      config.Mark
	Suggestion string
	address    netip.Addr // of the first
	known      map[netip.Addr]bool
}

// say records a remark about a backend, for tellGroups.
func (h *hostCheck) say(what alike, a netip.Addr, m config.Mark, severity config.Severity, suggestion string) {
	i := slices.IndexFunc(h.same, func(g group) bool { return g.alike == what })
	if i < 0 {
		i = len(h.same)
		h.same = append(h.same, group{what, severity, m, suggestion, a, map[netip.Addr]bool{}})
	}
	h.same[i].known[a] = true
}

// tellGroups adds a fault for each group.
func (h *hostCheck) tellGroups() {
	for _, g := range h.same {
		text := g.before + g.address.String() + g.one
		if more := len(g.known) - 1; more > 0 {
			text = fmt.Sprintf("%s%s and %d more%s", g.before, g.address, more, g.more)
		}
		h.faults.Add(g.severity, g.first, text, g.Suggestion)
	}
}

func (h *hostCheck) interfaces() {
	names := make([]string, len(h.own))
	for i, own := range h.own {
		names[i] = own.Name
	}
	for i, wanted := range h.Config.Interfaces {
		if wanted.IsPattern() { // they come and go
			continue
		}
		if slices.Contains(names, wanted.Name) {
			if wanted.Attach != model.AttachTC { // where programs run one after the other
				h.occupant(wanted.Name, h.Parsed.interfaces[i])
			}
			h.longFrames(wanted, h.Parsed.interfaces[i])
			continue
		}
		suggestion := "this machine has " + config.Join(names, "and")
		if near := config.Nearest(wanted.Name, names); near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		h.faults.Add(h.severity, h.Parsed.interfaces[i], fmt.Sprintf("interface %q does not exist on this machine", wanted.Name), suggestion)
	}
}

// onePageMTU is the largest MTU whose frames certainly fit into one page in generic mode, with the headroom and
// the kernel's data after them.
const onePageMTU = 3500

// longFrames checks that generic mode does not make Linux 6.12 lose pages: it does (6.12.117) when a program
// shortens a frame of several pages.
func (h *hostCheck) longFrames(wanted model.Interface, m config.Mark) {
	i := slices.IndexFunc(h.own, func(own HostInterface) bool { return own.Name == wanted.Name })
	if h.own[i].MTU <= onePageMTU || !strings.HasPrefix(h.host.Release(), "6.12.") {
		return
	}
	mode := ""
	switch wanted.Attach {
	case model.AttachGeneric:
	case model.AttachAuto:
		mode = ", which attach: auto becomes where the driver has no native mode"
	default:
		return
	}
	h.faults.Warnf(m, fmt.Sprintf("use native mode or tc, or an MTU of at most %d", onePageMTU),
		"in generic mode%s, Linux %s logs \"Bad page state\" and loses a page when shunt shortens a long frame, and interface %q has an MTU of %d", mode, h.host.Release(), wanted.Name, h.own[i].MTU)
}

// occupant checks that no other XDP program is on an interface.
func (h *hostCheck) occupant(name string, m config.Mark) {
	whose, takeOff, err := h.host.Occupant(name)
	switch {
	case err != nil:
		h.faults.Add(config.SeverityWarning, m, fmt.Sprintf("cannot see whether interface %q has another XDP program: %v", name, err), "")
	case whose != "" && takeOff == "":
		h.faults.Add(config.SeverityWarning, m, fmt.Sprintf("interface %q has an XDP program, either shunt's or another one: %s", name, whose), "")
	case whose != "":
		h.faults.Add(h.severity, m, fmt.Sprintf("interface %q has another XDP program, and the kernel runs one per interface, native or generic: %s", name, whose),
			"to replace it: "+takeOff+"; to run both: see `shunt chain --help`")
	}
}

func (h *hostCheck) service(s *model.Service, marks []config.Mark) {
	for i, backend := range s.Backends {
		h.backend(s, backend.Address, marks[i])
		h.source(s, backend.Address, marks[i])
		if _, near := h.network(backend.Address); s.Forwarding == model.ForwardingDSRL2 && !near && !h.routes[backend.Address].OnLink {
			const why = " in no network of this machine: dsr-l2 reaches only backends on the same link"
			h.say(alike{"backend ", " is" + why, " are" + why}, backend.Address, marks[i], config.SeverityWarning, "use forwarding: dsr-ipip")
		}
		if s.Forwarding != model.ForwardingNATDestination {
			continue
		}
		if prefix, near := h.network(backend.Address); near && !h.near[prefix] {
			h.near[prefix] = true
			h.faults.Warnf(marks[i], "use forwarding: nat for this service", "the backend answers clients in %s, its own network, directly and not through shunt: with nat-destination their connections fail", prefix)
		}
	}
}

// source checks that packets to a backend have a source address: with NAT the one that the kernel would choose,
// in tunnels' headers one of the interface or of the host.
func (h *hostCheck) source(s *model.Service, a netip.Addr, m config.Mark) {
	kind, configured, key := "IPv4", h.Config.Encapsulation.Sources4.IsValid(), "encapsulation.source"
	if a.Is6() {
		kind, configured = "IPv6", h.Config.Encapsulation.Sources6.IsValid()
	}
	if s.Forwarding == model.ForwardingNAT {
		key = "snat.addresses"
		configured = slices.ContainsFunc(h.Config.SNAT.Addresses, func(source netip.Addr) bool { return source.Is4() == a.Is4() })
	}
	if _, own := h.ownNames[a]; own || configured || h.sends(a.Is4(), s.Forwarding.Encapsulates()) || s.Forwarding != model.ForwardingNAT && !s.Forwarding.Encapsulates() {
		return
	}
	effect := fmt.Sprintf(": this machine has no %s address to send from", kind)
	h.say(alike{"no packet reaches backend ", effect, effect}, a, m, h.severity,
		fmt.Sprintf("give this machine one (on lo, if its links are to have none), or write it under %s", key))
}

// sends reports whether this machine has an address of a family that it can send from to others. Tunnels' headers are
// not sent from a VIP on lo, which other machines have, too.
func (h *hostCheck) sends(is4, encapsulates bool) bool {
	for a, iface := range h.ownNames {
		if a.Is4() == is4 && a.IsGlobalUnicast() && !(encapsulates && iface == "lo" && h.vips()[a]) {
			return true
		}
	}
	return false
}

// vips are the addresses of the file's services.
func (h *hostCheck) vips() map[netip.Addr]bool {
	if h.served == nil {
		h.served = map[netip.Addr]bool{}
		for _, s := range h.Config.Services {
			for _, f := range s.Frontends {
				h.served[f.Address] = true
			}
		}
	}
	return h.served
}

// backend checks the route to one backend.
func (h *hostCheck) backend(s *model.Service, a netip.Addr, m config.Mark) {
	if name, own := h.ownNames[a]; own {
		h.ownBackend(s, a, name, m)
		return
	}
	r := h.routes[a]
	if r.Err != nil {
		why := ": " + r.Err.Error()
		h.say(alike{"this machine has no route to backend ", why, why}, a, m, h.severity, "")
		return
	}
	if !slices.ContainsFunc(h.Config.Interfaces, func(i model.Interface) bool { return i.Means(r.Interface) }) {
		effect := "its answers would not pass shunt"
		if s.Forwarding.Direct() {
			effect = "shunt does not send there"
		}
		where := fmt.Sprintf(" behind %s, which is not under interfaces: %s", r.Interface, effect)
		h.say(alike{"backend ", " is" + where, " are" + where}, a, m, h.severity, fmt.Sprintf("add {name: %s} to interfaces", r.Interface))
	}
}

// ownNames returns the interface of each of this machine's addresses, the first that has it.
func ownNames(interfaces []HostInterface) map[netip.Addr]string {
	names := map[netip.Addr]string{}
	for _, own := range interfaces {
		for _, prefix := range own.Prefixes {
			if _, known := names[prefix.Addr()]; !known {
				names[prefix.Addr()] = own.Name
			}
		}
	}
	return names
}

// elsewhere returns the addresses of all backends that are not this machine, each once.
func (h *hostCheck) elsewhere() (all []netip.Addr) {
	known := map[netip.Addr]bool{}
	for _, s := range h.Config.Services {
		for _, b := range s.Backends {
			if known[b.Address] {
				continue
			}
			known[b.Address] = true
			if _, own := h.ownNames[b.Address]; !own {
				all = append(all, b.Address)
			}
		}
	}
	return all
}

func (h *hostCheck) atTC() bool {
	return slices.ContainsFunc(h.Config.Interfaces, func(i model.Interface) bool { return i.Attach == model.AttachTC })
}

// ownBackend checks a backend that is this machine itself. With direct return its answers need not pass shunt.
func (h *hostCheck) ownBackend(s *model.Service, a netip.Addr, iface string, m config.Mark) {
	if s.Forwarding.Direct() {
		h.ownServer(s, a, m)
		return
	}
	if h.atTC() {
		return
	}
	suggestion := "set attach: tc for the interfaces that clients use, or use the address of another machine"
	if len(h.Config.Decapsulation.From) > 0 {
		suggestion = "use forwarding: dsr-ipip for the service, or the address of another machine"
	}
	h.faults.Add(h.severity, m, fmt.Sprintf("%s is this machine's own address, on %s: its answers do not pass XDP, so this backend gets no traffic", a, iface), suggestion)
}

// ownServer checks a service with direct return that has this machine as a backend.
func (h *hostCheck) ownServer(s *model.Service, a netip.Addr, m config.Mark) {
	h.serves = true
	if len(h.Config.Decapsulation.From) == 0 {
		if !h.atTC() {
			h.faults.Add(h.severity, m, fmt.Sprintf("%s is this machine's own address, and the file does not say that this machine decapsulates: this backend gets no traffic while the service has others", a),
				"add decapsulation: {from: [the addresses of the other balancers]} at the top of the file, or set attach: tc")
		}
		return
	}
	if s.Announce == model.AnnounceL2 {
		h.faults.Add(h.severity, m, fmt.Sprintf("%s is this machine's own address, so the VIPs of service %q are on its lo, and shunt does not announce them here", a, s.Name),
			"write announce: none for the service, and let a router route the VIPs to all balancers (docs/guide/ecmp.md)")
	}
}

// decapsulates checks the key decapsulation.
func (h *hostCheck) decapsulates(strict bool) {
	from := h.Config.Decapsulation.From
	switch {
	case len(from) == 0:
	case h.serves && h.atTC():
		h.faults.Add(h.severity, h.decapsulation, "decapsulation is at XDP, and an interface has attach: tc", "use attach: native, generic or auto for all interfaces")
	case !h.serves && strict:
		h.faults.Warnf(h.decapsulation, "ignore this if this machine should only balance", "no backend of a service with dsr-* has an address of this machine, so decapsulation has no effect here")
	case h.serves:
		h.strangers(from)
	}
}

// strangers warns of balancers that are not permitted: in this layout each other backend is a balancer.
func (h *hostCheck) strangers(from []netip.Prefix) {
	const why = " in decapsulation.from: if such a machine balances, too, its packets to this one are dropped"
	known := func(a netip.Addr) bool {
		return slices.ContainsFunc(from, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	h.same = nil
	for i, s := range h.Config.Services {
		for j, b := range s.Backends {
			if _, own := h.ownNames[b.Address]; !own && s.Forwarding.Encapsulates() && !known(b.Address) {
				h.say(alike{"backend ", " is not" + why, " are not" + why}, b.Address, h.backends[i][j], config.SeverityWarning, "add its address, or its network, to decapsulation.from")
			}
		}
	}
	h.tellGroups()
}

// ownClients warns that XDP does not see packets that this machine itself sends to its VIPs.
func (h *hostCheck) ownClients() {
	if h.atTC() || len(h.Config.Interfaces) == 0 {
		return
	}
	h.faults.Warnf(h.Parsed.interfaces[0], "if there are such connections, set attach: tc for the interface that they leave by", "connections from this machine itself to its VIPs do not pass XDP, and are not balanced")
}

// network returns the machine's network that contains the address.
func (h *hostCheck) network(a netip.Addr) (netip.Prefix, bool) {
	for _, own := range h.own {
		for _, prefix := range own.Prefixes {
			if !prefix.IsSingleIP() && prefix.Contains(a) {
				return prefix.Masked(), true
			}
		}
	}
	return netip.Prefix{}, false
}
