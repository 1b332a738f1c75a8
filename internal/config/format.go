// Package config is the language of configuration files: YAML that is decoded into structs, with every
// fault found at once, each with its place and a suggestion. It knows no product.
//
//	bytes ──── go-yaml ────► tree ── decode ──► structs ── a package's build ──► its settings
//	                                    │                        │
//	                                    └─ Faults ◄──────────────┘
//	                                    types, keys          meaning
//
// A package writes its format down once, as structs of this package's types. The parser, the JSON
// Schema, the reference page and every suggestion are made from them and from their tags:
//
//	json      the key; without omitempty it is required
//	doc       what it means
//	default   the value without the key, as one would write it
//	inherits  the key whose value counts without this one
//	unit      of a number
//	min, max  bounds of a number or a duration (inclusive), or of the length of a text in bytes
//	enum      the words allowed, separated by |
//	later     words that are known but not supported yet, each with what to do instead, as in
//	          WORD: write another; separated by |
//	instead   of a key that is not supported yet: what to do without it
//	example   as one would write it
//
// Each struct embeds Mark, which has no key: `json:"-"`. Its fields are leaves such as Text and
// Number, Many of them, other structs, or a List of structs.
//
// Nothing here needs root or a daemon, and nothing is kept between calls.
package config

import (
	"reflect"
	"slices"
)

// Section is a top-level key that a package of its own decodes.
type Section struct {
	key      string
	doc      string
	example  string
	contents reflect.Type
	build    func(contents any, faults *Faults) any
}

// NewSection makes the key of a product known: what it is for, and an example as one would write it.
// T is a struct of this language, and its keys are the section's. build is called if a file has the
// section: it checks what the contents mean, adds what is wrong, and makes the product's settings.
func NewSection[T any](key, doc, example string, build func(contents *T, faults *Faults) any) Section {
	return Section{key, doc, example, reflect.TypeFor[T](), func(contents any, faults *Faults) any { return build(contents.(*T), faults) }}
}

// Format is what a configuration may hold: the keys of a struct, and sections beside them.
type Format struct {
	top      reflect.Type
	sections []Section
}

// NewFormat is the format of which T, a struct of this language, has the keys at the top.
func NewFormat[T any](sections ...Section) *Format {
	return &Format{reflect.TypeFor[T](), sections}
}

// fields are the keys at the top.
func (f *Format) fields() []Field {
	all := slices.Clone(FieldsOf(f.top))
	for i := range f.sections {
		s := &f.sections[i]
		all = append(all, Field{Name: s.key, Doc: s.doc, Example: s.example, Type: s.contents, section: s})
	}
	return all
}

// Contents is what files hold.
type Contents struct {
	format   *Format
	Top      any // a pointer to the format's struct
	sections map[*Section]reflect.Value
	Products map[string]any // what the sections' build made
	Faults   Faults
	Said     bool // the files say anything
	Unparsed bool // of a file nothing is known, so nothing can be missing
}

// field is the value of a key at the top.
func (c *Contents) field(f *Field) reflect.Value {
	if f.section != nil {
		return c.sections[f.section]
	}
	return reflect.ValueOf(c.Top).Elem().FieldByIndex(f.index)
}
