package file

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// tableSize is one of maglev.Sizes.
type tableSize struct {
	config.Mark
	Value uint32
}

func (t *tableSize) Read(s config.Scalar, f *config.Field) *config.Complaint {
	value, c := config.ReadNumber(s)
	if c != nil {
		return c
	}
	largest := maglev.Sizes[len(maglev.Sizes)-1]
	if value > uint64(largest) {
		return config.Complain(fmt.Sprintf("%s %s is not a size that a table can have", f.Name, s.Text), fmt.Sprintf("the largest is %d", largest))
	}
	i, exact := slices.BinarySearch(maglev.Sizes, uint32(value))
	if !exact {
		return config.Complain(fmt.Sprintf("%s %s is not a size that a table can have", f.Name, s.Text), fmt.Sprintf("the next larger one is %d", maglev.Sizes[i]))
	}
	t.Value = uint32(value)
	return nil
}

func (*tableSize) Schema(*config.Field) *jsonschema.Schema {
	schema := &jsonschema.Schema{Type: "integer"}
	for _, size := range maglev.Sizes {
		schema.Enum = append(schema.Enum, size)
	}
	return schema
}

func (*tableSize) Describe() string {
	sizes := make([]string, len(maglev.Sizes))
	for i, size := range maglev.Sizes {
		sizes[i] = strconv.FormatUint(uint64(size), 10)
	}
	return "one of " + strings.Join(sizes, ", ")
}

// octets is any bytes: as text, or as hexadecimal digits.
type octets struct {
	config.Mark
	Value string
}

const hexPrefix = "hex:"

func (o *octets) Read(s config.Scalar, f *config.Field) *config.Complaint {
	switch {
	case s.Kind == config.KindNumber || s.Kind == config.KindBool:
		return config.Wanted(s, "text", fmt.Sprintf("write it in quotes: %q", s.Text))
	case s.Kind != config.KindText:
		return config.Wanted(s, "text", "")
	}
	value := s.Text
	if digits, is := strings.CutPrefix(s.Text, hexPrefix); is {
		octets, err := hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
		if err != nil {
			return config.Complain(fmt.Sprintf("%s %q is not hexadecimal: want two digits (0-9, a-f) for each byte", f.Name, s.Text), "")
		}
		value = string(octets)
	}
	if c := config.Fits(value, f); c != nil {
		return c
	}
	o.Value = value
	return nil
}

func (*octets) Schema(*config.Field) *jsonschema.Schema {
	one := uint64(1)
	return &jsonschema.Schema{Type: "string", MinLength: &one}
}

func (*octets) Describe() string { return "text" }

// statuses is one HTTP status or a range of them.
type statuses struct {
	config.Mark
	Value model.StatusRange
}

const (
	statusMin = 100
	statusMax = 599 // RFC 9110, 15
)

func (r *statuses) Read(s config.Scalar, _ *config.Field) *config.Complaint {
	const want = "a status, or a range such as \"200-399\""
	firstText, lastText, isRange := strings.Cut(s.Text, "-")
	if !isRange {
		lastText = firstText
	}
	if s.Kind != config.KindText && s.Kind != config.KindNumber && s.Kind != config.KindDefault || !config.IsDigits(firstText) || !config.IsDigits(lastText) {
		suggestion := ""
		if digit, all := strings.CutSuffix(strings.ToLower(s.Text), "xx"); all && config.IsDigits(digit) && len(digit) == 1 {
			suggestion = fmt.Sprintf("write \"%s00-%s99\"", digit, digit)
		}
		return config.Wanted(s, want, suggestion)
	}
	first, errFirst := strconv.ParseUint(firstText, 10, 16)
	last, errLast := strconv.ParseUint(lastText, 10, 16)
	switch {
	case errFirst != nil || errLast != nil || first < statusMin || last > statusMax || first > statusMax || last < statusMin:
		return config.Complain(fmt.Sprintf("status %s is out of range, want %d to %d", s.Text, statusMin, statusMax), "")
	case first > last:
		return config.Complain(fmt.Sprintf("range %s ends before it begins", s.Text), fmt.Sprintf("write \"%d-%d\"", last, first))
	}
	r.Value = model.StatusRange{First: uint16(first), Last: uint16(last)}
	return nil
}

func (*statuses) Schema(*config.Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: json.Number(strconv.Itoa(statusMin)), Maximum: json.Number(strconv.Itoa(statusMax))},
		{Type: "string", Pattern: "^[1-5][0-9]{2}(-[1-5][0-9]{2})?$"},
	}}
}

func (*statuses) Describe() string { return "status or range" }
