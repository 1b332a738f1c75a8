package config

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/model"
)

// Kind is what a piece of YAML is. The value is the words messages use.
type Kind string

// The kinds that a leaf may be written as, and others.
const (
	KindText    Kind = "text"
	KindNumber  Kind = "a number"
	KindBool    Kind = "true or false"
	kindNothing Kind = "nothing"
	kindList    Kind = "a list"
	kindMapping Kind = "a mapping"
	kindOther   Kind = "something else"
	// KindDefault is of the default tag, whose kind is right by definition.
	KindDefault Kind = "default"
)

// Scalar is one value as written.
type Scalar struct {
	Kind Kind
	Text string
}

// found is what a message says was found.
func (s Scalar) found() string {
	switch s.Kind {
	case KindText:
		return fmt.Sprintf("text %q", s.Text)
	case KindNumber:
		return "the number " + s.Text
	case KindBool:
		return s.Text
	}
	return string(s.Kind)
}

// Complaint is what is wrong with a scalar.
type Complaint struct {
	Message    string
	Suggestion string
}

// Complain is a complaint, and what to do; suggestion may be empty.
func Complain(message, suggestion string) *Complaint { return &Complaint{message, suggestion} }

// Wanted is the complaint about a scalar of the wrong kind.
func Wanted(s Scalar, want, suggestion string) *Complaint {
	return &Complaint{fmt.Sprintf("found %s, want %s", s.found(), want), suggestion}
}

// Leaf is a value that is written as one scalar. A package may have leaves of its own; they embed Mark.
type Leaf interface {
	// Read takes the value from a scalar; on a complaint the value is unchanged.
	Read(s Scalar, f *Field) *Complaint
	// Where is the leaf's mark, to be filled in.
	Where() *Mark
	// Schema describes what Read accepts.
	Schema(f *Field) *jsonschema.Schema
	// Describe is the type, for people.
	Describe() string
}

// Where is the mark of what embeds it.
func (m *Mark) Where() *Mark { return m }

// List is a list of mappings.
type List[T any] struct {
	Mark
	Items []T
}

// JSONSchemaAlias makes the schema that of the items.
func (List[T]) JSONSchemaAlias() any { return []T{} }

// Many is one scalar or a list of them.
type Many[T any] struct {
	Mark
	Items []T
}

// whole is the mark of all of it. Lists whose brackets may be left out are known by this method.
func (list *Many[T]) whole() *Mark { return &list.Mark }

// Later is a key that is known but not supported yet. Nothing is read into it, so it takes no room.
type Later struct{}

func (*Later) Read(Scalar, *Field) *Complaint { return nil }

func (*Later) Where() *Mark { return &Mark{} }

func (*Later) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Not: jsonschema.TrueSchema}
}

func (*Later) Describe() string { return "" }

func notYet(what, suggestion string) *Complaint {
	return &Complaint{what + " is not supported yet", suggestion}
}

func count(n uint64) *uint64 { return &n }

func jsonNumber(n uint64) json.Number { return json.Number(strconv.FormatUint(n, 10)) }

// Text is a name or a path.
type Text struct {
	Mark
	Value string
}

func (t *Text) Read(s Scalar, f *Field) *Complaint {
	if s.Kind != KindText && s.Kind != KindDefault {
		suggestion := ""
		if s.Kind == KindNumber || s.Kind == KindBool {
			suggestion = fmt.Sprintf("write it in quotes: %q", s.Text)
		}
		return Wanted(s, "text", suggestion)
	}
	switch {
	case uint64(len(s.Text)) < f.Min:
		return &Complaint{f.Name + " is empty", "write for example " + f.Example}
	case uint64(len(s.Text)) > f.Max:
		return &Complaint{fmt.Sprintf("%s is %d bytes long, the most is %d", f.Name, len(s.Text), f.Max), ""}
	}
	if i := strings.IndexFunc(s.Text, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }); i >= 0 {
		return &Complaint{fmt.Sprintf("%s %q has a space or a control character in it", f.Name, s.Text), ""}
	}
	t.Value = s.Text
	return nil
}

