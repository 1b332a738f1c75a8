package file

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// establishedLeast is the minimum of RFC 5382 REQ-5 for idle established connections.
	establishedLeast = 2*time.Hour + 4*time.Minute
	// halfClosedLeast is its minimum for connections that are neither open nor closed.
	halfClosedLeast = 4 * time.Minute
	// udpLeast is the minimum of RFC 4787 REQ-5 for idle UDP flows.
	udpLeast = 2 * time.Minute
)

// build turns the document into the configuration, and checks its meaning.
func (p *Parsed) build(doc *document, read *config.Contents) {
	p.buildInterfaces(doc)
	b := &builder{parsed: p, vips: map[netip.Addr]config.Mark{}, distinct: map[model.BackendAddress]bool{}, named: map[named]uint64{}}
	b.services(doc)
	p.buildTimeouts(&doc.Timeouts)
	p.buildSNAT(&doc.SNAT, b)
	p.buildEncapsulation(&doc.Encapsulation, b)
	p.buildDecapsulation(&doc.Decapsulation)
	p.buildSockets(&doc.Sockets)
	p.Config.StampProbes = doc.StampProbes.Value
	p.buildLimits(doc, b)
	read.Claims(b.claims())
}

// missing reports a list at the top of the file that is absent or empty.
func (p *Parsed) missing(doc *document, list *config.Mark, count int, key, suggestion string) {
	switch {
	case count > 0 || list.Bad || doc.Bad || p.unparsed:
	case list.Set:
		p.faults.Errorf(*list, suggestion, "%s is an empty list", key)
	default:
		p.faults.Errorf(config.Mark{At: doc.At.Whole()}, suggestion, "there is no key %q", key)
	}
}

