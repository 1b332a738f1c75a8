package file

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/invopop/jsonschema"

	"github.com/shunt-lb/shunt/internal/model"
)

// boolean is yes or no.
type boolean struct {
	mark
	Value bool
}

func (b *boolean) read(s scalar, _ *field) *complaint {
	switch {
	case s.kind == kindBool || s.kind == kindDefault:
		b.Value = s.text == "true"
		return nil
	case s.kind == kindText:
		for word, meant := range map[string]string{"yes": "true", "on": "true", "no": "false", "off": "false"} {
			if strings.EqualFold(s.text, word) {
				return wanted(s, "true or false", "write "+meant)
			}
		}
	}
	return wanted(s, "true or false", "")
}

func (*boolean) schema(*field) *jsonschema.Schema { return &jsonschema.Schema{Type: "boolean"} }
func (*boolean) describe() string                 { return "`true` or `false`" }

// percent is a share of a hundred.
type percent struct {
	mark
	Value uint32
}

func (p *percent) read(s scalar, f *field) *complaint {
	want := "a percentage such as " + f.example
	digits, isPercent := strings.CutSuffix(s.text, "%")
	switch value, err := strconv.ParseUint(digits, 10, 32); {
	case s.kind == kindNumber && isDigits(s.text):
		return wanted(s, want, "write "+s.text+"%")
	case s.kind != kindText && s.kind != kindDefault || !isPercent || !isDigits(digits):
		return wanted(s, want, "")
	case leadingZero(digits):
		return wanted(s, want, "write it without the leading 0")
	case err != nil || value < f.min || value > f.max:
		return &complaint{fmt.Sprintf("%s %s is out of range, want %d%% to %d%%", f.name, s.text, f.min, f.max), ""}
	default:
		p.Value = uint32(value)
		return nil
	}
}

func (*percent) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[0-9]{1,3}%$"}
}

func (*percent) describe() string { return "percentage" }

// phrase is text that may have spaces in it.
type phrase struct {
	mark
	Value string
}

func (p *phrase) read(s scalar, f *field) *complaint {
	switch {
	case s.kind == kindNumber || s.kind == kindBool:
		return wanted(s, "text", fmt.Sprintf("write it in quotes: %q", s.text))
	case s.kind != kindText && s.kind != kindDefault:
		return wanted(s, "text", "")
	}
	if c := fits(s.text, f); c != nil {
		return c
	}
	if strings.ContainsFunc(s.text, unicode.IsControl) {
		return &complaint{fmt.Sprintf("%s %q has a control character in it", f.name, s.text), ""}
	}
	p.Value = s.text
	return nil
}

// fits is the complaint about a text's length in bytes.
func fits(text string, f *field) *complaint {
	switch {
	case uint64(len(text)) < f.min:
		return &complaint{f.name + " is empty", "write for example " + f.example}
	case uint64(len(text)) > f.max:
		return &complaint{fmt.Sprintf("%s is %d bytes long, the most is %d", f.name, len(text), f.max), ""}
	}
	return nil
}

func (*phrase) schema(f *field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: count(f.min), MaxLength: count(f.max)}
}

func (*phrase) describe() string { return "text" }

// octets is any bytes: as text, or as hexadecimal digits.
type octets struct {
	mark
	Value string
}

const hexPrefix = "hex:"

func (o *octets) read(s scalar, f *field) *complaint {
	switch {
	case s.kind == kindNumber || s.kind == kindBool:
		return wanted(s, "text", fmt.Sprintf("write it in quotes: %q", s.text))
	case s.kind != kindText:
		return wanted(s, "text", "")
	}
	value := s.text
	if digits, is := strings.CutPrefix(s.text, hexPrefix); is {
		octets, err := hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
		if err != nil {
			return &complaint{fmt.Sprintf("%s %q is not hexadecimal: want two of 0-9 and a-f for each byte", f.name, s.text), ""}
		}
		value = string(octets)
	}
	if c := fits(value, f); c != nil {
		return c
	}
	o.Value = value
	return nil
}

func (*octets) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: count(1)}
}

func (*octets) describe() string { return "text" }

// statuses is one HTTP status or a range of them.
type statuses struct {
	mark
	Value model.StatusRange
}

const (
	statusMin = 100
	statusMax = 599 // RFC 9110, 15
)

func (r *statuses) read(s scalar, _ *field) *complaint {
	const want = "a status, or a range such as \"200-399\""
	firstText, lastText, isRange := strings.Cut(s.text, "-")
	if !isRange {
		lastText = firstText
	}
	if s.kind != kindText && s.kind != kindNumber && s.kind != kindDefault || !isDigits(firstText) || !isDigits(lastText) {
		suggestion := ""
		if digit, all := strings.CutSuffix(strings.ToLower(s.text), "xx"); all && isDigits(digit) && len(digit) == 1 {
			suggestion = fmt.Sprintf("write \"%s00-%s99\"", digit, digit)
		}
		return wanted(s, want, suggestion)
	}
	first, errFirst := strconv.ParseUint(firstText, 10, 16)
	last, errLast := strconv.ParseUint(lastText, 10, 16)
	switch {
	case errFirst != nil || errLast != nil || first < statusMin || last > statusMax || first > statusMax || last < statusMin:
		return &complaint{fmt.Sprintf("status %s is out of range, want %d to %d", s.text, statusMin, statusMax), ""}
	case first > last:
		return &complaint{fmt.Sprintf("range %s ends before it begins", s.text), fmt.Sprintf("write \"%d-%d\"", last, first)}
	}
	r.Value = model.StatusRange{First: uint16(first), Last: uint16(last)}
	return nil
}

func (*statuses) schema(*field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: jsonNumber(statusMin), Maximum: jsonNumber(statusMax)},
		{Type: "string", Pattern: "^[1-5][0-9]{2}(-[1-5][0-9]{2})?$"},
	}}
}

func (*statuses) describe() string { return "status or range" }
