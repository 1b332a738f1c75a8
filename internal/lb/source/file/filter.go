package file

import (
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// listed is a prefix of one of a service's lists.
type listed struct {
	mark  config.Mark
	allow bool
}

func listName(allow bool) string {
	if allow {
		return "allow_from"
	}
	return "deny_from"
}

// admission sets the fields that decide which clients may use the service, and how often.
func (b *builder) admission(entry *serviceEntry, s *model.Service, vips []config.Address) {
	b.lists(entry, s, vips)
	most := &entry.MaxFlows
	s.Policy.FlowsMax = uint32(most.Value)
	if most.Set && !most.Bad && s.Forwarding.Direct() {
		b.parsed.faults.Errorf(most.Mark, "remove it, or use forwarding: nat", "with %s flows are not tracked, so shunt cannot count them", s.Forwarding)
	}
	r := &entry.MaxNewFlowsPerSource
	s.Policy.SourceRate = uint32(r.Value)
	if !r.Set || r.Bad || !s.Forwarding.Direct() {
		return
	}
	for _, f := range s.Frontends {
		if f.Protocol == model.UDP {
			b.parsed.faults.Errorf(r.Mark, "use forwarding: nat, or move udp to a service of its own without this limit",
				"with %s shunt cannot tell the first packet of a UDP flow from later ones, so it cannot count new flows", s.Forwarding)
			return
		}
	}
}

// segments sets the limit for TCP's segments.
func (b *builder) segments(entry *serviceEntry, s *model.Service) {
	most := &entry.TCPMSS
	s.Policy.TCPMSS = uint16(most.Value)
	if !most.Set || most.Bad || len(s.Frontends) == 0 {
		return
	}
	if !slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Protocol == model.TCP }) {
		b.parsed.faults.Errorf(most.Mark, "remove it", "tcp_mss has no meaning for service %q, which has no TCP", s.Name)
		return
	}
	if s.Forwarding.Direct() {
		b.parsed.faults.Warnf(most.Mark, "limit the segments of clients on the backends: `ip route change ROUTE advmss BYTES`",
			"with %s the backends' SYNs do not pass shunt: tcp_mss limits the segments that backends send, but not those that clients send", s.Forwarding)
	}
}

// lists sets allow_from and deny_from, and warns of entries without effect.
func (b *builder) lists(entry *serviceEntry, s *model.Service, vips []config.Address) {
	faults := b.parsed.faults
	all := map[netip.Prefix]listed{}
	for _, list := range []struct {
		entries []config.Prefix
		allow   bool
		into    *[]netip.Prefix
	}{{entry.AllowFrom.Items, true, &s.AllowFrom}, {entry.DenyFrom.Items, false, &s.DenyFrom}} {
		for _, p := range list.entries {
			earlier, double := all[p.Value]
			switch {
			case double && earlier.allow == list.allow:
				faults.Errorf(p.Mark, "remove one of them", "%s is listed twice, first at %s", p.Value, earlier.mark.At)
			case double:
				faults.Errorf(p.Mark, "remove it from one of the lists", "%s is in %s, too, at %s", p.Value, listName(earlier.allow), earlier.mark.At)
			default:
				all[p.Value] = listed{p.Mark, list.allow}
				*list.into = append(*list.into, p.Value)
			}
		}
	}
	b.filters += uint64(len(all))
	if entry.Address.Bad || entry.AllowFrom.Bad || entry.DenyFrom.Bad {
		return
	}
	families := map[bool]config.Address{} // by whether it is IPv4
	for _, vip := range vips {
		if _, known := families[vip.Value.Is4()]; !known {
			families[vip.Value.Is4()] = vip
		}
	}
	reached := map[bool]bool{}
	for _, p := range s.AllowFrom {
		reached[p.Addr().Is4()] = true
	}
	names := map[bool]string{true: "IPv4", false: "IPv6"}
	for _, is4 := range []bool{true, false} {
		if vip, has := families[is4]; has && len(s.AllowFrom) > 0 && !reached[is4] {
			everybody := map[bool]string{true: "0.0.0.0/0", false: "::/0"}[is4]
			faults.Warnf(vip.Mark, "add "+everybody+" to let all clients in", "allow_from of service %q has no %s prefix: nobody may use %s", s.Name, names[is4], vip.Value)
		}
	}
	for _, p := range append(entry.AllowFrom.Items, entry.DenyFrom.Items...) {
		if all[p.Value].mark.At != p.At {
			continue // it was said that it is double
		}
		if _, has := families[p.Value.Addr().Is4()]; !has && len(vips) > 0 {
			faults.Warnf(p.Mark, "remove it", "service %q has no %s address: %s has no effect", s.Name, names[p.Value.Addr().Is4()], p.Value)
			continue
		}
		b.needless(all, p, len(s.AllowFrom) > 0)
	}
}

// needless warns if a prefix has the verdict that its addresses would have without it.
func (b *builder) needless(all map[netip.Prefix]listed, p config.Prefix, someAllowed bool) {
	own := all[p.Value]
	for bits := p.Value.Bits() - 1; bits >= 0; bits-- {
		wider := netip.PrefixFrom(p.Value.Addr(), bits).Masked()
		if around, ok := all[wider]; ok {
			if around.allow == own.allow {
				b.parsed.faults.Warnf(p.Mark, "remove it", "%s is in %s, at %s, and changes nothing", p.Value, wider, around.mark.At)
			}
			return
		}
	}
	if !own.allow && someAllowed {
		b.parsed.faults.Warnf(p.Mark, "remove it", "%s is in no prefix of allow_from, so it is kept out anyway", p.Value)
	}
}
