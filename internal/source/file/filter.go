package file

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/shunt-lb/shunt/internal/model"
)

// prefix is source addresses: one address, or all that begin alike, from none (/0) to all bits.
type prefix struct {
	mark
	Value netip.Prefix // masked
}

func (p *prefix) read(s scalar, _ *field) *complaint {
	const want = "an IP address or a prefix"
	if s.kind != kindText {
		return wanted(s, want, "")
	}
	value, err := netip.ParsePrefix(s.text)
	if one, alone := netip.ParseAddr(s.text); alone == nil {
		if zone := one.Zone(); zone != "" {
			return &complaint{s.text + " has a zone", "write the address without %" + zone}
		}
		value, err = netip.PrefixFrom(one, one.BitLen()), nil
	}
	if err != nil {
		return wanted(s, want, suggestAddress(s.text))
	}
	single := !strings.Contains(s.text, "/")
	switch {
	case value.Addr().Is4In6() && value.Bits() >= 96:
		return &complaint{s.text + " is IPv4 in IPv6 form", "write " + netip.PrefixFrom(value.Addr().Unmap(), value.Bits()-96).String()}
	case value.Masked() != value:
		return &complaint{s.text + " has bits set behind the prefix", fmt.Sprintf("write %s for the prefix, or %s for the address", value.Masked(), value.Addr())}
	case value.Addr().IsUnspecified() && single:
		return &complaint{s.text + " is no source of packets", fmt.Sprintf("write %s/0 for every address", s.text)}
	case value.Addr().IsMulticast():
		return &complaint{s.text + " is multicast: no packet has such a source", "remove it"}
	}
	p.Value = value
	return nil
}

func (*prefix) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
		{Type: "string", Pattern: `^[0-9a-fA-F.:]+/[0-9]{1,3}$`},
	}}
}

func (*prefix) describe() string { return "IP address or prefix" }

// rate is a number of events per second.
type rate struct {
	mark
	Value uint64
}

func (r *rate) read(s scalar, f *field) *complaint {
	want := "a rate per second such as " + f.example
	digits, unit, cut := strings.Cut(s.text, "/")
	switch value, err := strconv.ParseUint(digits, 10, 64); {
	case s.kind == kindNumber && isDigits(s.text):
		return wanted(s, want, "write "+s.text+"/s")
	case s.kind != kindText || !cut || !isDigits(digits):
		return wanted(s, want, "")
	case leadingZero(digits):
		return wanted(s, want, "write it without the leading 0")
	case unit != "s":
		return wanted(s, want, "the unit is s, a second")
	case err != nil || value < f.min || value > f.max:
		return &complaint{fmt.Sprintf("%s %s is out of range, want %d/s to %d/s", f.name, s.text, f.min, f.max), ""}
	default:
		r.Value = value
		return nil
	}
}

func (*rate) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[1-9][0-9]*/s$"}
}

func (*rate) describe() string { return "rate per second" }

// listed is a prefix of one of a service's lists.
type listed struct {
	mark  mark
	allow bool
}

func listName(allow bool) string {
	if allow {
		return "allow_from"
	}
	return "deny_from"
}

// admission fills in who may use the service, and how often.
func (b *builder) admission(entry *serviceEntry, s *model.Service, vips []address) {
	b.lists(entry, s, vips)
	most := &entry.MaxFlows
	s.Policy.FlowsMax = uint32(most.Value)
	if most.set && !most.bad && s.Forwarding.Direct() {
		b.parsed.faults.errorf(most.mark, "remove it, or use forwarding: nat", "with %s flows are not tracked, so nobody knows how many there are", s.Forwarding)
	}
	r := &entry.MaxNewFlowsPerSource
	s.Policy.SourceRate = uint32(r.Value)
	if !r.set || r.bad || !s.Forwarding.Direct() {
		return
	}
	for _, f := range s.Frontends {
		if f.Protocol == model.UDP {
			b.parsed.faults.errorf(r.mark, "use forwarding: nat, or give udp a service of its own without it",
				"with %s nothing tells the first packet of a UDP flow from the others, so new ones cannot be counted", s.Forwarding)
			return
		}
	}
}

// segments fills in the bound for TCP's segments.
func (b *builder) segments(entry *serviceEntry, s *model.Service) {
	most := &entry.TCPMSS
	s.Policy.TCPMSS = uint16(most.Value)
	if !most.set || most.bad || len(s.Frontends) == 0 {
		return
	}
	if !slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Protocol == model.TCP }) {
		b.parsed.faults.errorf(most.mark, "remove it", "tcp_mss has no meaning for service %q, which has no TCP", s.Name)
		return
	}
	if s.Forwarding.Direct() {
		b.parsed.faults.warnf(most.mark, "bound what clients send at the backends: `ip route change ROUTE advmss BYTES`",
			"with %s the backends' SYNs do not come by: tcp_mss bounds what backends send, and not what clients do", s.Forwarding)
	}
}

// lists fills in allow_from and deny_from, and says what in them has no effect.
func (b *builder) lists(entry *serviceEntry, s *model.Service, vips []address) {
	faults := &b.parsed.faults
	all := map[netip.Prefix]listed{}
	for _, list := range []struct {
		entries []prefix
		allow   bool
		into    *[]netip.Prefix
	}{{entry.AllowFrom.Items, true, &s.AllowFrom}, {entry.DenyFrom.Items, false, &s.DenyFrom}} {
		for _, p := range list.entries {
			earlier, double := all[p.Value]
			switch {
			case double && earlier.allow == list.allow:
				faults.errorf(p.mark, "remove one of them", "%s is listed twice, first at %s", p.Value, earlier.mark.at)
			case double:
				faults.errorf(p.mark, "remove it from one of the lists", "%s is in %s, too, at %s", p.Value, listName(earlier.allow), earlier.mark.at)
			default:
				all[p.Value] = listed{p.mark, list.allow}
				*list.into = append(*list.into, p.Value)
			}
		}
	}
	b.filters += uint64(len(all))
	if entry.Address.bad || entry.AllowFrom.bad || entry.DenyFrom.bad {
		return
	}
	families := map[bool]address{} // by whether it is IPv4
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
			faults.warnf(vip.mark, "add "+everybody+" to let all of them in", "allow_from of service %q has no %s prefix: nobody may use %s", s.Name, names[is4], vip.Value)
		}
	}
	for _, p := range append(entry.AllowFrom.Items, entry.DenyFrom.Items...) {
		if all[p.Value].mark.at != p.at {
			continue // it was said that it is double
		}
		if _, has := families[p.Value.Addr().Is4()]; !has && len(vips) > 0 {
			faults.warnf(p.mark, "remove it", "service %q has no %s address: %s has no effect", s.Name, names[p.Value.Addr().Is4()], p.Value)
			continue
		}
		b.needless(all, p, len(s.AllowFrom) > 0)
	}
}

// needless says so if a prefix has the verdict that its addresses would have without it.
func (b *builder) needless(all map[netip.Prefix]listed, p prefix, someAllowed bool) {
	own := all[p.Value]
	for bits := p.Value.Bits() - 1; bits >= 0; bits-- {
		wider := netip.PrefixFrom(p.Value.Addr(), bits).Masked()
		if around, ok := all[wider]; ok {
			if around.allow == own.allow {
				b.parsed.faults.warnf(p.mark, "remove it", "%s is in %s, at %s, and changes nothing", p.Value, wider, around.mark.at)
			}
			return
		}
	}
	if !own.allow && someAllowed {
		b.parsed.faults.warnf(p.mark, "remove it", "%s is in no prefix of allow_from, so it is kept out anyway", p.Value)
	}
}
