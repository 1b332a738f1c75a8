package file

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

	"github.com/shunt-lb/shunt/internal/maglev"
	"github.com/shunt-lb/shunt/internal/model"
)

// kind is what a piece of YAML is. The value is the words messages use.
type kind string

const (
	kindText    kind = "text"
	kindNumber  kind = "a number"
	kindBool    kind = "true or false"
	kindNothing kind = "nothing"
	kindList    kind = "a list"
	kindMapping kind = "a mapping"
	kindOther   kind = "something else"
	// kindDefault is of the default tag, whose kind is right by definition.
	kindDefault kind = "default"
)

// scalar is one value as written.
type scalar struct {
	kind kind
	text string
}

// found is what a message says was found.
func (s scalar) found() string {
	switch s.kind {
	case kindText:
		return fmt.Sprintf("text %q", s.text)
	case kindNumber:
		return "the number " + s.text
	case kindBool:
		return s.text
	}
	return string(s.kind)
}

// complaint is what is wrong with a scalar.
type complaint struct {
	message    string
	suggestion string
}

// wanted is the complaint about a scalar of the wrong kind.
func wanted(s scalar, want, suggestion string) *complaint {
	return &complaint{fmt.Sprintf("found %s, want %s", s.found(), want), suggestion}
}

// leaf is a value that is written as one scalar.
type leaf interface {
	// read takes the value from a scalar; on a complaint the value is unchanged.
	read(s scalar, f *field) *complaint
	// where is the leaf's mark, to be filled in.
	where() *mark
	// schema describes what read accepts.
	schema(f *field) *jsonschema.Schema
	// describe is the type, for people.
	describe() string
}

func (m *mark) where() *mark { return m }

// list is a list of mappings.
type list[T any] struct {
	mark
	Items []T
}

// JSONSchemaAlias makes the schema that of the items.
func (list[T]) JSONSchemaAlias() any { return []T{} }

// many is one scalar or a list of them.
type many[T any] struct {
	mark
	Items []T
}

// whole is the mark of all of it. Lists whose brackets may be left out are known by this method.
func (list *many[T]) whole() *mark { return &list.mark }

// later is a key that is known but not supported yet. Nothing is read into it, so it takes no room.
type later struct{}

func (*later) read(scalar, *field) *complaint { return nil }
func (*later) where() *mark                   { return &mark{} }
func (*later) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Not: jsonschema.TrueSchema}
}
func (*later) describe() string { return "" }

func notYet(what, suggestion string) *complaint {
	return &complaint{what + " is not supported yet", suggestion}
}
func count(n uint64) *uint64          { return &n }
func jsonNumber(n uint64) json.Number { return json.Number(strconv.FormatUint(n, 10)) }

// text is a name or a path.
type text struct {
	mark
	Value string
}

func (t *text) read(s scalar, f *field) *complaint {
	if s.kind != kindText && s.kind != kindDefault {
		suggestion := ""
		if s.kind == kindNumber || s.kind == kindBool {
			suggestion = fmt.Sprintf("write it in quotes: %q", s.text)
		}
		return wanted(s, "text", suggestion)
	}
	switch {
	case uint64(len(s.text)) < f.min:
		return &complaint{f.name + " is empty", "write for example " + f.example}
	case uint64(len(s.text)) > f.max:
		return &complaint{fmt.Sprintf("%s is %d bytes long, the most is %d", f.name, len(s.text), f.max), ""}
	}
	if i := strings.IndexFunc(s.text, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }); i >= 0 {
		return &complaint{fmt.Sprintf("%s %q has a space or a control character in it", f.name, s.text), ""}
	}
	t.Value = s.text
	return nil
}

func (*text) schema(f *field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: count(f.min), MaxLength: count(f.max), Pattern: `^\S*$`}
}

func (*text) describe() string { return "text" }

// word is one of an enumeration.
type word struct {
	mark
	Value string
}