func (*Text) Schema(f *Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: count(f.Min), MaxLength: count(f.Max), Pattern: `^\S*$`}
}

func (*Text) Describe() string { return "text" }

// Word is one of an enumeration.
type Word struct {
	Mark
	Value string
}

func (w *Word) Read(s Scalar, f *Field) *Complaint {
	if s.Kind != KindText && s.Kind != KindDefault {
		return Wanted(s, f.supportedWords(), "")
	}
	if slices.Contains(f.Words, s.Text) {
		w.Value = s.Text
		return nil
	}
	if instead, known := f.insteadOf(s.Text); known {
		return notYet(f.Name+" "+s.Text, instead)
	}
	suggestion := ""
	if near := Nearest(s.Text, f.Words); near != "" {
		suggestion = fmt.Sprintf("did you mean %q?", near)
	}
	return &Complaint{fmt.Sprintf("unknown %s %q, want %s", f.Name, s.Text, f.supportedWords()), suggestion}
}

func (*Word) Schema(f *Field) *jsonschema.Schema {
	schema := &jsonschema.Schema{Type: "string"}
	for _, w := range f.Words {
		schema.Enum = append(schema.Enum, w)
	}
	return schema
}

func (*Word) Describe() string { return "word" }

// Number is a whole number within the field's bounds.
type Number struct {
	Mark
	Value uint64
}

func (n *Number) Read(s Scalar, f *Field) *Complaint {
	value, c := ReadNumber(s)
	if c != nil {
		return c
	}
	if value < f.Min || value > f.Max {
		return &Complaint{fmt.Sprintf("%s %s is out of range, want %d to %d", f.Name, s.Text, f.Min, f.Max), ""}
	}
	n.Value = value
	return nil
}

// ReadNumber reads digits. A number beyond 64 bits is read as the largest there is.
func ReadNumber(s Scalar) (uint64, *Complaint) {
	const want = "a whole number"
	value, err := strconv.ParseUint(s.Text, 10, 64)
	beyond := err != nil && IsDigits(s.Text)
	switch {
	case s.Kind == KindText && (err == nil || beyond) && !leadingZero(s.Text):
		return 0, Wanted(s, want, "write "+s.Text+" without quotes")
	case s.Kind != KindNumber && s.Kind != KindDefault:
		return 0, Wanted(s, want, "")
	case leadingZero(s.Text):
		return 0, Wanted(s, want, "write it without the leading 0")
	case beyond:
		return ^uint64(0), nil
	case err != nil && strings.HasPrefix(s.Text, "-"):
		return 0, &Complaint{s.Text + " is below zero", ""}
	case err != nil && IsDigits(strings.ReplaceAll(s.Text, "_", "")):
		return 0, Wanted(s, want, "write "+strings.ReplaceAll(s.Text, "_", ""))
	case err != nil:
		return 0, Wanted(s, want+" in decimal", "")
	}
	return value, nil
}

// IsDigits is whether text is a number without a sign.
func IsDigits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// leadingZero finds numbers that YAML 1.1 reads as octal and YAML 1.2 as decimal.
func leadingZero(s string) bool { return len(s) > 1 && s[0] == '0' && IsDigits(s) }

func (*Number) Schema(f *Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "integer", Minimum: jsonNumber(f.Min), Maximum: jsonNumber(f.Max)}
}

func (*Number) Describe() string { return "number" }

// Duration is a time with its unit.
type Duration struct {
	Mark
	Value time.Duration
}

const (
	// durationMin is the kernel's coarsest tick, CONFIG_HZ=100: flows age in ticks.
	durationMin = 10 * time.Millisecond
	// durationMax fits 2^31 ticks of CONFIG_HZ=1000 (24 d 20 h), beyond which a 32-bit
	// difference of ticks changes its sign.
	durationMax = 24 * 24 * time.Hour
)

