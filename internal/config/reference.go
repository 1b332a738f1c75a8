package config

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
)

// Reference describes every key, in Markdown, made from the structs that the parser uses.
func (f *Format) Reference() []byte {
	var b bytes.Buffer
	guideMapping(&b, nil, f.fields(), "", "The top of the file", map[reflect.Type]string{})
	return b.Bytes()
}

// guideMapping writes the section of one mapping, followed by those of the mappings in it. A mapping that
// occurs several times is written once; written has the titles.
func guideMapping(b *bytes.Buffer, t reflect.Type, fields []Field, path, title string, written map[reflect.Type]string) {
	fmt.Fprintf(b, "\n## %s\n\n", title)
	if first, is := written[t]; is {
		fmt.Fprintf(b, "The keys are the same as in %s.\n", first)
		return
	}
	written[t] = title
	b.WriteString("| key | type | unit | default | meaning | example |\n|---|---|---|---|---|---|\n")
	var refused []string
	for _, f := range fields {
		if !f.Supported() {
			refused = append(refused, fmt.Sprintf("- %s: %s.\n", code(f.Name), f.Instead))
			continue
		}
		for _, w := range f.Later {
			refused = append(refused, fmt.Sprintf("- %s: %s.\n", code(f.Name+": "+w.Word), w.Instead))
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", code(f.Name), f.typeText(), f.unitText(), f.defaultText(),
			strings.ReplaceAll(f.Doc, "|", `\|`), code(f.Example))
	}
	if len(refused) > 0 {
		fmt.Fprintf(b, "\nNot supported yet, and what to do instead:\n\n%s", strings.Join(refused, ""))
	}
	for _, f := range fields {
		if element, isList, ok := ElementOf(f.Type); ok && f.Supported() {
			inner := path + f.Name
			if isList {
				inner += "[]"
			}
			guideMapping(b, element, FieldsOf(element), inner+".", code(inner), written)
		}
	}
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

// typeText is the field's type with its words or bounds.
func (f *Field) typeText() string {
	_, isList, mappings := ElementOf(f.Type)
	switch {
	case mappings && isList:
		return "list of mappings"
	case mappings:
		return "mapping"
	}
	t := f.Type
	if isList {
		items, _ := t.FieldByName("Items")
		t = items.Type.Elem()
	}
	text := reflect.New(t).Interface().(Leaf).Describe()
	switch {
	case f.Words != nil:
		words := make([]string, len(f.Words))
		for i, w := range f.Words {
			words[i] = code(w)
		}
		text = Join(words, "or")
	case f.Bounded && t == reflect.TypeFor[Number]():
		text = fmt.Sprintf("number, %d to %d", f.Min, f.Max)
	case f.Bounded && t == reflect.TypeFor[Duration]():
		text = fmt.Sprintf("duration, %s to %s", brief(f.Min), brief(f.Max))
	case f.Bounded && t == reflect.TypeFor[Rate]():
		text = fmt.Sprintf("rate, %d/s to %d/s", f.Min, f.Max)
	case f.Bounded && t == reflect.TypeFor[Percent]():
		text = fmt.Sprintf("percentage, %d%% to %d%%", f.Min, f.Max)
	case f.Bounded:
		text = fmt.Sprintf("text, %d to %d bytes", f.Min, f.Max)
	}
	if isList {
		text += ", or a list"
	}
	return text
}

// unitText is the field's unit; durations carry theirs.
func (f *Field) unitText() string {
	switch f.Type {
	case reflect.TypeFor[Duration](), reflect.TypeFor[Rate](), reflect.TypeFor[Percent]():
		return "in the value"
	}
	return f.Unit
}

func (f *Field) defaultText() string {
	switch {
	case f.Required:
		return "required"
	case f.Inherits != "":
		return "same as " + code(f.Inherits)
	}
	if _, _, mappings := ElementOf(f.Type); f.Default == "" && !mappings {
		return "see meaning"
	}
	return code(f.Default)
}