func (w *word) read(s scalar, f *field) *complaint {
	if s.kind != kindText && s.kind != kindDefault {
		return wanted(s, f.supportedWords(), "")
	}
	if slices.Contains(f.words, s.text) {
		w.Value = s.text
		return nil
	}
	if instead, known := f.insteadOf(s.text); known {
		return notYet(f.name+" "+s.text, instead)
	}
	suggestion := ""
	if near := nearest(s.text, f.words); near != "" {
		suggestion = fmt.Sprintf("did you mean %q?", near)
	}
	return &complaint{fmt.Sprintf("unknown %s %q, want %s", f.name, s.text, f.supportedWords()), suggestion}
}

func (*word) schema(f *field) *jsonschema.Schema {
	schema := &jsonschema.Schema{Type: "string"}
	for _, w := range f.words {
		schema.Enum = append(schema.Enum, w)
	}
	return schema
}

func (*word) describe() string { return "word" }

// number is a whole number within the field's bounds.
type number struct {
	mark
	Value uint64
}

func (n *number) read(s scalar, f *field) *complaint {
	value, c := readNumber(s)
	if c != nil {
		return c
	}
	if value < f.min || value > f.max {
		return &complaint{fmt.Sprintf("%s %s is out of range, want %d to %d", f.name, s.text, f.min, f.max), ""}
	}
	n.Value = value
	return nil
}

// readNumber reads digits. A number beyond 64 bits is read as the largest there is.
func readNumber(s scalar) (uint64, *complaint) {
	const want = "a whole number"
	value, err := strconv.ParseUint(s.text, 10, 64)
	beyond := err != nil && isDigits(s.text)
	switch {
	case s.kind == kindText && (err == nil || beyond) && !leadingZero(s.text):
		return 0, wanted(s, want, "write "+s.text+" without quotes")
	case s.kind != kindNumber && s.kind != kindDefault:
		return 0, wanted(s, want, "")
	case leadingZero(s.text):
		return 0, wanted(s, want, "write it without the leading 0")
	case beyond:
		return ^uint64(0), nil
	case err != nil && strings.HasPrefix(s.text, "-"):
		return 0, &complaint{s.text + " is below zero", ""}
	case err != nil && isDigits(strings.ReplaceAll(s.text, "_", "")):
		return 0, wanted(s, want, "write "+strings.ReplaceAll(s.text, "_", ""))
	case err != nil:
		return 0, wanted(s, want+" in decimal", "")
	}
	return value, nil
}

func isDigits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// leadingZero finds numbers that YAML 1.1 reads as octal and YAML 1.2 as decimal.
func leadingZero(s string) bool { return len(s) > 1 && s[0] == '0' && isDigits(s) }

func (*number) schema(f *field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "integer", Minimum: jsonNumber(f.min), Maximum: jsonNumber(f.max)}
}

func (*number) describe() string { return "number" }

// tableSize is one of maglev.Sizes.
type tableSize struct {
	mark
	Value uint32
}

func (t *tableSize) read(s scalar, f *field) *complaint {
	value, c := readNumber(s)
	if c != nil {
		return c
	}
	largest := maglev.Sizes[len(maglev.Sizes)-1]
	if value > uint64(largest) {
		return &complaint{fmt.Sprintf("%s %s is not a size that a table can have", f.name, s.text), fmt.Sprintf("the largest is %d", largest)}
	}
	i, exact := slices.BinarySearch(maglev.Sizes, uint32(value))
	if !exact {
		return &complaint{fmt.Sprintf("%s %s is not a size that a table can have", f.name, s.text), fmt.Sprintf("the next larger one is %d", maglev.Sizes[i])}
	}
	t.Value = uint32(value)
	return nil
}

func (*tableSize) schema(*field) *jsonschema.Schema {
	schema := &jsonschema.Schema{Type: "integer"}
	for _, size := range maglev.Sizes {
		schema.Enum = append(schema.Enum, size)
	}
	return schema
}