func (p *Parsed) buildInterfaces(doc *document) {
	p.list = doc.Interfaces.Mark
	p.missing(doc, &doc.Interfaces.Mark, len(doc.Interfaces.Items), "interfaces", "list the interfaces that shunt attaches to, for example interfaces: [{name: eth0}]")
	first := map[string]config.Mark{}
	for i := range doc.Interfaces.Items {
		entry := &doc.Interfaces.Items[i]
		name := entry.Name.Value
		if name == "" {
			continue
		}
		wanted := model.Interface{Name: name, Attach: model.Attach(entry.Attach.Value)}
		if strings.ContainsAny(name, "/:") || name == "." || name == ".." || wanted.IsPattern() && strings.ContainsAny(name, `[]\`) {
			p.faults.Errorf(entry.Name.Mark, "", "%q cannot be an interface's name", name)
			continue
		}
		if wanted.IsPattern() && wanted.Attach != model.AttachTC {
			p.faults.Errorf(entry.Name.Mark, "add attach: tc", "%q is a pattern, which stands for the interfaces of this machine's pods, and these are served at tc alone", name)
			continue
		}
		if earlier, double := first[name]; double {
			p.faults.Errorf(entry.Name.Mark, "remove one of them", "interface %q is listed twice, first at %s", name, earlier.At)
			continue
		}
		first[name] = entry.Name.Mark
		p.Config.Interfaces = append(p.Config.Interfaces, wanted)
		p.interfaces = append(p.interfaces, entry.Name.Mark)
	}
}

// builder holds the data that services have to agree on.
type builder struct {
	parsed    *Parsed
	frontends []frontend
	full      bool                       // the frontends are too many, which is said once
	vips      map[netip.Addr]config.Mark // where each was first
	hosts     []config.Address           // of backends
	distinct  map[model.BackendAddress]bool
	named     map[named]uint64 // addresses at most
	slots     uint64           // of all tables together
	filters   uint64           // prefixes of allow_from and deny_from
	halves    uint64           // services of the data plane: one for each family of a service's addresses
	pools     map[string]*pool
}

func (b *builder) services(doc *document) {
	p := b.parsed
	if !p.sources {
		p.missing(doc, &doc.Services.Mark, len(doc.Services.Items), "services", "list the services to balance, for example services: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]")
	}
	b.readPools(doc)
	first := map[string]config.Mark{}
	for i := range doc.Services.Items {
		entry := &doc.Services.Items[i]
		if name := entry.Name.Value; name != "" {
			if earlier, double := first[name]; double {
				p.faults.Errorf(entry.Name.Mark, "give one of them another name", "service %q is in the list twice, first at %s", name, earlier.At)
			} else {
				first[name] = entry.Name.Mark
			}
		}
		b.service(entry, &doc.Defaults)
	}
	b.unusedPools(doc)
	b.overlaps()
	b.sharedHashes()
	for _, h := range b.hosts {
		if vip, is := b.vips[h.Value]; is {
			p.faults.Errorf(h.Mark, "write the server's own address", "%s is also the address of a service, at %s", h.Value, vip.At)
		}
	}
}

// service adds one service to the configuration.
func (b *builder) service(entry *serviceEntry, defaults *defaultsEntry) {
	b.fromPool(entry)
	s := model.Service{
		Name:       entry.Name.Value,
		Pool:       entry.Pool.Value,
		Forwarding: model.Forwarding(either(&entry.Forwarding, &defaults.Forwarding)),
		Announce:   model.Announce(either(&entry.Announce, &defaults.Announce)),
		TableSize:  entry.TableSize.Value,
		ClosesDown: entry.OnDown.Value == "close",
		Policy:     model.Policy{Rejects: entry.OnNoBackend.Value == "reject"},
	}
	addresses := b.addresses(entry)
	protocols := b.protocols(entry)
	usable := b.ports(entry)
	for _, a := range addresses {
		if _, known := b.vips[a.Value]; !known {
			b.vips[a.Value] = a.Mark
		}
	}
	if uint64(len(b.frontends))+uint64(len(addresses))*uint64(len(protocols))*uint64(len(usable)) > frontendsMax {
		if !b.full {
			b.parsed.faults.Errorf(entry.Port.Mark, "use ranges", "this makes more than %d frontends (one for each combination of address, port and protocol)", frontendsMax)
		}
		b.full = true
	} else {
		for _, a := range addresses {
			for _, protocol := range protocols {
				for _, port := range usable {
					f := model.Frontend{Address: a.Value, Ports: port.Value, Protocol: protocol}
					s.Frontends = append(s.Frontends, f)
					b.frontends = append(b.frontends, frontend{f, entry, port.Mark})
				}
			}
		}
	}
	marks := b.backends(entry, &s)
	b.remembering(entry, &s)
	b.hashing(entry, &s)
	if !entry.Forwarding.Bad && (entry.Forwarding.Set || !defaults.Forwarding.Bad) {
		b.directPorts(entry, &s, usable)
		b.families(entry, &s, addresses)
	}
	b.admission(entry, &s, addresses)
	b.segments(entry, &s)
	b.health(entry, &defaults.Health, &s)
	b.weights(entry, &s)
	b.parsed.Config.Services = append(b.parsed.Config.Services, s)
	b.parsed.backends = append(b.parsed.backends, marks)
}

// either returns the service's value, or else the default's.
func either(own, inherited *config.Word) string {
	if own.Value != "" {
		return own.Value
	}
	return inherited.Value
}

// addresses returns a service's VIPs, each once.
func (b *builder) addresses(entry *serviceEntry) []config.Address {
	var kept []config.Address
	first := map[netip.Addr]config.Mark{}
	for _, a := range entry.Address.Items {
		if earlier, double := first[a.Value]; double {
			b.parsed.faults.Errorf(a.Mark, "remove one of them", "address %s is listed twice, first at %s", a.Value, earlier.At)
			continue
		}
		first[a.Value] = a.Mark
		kept = append(kept, a)
	}
	return kept
}

// protocols returns a service's protocols, each once.
func (b *builder) protocols(entry *serviceEntry) []model.Protocol {
	var kept []model.Protocol
	first := map[string]config.Mark{}
	for _, w := range entry.Protocol.Items {
		if earlier, double := first[w.Value]; double {
			b.parsed.faults.Errorf(w.Mark, "remove one of them", "protocol %s is listed twice, first at %s", w.Value, earlier.At)
			continue
		}
		first[w.Value] = w.Mark
		protocol := model.TCP
		if w.Value == model.UDP.String() {
			protocol = model.UDP
		}
		kept = append(kept, protocol)
	}
	return kept
}

// ports returns a service's ports without the ranges that overlap an earlier one.
func (b *builder) ports(entry *serviceEntry) []config.Ports {
	bad := map[int]bool{}
	spans := make([]span, len(entry.Port.Items))
	for i, item := range entry.Port.Items {
		spans[i] = span{item.Value, i}
	}
	overlapping(spans, func(earlier, later int) {
		bad[later] = true
		b.parsed.faults.Errorf(entry.Port.Items[later].Mark, "remove one of them", "port %s overlaps %s, at %s",
			entry.Port.Items[later].Value, entry.Port.Items[earlier].Value, entry.Port.Items[earlier].At)
	})
	var kept []config.Ports
	for i, item := range entry.Port.Items {
		if !bad[i] {
			kept = append(kept, item)
		}
	}
	return kept
}

// backends fills a service's backends, and returns where each was written.
func (b *builder) backends(entry *serviceEntry, s *model.Service) (marks []config.Mark) {
	if entry.Backends.Set && !entry.Backends.Bad && len(entry.Backends.Items) == 0 {
		b.parsed.faults.Errorf(entry.Backends.Mark, "write for example [{address: 10.0.0.2}]", "service %q has no backends", s.Name)
		entry.Backends.Bad = true
	}
	count := len(entry.Backends.Items)
	byAddress, byName := make(map[model.BackendAddress]*config.Mark, count), make(map[string]*config.Mark, count)
	byDNS := map[model.BackendName]*config.Mark{}
	s.Backends, marks = make([]model.Backend, 0, count), make([]config.Mark, 0, count)
	for i := range entry.Backends.Items {
		item := &entry.Backends.Items[i]
		if item.DNS.Set {
			b.backendName(item, s, byDNS)
			continue
		}
		if item.Max.Set {
			b.parsed.faults.Errorf(item.Max.Mark, "remove it", "max has no meaning without dns")
		}
		if !item.Address.Set && !item.Bad {
			b.parsed.faults.Errorf(item.Mark, "add for example address: 10.0.0.2", "the backend has neither address nor dns")
		}
		if !item.Address.Value.IsValid() || item.Port.Bad {
			entry.Backends.Bad = true
			continue
		}
		backend := model.Backend{
			BackendAddress: model.BackendAddress{Address: item.Address.Value, Port: uint16(item.Port.Value)},
			Weight:         uint16(item.Weight.Value),
			Name:           item.Name.Value,
			Backup:         item.Backup.Value,
			CheckAt:        model.BackendAddress{Address: item.Health.Address.Value, Port: uint16(item.Health.Port.Value)},
		}
		same := s.Identity(backend.BackendAddress)
		if earlier, double := byAddress[same]; double {
			b.parsed.faults.Errorf(item.Address.Mark, "remove one of them, and give the other the sum of the weights",
				"backend %s is listed twice, first at %s", backend.BackendAddress, earlier.At)
			continue
		}
		byAddress[same] = &item.Address.Mark
		named := &item.Name.Mark
		if backend.Name == "" {
			backend.Name, named = backend.BackendAddress.String(), &item.Address.Mark
		}
		if earlier, double := byName[backend.Name]; double {
			b.parsed.faults.Errorf(*named, "give one of them another name", "a backend of this service is called %q already, at %s", backend.Name, earlier.At)
		}
		byName[backend.Name] = named
		b.distinct[backend.BackendAddress] = true
		b.hosts = append(b.hosts, item.Address)
		s.Backends = append(s.Backends, backend)
		marks = append(marks, item.Address.Mark)
	}
	return marks
}

// families checks that each frontend has a backend, and each backend a frontend.
func (b *builder) families(entry *serviceEntry, s *model.Service, vips []config.Address) {
	names := map[bool]string{true: "IPv4", false: "IPv6"}
	for _, vip := range vips {
		is4 := vip.Value.Is4()
		serves := serving(s, is4)
		if !slices.ContainsFunc(s.Backends, func(x model.Backend) bool { return serves(x.Address) }) && len(s.Names) == 0 && entry.Backends.Set && !entry.Backends.Bad {
			b.parsed.faults.Errorf(vip.Mark, "add one, or remove this address", "service %q has no %s backend for %s", s.Name, names[is4], vip.Value)
		}
	}
	if !entry.Address.Set || entry.Address.Bad {
		return
	}
	for i := range entry.Backends.Items {
		a := &entry.Backends.Items[i].Address
		if a.Value.IsValid() && !slices.ContainsFunc(vips, func(vip config.Address) bool { return serving(s, vip.Value.Is4())(a.Value) }) {
			b.parsed.faults.Warnf(a.Mark, "", "service %q has no %s address: backend %s gets no traffic", s.Name, names[a.Value.Is4()], a.Value)
		}
	}
}

// weights checks that weights can be told apart in the tables; there is one table for each family that has a
// frontend.
func (b *builder) weights(entry *serviceEntry, s *model.Service) {
	for i := range entry.Backends.Items {
		if entry.Backends.Items[i].Weight.Bad {
			return // the sum is not known
		}
	}
	for _, is4 := range []bool{true, false} {
		if slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address.Is4() == is4 }) {
			b.familyWeights(entry, s, is4)
		}
	}
	if len(s.Backends)+len(s.Names) > 0 && !entry.Backends.Bad && !slices.ContainsFunc(s.Backends, func(x model.Backend) bool { return x.Weight > 0 }) &&
		!slices.ContainsFunc(s.Names, func(x model.BackendName) bool { return x.Weight > 0 }) {
		b.parsed.faults.Warnf(entry.Backends.Mark, "give one of them a weight", "every backend of service %q has weight 0: it takes no new flows", s.Name)
	}
}

func (b *builder) familyWeights(entry *serviceEntry, s *model.Service, is4 bool) {
	var sum uint64
	count := 0
	serves := serving(s, is4)
	b.halves++
	for _, backend := range s.Backends {
		if serves(backend.Address) {
			sum += uint64(backend.Weight)
			count++
		}
	}
	for _, name := range s.Names {
		if s.NamesServe(is4) {
			count += int(name.Max) // at most; their weights are not known to count
		}
	}
	size := uint64(s.TableSize)
	if size == 0 {
		size = uint64(maglev.SizeFor(count))
	}
	b.slots += size
	for i := range entry.Backends.Items {
		item := &entry.Backends.Items[i]
		weight := &item.Weight
		if !item.Address.Value.IsValid() || !serves(item.Address.Value) || weight.Value == 0 || weight.Value*size >= sum {
			continue
		}
		at := weight.Mark
		if !weight.Set {
			at = item.Mark
		}
		b.parsed.faults.Warnf(at, "raise this weight or table_size, or lower the other weights",
			"weight %d of a total of %d is worth less than one of the table's %d slots: the backend may get no flows", weight.Value, sum, size)
	}
}

func (p *Parsed) buildTimeouts(t *timeoutsEntry) {
	p.Config.Timeouts = model.Timeouts{
		TCPEstablished: t.TCPEstablished.Value,
		TCPHandshake:   t.TCPHandshake.Value,
		TCPClosing:     t.TCPClosing.Value,
		TCPHalfClosed:  t.TCPHalfClosed.Value,
		UDP:            t.UDP.Value,
		Settle:         t.Settle.Value,
	}
	if d := &t.Settle; d.Value < settleLeast {
		p.faults.Warnf(d.Mark, "15m is the default", "with dsr-* and affinity, a connection that is idle for longer than %s after a change of the backends may be lost", d.Text)
	}
	if d := &t.TCPEstablished; d.Value < establishedLeast {
		p.faults.Warnf(d.Mark, "2h4m is the default", "RFC 5382 REQ-5 asks for at least 2h4m: connections idle for %s will break", d.Text)
	}
	switch d := &t.TCPHalfClosed; {
	case d.Set && d.Value > t.TCPEstablished.Value:
		p.faults.Errorf(d.Mark, "raise tcp_established, too", "a connection that is closed on one side cannot be kept for longer, %s, than one that is open, %s", d.Text, value.DurationText(t.TCPEstablished.Value))
	case d.Value < halfClosedLeast:
		p.faults.Warnf(d.Mark, "4m is the default", "RFC 5382 REQ-5 asks for at least 4m: an answer that pauses for %s after the client has closed its side will break", d.Text)
	}
	if d := &t.UDP; d.Value < udpLeast {
		p.faults.Warnf(d.Mark, "5m is the default", "RFC 4787 REQ-5 asks for at least 2m: exchanges idle for %s will break", d.Text)
	}
}

func (p *Parsed) buildSockets(s *socketsEntry) {
	p.Config.Sockets.Cgroup = s.Cgroup.Value
	if c := &s.Cgroup; c.Set && !c.Bad && !filepath.IsAbs(c.Value) {
		p.faults.Errorf(c.Mark, "write the whole path, for example /sys/fs/cgroup", "cgroup %q is not an absolute path", c.Value)
	}
}

func (p *Parsed) buildSNAT(s *snatEntry, b *builder) {
	p.Config.SNAT.Ports = s.Ports.Value
	first := map[netip.Addr]config.Mark{}
	for _, a := range s.Addresses.Items {
		if earlier, double := first[a.Value]; double {
			p.faults.Errorf(a.Mark, "remove one of them", "address %s is listed twice, first at %s", a.Value, earlier.At)
			continue
		}
		first[a.Value] = a.Mark
		p.Config.SNAT.Addresses = append(p.Config.SNAT.Addresses, a.Value)
	}
	for _, h := range b.hosts {
		if own, is := first[h.Value]; is {
			p.faults.Errorf(h.Mark, "write the server's own address", "%s is also a source address of shunt, at %s", h.Value, own.At)
		}
	}
}
