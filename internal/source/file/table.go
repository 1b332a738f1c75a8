package file

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// field is one key of a mapping, as its struct tags describe it.
type field struct {
	name     string
	doc      string
	unit     string
	def      string // default
	inherits string
	example  string
	required bool
	bounded  bool
	min, max uint64   // of a duration in nanoseconds
	words    []string // allowed
	later    []laterWord
	instead  string // what to do without a key that is not supported yet
	index    []int
	typ      reflect.Type
}

// laterWord is one that is known, not supported yet, and what to do without it.
type laterWord struct{ word, instead string }

// supported is false for a key that is known but not supported yet.
func (f *field) supported() bool { return f.typ != reflect.TypeFor[later]() }

var tables sync.Map // reflect.Type → []field

// fieldsOf is the table of a mapping's keys, in the order of the struct.
func fieldsOf(t reflect.Type) []field {
	if known, ok := tables.Load(t); ok {
		return known.([]field)
	}
	var fields []field
	for i := range t.NumField() {
		sf := t.Field(i)
		name, options, _ := strings.Cut(sf.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		f := field{
			name: name, doc: sf.Tag.Get("doc"), unit: sf.Tag.Get("unit"), def: sf.Tag.Get("default"),
			inherits: sf.Tag.Get("inherits"), example: sf.Tag.Get("example"),
			required: options != "omitempty", index: sf.Index, typ: sf.Type,
			words: splitWords(sf.Tag.Get("enum")), instead: sf.Tag.Get("instead"),
		}
		for _, text := range splitWords(sf.Tag.Get("later")) {
			word, instead, _ := strings.Cut(text, ": ")
			f.later = append(f.later, laterWord{word, instead})
		}
		if text, ok := sf.Tag.Lookup("max"); ok {
			f.bounded = true
			bound := mustNumber
			if sf.Type == reflect.TypeFor[duration]() {
				bound = mustDuration
			}
			f.min, f.max = bound(sf.Tag.Get("min")), bound(text)
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
		panic(fmt.Sprintf("struct tag %q is not a number: %v", s, err)) // of format.go, so every test would fail
	}
	return n
}

func mustDuration(s string) uint64 {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic(fmt.Sprintf("struct tag %q is not a duration: %v", s, err)) // of format.go, so every test would fail
	}
	return uint64(d)
}

// elementOf is the struct behind a field of mappings: of the field itself or of its
// list's items. ok is false for a field of scalars.
func elementOf(t reflect.Type) (element reflect.Type, isList, ok bool) {
	if reflect.PointerTo(t).Implements(reflect.TypeFor[leaf]()) {
		return nil, false, false
	}
	if items, found := t.FieldByName("Items"); found {
		element = items.Type.Elem()
		if reflect.PointerTo(element).Implements(reflect.TypeFor[leaf]()) {
			return nil, true, false
		}
		return element, true, true
	}
	return t, false, true
}

// keyPlaces says where else in the format a key exists, as paths such as
// services[].backends[].weight.
func keyPlaces(key string) []string {
	var paths []string
	var visit func(t reflect.Type, prefix string)
	visit = func(t reflect.Type, prefix string) {
		for _, f := range fieldsOf(t) {
			path := prefix + f.name
			if f.name == key && f.supported() {
				paths = append(paths, path)
			}
			if element, isList, ok := elementOf(f.typ); ok {
				if isList {
					path += "[]"
				}
				visit(element, path+".")
			}
		}
	}
	visit(reflect.TypeFor[document](), "")
	return paths
}

// suggestKey says what an unknown key may have meant, among the keys of a mapping.
func suggestKey(key string, fields []field) string {
	names := make([]string, 0, len(fields))
	for i := range fields {
		if fields[i].supported() {
			names = append(names, fields[i].name)
		}
	}
	if near := nearest(key, names); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	if paths := keyPlaces(key); len(paths) > 0 {
		return "this key belongs in " + join(paths, "or")
	}
	return "the keys here are " + join(names, "and")
}

// join is "a, b or c".
func join(words []string, last string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " " + last + " " + words[len(words)-1]
}

// nearest is the candidate that a mistyped word most likely meant, or "".
func nearest(word string, candidates []string) string {
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
func (f *field) supportedWords() string { return join(f.words, "or") }

// insteadOf is what to do without a word, if that is known and not supported yet. Elsewhere some of
// them are written in capitals or with underscores.
func (f *field) insteadOf(word string) (instead string, known bool) {
	word = strings.ReplaceAll(strings.ToLower(word), "_", "-")
	for _, l := range f.later {
		if l.word == word {
			return l.instead, true
		}
	}
	return "", false
}
