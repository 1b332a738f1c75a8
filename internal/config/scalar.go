package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/value"
)

// Text is a name or a path.
type Text struct {
	Mark
	Value string
}

func (t *Text) Read(s Scalar, f *Field) *Complaint {
	if c := wantText(s, f); c != nil {
		return c
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

// ReadNumber reads digits. A number beyond 64 bits is read as the largest one.
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

// IsDigits reports whether text is a number without a sign.
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
	// durationMin is the kernel's coarsest tick, CONFIG_HZ=100: flows age in ticks. It is for fields without
	// bounds of their own.
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
		units := "ms, s, m and h"
		if f.Bounded && f.Min < uint64(time.Millisecond) {
			units = "us, " + units
		}
		return Wanted(s, want, "the units are "+units+": write for example "+f.Example)
	case value <= 0:
		return &Complaint{fmt.Sprintf("%s %s is not above zero", f.Name, s.Text), "write for example " + f.Example}
	case value < durationMin && !f.Bounded:
		return &Complaint{fmt.Sprintf("%s %s is too short: a tick of the kernel's clock can take longer", f.Name, s.Text), "the minimum is 10ms"}
	case value > durationMax:
		return &Complaint{fmt.Sprintf("%s %s is longer than 24 days", f.Name, s.Text), "the maximum is 576h"}
	}
	d.Value = value
	return nil
}

func (*Duration) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`}
}

func (*Duration) Describe() string { return "duration" }

// brief is a bound of a duration as one would write it.
func brief(bound uint64) string { return value.DurationText(time.Duration(bound)) }

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
	if c := wantText(s, f); c != nil {
		return c
	}
	if strings.ContainsFunc(s.Text, unicode.IsControl) {
		return &Complaint{fmt.Sprintf("%s %q has a control character in it", f.Name, s.Text), ""}
	}
	p.Value = s.Text
	return nil
}

// wantText returns the complaint about a scalar that is no text, or not of the field's length.
func wantText(s Scalar, f *Field) *Complaint {
	switch s.Kind {
	case KindText, KindDefault:
		return Fits(s.Text, f)
	case KindNumber, KindBool:
		return Wanted(s, "text", fmt.Sprintf("write it in quotes: %q", s.Text))
	}
	return Wanted(s, "text", "")
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
