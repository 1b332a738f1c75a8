package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
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
	Instead  string // what to do without a key that is not supported yet
	Type     reflect.Type

	index   []int
	section *Section // whose key it is, at the top
}

// LaterWord is one that is known, not supported yet, and what to do without it.
type LaterWord struct{ Word, Instead string }

// Supported is false for a key that is known but not supported yet.
func (f *Field) Supported() bool { return f.Type != reflect.TypeFor[Later]() }

var tables sync.Map // reflect.Type → []field

// FieldsOf is the table of a mapping's keys, in the order of the struct.
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

// ElementOf is the struct behind a field of mappings: of the field itself or of its
// list's items. ok is false for a field of scalars.
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

// keyPlaces says where else in the format a key exists, as paths such as
// services[].backends[].weight.
func (f *Format) keyPlaces(key string) []string {
	var paths []string
	var visit func(fields []Field, prefix string)
	visit = func(fields []Field, prefix string) {
		for _, f := range fields {
			path := prefix + f.Name
			if f.Name == key && f.Supported() {
				paths = append(paths, path)
			}
			if element, isList, ok := ElementOf(f.Type); ok {
				if isList {
					path += "[]"
				}
				visit(FieldsOf(element), path+".")
			}
		}
	}
	visit(f.fields(), "")
	return paths
}

// suggestKey says what an unknown key may have meant, among the keys of a mapping.
func (f *Format) suggestKey(key string, fields []Field) string {
	names := make([]string, 0, len(fields))
	for i := range fields {
		if fields[i].Supported() {
			names = append(names, fields[i].Name)
		}
	}
	if near := Nearest(key, names); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	if paths := f.keyPlaces(key); len(paths) > 0 {
		return "this key belongs in " + Join(paths, "or")
	}
	return "the keys here are " + Join(names, "and")
}

// Join is "a, b or c".
func Join(words []string, last string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " " + last + " " + words[len(words)-1]
}

// Nearest is the candidate that a mistyped word most likely meant, or "".
func Nearest(word string, candidates []string) string {
	folded := fold(word)
	length := utf8.RuneCountInString(folded)
	best, bestDistance := "", max(1, length/3)+1
	for _, c := range candidates {
		other := fold(c)
		if length-utf8.RuneCountInString(other) >= bestDistance {
			continue // also keeps a very long word cheap
		}
		if d := distance([]rune(folded), []rune(other)); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	if bestDistance >= length {
		return "" // nothing of the word would be left
	}
	return best
}

// fold makes words equal that differ in case or in the sign between their parts.
func fold(s string) string {
	return strings.ReplaceAll(strings.ToLower(s), "-", "_")
}

// distance counts the insertions, deletions, replacements and swaps of neighbours that
// turn a into b (optimal string alignment).
func distance(a, b []rune) int {
	before, previous, current := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range previous {
		previous[j] = j
	}
	for i := 1; i <= len(a); i++ {
		current[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			current[j] = min(previous[j]+1, current[j-1]+1, previous[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				current[j] = min(current[j], before[j-2]+1)
			}
		}
		before, previous, current = previous, current, before
	}
	return previous[len(b)]
}

// supportedWords is "nat or nat-destination", for messages.
func (f *Field) supportedWords() string { return Join(f.Words, "or") }

// insteadOf is what to do without a word, if that is known and not supported yet. Elsewhere some of
// them are written in capitals or with underscores.
func (f *Field) insteadOf(word string) (instead string, known bool) {
	word = strings.ReplaceAll(strings.ToLower(word), "_", "-")
	for _, l := range f.Later {
		if l.Word == word {
			return l.Instead, true
		}
	}
	return "", false
}
