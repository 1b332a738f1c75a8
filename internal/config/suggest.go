package config

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// keyPaths finds the other positions of a key in the format, as paths such as services[].backends[].weight. If
// there are none, later is the unsupported key of that name, or nil.
func (f *Format) keyPaths(key string) (paths []string, later *Field) {
	var visit func(fields []Field, prefix string)
	visit = func(fields []Field, prefix string) {
		for i := range fields {
			f := &fields[i]
			path := prefix + f.Name
			if f.Name == key {
				if f.Supported() {
					paths = append(paths, path)
				} else {
					later = f
				}
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
	return paths, later
}

// unknownKey describes a key that a mapping does not have, and the key that was probably meant, or says that
// shunt does not support it yet, here or elsewhere.
func (f *Format) unknownKey(key string, fields []Field) (fault, suggestion string) {
	fault = fmt.Sprintf("unknown key %q", key)
	names := make([]string, 0, len(fields))
	for i := range fields {
		if fields[i].Supported() {
			names = append(names, fields[i].Name)
		}
	}
	if near := Nearest(key, names); near != "" {
		return fault, fmt.Sprintf("did you mean %q?", near)
	}
	paths, later := f.keyPaths(key)
	switch {
	case len(paths) > 0:
		return fault, "this key belongs in " + Join(paths, "or")
	case later != nil:
		return later.unsupported(), later.Instead
	default:
		return fault, "the keys here are " + Join(names, "and")
	}
}

// Join returns "a, b or c".
func Join(words []string, last string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " " + last + " " + words[len(words)-1]
}

// Nearest returns the candidate that a mistyped word most likely meant, or "".
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
