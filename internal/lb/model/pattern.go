package model

import (
	"path"
	"strings"
)

// IsPattern reports whether the name stands for interfaces of pods: in it * means any characters, and ? one.
func (i Interface) IsPattern() bool { return strings.ContainsAny(i.Name, "*?") }

// Means reports whether the entry is, or stands for, an interface of this name. That the interface is one of a pod is for
// others to find out.
func (i Interface) Means(name string) bool {
	if !i.IsPattern() {
		return i.Name == name
	}
	matched, err := path.Match(i.Name, name)
	return err == nil && matched
}
