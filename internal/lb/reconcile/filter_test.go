package reconcile_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
)

// prefixes parses a list, separated by spaces.
func prefixes(text string) (list []netip.Prefix) {
	for _, word := range strings.Fields(text) {
		list = append(list, netip.MustParsePrefix(word))
	}
	return list
}

// Each prefix is in some of the others, and the sources below tell them apart.
var (
	poolPrefixes = prefixes("0.0.0.0/0 10.0.0.0/8 10.1.0.0/16 10.1.2.0/24 10.1.2.3/32 ::/0 2001:db8::/32 2001:db8:1::/48 2001:db8:1::1/128")
	poolClients  = []netip.Addr{
		netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.1.3.1"),
		netip.MustParseAddr("10.1.2.4"), netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("2001:db9::1"),
		netip.MustParseAddr("2001:db8:2::1"), netip.MustParseAddr("2001:db8:1::2"), netip.MustParseAddr("2001:db8:1::1"),
	}
)

// drawLists gives a service lists of sources, most often none.
func (w *world) drawLists(s *model.Service) {
	s.AllowFrom, s.DenyFrom = nil, nil
	if rapid.IntRange(0, 2).Draw(w.T, "filters") > 0 {
		return
	}
	for _, prefix := range poolPrefixes {
		switch rapid.IntRange(0, 5).Draw(w.T, "list") {
		case 0:
			s.AllowFrom = append(s.AllowFrom, prefix)
		case 1, 2:
			s.DenyFrom = append(s.DenyFrom, prefix)
		}
	}
}

// mayUse reports whether the configuration allows a source, straight from its lists.
func mayUse(s model.Service, client netip.Addr) bool {
	allowed, longest := len(s.AllowFrom) == 0, -1
	for _, p := range s.AllowFrom {
		if p.Contains(client) && p.Bits() > longest {
			allowed, longest = true, p.Bits()
		}
	}
	for _, p := range s.DenyFrom {
		if p.Contains(client) && p.Bits() > longest {
			allowed, longest = false, p.Bits()
		}
	}
	return allowed
}

// letsIn reports whether a program lets a source in now.
func letsIn(c reconcile.Contents, s reconcile.ServiceRecord, client netip.Addr) bool {
	if !s.Policy.Filters {
		return true
	}
	allowed, longest := false, -1
	for f, allow := range c.Filters {
		if f.Service == s.Index && f.Generation == s.Generation && f.Prefix.Contains(client) && f.Prefix.Bits() > longest {
			allowed, longest = allow, f.Prefix.Bits()
		}
	}
	return allowed
}

// clientOf is a source and the service that it wants to use.
type clientOf struct {
	service string
	client  netip.Addr
}

// verdicts are the answers of programs for every source of every service.
func verdicts(c reconcile.Contents) map[clientOf]bool {
	found := map[clientOf]bool{}
	for f, index := range c.Frontends {
		for _, client := range poolClients {
			if service, ok := c.Services[index]; ok && client.Is6() == f.Address.Is6() {
				found[clientOf{service.Name, client}] = letsIn(c, service, client)
			}
		}
	}
	return found
}

// takesOver reports whether a service wants a frontend that the service of this name has now, or one with more ports: it
// may be the heir of that service's position.
func takesOver(c reconcile.Contents, name string, s model.Service) bool {
	for had, index := range c.Frontends {
		if c.Services[index].Name == name && slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Covers(had) }) {
			return true
		}
	}
	return false
}

// checkSources fails if the treatment of a source is neither that from the beginning of the change, nor
// the one that the change, or one that failed before, wants.
func (w *world) checkSources(before map[clientOf]bool, operation string) {
	c, _ := w.maps.Contents()
	for at, got := range verdicts(c) {
		if was, ok := before[at]; ok && was == got {
			continue
		}
		tried := append(slices.Clone(w.failed), w.attempt)
		if !slices.ContainsFunc(tried, func(d reconcile.Desired) bool {
			return slices.ContainsFunc(d.Services, func(s *model.Service) bool {
				return (s.Name == at.service || takesOver(c, at.service, *s)) && mayUse(*s, at.client) == got
			})
		}) {
			w.Fatalf("before %q %s is let into service %s: %v, which neither was so nor is wanted; operations:\n%s\ncontents:\n%s",
				operation, at.client, at.service, got, strings.Join(w.maps.Operations, "\n"), reconcile.Dump(c))
		}
	}
}

// wantedFilters returns the prefixes of a half as lines, and whether it filters at all.
func wantedFilters(s model.Service, seed uint32, ipv6 bool) (lines []string, filters bool) {
	line := func(p netip.Prefix, allow bool) {
		lines = append(lines, fmt.Sprintf("filter %s: %s %d allow %v", p, s.Name, seed, allow))
	}
	for _, p := range poolPrefixes {
		allows := slices.Contains(s.AllowFrom, p)
		if p.Addr().Is6() == ipv6 && p.Bits() > 0 && (allows || slices.Contains(s.DenyFrom, p)) {
			line(p, allows)
		}
	}
	zero, others := netip.MustParsePrefix("0.0.0.0/0"), poolClients[0]
	if ipv6 {
		zero, others = netip.MustParsePrefix("::/0"), poolClients[5]
	}
	if len(lines) == 0 && mayUse(s, others) {
		return nil, false
	}
	line(zero, mayUse(s, others))
	return lines, true
}

