// Package config is the language of configuration files: YAML that is decoded into structs, with every
// fault found at once, each with its position and a suggestion. It knows no product.
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
//	doc       its meaning
//	default   the value without the key, as one would write it
//	inherits  the key whose value counts without this one
//	unit      of a number
//	min, max  bounds of a number or a duration (inclusive), or of the length of a text in bytes
//	enum      the words allowed, separated by |
//	later     words that are known but not supported yet, each with the word to use instead, as in
//	          WORD: write another; separated by |
//	instead   of a key that is not supported yet: the advice for doing without it
//	example   as one would write it
//
// Each struct embeds Mark, which has no key: `json:"-"`. Its fields are leaves such as Text and
// Number, Many of them, other structs, or a List of structs.
//
// Nothing here needs root or a daemon, and nothing is kept between calls.
package config

import "reflect"

// Part is one package's share of a file: keys at the top of the file, or one key with all keys under it.
type Part struct {
	name     string // of the settings; a section's is its key
	key      string // empty: the keys are at the top
	doc      string
	example  string
	always   bool
	contents reflect.Type
	build    func(contents any, read *Contents) any
}

// NewTop defines keys at the top of the file: those of T, a struct of this language. build is called if a file
// has one of them; it checks the meaning of the contents, adds faults, and makes the settings, which are
// stored under the name.
func NewTop[T any](name string, build func(contents *T, read *Contents) any) Part {
	return Part{name: name, contents: reflect.TypeFor[T](), build: func(contents any, read *Contents) any { return build(contents.(*T), read) }}
}

// Always returns the part whose build is called for every file, because its settings have defaults, or because
// no file may omit it.
func (p Part) Always() Part {
	p.always = true
	return p
}

// NewSection defines one key at the top of the file: its purpose, and an example as one would write it. T is a
// struct of this language, and its keys are the section's. build is as in NewTop, and the settings have the
// name of the key.
func NewSection[T any](key, doc, example string, build func(contents *T, read *Contents) any) Part {
	part := NewTop(key, build)
	part.key, part.doc, part.example = key, doc, example
	return part
}

// Format describes the keys that a configuration may hold.
type Format struct{ parts []Part }

// NewFormat returns the format of these parts. For a file that has keys of none of them, except perhaps of
// parts that are always built, the first one is built, so that it reports the missing keys.
func NewFormat(parts ...Part) *Format { return &Format{parts} }

// fields are the keys at the top.
func (f *Format) fields() (all []Field) {
	for i := range f.parts {
		p := &f.parts[i]
		if p.key != "" {
			all = append(all, Field{Name: p.key, Doc: p.doc, Example: p.example, Type: p.contents, part: p})
			continue
		}
		for _, field := range FieldsOf(p.contents) {
			field.part = p
			all = append(all, field)
		}
	}
	return all
}

// Contents is the contents of files.
type Contents struct {
	format *Format
	values map[*Part]reflect.Value // structs; nil once the settings are made of them, because they are large
	named  map[*Part]bool          // a file has a key of it
	// Settings are the results of the parts' build, by their names.
	Settings map[string]any
	Faults   Faults
	Said     bool // the files say anything
	Unparsed bool // of a part of the files nothing is known, so nothing can be missing
	gaveUp   bool // there were too many faults to read on
	building *Part
	claims   []claimed
}

// field is the value of a key at the top.
func (c *Contents) field(f *Field) reflect.Value {
	value := c.values[f.part]
	if f.part.key != "" {
		return value
	}
	return value.FieldByIndex(f.index)
}

// tops returns the marks of the parts whose keys are at the top.
func (c *Contents) tops() (marks []*Mark) {
	for part, value := range c.values {
		if part.key == "" {
			marks = append(marks, markIn(value))
		}
	}
	return marks
}

// build makes the settings of every part that the files name. A section that no file names, and that is built
// all the same, has the position of the files as a whole.
func (c *Contents) build(path string) {
	named := false
	for part := range c.named {
		named = named || !part.always
	}
	for i := range c.format.parts {
		part := &c.format.parts[i]
		if !c.named[part] && !part.always && (named || i > 0) {
			continue
		}
		value := c.values[part]
		if !c.named[part] && part.key != "" {
			markIn(value).At = Position{file: &file{name: path}}
		}
		applyDefaults(value)
		c.building = part
		c.Settings[part.name] = part.build(value.Addr().Interface(), c)
	}
	c.values = nil
	c.compareClaims()
}
