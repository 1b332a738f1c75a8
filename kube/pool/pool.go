// Package pool gives Services of type LoadBalancer their addresses.
//
//	all Services ──► Pool.Plan ─┬─► faults, the same on every node
//	                            └─► gifts ──► give.Giver, on the node that holds the Lease ──► status.loadBalancer
//
// Only the Services' status records the gifts: an agent that starts, or that takes the Lease over, knows as much as the
// agent before.
//
// Invariant: an address that a Service has is never taken from it or changed, regardless of changes to the pool, to other Services and to this agent.
package pool

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Pool is a set of addresses, which does not change. The zero value is empty.
type Pool struct{ ranges []span }

// span has the addresses from first to last, of one family.
type span struct {
	first, last netip.Addr
	text        string // as written
}

func (s span) contains(a netip.Addr) bool {
	return a.BitLen() == s.first.BitLen() && a.Compare(s.first) >= 0 && a.Compare(s.last) <= 0
}

// Parse reads ranges: an address, FIRST-LAST, or a prefix. A prefix leaves out the addresses that a network reserves: the first and
// the last one of IPv4 (RFC 1812 section 4.2.3.1), and the first one of IPv6 (the routers' anycast address, RFC 4291
// section 2.6.1), unless it has only one or two addresses. No two ranges may have an address in common.
func Parse(texts []string) (Pool, error) {
	var p Pool
	for _, text := range texts {
		s, err := parseSpan(strings.TrimSpace(text))
		if err != nil {
			return Pool{}, err
		}
		for _, other := range p.ranges {
			if s.contains(other.first) || other.contains(s.first) {
				return Pool{}, fmt.Errorf("the ranges %s and %s have addresses in common: write each address once", other.text, s.text)
			}
		}
		p.ranges = append(p.ranges, s)
	}
	return p, nil
}

func parseSpan(text string) (s span, err error) {
	s.text = text
	switch first, last, isRange := strings.Cut(text, "-"); {
	case isRange:
		s.first, err = netip.ParseAddr(strings.TrimSpace(first))
		if err == nil {
			s.last, err = netip.ParseAddr(strings.TrimSpace(last))
		}
	case strings.Contains(text, "/"):
		var prefix netip.Prefix
		if prefix, err = netip.ParsePrefix(text); err == nil {
			s.first, s.last, err = hosts(prefix)
		}
	default:
		s.first, err = netip.ParseAddr(text)
		s.last = s.first
	}
	switch {
	case err != nil:
		return s, fmt.Errorf("%q is no range of addresses: %w: write 192.0.2.240-192.0.2.250, or 2001:db8:1::/120, or one address", text, err)
	case s.first.BitLen() != s.last.BitLen():
		return s, fmt.Errorf("%q is no range of addresses: it begins in one family and ends in the other", text)
	case s.last.Less(s.first):
		return s, fmt.Errorf("%q is no range of addresses: it ends before it begins", text)
	}
	for _, a := range []netip.Addr{s.first, s.last} {
		if !usable(a) {
			return s, fmt.Errorf("%q is no range for load balancers: %s is no address that clients can send packets to", text, a)
		}
	}
	for _, a := range unusable {
		if s.contains(a) {
			return s, fmt.Errorf("%q is no range for load balancers: it has %s, which is no address that clients can send packets to", text, a)
		}
	}
	return s, nil
}

// unusable are the first addresses of ranges that are only for a host, a link or a group.
var unusable = []netip.Addr{
	netip.MustParseAddr("127.0.0.0"), netip.MustParseAddr("169.254.0.0"), netip.MustParseAddr("224.0.0.0"),
	netip.MustParseAddr("fe80::"), netip.MustParseAddr("ff00::"),
}

// hosts returns a prefix without the addresses that its network reserves.
func hosts(prefix netip.Prefix) (first, last netip.Addr, err error) {
	if prefix != prefix.Masked() {
		return first, last, fmt.Errorf("the prefix of that length is %s", prefix.Masked())
	}
	first = prefix.Addr()
	bytes := first.AsSlice()
	for bit := prefix.Bits(); bit < first.BitLen(); bit++ {
		bytes[bit/8] |= 1 << (7 - bit%8)
	}
	last, _ = netip.AddrFromSlice(bytes) // it has the length of an address
	if first.BitLen()-prefix.Bits() > 1 {
		if first = first.Next(); first.Is4() {
			last = last.Prev()
		}
	}
	return first, last, nil
}

func usable(a netip.Addr) bool {
	return a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// String returns the ranges as written.
func (p Pool) String() string {
	all := make([]string, len(p.ranges))
	for i, s := range p.ranges {
		all[i] = s.text
	}
	return strings.Join(all, ",")
}

// Empty reports whether the pool has no address.
func (p Pool) Empty() bool { return len(p.ranges) == 0 }

// Contains reports whether the pool has the address.
func (p Pool) Contains(a netip.Addr) bool {
	for _, s := range p.ranges {
		if s.contains(a) {
			return true
		}
	}
	return false
}

// Within reports whether each range is in one of the networks.
func (p Pool) Within(networks []netip.Prefix) bool {
	for _, s := range p.ranges {
		if !slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(s.first) && n.Contains(s.last) }) {
			return false
		}
	}
	return true
}

// has reports whether the pool has addresses of the family.
func (p Pool) has(is4 bool) bool {
	for _, s := range p.ranges {
		if s.first.Is4() == is4 {
			return true
		}
	}
	return false
}

// addresses returns the addresses of a family, in the order of the ranges as written.
func (p Pool) addresses(is4 bool) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, s := range p.ranges {
			if s.first.Is4() != is4 {
				continue
			}
			for a := s.first; a.IsValid() && a.Compare(s.last) <= 0; a = a.Next() {
				if !yield(a) {
					return
				}
			}
		}
	}
}
