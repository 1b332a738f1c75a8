package main

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/test/unchanged"
)

// seen is a file, tree or variable that tests read while they ran, with a digest of its contents.
type seen struct {
	Kind   kind
	Name   string // of a file: relative to the repository's root
	Digest string
}

type kind string

const (
	file     kind = "file" // or a folder, with the names in it
	tree     kind = "all of"
	variable kind = "variable"
)

// look reads the log of a test binary that ran in a folder. It leaves out files outside the repository:
// they belong to the test, or to the kernel.
func (s *session) look(log, pwd string) ([]seen, error) {
	text, err := os.ReadFile(log)
	if err != nil {
		return nil, fmt.Errorf("read the log of its tests: %w", err)
	}
	folders, known := starts[s.short(pwd)]
	files, variables := map[string]bool{}, map[string]bool{"GODEBUG": true} // the runtime reads it without a line in the log
	for line := range strings.Lines(string(text)) {
		operation, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if operation == "getenv" {
			variables[name] = true
			continue
		}
		if !filepath.IsAbs(name) {
			name = filepath.Join(pwd, name)
		}
		switch operation {
		case "#": // the log's first line
		case "chdir":
			pwd = name
		case "open", "stat":
			if !known && operation == "stat" && slices.Contains(programs, filepath.Base(name)) && isProgram(name) {
				return nil, fmt.Errorf("it starts %s, which may read any file", filepath.Base(name))
			}
			if in, ok := inside(s.root, name); ok {
				files[in] = true
			}
		default:
			return nil, fmt.Errorf("read the log of its tests: it has an unknown line: %q", line)
		}
	}
	delete(variables, "PWD") // the clone's folder
	var all []seen
	for _, name := range slices.Sorted(maps.Keys(files)) {
		all = append(all, seen{Kind: file, Name: name})
	}
	for _, name := range folders {
		all = append(all, seen{Kind: tree, Name: name})
	}
	for _, name := range slices.Sorted(maps.Keys(variables)) {
		all = append(all, seen{Kind: variable, Name: name})
	}
	return all, nil
}

// isProgram reports whether a name is an executable file; a search of PATH looks at every folder.
func isProgram(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// now returns a digest of the present contents or value.
func (s *session) now(one seen) (string, error) {
	switch one.Kind {
	case variable:
		value, set := os.LookupEnv(one.Name)
		return fmt.Sprintf("%v %x", set, sha256.Sum256([]byte(value))), nil
	case tree:
		return unchanged.Digest(s.root, one.Name)
	default:
		return contents(filepath.Join(s.root, one.Name))
	}
}

// changed returns an error that names something that has changed since the tests passed.
func (s *session) changed(r *record) error {
	for _, one := range r.Seen {
		digest, err := s.now(one)
		if err != nil {
			return err
		}
		if digest != one.Digest {
			return fmt.Errorf("%s %s has changed", one.Kind, one.Name)
		}
	}
	return nil
}

// settled returns an error if a file was changed while the tests ran, because they may have seen either
// contents. Folders do not count: a temporary file of a test changes them.
func (s *session) settled(name string) error {
	info, err := os.Stat(name)
	if err != nil || info.IsDir() || !stamp(info).After(s.began) {
		return nil // a missing file has a digest of its own
	}
	return fmt.Errorf("%s was changed while it ran", s.short(name))
}
