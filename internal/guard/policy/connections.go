package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
)

// The operations that a rule of connections can deny.
const (
	Connect = "connect"
	Bind    = "bind"
	Listen  = "listen"
	Accept  = "accept"
	Raw     = "raw"
)

// ConnectionOperations are in the order in which they are listed.
var ConnectionOperations = []string{Connect, Bind, Listen, Accept, Raw}

// TargetsMax limits the addresses that all rules of connections name together, exceptions included: each costs the programs a comparison.
const TargetsMax = 1024

// Connection is a rule for connections of a program.
type Connection struct {
	Name     string
	Program  string // absolute and clean
	Children bool   // also programs that it starts
	Deny     []string
	To       []Target // empty: everywhere
	Except   []Target // but not there
	Mode     string
	At       string // its position in the file: FILE:LINE
}

// Target is a range of addresses and ports.
type Target struct {
	Prefix      netip.Prefix // masked; not valid: all addresses
	First, Last uint16       // ports; 0 and 65535: all
}

// String returns the target as a file has it.
func (t Target) String() string {
	text := ""
	switch {
	case !t.Prefix.IsValid():
	case t.Prefix.IsSingleIP():
		text = t.Prefix.Addr().String()
	default:
		text = t.Prefix.String()
	}
	if t.First == 0 && t.Last == 65535 {
		return text
	}
	if strings.Contains(text, ":") {
		text = "[" + text + "]"
	}
	if t.First == t.Last {
		return fmt.Sprintf("%s:%d", text, t.First)
	}
	return fmt.Sprintf("%s:%d-%d", text, t.First, t.Last)
}

// Has reports whether this target covers another one completely.
func (t Target) Has(other Target) bool {
	if other.First < t.First || other.Last > t.Last {
		return false
	}
	return !t.Prefix.IsValid() || other.Prefix.IsValid() && t.Prefix.Bits() <= other.Prefix.Bits() && t.Prefix.Contains(other.Prefix.Addr())
}

// texts returns targets as a file has them.
func texts(targets []Target) []string {
	all := make([]string, len(targets))
	for i, t := range targets {
		all[i] = t.String()
	}
	return all
}

// String returns the rule as one line for people.
func (c Connection) String() string {
	where := ""
	if len(c.To) > 0 {
		where = " of " + strings.Join(texts(c.To), ", ")
	}
	if len(c.Except) > 0 {
		where += " but not of " + strings.Join(texts(c.Except), ", ")
	}
	who := c.Program
	if c.Children {
		who += " and what it starts"
	}
	return fmt.Sprintf("%s: %s%s by %s", c.Mode, strings.Join(c.Deny, ", "), where, who)
}

type connectionEntry struct {
	config.Mark `json:"-"`
	Name        config.Text                `json:"name" doc:"The rule's name in events and in the status." min:"1" max:"63" example:"no-mail"`
	Program     config.Phrase              `json:"program" doc:"The executable whose processes are under the rule. A copy of it is another program." min:"1" max:"4095" example:"/usr/sbin/app"`
	Children    config.Boolean             `json:"children,omitempty" doc:"Put the programs that it starts, and those that they start in turn, under the rule, too. They cannot leave it." default:"false" example:"true"`
	Deny        config.Many[config.Word]   `json:"deny" doc:"The operations with IPv4 and IPv6 that the program must not do. connect: connect to an address, or send a datagram to it; bind: bind to an address and port; listen, accept: wait for connections, and accept one; raw: make a socket through which the program builds its own packets (SOCK_RAW, AF_PACKET, AF_XDP). AF_UNIX and other families are not covered." enum:"connect|bind|listen|accept|raw" example:"[connect]"`
	To          config.Many[config.Phrase] `json:"to,omitempty" doc:"The forbidden addresses: addresses and prefixes, each with a port or a range of ports, or :PORT for all addresses. For connect these are the peer's addresses, for bind, listen and accept the socket's own. Default: all addresses." min:"1" max:"64" example:"[10.0.0.0/8, '[2001:db8::/32]:443', ':25']"`
	Except      config.Many[config.Phrase] `json:"except,omitempty" doc:"Addresses that are allowed although to forbids them, written as in to. raw, and sockets of other protocols, have no address and stay denied. Only :PORT excepts a socket that is bound to all addresses." min:"1" max:"64" example:"['10.0.0.5:5432']"`
	Mode        config.Word                `json:"mode" doc:"audit: allow the operation and report it; deny: refuse it with EPERM and report it." enum:"audit|deny" example:"audit"`
}

// connection checks the meaning of a rule.
func (e *connectionEntry) connection(faults *config.Faults) Connection {
	c := Connection{Name: e.Name.Value, Children: e.Children.Value, Deny: words(e.Deny, faults), Mode: e.Mode.Value, At: e.At.String()}
	if clean := paths([]config.Phrase{e.Program}, faults); len(clean) > 0 {
		c.Program = clean[0]
	}
	if Interprets(c.Program) {
		faults.Warnf(e.Program.Mark, "name a program with one task", "%s runs any script: the rule would be about all scripts", c.Program)
	}
	c.To, c.Except = targets(e.To.Items, faults), targets(e.Except.Items, faults)
	if e.To.Set && len(e.To.Items) == 0 {
		faults.Errorf(e.To.Mark, "leave it out to forbid all addresses", "to is empty, so the rule would deny nothing")
	}
	for _, list := range []config.Many[config.Phrase]{e.To, e.Except} {
		if len(list.Items) > 0 && len(c.Deny) == 1 && c.Deny[0] == Raw {
			faults.Errorf(list.Mark, "leave it out", "the destination of a raw socket is not known when it is made")
		}
	}
	return c
}

