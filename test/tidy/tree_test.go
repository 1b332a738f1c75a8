package tidy

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
)

// source is one file of the repository.
type source struct {
	path string // from the root, with slashes
	text string
}

func (s source) lines() []string { return strings.Split(strings.TrimSuffix(s.text, "\n"), "\n") }

// isGenerated follows https://go.dev/s/generatedcode.
func (s source) isGenerated() bool {
	for _, line := range s.lines() {
		if strings.HasPrefix(line, "// Code generated ") && strings.HasSuffix(line, " DO NOT EDIT.") {
			return true
		}
		if strings.HasPrefix(line, "package ") {
			break
		}
	}
	return false
}

// isGo reports whether a person wrote this Go file.
func (s source) isGo() bool { return strings.HasSuffix(s.path, ".go") && !s.isGenerated() }

// isBPF reports whether the file is part of the code that runs in the kernel.
func (s source) isBPF() bool {
	return strings.HasPrefix(s.path, "bpf/") && (strings.HasSuffix(s.path, ".c") || strings.HasSuffix(s.path, ".h"))
}

// isC reports whether the file is C, in any folder.
func (s source) isC() bool { return strings.HasSuffix(s.path, ".c") || strings.HasSuffix(s.path, ".h") }

// violation is a place that breaks a rule.
type violation struct {
	path string
	line int
	text string
}

func (v violation) String() string { return fmt.Sprintf("%s:%d: %s", v.path, v.line, v.text) }

// at makes a violation of a file.
func (s source) at(line int, format string, args ...any) violation {
	return violation{s.path, line, fmt.Sprintf(format, args...)}
}

// root is the repository, seen from this package.
const root = "../.."

// tree reads every text file of the repository that people write or read.
func tree(t *testing.T) []source {
	t.Helper()
	var files []source
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (strings.HasPrefix(name, ".") && name != ".ci" || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		switch filepath.Ext(name) {
		case ".go", ".c", ".h", ".md", ".yaml", ".mod":
		default:
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		files = append(files, source{filepath.ToSlash(relative), string(text)})
		return nil
	})
	if err != nil {
		t.Fatalf("reading the repository: %v", err)
	}
	if len(files) < 20 {
		t.Fatalf("found only %d files under %s; is this the repository?", len(files), root)
	}
	return files
}

// check applies a rule to the files that concern it, and fails when there are none.
func check(t *testing.T, concerns func(source) bool, rule func(source) []violation) {
	t.Helper()
	seen := 0
	var found []violation
	for _, s := range tree(t) {
		if concerns(s) {
			seen++
			found = append(found, rule(s)...)
		}
	}
	if seen == 0 {
		t.Fatal("the rule concerns no file, so it checks nothing")
	}
	report(t, found)
}

func report(t *testing.T, found []violation) {
	t.Helper()
	sort.Slice(found, func(i, j int) bool {
		if found[i].path != found[j].path {
			return found[i].path < found[j].path
		}
		return found[i].line < found[j].line
	})
	for _, v := range found {
		t.Error(v)
	}
}
