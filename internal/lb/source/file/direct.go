package file

import (
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// settleLeast is a time that pauses of living connections often exceed: TCP's own
// retransmissions alone are up to 60 s apart (RFC 6298, 2.5).
const settleLeast = time.Minute

// serving returns the backends that frontends of one family use: the backends of the family. With direct return,
// it returns all backends if all are of the other family.
func serving(s *model.Service, is4 bool) func(netip.Addr) bool {
	own := slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Address.Is4() == is4 })
	if s.Forwarding.Direct() && !own {
		return func(netip.Addr) bool { return true }
	}
	return func(a netip.Addr) bool { return a.Is4() == is4 }
}

// directPorts refuses ports of backends that direct return cannot reach, because it forwards the client's
// packet unchanged.
func (b *builder) directPorts(entry *serviceEntry, s *model.Service, usable []config.Ports) {
	if !s.Forwarding.Direct() || !entry.Port.Set || entry.Port.Bad {
		return
	}
	for i := range entry.Backends.Items {
		port := &entry.Backends.Items[i].Port
		switch {
		case !port.Set || port.Bad:
		case len(usable) != 1 || !usable[0].Value.Exact():
			b.parsed.faults.Errorf(port.Mark, "remove it", "with %s packets keep their destination port, and service %q has several", s.Forwarding, s.Name)
		case port.Value != uint64(usable[0].Value.First):
			b.parsed.faults.Errorf(port.Mark, "remove it, or use forwarding: nat", "with %s packets keep their destination port: %d differs from port %s of service %q",
				s.Forwarding, port.Value, usable[0].Value, s.Name)
		}
	}
}

// remembering sets the fields that decide which flows are remembered.
func (b *builder) remembering(entry *serviceEntry, s *model.Service) {
	faults := b.parsed.faults
	affinity := entry.Affinity.Value == "client-ip"
	s.Tracking = model.Tracking(entry.Tracking.Value)
	if affinity {
		s.AffinityTimeout = entry.AffinityTimeout.Value
	}
	if t := &entry.AffinityTimeout; t.Set && !t.Bad {
		switch {
		case entry.Affinity.Bad:
		case !affinity:
			faults.Errorf(t.Mark, "add affinity: client-ip, or remove it", "affinity_timeout has no meaning without affinity")
		case s.Tracking == model.TrackingNone:
			faults.Warnf(t.Mark, "remove it, or use another tracking", "with tracking: none no client is remembered: affinity_timeout has no effect")
		}
	}
	if t := &entry.Tracking; t.Set && !t.Bad && !s.Forwarding.Direct() && !affinity && !entry.Affinity.Bad {
		faults.Warnf(t.Mark, "remove it", "tracking has no meaning under %s without affinity, where every flow is remembered", s.Forwarding)
	}
}

// hashing sets the fields that decide a flow's slot.
func (b *builder) hashing(entry *serviceEntry, s *model.Service) {
	s.Policy.HashAddresses = entry.Hash.Value == "addresses"
	if s.Policy.HashAddresses && s.AffinityTimeout > 0 {
		b.parsed.faults.Errorf(entry.Hash.Mark, "remove one of the two", "with affinity the client's address alone decides a flow's slot: hash: addresses contradicts that")
	}
}

// sharedHashes warns if a VIP's protocol has other services than one that hashes addresses: the service of a
// fragment without ports is then known only after its first fragment.
func (b *builder) sharedHashes() {
	type endpoint struct {
		address  netip.Addr
		protocol model.Protocol
	}
	users := map[endpoint][]*serviceEntry{}
	for _, f := range b.frontends {
		at := endpoint{f.Address, f.Protocol}
		// A service's frontends are adjacent.
		if n := len(users[at]); n == 0 || users[at][n-1] != f.service {
			users[at] = append(users[at], f.service)
		}
	}
	said := map[*serviceEntry]bool{}
	for _, f := range b.frontends {
		others := users[endpoint{f.Address, f.Protocol}]
		if f.service.Hash.Value != "addresses" || len(others) == 1 || said[f.service] {
			continue
		}
		said[f.service] = true
		other := others[0]
		if other == f.service {
			other = others[1]
		}
		b.parsed.faults.Warnf(f.service.Hash.Mark, "give this service an address of its own", "service %q has %s over %s too: fragments to this address are dropped if the first fragment is missing",
			other.Name.Value, f.Address, f.Protocol)
	}
}

func (p *Parsed) buildEncapsulation(e *encapsulationEntry, b *builder) {
	p.Config.Encapsulation.GUEPort = uint16(e.GUEPort.Value)
	used := slices.ContainsFunc(p.Config.Services, func(s model.Service) bool { return s.Forwarding.Encapsulates() })
	first := map[bool]config.Mark{} // by whether it is IPv4
	for i := range e.Source.Items {
		source := &e.Source.Items[i]
		is4 := source.Value.Addr().Is4()
		if earlier, double := first[is4]; double {
			p.faults.Errorf(source.Mark, "give one address or one prefix per family", "there is a source of this family already, at %s", earlier.At)
			continue
		}
		first[is4] = source.Mark
		if is4 {
			p.Config.Encapsulation.Sources4 = source.Value
		} else {
			p.Config.Encapsulation.Sources6 = source.Value
		}
		if used {
			p.checkSource(source, b)
		}
	}
}

// checkSource refuses outer source addresses that a backend has itself: its kernel drops packets that come from
// its own address (accept_local of the kernel's ip-sysctl), and errors about the outer packet would go to the
// backend. It reports one of each kind.
func (p *Parsed) checkSource(source *config.Network, b *builder) {
	const suggestion = "use addresses that no other machine has"
	for _, h := range b.hosts {
		if source.Value.Contains(h.Value) {
			p.faults.Errorf(source.Mark, suggestion, "%s is the address of a backend, at %s", h.Value, h.At)
			break
		}
	}
	for _, f := range b.frontends {
		if source.Value.Contains(f.Address) {
			p.faults.Errorf(source.Mark, suggestion, "%s is an address of service %q, at %s, and its backends have this address, too",
				f.Address, f.service.Name.Value, b.vips[f.Address].At)
			break
		}
	}
}

func (p *Parsed) buildDecapsulation(d *decapsulationEntry) {
	for _, from := range d.From.Items {
		p.Config.Decapsulation.From = append(p.Config.Decapsulation.From, from.Value)
	}
	p.decapsulation = d.Mark
}
