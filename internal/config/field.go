package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Field is one key of a mapping, as its struct tags describe it.
type Field struct {
	Name     string // the key
	Doc      string
	Unit     string
	Default  string
	Inherits string
	Example  string
	Required bool
	Bounded  bool
	Min, Max uint64   // of a duration in nanoseconds
	Words    []string // allowed
	Later    []LaterWord
	Instead  string // advice for doing without a key that is not supported yet
	Type     reflect.Type

	index []int
	part  *Part // that has the key, at the top
}

// LaterWord is a word that is known and not supported yet, with the advice for its absence.
type LaterWord struct{ Word, Instead string }

// Supported is false for a key that is known but not supported yet.
func (f *Field) Supported() bool { return f.Type != reflect.TypeFor[Later]() }

// unsupported returns the fault of a file with a key that is not supported yet.
func (f *Field) unsupported() string { return f.Name + " is not supported yet" }

var tables sync.Map // reflect.Type → []field

// FieldsOf returns the table of a mapping's keys, in the order of the struct.
func FieldsOf(t reflect.Type) []Field {
	if known, ok := tables.Load(t); ok {
		return known.([]Field)
	}
	var fields []Field
	for i := range t.NumField() {
		sf := t.Field(i)
		name, options, _ := strings.Cut(sf.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		f := Field{
			Name: name, Doc: sf.Tag.Get("doc"), Unit: sf.Tag.Get("unit"), Default: sf.Tag.Get("default"),
			Inherits: sf.Tag.Get("inherits"), Example: sf.Tag.Get("example"),
			Required: options != "omitempty", index: sf.Index, Type: sf.Type,
			Words: splitWords(sf.Tag.Get("enum")), Instead: sf.Tag.Get("instead"),
		}
		for _, text := range splitWords(sf.Tag.Get("later")) {
			word, instead, _ := strings.Cut(text, ": ")
			f.Later = append(f.Later, LaterWord{word, instead})
		}
		if text, ok := sf.Tag.Lookup("max"); ok {
			f.Bounded = true
			bound := mustNumber
			if sf.Type == reflect.TypeFor[Duration]() {
				bound = mustDuration
			}
			f.Min, f.Max = bound(sf.Tag.Get("min")), bound(text)
		}
		fields = append(fields, f)
	}
	tables.Store(t, fields)
	return fields
}

func splitWords(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, "|")
}

func mustNumber(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("struct tag %q is not a number: %v", s, err)) // of the tags, so every test would fail
	}
	return n
}

func mustDuration(s string) uint64 {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic(fmt.Sprintf("struct tag %q is not a duration: %v", s, err)) // of the tags, so every test would fail
	}
	return uint64(d)
}

// ElementOf returns the struct behind a field of mappings: of the field itself or of its list's items. ok is
// false for a field of scalars.
func ElementOf(t reflect.Type) (element reflect.Type, isList, ok bool) {
	if reflect.PointerTo(t).Implements(reflect.TypeFor[Leaf]()) {
		return nil, false, false
	}
	if items, found := t.FieldByName("Items"); found {
		element = items.Type.Elem()
		if reflect.PointerTo(element).Implements(reflect.TypeFor[Leaf]()) {
			return nil, true, false
		}
		return element, true, true
	}
	return t, false, true
}

// supportedWords returns "nat or nat-destination", for messages.
func (f *Field) supportedWords() string { return Join(f.Words, "or") }

// insteadOf returns the advice for a word that is known and not supported yet. Elsewhere some words are written
// in capitals or with underscores.
func (f *Field) insteadOf(word string) (instead string, known bool) {
	word = strings.ReplaceAll(strings.ToLower(word), "_", "-")
	for _, l := range f.Later {
		if l.Word == word {
			return l.Instead, true
		}
	}
	return "", false
}