func (*tableSize) describe() string {
	sizes := make([]string, len(maglev.Sizes))
	for i, size := range maglev.Sizes {
		sizes[i] = strconv.FormatUint(uint64(size), 10)
	}
	return "one of " + strings.Join(sizes, ", ")
}

// duration is a time with its unit.
type duration struct {
	mark
	Value time.Duration
}

const (
	// durationMin is the kernel's coarsest tick, CONFIG_HZ=100: flows age in ticks.
	durationMin = 10 * time.Millisecond
	// durationMax fits 2^31 ticks of CONFIG_HZ=1000 (24 d 20 h), beyond which a 32-bit
	// difference of ticks changes its sign.
	durationMax = 24 * 24 * time.Hour
)

func (d *duration) read(s scalar, f *field) *complaint {
	const want = "a duration with a unit"
	if s.kind == kindNumber || s.kind == kindText && isDigits(s.text) {
		return wanted(s, want, fmt.Sprintf("if seconds are meant, write %ss", s.text))
	}
	if s.kind != kindText && s.kind != kindDefault {
		return wanted(s, want, "write for example "+f.example)
	}
	value, err := time.ParseDuration(s.text)
	switch {
	case err == nil && f.bounded && (value < time.Duration(f.min) || value > time.Duration(f.max)):
		return &complaint{fmt.Sprintf("%s %s is out of range, want %s to %s", f.name, s.text, brief(f.min), brief(f.max)), ""}
	case err != nil:
		return wanted(s, want, "the units are ms, s, m and h: write for example "+f.example)
	case value <= 0:
		return &complaint{fmt.Sprintf("%s %s is not above zero", f.name, s.text), "write for example " + f.example}
	case value < durationMin:
		return &complaint{fmt.Sprintf("%s %s is shorter than a tick of the kernel's clock can be", f.name, s.text), "10ms is the least"}
	case value > durationMax:
		return &complaint{fmt.Sprintf("%s %s is longer than 24 days", f.name, s.text), "576h is the most"}
	}
	d.Value = value
	return nil
}

