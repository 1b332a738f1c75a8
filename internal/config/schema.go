package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"go.yaml.in/yaml/v4"
)

// Schema returns the JSON Schema (draft 2020-12) of the format, for editors, made from the structs that the
// parser uses. It cannot express all checks of the packages behind it; everything that it refuses, they refuse
// too.
func (f *Format) Schema(title string) []byte {
	root := schemaOf(reflect.TypeFor[nothing](), "")
	root.Title = title
	root.PatternProperties = map[string]*jsonschema.Schema{"^x-": jsonschema.TrueSchema}
	if root.Definitions == nil {
		root.Definitions = jsonschema.Definitions{}
	}
	for i := range f.parts {
		f.parts[i].schema(root)
	}
	text, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("encoding the schema of the configuration: %v", err)) // of the tags, so every test would fail
	}
	return append(text, '\n')
}

// nothing is a mapping without keys.
type nothing struct {
	Mark `json:"-"`
}

// schema adds the keys of a part. Its required keys are required if any of its keys is present: a file may be
// about another product.
func (p *Part) schema(root *jsonschema.Schema) {
	if p.key == "" {
		contents := schemaOf(p.contents, "")
		for name, definition := range contents.Definitions {
			if root.Definitions[name] != nil {
				panic(fmt.Sprintf("two parts of the configuration have a mapping %s", name)) // of their types, so every test would fail
			}
			root.Definitions[name] = definition
		}
		for property := contents.Properties.Oldest(); property != nil; property = property.Next() {
			root.Properties.Set(property.Key, property.Value)
			if others := slices.DeleteFunc(slices.Clone(contents.Required), func(key string) bool { return key == property.Key }); len(others) > 0 {
				if root.DependentRequired == nil {
					root.DependentRequired = map[string][]string{}
				}
				root.DependentRequired[property.Key] = others
			}
		}
		return
	}
	contents := schemaOf(p.contents, p.key+".")
	maps.Copy(root.Definitions, contents.Definitions)
	contents.Version, contents.Definitions = "", nil
	root.Definitions[p.key] = contents
	property := &jsonschema.Schema{Ref: "#/$defs/" + p.key}
	(&Field{Doc: p.doc, Example: p.example, Type: p.contents}).annotate(property)
	root.Properties.Set(p.key, property)
}

// schemaOf returns the schema of a struct, with the schemas of the mappings in it as definitions. prefix keeps
// their names apart from those of other structs.
func schemaOf(t reflect.Type, prefix string) *jsonschema.Schema {
	name := func(t reflect.Type) string {
		if t.Name() == "" {
			return "" // a list's, which has no definition
		}
		return prefix + strings.TrimSuffix(t.Name(), "Entry")
	}
	reflector := &jsonschema.Reflector{
		Anonymous:      true,
		ExpandedStruct: true,
		Namer:          name,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if t.Kind() == reflect.Struct {
				if _, _, mappings := ElementOf(t); !mappings {
					return &jsonschema.Schema{} // describe fills it in
				}
			}
			return nil
		},
	}
	s := reflector.ReflectFromType(t)
	describe(s, t, s.Definitions, name)
	return s
}

// describe completes the schema of a mapping's keys with the contents of the tags.
func describe(s *jsonschema.Schema, t reflect.Type, definitions jsonschema.Definitions, name func(reflect.Type) string) {
	for _, f := range FieldsOf(t) {
		property, _ := s.Properties.Get(f.Name)
		element, isList, mappings := ElementOf(f.Type)
		switch {
		case mappings:
			describe(definitions[name(element)], element, definitions, name)
			if isList && f.Required {
				property.MinItems = count(1)
			}
		case isList:
			items, _ := f.Type.FieldByName("Items")
			one := reflect.New(items.Type.Elem()).Interface().(Leaf).Schema(&f)
			property.AnyOf = []*jsonschema.Schema{one, {Type: "array", Items: one, MinItems: count(1)}}
		default:
			*property = *reflect.New(f.Type).Interface().(Leaf).Schema(&f)
		}
		f.annotate(property)
	}
}

// annotate adds a key's meaning, its default and its example.
func (f *Field) annotate(property *jsonschema.Schema) {
	property.Description = f.text()
	if !f.Supported() {
		property.Description += " Not supported yet."
		return
	}
	if f.Default != "" {
		property.Default = f.value(f.Default)
	}
	if f.Example != "" {
		property.Examples = []any{f.value(f.Example)}
	}
}

// text returns the field's meaning, with its unit.
func (f *Field) text() string {
	if f.Unit == "" {
		return f.Doc
	}
	return f.Doc + " Unit: " + f.Unit + "."
}

// value returns a default or an example as JSON.
func (f *Field) value(written string) any {
	if n, err := strconv.ParseUint(written, 10, 64); err == nil {
		return n
	}
	var v any
	if err := yaml.Unmarshal([]byte(written), &v); err != nil {
		panic(fmt.Sprintf("example of %s: %v", f.Name, err)) // of the tags, so every test would fail
	}
	return v
}