// TestListsThatChange checks the difference for changed lists, and the order of the operations.
func TestListsThatChange(t *testing.T) {
	b := newBench(t, roomy)
	s := service("web", "192.0.2.10:80 [2001:db8::10]:80", "10.0.0.2:80 [2001:db8:1::2]:80")
	apply := func(allow, deny string) (string, []string) {
		s.AllowFrom, s.DenyFrom = prefixes(allow), prefixes(deny)
		difference, operations := b.apply(desired(s))
		return difference.String(), operations
	}
	apply("", "")
	for _, c := range []struct{ allow, deny, difference, operations string }{
		{"", "10.0.0.0/8", "~ service web: deny_from: 1 added",
			"put filter 10.0.0.0/8 service 0/1 allow false\nput filter 0.0.0.0/0 service 0/1 allow true\nput service 0/1 web slots 0+251"},
		{"10.1.0.0/16", "10.0.0.0/8", "~ service web: allow_from: 1 added, sources in no list denied",
			"put filter 10.1.0.0/16 service 0/1 allow true\nput filter ::/0 service 1/1 allow false\nput filter 0.0.0.0/0 service 0/1 allow false\nput service 1/1 web slots 251+251"},
		{"10.1.0.0/16", "10.0.0.0/8 0.0.0.0/0 ::/0", "nothing to change", ""},
		{"10.0.0.0/8 2001:db8::/32", "10.1.0.0/16", "~ service web: allow_from: 2 added and 1 removed, deny_from: 1 added and 1 removed",
			"put filter 2001:db8::/32 service 1/1 allow true\nput filter 10.1.0.0/16 service 0/1 allow false\nput filter 10.0.0.0/8 service 0/1 allow true"},
		{"10.0.0.0/8 ::/0", "", "~ service web: allow_from: 1 removed, deny_from: 1 removed, sources in no list allowed",
			"delete filter 10.1.0.0/16 service 0/1\nput service 1/1 web slots 251+251\ngrace\ndelete filter ::/0 service 1/1\ndelete filter 2001:db8::/32 service 1/1"},
		{"", "", "~ service web: allow_from: 1 removed, sources in no list allowed",
			"put service 0/1 web slots 0+251\ngrace\ndelete filter 0.0.0.0/0 service 0/1\ndelete filter 10.0.0.0/8 service 0/1"},
	} {
		difference, operations := apply(c.allow, c.deny)
		if difference != c.difference || strings.Join(operations, "\n") != c.operations {
			t.Errorf("allow %q, deny %q: %s\n%s", c.allow, c.deny, difference, strings.Join(operations, "\n"))
		}
		b.r = reconcile.New(b.maps) // adoption finds the same
		if difference, operations := apply(c.allow, c.deny); difference != "nothing to change" || len(operations) > 0 {
			t.Errorf("allow %q, deny %q after adoption: %s, %q", c.allow, c.deny, difference, operations)
		}
	}
}

// TestListsThatDoNotFit: lists that do not fit or contradict themselves are refused.
func TestListsThatDoNotFit(t *testing.T) {
	limits := roomy
	limits.Filters = 2
	b := newBench(t, limits)
	s := service("web", "192.0.2.10:80", "10.0.0.2:80")
	d := func(allow, deny string) reconcile.Desired {
		s.AllowFrom, s.DenyFrom = prefixes(allow), prefixes(deny)
		d := desired(s)
		d.Limits = limits
		return d
	}
	b.apply(d("10.0.0.0/8 0.0.0.0/0", "10.1.0.0/16"))
	b.apply(d("11.0.0.0/8", "11.1.0.0/16"))
	var capacity *reconcile.CapacityError
	if _, err := b.r.Apply(d("11.0.0.0/8 12.0.0.0/8", "11.1.0.0/16")); !errors.As(err, &capacity) || capacity.What != "filters" || capacity.Need != 3 {
		t.Errorf("three prefixes where two fit: %v", err)
	}
	b.maps.Fault = failing("delete filter", fake.Before)
	if _, err := b.r.Apply(d("12.0.0.0/8", "12.1.0.0/16")); !errors.Is(err, fake.ErrInjected) {
		t.Fatal(err)
	}
	if _, err := b.r.Apply(d("13.0.0.0/8", "")); !errors.As(err, &capacity) || !strings.Contains(err.Error(), "1 prefixes wanted, and 4 that are removed only afterwards") {
		t.Errorf("a fifth prefix: %v", err)
	}
	b.maps.Fault = nil
	b.apply(d("12.0.0.0/8", "12.1.0.0/16"))
	b.apply(d("13.0.0.0/8", ""))
	if _, err := b.r.Apply(d("10.0.0.0/8", "10.0.0.0/8")); err == nil || !strings.Contains(err.Error(), `service "web" both allows and denies 10.0.0.0/8`) {
		t.Errorf("a prefix in both lists: %v", err)
	}
}