func (d *Duration) Read(s Scalar, f *Field) *Complaint {
	const want = "a duration with a unit"
	if s.Kind == KindNumber || s.Kind == KindText && IsDigits(s.Text) {
		return Wanted(s, want, fmt.Sprintf("if seconds are meant, write %ss", s.Text))
	}
	if s.Kind != KindText && s.Kind != KindDefault {
		return Wanted(s, want, "write for example "+f.Example)
	}
	value, err := time.ParseDuration(s.Text)
	switch {
	case err == nil && f.Bounded && (value < time.Duration(f.Min) || value > time.Duration(f.Max)):
		return &Complaint{fmt.Sprintf("%s %s is out of range, want %s to %s", f.Name, s.Text, brief(f.Min), brief(f.Max)), ""}
	case err != nil:
		return Wanted(s, want, "the units are ms, s, m and h: write for example "+f.Example)
	case value <= 0:
		return &Complaint{fmt.Sprintf("%s %s is not above zero", f.Name, s.Text), "write for example " + f.Example}
	case value < durationMin:
		return &Complaint{fmt.Sprintf("%s %s is shorter than a tick of the kernel's clock can be", f.Name, s.Text), "10ms is the least"}
	case value > durationMax:
		return &Complaint{fmt.Sprintf("%s %s is longer than 24 days", f.Name, s.Text), "576h is the most"}
	}
	d.Value = value
	return nil
}

