package suggest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/value"
)

const operationsMax = 1000 // of a rule of connections

// Forbidden is an operation at an address that a rule of connections forbids.
type Forbidden struct {
	Operation string   `json:"operation"`
	Address   string   `json:"address,omitempty"` // with its port; empty: not known yet
	Protocol  string   `json:"protocol"`          // of the first attempt
	Times     int      `json:"times"`
	Except    []string `json:"except,omitempty"` // the addition of the suggestion to the rule's exceptions
	Not       string   `json:"not,omitempty"`    // why it adds nothing

	denied int
}

// Connection lists the attempts that a rule of connections reported.
type Connection struct {
	Name       string       `json:"name"`
	Operations []*Forbidden `json:"operations"` // the most frequent first
}

// connection counts an attempt by a rule.
func (s *reading) connection(name string, a connect.Attempt) error {
	if !slices.ContainsFunc(s.Policy.Connections, func(c policy.Connection) bool { return c.Name == name }) {
		s.Unknown++
		return nil
	}
	c := s.connections[name]
	if c == nil {
		c = &Connection{Name: name}
		s.connections[name] = c
	}
	i := slices.IndexFunc(c.Operations, func(p *Forbidden) bool { return p.Operation == a.Operation && p.Address == a.Address })
	if i < 0 {
		if i = len(c.Operations); i == operationsMax {
			return fmt.Errorf("read the attempts under rule %q: there are more than %d addresses, so the rule forbids what its program does all the time. List the forbidden addresses in the rule's to", name, operationsMax)
		}
		c.Operations = append(c.Operations, &Forbidden{Operation: a.Operation, Address: a.Address, Protocol: a.Protocol})
	}
	one := c.Operations[i]
	one.Times++
	if a.Denied {
		one.denied++
	}
	return nil
}

// except adds to each rule of connections the operations that it has audited.
func (s *reading) except() {
	s.Policy.Connections = slices.Clone(s.Policy.Connections)
	room := policy.TargetsMax
	for _, r := range s.Policy.Connections {
		room -= len(r.To) + len(r.Except)
	}
	for i := range s.Policy.Connections {
		r := &s.Policy.Connections[i]
		told := s.connections[r.Name]
		if told == nil {
			continue
		}
		s.Connections = append(s.Connections, told)
		slices.SortStableFunc(told.Operations, func(a, b *Forbidden) int { return b.Times - a.Times })
		before := r.Except
		r.Except = slices.Clone(before)
		for _, one := range told.Operations {
			var more []policy.Target
			if more, one.Not = one.exceptions(*r, before); one.Not != "" {
				continue
			}
			more = slices.DeleteFunc(more, func(t policy.Target) bool { // covered by one that was added before
				return slices.ContainsFunc(r.Except, func(by policy.Target) bool { return by.Has(t) })
			})
			if len(more) > room {
				one.Not = fmt.Sprintf("a policy can name %d addresses: join some to prefixes", policy.TargetsMax)
				continue
			}
			room -= len(more)
			r.Except = append(r.Except, more...)
			for _, t := range more {
				one.Except = append(one.Except, t.String())
			}
		}
	}
}

// exceptions returns the exceptions that make a rule allow an operation at this address; not has the reason if there
// is none.
func (one *Forbidden) exceptions(r policy.Connection, before []policy.Target) (all []policy.Target, not string) {
	at, err := netip.ParseAddrPort(one.Address)
	isOwn := one.Operation != policy.Connect
	denies := func(word string) bool { return slices.Contains(r.Deny, word) }
	switch {
	case one.denied == one.Times:
		return nil, "it was denied in each case, and never audited"
	case one.Operation == policy.Raw:
		return nil, "a raw socket has no address: take raw out of the rule if the program needs it"
	case one.Address == "":
		return nil, "it is a socket of " + one.Protocol + ", whose addresses are not known when it is made, so no exception can name it"
	case err != nil || at.Addr().Zone() != "":
		return nil, "it is not an address with a port"
	case at.Port() == 0:
		return nil, "it asks for any free port, which only rules without ports forbid: give the rule's addresses ports if the program needs it"
	case isOwn && denies(policy.Connect):
		return nil, "the rule denies connect, too, and the exception would allow that as well: write a separate rule for " + one.Operation
	case !isOwn && slices.ContainsFunc([]string{policy.Bind, policy.Listen, policy.Accept}, denies):
		return nil, "the rule denies more than connect, and the exception would allow that as well: write a separate rule for connect"
	}
	target := func(a netip.Addr) policy.Target {
		t := policy.Target{First: at.Port(), Last: at.Port()}
		if a.IsValid() {
			t.Prefix = netip.PrefixFrom(a, a.BitLen())
		}
		return t
	}
	switch a := at.Addr().Unmap(); {
	case !a.IsUnspecified():
		all = []policy.Target{target(a)}
	case isOwn: // all addresses of the machine
		all = []policy.Target{target(netip.Addr{})}
	default: // a loopback address: the family of the socket decides which
		all = []policy.Target{target(netip.AddrFrom4([4]byte{127, 0, 0, 1})), target(netip.IPv6Loopback())}
	}
	if !slices.ContainsFunc(all, func(t policy.Target) bool {
		return !slices.ContainsFunc(before, func(by policy.Target) bool { return by.Has(t) })
	}) {
		return nil, "the policy excepts it already: the attempt was reported before this policy was in force"
	}
	return all, ""
}

func (c *Connection) print(b *strings.Builder) {
	fmt.Fprintf(b, "%s: its program attempted %s that the rule forbids\n", event.Printable(c.Name), value.Counted(len(c.Operations), "operation"))
	for _, one := range c.Operations {
		verdict := "excepted"
		switch {
		case one.Not != "":
			verdict = "not excepted: " + one.Not
		case len(one.Except) > 0:
			verdict = "added to except: " + strings.Join(one.Except, ", ")
		}
		at := one.Address
		if at == "" {
			at = one.Protocol
		}
		fmt.Fprintf(b, "  %s of %s  %s\n    %s\n", event.Printable(one.Operation), event.Printable(at), value.Counted(one.Times, "time"), verdict)
	}
}