// targets reads a list.
func targets(items []config.Phrase, faults *config.Faults) (all []Target) {
	for _, item := range items {
		if item.Value == "" { // it is faulty already
			continue
		}
		t, problem := ParseTarget(item.Value)
		switch {
		case problem != "":
			faults.Errorf(item.Mark, "write ADDRESS, ADDRESS/BITS, either with :PORT or :FIRST-LAST behind it, or :PORT alone; brackets around IPv6 before a port", "%q is no address of connections: %s", item.Value, problem)
		case slices.Contains(all, t):
			faults.Warnf(item.Mark, "remove one of them", "%v is there twice", t)
		default:
			all = append(all, t)
		}
	}
	return all
}

// ParseTarget reads a target; problem has the reason why it is none.
func ParseTarget(text string) (t Target, problem string) {
	t = Target{Last: 65535}
	address, ports := splitPorts(text)
	if ports != "" {
		if t.First, t.Last, problem = parsePorts(ports); problem != "" {
			return Target{}, problem
		}
	}
	if address == "" {
		if ports == "" {
			return Target{}, "there is no address"
		}
		return t, ""
	}
	prefix, err := netip.ParsePrefix(address)
	if err != nil {
		one, oneErr := netip.ParseAddr(address)
		if oneErr != nil || one.Zone() != "" {
			return Target{}, fmt.Sprintf("%q is no IP address and no prefix; names are not looked up", address)
		}
		prefix = netip.PrefixFrom(one, one.BitLen())
	}
	if a := prefix.Addr(); a.Is4In6() {
		return Target{}, fmt.Sprintf("write %s as IPv4: both forms are then the same", a.Unmap())
	}
	if prefix != prefix.Masked() {
		return Target{}, fmt.Sprintf("it has bits beyond its length: write %s", prefix.Masked())
	}
	t.Prefix = prefix
	return t, ""
}

// splitPorts separates the ports. Without brackets, two colons mean an address of IPv6.
func splitPorts(text string) (address, ports string) {
	if inner, is := strings.CutPrefix(text, "["); is {
		address, rest, closed := strings.Cut(inner, "]")
		if closed && rest == "" {
			return address, ""
		}
		if after, is := strings.CutPrefix(rest, ":"); closed && is && after != "" {
			return address, after
		}
		return text, ""
	}
	address, ports, is := strings.Cut(text, ":")
	if !is || ports == "" || strings.Contains(ports, ":") {
		return text, ""
	}
	return address, ports
}

func parsePorts(text string) (first, last uint16, problem string) {
	low, high, isRange := strings.Cut(text, "-")
	if !isRange {
		high = low
	}
	a, err1 := strconv.ParseUint(low, 10, 16)
	b, err2 := strconv.ParseUint(high, 10, 16)
	switch {
	case err1 != nil || err2 != nil || a == 0:
		return 0, 0, fmt.Sprintf("the ports %q are no number from 1 to 65535, and no two with - between", text)
	case a > b:
		return 0, 0, fmt.Sprintf("the ports %q end before they begin", text)
	}
	return uint16(a), uint16(b), ""
}

// connections checks the meaning of the section. taken has the names of earlier rules.
func connections(entries []connectionEntry, taken map[string]bool, faults *config.Faults) (all []Connection) {
	named := 0
	for i := range entries {
		e := &entries[i]
		c := e.connection(faults)
		if c.Name != "" && taken[c.Name] {
			faults.Errorf(e.Name.Mark, "give each rule a name of its own", "an earlier rule has the name %q, too", c.Name)
		}
		taken[c.Name] = true
		named += len(c.To) + len(c.Except)
		all = append(all, c)
	}
	if len(all) > RulesMax {
		faults.Errorf(entries[RulesMax].Mark, "join rules that deny the same", "%d rules of connections, and at most %d are possible", len(all), RulesMax)
	}
	if named > TargetsMax {
		faults.Errorf(entries[0].Mark, "join addresses to prefixes", "the rules of connections name %d addresses, and at most %d are possible", named, TargetsMax)
	}
	return all
}

// yaml returns the rule as a file has it.
func (c Connection) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, "    - name: %s\n      program: %s\n", quote(c.Name), quote(c.Program))
	if c.Children {
		b.WriteString("      children: true\n")
	}
	fmt.Fprintf(&b, "      deny: %s\n", list(c.Deny))
	if len(c.To) > 0 {
		fmt.Fprintf(&b, "      to: %s\n", list(texts(c.To)))
	}
	if len(c.Except) > 0 {
		fmt.Fprintf(&b, "      except: %s\n", list(texts(c.Except)))
	}
	fmt.Fprintf(&b, "      mode: %s\n", c.Mode)
	return b.String()
}