func (*duration) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`}
}

func (*duration) describe() string { return "duration" }

// brief is a bound of a duration as one would write it.
func brief(bound uint64) string { return model.DurationText(time.Duration(bound)) }

// address is an IP address that a packet can be sent to over a network.
type address struct {
	mark
	Value netip.Addr
}

func (a *address) read(s scalar, _ *field) *complaint {
	const want = "an IP address"
	if s.kind != kindText {
		return wanted(s, want, "")
	}
	value, err := netip.ParseAddr(s.text)
	if err != nil {
		return wanted(s, want, suggestAddress(s.text))
	}
	if c := unusable(value, s.text); c != nil {
		return c
	}
	a.Value = value
	return nil
}

// unusable is what keeps an address from being one that packets of a network carry.
func unusable(value netip.Addr, text string) *complaint {
	switch {
	case value.Zone() != "":
		return &complaint{text + " has a zone", "write the address without %" + value.Zone()}
	case value.Is4In6():
		return &complaint{text + " is an IPv4 address in IPv6 form", "write " + value.Unmap().String()}
	case value.IsUnspecified():
		return &complaint{text + " means every address", "write the one that is meant"}
	case value.IsMulticast():
		return &complaint{text + " is a multicast address", "write a unicast address"}
	case value.IsLoopback():
		return &complaint{text + " is a loopback address: packets to it never cross a network", "write an address of a network"}
	case value == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return &complaint{text + " is the broadcast address", "write a unicast address"}
	case value.Is4() && value.As4()[0] == 0:
		return &complaint{text + " is in 0.0.0.0/8, which has no hosts (RFC 6890)", ""}
	case value.Is6() && value.IsLinkLocalUnicast():
		return &complaint{text + " is a link-local address: it names a host on one link only", "write a global or unique local address"}
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

func (*address) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
	}}
}

func (*address) describe() string { return "IP address" }

// network is one address, or a prefix of them. A single address is a prefix of its whole
// length.
type network struct {
	mark
	Value netip.Prefix // masked
}

func (n *network) read(s scalar, _ *field) *complaint {
	const want = "an IP address or a prefix"
	if s.kind != kindText {
		return wanted(s, want, "")
	}
	value, err := netip.ParsePrefix(s.text)
	if one, alone := netip.ParseAddr(s.text); alone == nil {
		value, err = netip.PrefixFrom(one, one.BitLen()), nil
		if zone := one.Zone(); zone != "" {
			return &complaint{s.text + " has a zone", "write the address without %" + zone}
		}
	}
	if err != nil {
		return wanted(s, want, suggestAddress(s.text))
	}
	switch c := unusable(value.Addr(), s.text); {
	case c != nil:
		return c
	case value.Masked() != value:
		return &complaint{s.text + " has bits set behind the prefix", fmt.Sprintf("write %s for the prefix, or %s for the address", value.Masked(), value.Addr())}
	case value.Bits() < 8:
		return &complaint{s.text + " is wider than any network is", "write a prefix of 8 bits or more"}
	}
	n.Value = value
	return nil
}

func (*network) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string", Format: "ipv4"}, {Type: "string", Format: "ipv6"},
		{Type: "string", Pattern: `^[0-9a-fA-F.:]+/[0-9]{1,3}$`},
	}}
}

func (*network) describe() string { return "IP address or prefix" }

// ports is a port, a range, or any.
type ports struct {
	mark
	Value model.PortRange
}

func (p *ports) read(s scalar, _ *field) *complaint {
	if s.kind == kindText && s.text == "any" {
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
func readPorts(s scalar, want string) (model.PortRange, *complaint) {
	if s.kind != kindText && s.kind != kindNumber {
		return model.PortRange{}, wanted(s, want, "")
	}
	firstText, lastText, isRange := strings.Cut(s.text, "-")
	if !isRange {
		lastText = firstText
	}
	firstText, lastText = strings.TrimSpace(firstText), strings.TrimSpace(lastText)
	if !isDigits(firstText) || !isDigits(lastText) || leadingZero(firstText) || leadingZero(lastText) {
		suggestion := ""
		if near := nearest(s.text, []string{"any"}); s.kind == kindText && near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		return model.PortRange{}, wanted(s, want, suggestion)
	}
	first, errFirst := strconv.ParseUint(firstText, 10, 16)
	last, errLast := strconv.ParseUint(lastText, 10, 16)
	switch {
	case errFirst != nil || errLast != nil || first == 0:
		return model.PortRange{}, &complaint{fmt.Sprintf("port %s is out of range, want 1 to 65535", s.text), ""}
	case first > last:
		return model.PortRange{}, &complaint{fmt.Sprintf("range %s ends before it begins", s.text), fmt.Sprintf("write \"%d-%d\"", last, first)}
	}
	return model.PortRange{First: uint16(first), Last: uint16(last)}, nil
}

func (*ports) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "1", Maximum: "65535"},
		{Type: "string", Pattern: "^(any|" + portPattern + `(\s*-\s*` + portPattern + ")?)$"},
	}}
}

func (*ports) describe() string { return "port, range or any" }

// portRange is a range that source ports are taken from.
type portRange struct {
	mark
	Value model.PortRange
}

func (p *portRange) read(s scalar, f *field) *complaint {
	want := "a range such as " + f.example
	if !strings.Contains(s.text, "-") {
		return wanted(s, want, "")
	}
	value, c := readPorts(s, want)
	if c == nil {
		p.Value = value
	}
	return c
}

func (*portRange) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^" + portPattern + `\s*-\s*` + portPattern + "$"}
}

func (*portRange) describe() string { return "range" }
