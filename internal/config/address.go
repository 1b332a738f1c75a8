package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/value"
)

// Address is an IP address that a packet can be sent to over a network.
type Address struct {
	Mark
	Value netip.Addr
}

func (a *Address) Read(s Scalar, f *Field) *Complaint {
	const want = "an IP address"
	if s.Kind != KindText {
		return Wanted(s, want, "")
	}
	value, err := netip.ParseAddr(s.Text)
	if err != nil {
		return Wanted(s, want, suggestAddress(s.Text, f.Instead))
	}
	if c := unusable(value, s.Text); c != nil {
		return c
	}
	a.Value = value
	return nil
}

// unusable returns the complaint about an address that packets of a network cannot carry.
func unusable(value netip.Addr, text string) *Complaint {
	switch {
	case value.Zone() != "":
		return &Complaint{text + " has a zone", "write the address without %" + value.Zone()}
	case value.Is4In6():
		return &Complaint{text + " is an IPv4 address in IPv6 form", "write " + value.Unmap().String()}
	case value.IsUnspecified():
		return &Complaint{text + " means every address, which is not supported", "write each address"}
	case value.IsMulticast():
		return &Complaint{text + " is a multicast address", "write a unicast address"}
	case value.IsLoopback():
		return &Complaint{text + " is a loopback address: packets to it never cross a network", "write an address of a network"}
	case value == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return &Complaint{text + " is the broadcast address", "write a unicast address"}
	case value.Is4() && value.As4()[0] == 0:
		return &Complaint{text + " is in 0.0.0.0/8, which has no hosts (RFC 6890)", ""}
	case value.Is6() && value.IsLinkLocalUnicast():
		return &Complaint{text + " is a link-local address: it names a host on one link only", "write a global or unique local address"}
	}
	return nil
}

// suggestAddress guesses the meaning of text that is no address. instead is the advice for a name; "": a name
// is useless there.
func suggestAddress(s, instead string) string {
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return "write it without the prefix length: " + prefix.Addr().String()
	}
	if pair, err := netip.ParseAddrPort(s); err == nil {
		return fmt.Sprintf("write %s here and %d as port", pair.Addr(), pair.Port())
	}
	if bare, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return "write it without brackets: " + bare.String()
	}
	if s == "any" || s == "*" {
		return "every address of an interface at once is not supported: write each address"
	}
	if strings.ContainsFunc(s, unicode.IsLetter) && !strings.Contains(s, ":") {
		return cmp.Or(instead, "names are not looked up here: write the IP address")
	}
	return ""
}

func (*Address) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
	}}
}

func (*Address) Describe() string { return "IP address" }

// Listen is an address of this machine and a port, at which a program answers.
type Listen struct {
	Mark
	Value netip.AddrPort
}

func (l *Listen) Read(s Scalar, f *Field) *Complaint {
	want := "an IP address and a port, such as " + f.Example
	if s.Kind != KindText {
		return Wanted(s, want, suggestListen(s.Text, f))
	}
	value, err := netip.ParseAddrPort(s.Text)
	switch {
	case err != nil:
		return Wanted(s, want, suggestListen(s.Text, f))
	case value.Port() == 0:
		return &Complaint{s.Text + " has port 0, which is a different port each time", "write the port"}
	case value.Addr().Is4In6():
		return &Complaint{s.Text + " is an IPv4 address in IPv6 form", "write " + netip.AddrPortFrom(value.Addr().Unmap(), value.Port()).String()}
	case value.Addr().Zone() != "" || value.Addr().IsLinkLocalUnicast() && value.Addr().Is6():
		return &Complaint{s.Text + " is a link-local address", "write a global or unique local address"}
	case value.Addr().IsMulticast():
		return &Complaint{s.Text + " is a multicast address", "write a unicast address"}
	}
	l.Value = value
	return nil
}

// suggestListen guesses the meaning of text that is no address and port.
func suggestListen(s string, f *Field) string {
	if port, is := strings.CutPrefix(s, ":"); is && IsDigits(port) {
		return fmt.Sprintf("write \"127.0.0.1:%s\" for this machine alone, or \"[::]:%s\" for every address", port, port)
	}
	if IsDigits(s) {
		return fmt.Sprintf("write \"127.0.0.1:%s\"", s)
	}
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		_, port, _ := net.SplitHostPort(f.Example)
		return fmt.Sprintf("write it with a port: %q", net.JoinHostPort(a.String(), port))
	}
	if port, is := strings.CutPrefix(s, "localhost:"); is && IsDigits(port) {
		return fmt.Sprintf("write \"127.0.0.1:%s\"", port)
	}
	return ""
}

func (*Listen) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: `^(\[[0-9a-fA-F:.]+\]|[0-9.]+):` + portPattern + "$"}
}

func (*Listen) Describe() string { return "address and port" }

// Network is one address, or a prefix of them. A single address is a prefix of its whole
// length.
type Network struct {
	Mark
	Value netip.Prefix // masked
}

func (n *Network) Read(s Scalar, _ *Field) *Complaint {
	value, c := readPrefix(s)
	if c != nil {
		return c
	}
	switch c := unusable(value.Addr(), s.Text); {
	case c != nil:
		return c
	case value.Masked() != value:
		return strayBits(value, s.Text)
	case value.Bits() < 8:
		return &Complaint{s.Text + " is too wide for a network", "write a prefix of 8 bits or more"}
	}
	n.Value = value
	return nil
}

