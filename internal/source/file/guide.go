package file

import (
	"bytes"
	_ "embed" // the sample
	"fmt"
	"reflect"
	"strings"
)

// Sample is a configuration that uses most of the format. It has no faults.
//
//go:embed sample.yaml
var Sample []byte

// Guide is docs/guide/configuration.md: the reference of the format in Markdown, made
// from the structs of format.go, as the parser is.
func Guide() []byte {
	var b bytes.Buffer
	b.WriteString(guideIntroduction)
	fmt.Fprintf(&b, "## A whole file\n\n```yaml\n%s```\n", Sample)
	guideMapping(&b, reflect.TypeFor[document](), "", "The top of the file", map[reflect.Type]string{})
	return b.Bytes()
}

const guideIntroduction = `# The configuration file

<!-- Generated from internal/source/file/format.go: go test ./internal/source/file -update -->

` + "`--config`" + ` takes a YAML file, or a directory. Of a directory, every ` + "`*.yaml`" + ` that does not begin with a dot is
read, in the order of names: lists are appended to each other, and a value may be set in one file only.

- ` + "`shunt check --config FILE`" + ` reports every fault with its line, column and a suggestion. It needs no root and no
  daemon. ` + "`--host`" + ` turns what only this machine knows (interfaces, routes) from warnings into errors.
- ` + "`shunt schema`" + ` prints a JSON Schema for editors.
- Every address, port and protocol of a service together is a *frontend*. All frontends of a service share its backends
  and its table. An exact port beats a range, and a range beats ` + "`any`" + `; every other overlap is an error, and so is a
  frontend without a backend of its family, unless the service is one of direct return (` + "`dsr-*`" + `) whose backends are all
  of the other family.
- Durations carry a unit: ` + "`ms`, `s`, `m`, `h`" + `, or several, as in ` + "`2h4m`" + `. The least is 10ms, the most 24 days (` + "`576h`" + `),
  unless the table says otherwise.
- Keys at the top of the file that begin with ` + "`x-`" + ` are ignored. YAML anchors, aliases and merge keys work.
- The file expands no environment variables.
- What shunt knows by name but cannot do yet is refused, never ignored.

`

// guideMapping writes the section of one mapping, then those of the mappings in it. A mapping
// that is in several places is written once; written has the titles.
func guideMapping(b *bytes.Buffer, t reflect.Type, path, title string, written map[reflect.Type]string) {
	fmt.Fprintf(b, "\n## %s\n\n", title)
	if first, is := written[t]; is {
		fmt.Fprintf(b, "The keys are those of %s.\n", first)
		return
	}
	written[t] = title
	b.WriteString("| key | type | unit | default | meaning | example |\n|---|---|---|---|---|---|\n")
	var refused []string
	for _, f := range fieldsOf(t) {
		if !f.supported() {
			refused = append(refused, fmt.Sprintf("- %s: %s.\n", code(f.name), f.instead))
			continue
		}
		for _, w := range f.later {
			refused = append(refused, fmt.Sprintf("- %s: %s.\n", code(f.name+": "+w.word), w.instead))
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", code(f.name), f.typeText(), f.unitText(), f.defaultText(),
			strings.ReplaceAll(f.doc, "|", `\|`), code(f.example))
	}
	if len(refused) > 0 {
		fmt.Fprintf(b, "\nNot supported yet, and what to do instead:\n\n%s", strings.Join(refused, ""))
	}
	for _, f := range fieldsOf(t) {
		if element, isList, ok := elementOf(f.typ); ok && f.supported() {
			inner := path + f.name
			if isList {
				inner += "[]"
			}
			guideMapping(b, element, inner+".", code(inner), written)
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
func (f *field) typeText() string {
	_, isList, mappings := elementOf(f.typ)
	switch {
	case mappings && isList:
		return "list of mappings"
	case mappings:
		return "mapping"
	}
	t := f.typ
	if isList {
		items, _ := t.FieldByName("Items")
		t = items.Type.Elem()
	}
	text := reflect.New(t).Interface().(leaf).describe()
	switch {
	case f.words != nil:
		words := make([]string, len(f.words))
		for i, w := range f.words {
			words[i] = code(w)
		}
		text = join(words, "or")
	case f.bounded && t == reflect.TypeFor[number]():
		text = fmt.Sprintf("number, %d to %d", f.min, f.max)
	case f.bounded && t == reflect.TypeFor[duration]():
		text = fmt.Sprintf("duration, %s to %s", brief(f.min), brief(f.max))
	case f.bounded && t == reflect.TypeFor[rate]():
		text = fmt.Sprintf("rate, %d/s to %d/s", f.min, f.max)
	case f.bounded && t == reflect.TypeFor[percent]():
		text = fmt.Sprintf("percentage, %d%% to %d%%", f.min, f.max)
	case f.bounded:
		text = fmt.Sprintf("text, %d to %d bytes", f.min, f.max)
	}
	if isList {
		text += ", or a list"
	}
	return text
}

// unitText is the field's unit; durations carry theirs.
func (f *field) unitText() string {
	switch f.typ {
	case reflect.TypeFor[duration](), reflect.TypeFor[rate](), reflect.TypeFor[percent]():
		return "in the value"
	}
	return f.unit
}

func (f *field) defaultText() string {
	switch {
	case f.required:
		return "required"
	case f.inherits != "":
		return "that of " + code(f.inherits)
	}
	if _, _, mappings := elementOf(f.typ); f.def == "" && !mappings {
		return "see there"
	}
	return code(f.def)
}
