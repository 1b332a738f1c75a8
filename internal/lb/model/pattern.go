package model

import (
	"path"
	"strings"
)

// IsPattern reports whether the name stands for interfaces of pods: * means any characters, and ? means one.
func (i Interface) IsPattern() bool { return strings.ContainsAny(i.Name, "*?") }

// Means reports whether the entry is, or stands for, an interface of this name. It does not check that the interface is a
// pod's.
func (i Interface) Means(name string) bool {
	if !i.IsPattern() {
		return i.Name == name
	}
	matched, err := path.Match(i.Name, name)
	return err == nil && matched
}