func (*Duration) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`}
}

func (*Duration) Describe() string { return "duration" }

// brief is a bound of a duration as one would write it.
func brief(bound uint64) string { return model.DurationText(time.Duration(bound)) }

// Address is an IP address that a packet can be sent to over a network.
type Address struct {
	Mark
	Value netip.Addr
}

func (a *Address) Read(s Scalar, _ *Field) *Complaint {
	const want = "an IP address"
	if s.Kind != KindText {
		return Wanted(s, want, "")
	}
	value, err := netip.ParseAddr(s.Text)
	if err != nil {
		return Wanted(s, want, suggestAddress(s.Text))
	}
	if c := unusable(value, s.Text); c != nil {
		return c
	}
	a.Value = value
	return nil
}

// unusable is what keeps an address from being one that packets of a network carry.
func unusable(value netip.Addr, text string) *Complaint {
	switch {
	case value.Zone() != "":
		return &Complaint{text + " has a zone", "write the address without %" + value.Zone()}
	case value.Is4In6():
		return &Complaint{text + " is an IPv4 address in IPv6 form", "write " + value.Unmap().String()}
	case value.IsUnspecified():
		return &Complaint{text + " means every address", "write the one that is meant"}
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

// suggestAddress guesses what was meant by text that is no address.
func suggestAddress(s string) string {
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return "write it without the prefix length: " + prefix.Addr().String()
	}
	if pair, err := netip.ParseAddrPort(s); err == nil {
		return fmt.Sprintf("write %s here and %d as port", pair.Addr(), pair.Port())
	}
	if bare, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return "write it without brackets: " + bare.String()
	}
	if strings.ContainsFunc(s, unicode.IsLetter) && !strings.Contains(s, ":") {
		return "DNS names are not supported yet: write the IP address"
	}
	return ""
}

func (*Address) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
	}}
}

func (*Address) Describe() string { return "IP address" }

// Network is one address, or a prefix of them. A single address is a prefix of its whole
// length.
type Network struct {
	Mark
	Value netip.Prefix // masked
}

func (n *Network) Read(s Scalar, _ *Field) *Complaint {
	const want = "an IP address or a prefix"
	if s.Kind != KindText {
		return Wanted(s, want, "")
	}
	value, err := netip.ParsePrefix(s.Text)
	if one, alone := netip.ParseAddr(s.Text); alone == nil {
		value, err = netip.PrefixFrom(one, one.BitLen()), nil
		if zone := one.Zone(); zone != "" {
			return &Complaint{s.Text + " has a zone", "write the address without %" + zone}
		}
	}
	if err != nil {
		return Wanted(s, want, suggestAddress(s.Text))
	}
	switch c := unusable(value.Addr(), s.Text); {
	case c != nil:
		return c
	case value.Masked() != value:
		return &Complaint{s.Text + " has bits set behind the prefix", fmt.Sprintf("write %s for the prefix, or %s for the address", value.Masked(), value.Addr())}
	case value.Bits() < 8:
		return &Complaint{s.Text + " is wider than any network is", "write a prefix of 8 bits or more"}
	}
	n.Value = value
	return nil
}

func (*Network) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
		{Type: "string", Pattern: `^[0-9a-fA-F.:]+/[0-9]{1,3}$`},
	}}
}

func (*Network) Describe() string { return "IP address or prefix" }

// Ports is a port, a range, or any.
type Ports struct {
	Mark
	Value model.PortRange
}

func (p *Ports) Read(s Scalar, _ *Field) *Complaint {
	if s.Kind == KindText && s.Text == "any" {
		p.Value = model.AnyPort
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
func readPorts(s Scalar, want string) (model.PortRange, *Complaint) {
	if s.Kind != KindText && s.Kind != KindNumber {
		return model.PortRange{}, Wanted(s, want, "")
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
		return model.PortRange{}, Wanted(s, want, suggestion)
	}
	first, errFirst := strconv.ParseUint(firstText, 10, 16)
	last, errLast := strconv.ParseUint(lastText, 10, 16)
	switch {
	case errFirst != nil || errLast != nil || first == 0:
		return model.PortRange{}, &Complaint{fmt.Sprintf("port %s is out of range, want 1 to 65535", s.Text), ""}
	case first > last:
		return model.PortRange{}, &Complaint{fmt.Sprintf("range %s ends before it begins", s.Text), fmt.Sprintf("write \"%d-%d\"", last, first)}
	}
	return model.PortRange{First: uint16(first), Last: uint16(last)}, nil
}

func (*Ports) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "1", Maximum: "65535"},
		{Type: "string", Pattern: "^(any|" + portPattern + `(\s*-\s*` + portPattern + ")?)$"},
	}}
}

func (*Ports) Describe() string { return "port, range or any" }

// PortRange is a range that source ports are taken from.
type PortRange struct {
	Mark
	Value model.PortRange
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

// Boolean is yes or no.
type Boolean struct {
	Mark
	Value bool
}

func (b *Boolean) Read(s Scalar, _ *Field) *Complaint {
	switch {
	case s.Kind == KindBool || s.Kind == KindDefault:
		b.Value = s.Text == "true"
		return nil
	case s.Kind == KindText:
		for word, meant := range map[string]string{"yes": "true", "on": "true", "no": "false", "off": "false"} {
			if strings.EqualFold(s.Text, word) {
				return Wanted(s, "true or false", "write "+meant)
			}
		}
	}
	return Wanted(s, "true or false", "")
}

func (*Boolean) Schema(*Field) *jsonschema.Schema { return &jsonschema.Schema{Type: "boolean"} }

func (*Boolean) Describe() string { return "`true` or `false`" }

// Percent is a share of a hundred.
type Percent struct {
	Mark
	Value uint32
}

func (p *Percent) Read(s Scalar, f *Field) *Complaint {
	want := "a percentage such as " + f.Example
	digits, isPercent := strings.CutSuffix(s.Text, "%")
	switch value, err := strconv.ParseUint(digits, 10, 32); {
	case s.Kind == KindNumber && IsDigits(s.Text):
		return Wanted(s, want, "write "+s.Text+"%")
	case s.Kind != KindText && s.Kind != KindDefault || !isPercent || !IsDigits(digits):
		return Wanted(s, want, "")
	case leadingZero(digits):
		return Wanted(s, want, "write it without the leading 0")
	case err != nil || value < f.Min || value > f.Max:
		return &Complaint{fmt.Sprintf("%s %s is out of range, want %d%% to %d%%", f.Name, s.Text, f.Min, f.Max), ""}
	default:
		p.Value = uint32(value)
		return nil
	}
}

func (*Percent) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[0-9]{1,3}%$"}
}

func (*Percent) Describe() string { return "percentage" }

// Phrase is text that may have spaces in it.
type Phrase struct {
	Mark
	Value string
}

func (p *Phrase) Read(s Scalar, f *Field) *Complaint {
	switch {
	case s.Kind == KindNumber || s.Kind == KindBool:
		return Wanted(s, "text", fmt.Sprintf("write it in quotes: %q", s.Text))
	case s.Kind != KindText && s.Kind != KindDefault:
		return Wanted(s, "text", "")
	}
	if c := Fits(s.Text, f); c != nil {
		return c
	}
	if strings.ContainsFunc(s.Text, unicode.IsControl) {
		return &Complaint{fmt.Sprintf("%s %q has a control character in it", f.Name, s.Text), ""}
	}
	p.Value = s.Text
	return nil
}

// Fits is the complaint about a text's length in bytes.
func Fits(text string, f *Field) *Complaint {
	switch {
	case uint64(len(text)) < f.Min:
		return &Complaint{f.Name + " is empty", "write for example " + f.Example}
	case uint64(len(text)) > f.Max:
		return &Complaint{fmt.Sprintf("%s is %d bytes long, the most is %d", f.Name, len(text), f.Max), ""}
	}
	return nil
}

func (*Phrase) Schema(f *Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: count(f.Min), MaxLength: count(f.Max)}
}

func (*Phrase) Describe() string { return "text" }

// Prefix is source addresses: one address, or all that begin alike, from none (/0) to all bits.
type Prefix struct {
	Mark
	Value netip.Prefix // masked
}

func (p *Prefix) Read(s Scalar, _ *Field) *Complaint {
	const want = "an IP address or a prefix"
	if s.Kind != KindText {
		return Wanted(s, want, "")
	}
	value, err := netip.ParsePrefix(s.Text)
	if one, alone := netip.ParseAddr(s.Text); alone == nil {
		if zone := one.Zone(); zone != "" {
			return &Complaint{s.Text + " has a zone", "write the address without %" + zone}
		}
		value, err = netip.PrefixFrom(one, one.BitLen()), nil
	}
	if err != nil {
		return Wanted(s, want, suggestAddress(s.Text))
	}
	single := !strings.Contains(s.Text, "/")
	switch {
	case value.Addr().Is4In6() && value.Bits() >= 96:
		return &Complaint{s.Text + " is IPv4 in IPv6 form", "write " + netip.PrefixFrom(value.Addr().Unmap(), value.Bits()-96).String()}
	case value.Masked() != value:
		return &Complaint{s.Text + " has bits set behind the prefix", fmt.Sprintf("write %s for the prefix, or %s for the address", value.Masked(), value.Addr())}
	case value.Addr().IsUnspecified() && single:
		return &Complaint{s.Text + " is no source of packets", fmt.Sprintf("write %s/0 for every address", s.Text)}
	case value.Addr().IsMulticast():
		return &Complaint{s.Text + " is multicast: no packet has such a source", "remove it"}
	}
	p.Value = value
	return nil
}

func (*Prefix) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
		{Type: "string", Pattern: `^[0-9a-fA-F.:]+/[0-9]{1,3}$`},
	}}
}

func (*Prefix) Describe() string { return "IP address or prefix" }

// Rate is a number of events per second.
type Rate struct {
	Mark
	Value uint64
}

func (r *Rate) Read(s Scalar, f *Field) *Complaint {
	want := "a rate per second such as " + f.Example
	digits, unit, cut := strings.Cut(s.Text, "/")
	switch value, err := strconv.ParseUint(digits, 10, 64); {
	case s.Kind == KindNumber && IsDigits(s.Text):
		return Wanted(s, want, "write "+s.Text+"/s")
	case s.Kind != KindText || !cut || !IsDigits(digits):
		return Wanted(s, want, "")
	case leadingZero(digits):
		return Wanted(s, want, "write it without the leading 0")
	case unit != "s":
		return Wanted(s, want, "the unit is s, a second")
	case err != nil || value < f.Min || value > f.Max:
		return &Complaint{fmt.Sprintf("%s %s is out of range, want %d/s to %d/s", f.Name, s.Text, f.Min, f.Max), ""}
	default:
		r.Value = value
		return nil
	}
}

func (*Rate) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[1-9][0-9]*/s$"}
}

func (*Rate) Describe() string { return "rate per second" }