func (*Network) Schema(*Field) *jsonschema.Schema { return prefixSchema() }

func (*Network) Describe() string { return "IP address or prefix" }

// Ports is a port, a range, or any.
type Ports struct {
	Mark
	Value value.PortRange
}

func (p *Ports) Read(s Scalar, _ *Field) *Complaint {
	if s.Kind == KindText && s.Text == "any" {
		p.Value = value.AnyPort
		return nil
	}
	value, c := readPorts(s, "a port, a range such as \"8000-8099\", or any")
	if c == nil {
		p.Value = value
	}
	return c
}

const portPattern = "[1-9][0-9]{0,4}"

// readPorts reads "80" or "8000-8099".
func readPorts(s Scalar, want string) (value.PortRange, *Complaint) {
	if s.Kind != KindText && s.Kind != KindNumber {
		return value.PortRange{}, Wanted(s, want, "")
	}
	firstText, lastText, isRange := strings.Cut(s.Text, "-")
	if !isRange {
		lastText = firstText
	}
	firstText, lastText = strings.TrimSpace(firstText), strings.TrimSpace(lastText)
	if !IsDigits(firstText) || !IsDigits(lastText) || leadingZero(firstText) || leadingZero(lastText) {
		suggestion := ""
		if near := Nearest(s.Text, []string{"any"}); s.Kind == KindText && near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		return value.PortRange{}, Wanted(s, want, suggestion)
	}
	first, errFirst := strconv.ParseUint(firstText, 10, 16)
	last, errLast := strconv.ParseUint(lastText, 10, 16)
	switch {
	case errFirst != nil || errLast != nil || first == 0:
		return value.PortRange{}, &Complaint{fmt.Sprintf("port %s is out of range, want 1 to 65535", s.Text), ""}
	case first > last:
		return value.PortRange{}, &Complaint{fmt.Sprintf("range %s ends before it begins", s.Text), fmt.Sprintf("write \"%d-%d\"", last, first)}
	}
	return value.PortRange{First: uint16(first), Last: uint16(last)}, nil
}

func (*Ports) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "1", Maximum: "65535"},
		{Type: "string", Pattern: "^(any|" + portPattern + `(\s*-\s*` + portPattern + ")?)$"},
	}}
}

func (*Ports) Describe() string { return "port, range or any" }

// PortRange is a range of source ports.
type PortRange struct {
	Mark
	Value value.PortRange
}

func (p *PortRange) Read(s Scalar, f *Field) *Complaint {
	want := "a range such as " + f.Example
	if !strings.Contains(s.Text, "-") {
		return Wanted(s, want, "")
	}
	value, c := readPorts(s, want)
	if c == nil {
		p.Value = value
	}
	return c
}

func (*PortRange) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^" + portPattern + `\s*-\s*` + portPattern + "$"}
}

func (*PortRange) Describe() string { return "range" }

// Prefix is a prefix of source addresses: from length 0 to a single address.
type Prefix struct {
	Mark
	Value netip.Prefix // masked
}

func (p *Prefix) Read(s Scalar, _ *Field) *Complaint {
	value, c := readPrefix(s)
	if c != nil {
		return c
	}
	single := !strings.Contains(s.Text, "/")
	switch {
	case value.Addr().Is4In6() && value.Bits() >= 96:
		return &Complaint{s.Text + " is IPv4 in IPv6 form", "write " + netip.PrefixFrom(value.Addr().Unmap(), value.Bits()-96).String()}
	case value.Masked() != value:
		return strayBits(value, s.Text)
	case value.Addr().IsUnspecified() && single:
		return &Complaint{s.Text + " cannot be the source address of a packet", fmt.Sprintf("write %s/0 for every address", s.Text)}
	case value.Addr().IsMulticast():
		return &Complaint{s.Text + " is multicast: no packet has such a source", "remove it"}
	}
	p.Value = value
	return nil
}

func (*Prefix) Schema(*Field) *jsonschema.Schema { return prefixSchema() }

func (*Prefix) Describe() string { return "IP address or prefix" }

// readPrefix reads an address, which is a prefix of its whole length, or a prefix.
func readPrefix(s Scalar) (netip.Prefix, *Complaint) {
	const want = "an IP address or a prefix"
	if s.Kind != KindText {
		return netip.Prefix{}, Wanted(s, want, "")
	}
	if one, err := netip.ParseAddr(s.Text); err == nil {
		if zone := one.Zone(); zone != "" {
			return netip.Prefix{}, &Complaint{s.Text + " has a zone", "write the address without %" + zone}
		}
		return netip.PrefixFrom(one, one.BitLen()), nil
	}
	value, err := netip.ParsePrefix(s.Text)
	if err != nil {
		return netip.Prefix{}, Wanted(s, want, suggestAddress(s.Text, ""))
	}
	return value, nil
}

// strayBits returns the complaint about a prefix that is not masked.
func strayBits(value netip.Prefix, text string) *Complaint {
	return &Complaint{text + " has bits set behind the prefix", fmt.Sprintf("write %s for the prefix, or %s for the address", value.Masked(), value.Addr())}
}

// prefixSchema returns the schema of an address or a prefix.
func prefixSchema() *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
		{Type: "string", Pattern: `^[0-9a-fA-F.:]+/[0-9]{1,3}$`},
	}}
}
