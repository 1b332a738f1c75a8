package file

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"go.yaml.in/yaml/v4"
)

// Schema is the JSON Schema (draft 2020-12) of the file, for editors. It is made from
// the structs of format.go, as the parser is. It cannot say everything that check does,
// such as that frontends may not overlap; what it refuses, check refuses too.
func Schema() []byte {
	reflector := &jsonschema.Reflector{
		Anonymous:      true,
		ExpandedStruct: true,
		Namer:          func(t reflect.Type) string { return strings.TrimSuffix(t.Name(), "Entry") },
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if t.Kind() == reflect.Struct {
				if _, _, mappings := elementOf(t); !mappings {
					return &jsonschema.Schema{} // describe fills it in
				}
			}
			return nil
		},
	}
	root := reflector.ReflectFromType(reflect.TypeFor[document]())
	root.Title = "shunt configuration"
	root.PatternProperties = map[string]*jsonschema.Schema{"^x-": jsonschema.TrueSchema}
	describe(root, reflect.TypeFor[document](), root.Definitions)
	text, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("encoding the schema of the configuration: %v", err)) // of format.go, so every test would fail
	}
	return append(text, '\n')
}

// describe completes the schema of a mapping's keys with what only the tags know.
func describe(s *jsonschema.Schema, t reflect.Type, definitions jsonschema.Definitions) {
	for _, f := range fieldsOf(t) {
		property, _ := s.Properties.Get(f.name)
		element, isList, mappings := elementOf(f.typ)
		switch {
		case mappings:
			name := strings.TrimSuffix(element.Name(), "Entry")
			describe(definitions[name], element, definitions)
			if isList && f.required {
				property.MinItems = count(1)
			}
		case isList:
			items, _ := f.typ.FieldByName("Items")
			one := reflect.New(items.Type.Elem()).Interface().(leaf).schema(&f)
			property.AnyOf = []*jsonschema.Schema{one, {Type: "array", Items: one, MinItems: count(1)}}
		default:
			*property = *reflect.New(f.typ).Interface().(leaf).schema(&f)
		}
		property.Description = f.text()
		if !f.supported() {
			property.Description += " Not supported yet."
			continue
		}
		if f.def != "" {
			property.Default = f.value(f.def)
		}
		if f.example != "" {
			property.Examples = []any{f.value(f.example)}
		}
	}
}

// text is the field's meaning, with its unit.
func (f *field) text() string {
	if f.unit == "" {
		return f.doc
	}
	return f.doc + " Unit: " + f.unit + "."
}

// value is a default or an example as JSON has it.
func (f *field) value(written string) any {
	if n, err := strconv.ParseUint(written, 10, 64); err == nil {
		return n
	}
	var v any
	if err := yaml.Unmarshal([]byte(written), &v); err != nil {
		panic(fmt.Sprintf("example of %s: %v", f.name, err)) // of format.go, so every test would fail
	}
	return v
}
