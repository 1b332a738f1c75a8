package main

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// testee is a package of this run.
type testee struct {
	Path, Dir string
	Tests     bool
	// files are the repository's files that its test binary is made of, absolute; others has all other inputs
	// of the binary: modules with their versions, settings.
	files, others []string
	key           string // empty: its result is not recorded
}

// listed has the fields of `go list -json` that rest uses.
type listed struct {
	ImportPath, Dir, DefaultGODEBUG              string
	Match                                        []string // the patterns that name it
	Standard                                     bool
	TestGoFiles, XTestGoFiles                    []string
	GoFiles, SFiles, HFiles, CgoFiles, SysoFiles []string
	EmbedFiles, Deps                             []string
	Module                                       *struct {
		Path, Version, GoVersion string
		Replace                  *struct{ Path, Version string }
	}
}

// list returns the packages of a module that the patterns name, in the patterns' order, each with the
// files and settings of its test binary.
func list(module string, patterns []string) ([]*testee, error) {
	fields := "-json=ImportPath,Dir,Match,DefaultGODEBUG,Standard,TestGoFiles,XTestGoFiles,GoFiles,SFiles,HFiles,CgoFiles,SysoFiles,EmbedFiles,Deps,Module"
	out, err := goes(module, append([]string{"list", "-deps", "-test", fields}, patterns...)...)
	if err != nil {
		return nil, err
	}
	all := map[string]*listed{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var one listed
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the output of go list: %w", err)
		}
		all[one.ImportPath] = &one
	}
	var packages []*testee
	for _, path := range ordered(all, patterns) {
		one := all[path]
		p := &testee{Path: one.ImportPath, Dir: one.Dir, Tests: len(one.TestGoFiles)+len(one.XTestGoFiles) > 0}
		if p.Tests {
			if err := p.madeOf(all); err != nil {
				return nil, err
			}
		}
		packages = append(packages, p)
	}
	return packages, nil
}

// ordered returns the paths of the packages that match, once each, in the order of the patterns.
func ordered(all map[string]*listed, patterns []string) (paths []string) {
	for _, pattern := range patterns {
		for _, path := range slices.Sorted(maps.Keys(all)) {
			variant := strings.Contains(path, " [") || strings.HasSuffix(path, ".test") && all[strings.TrimSuffix(path, ".test")] != nil // of a test binary
			if !variant && slices.Contains(all[path].Match, pattern) && !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// madeOf fills in the files and settings of the test binary.
func (p *testee) madeOf(all map[string]*listed) error {
	binary := all[p.Path+".test"]
	if binary == nil {
		return fmt.Errorf("go list does not describe the test binary of %s", p.Path)
	}
	files, others := map[string]bool{}, map[string]bool{"GODEBUG " + binary.DefaultGODEBUG: true}
	for _, path := range binary.Deps {
		d := all[path]
		switch {
		case d == nil:
			return fmt.Errorf("go list does not describe %s, on which %s depends", path, p.Path)
		case d.Standard:
			continue // Go's version stands for it
		case d.Module == nil:
			return fmt.Errorf("%s, on which %s depends, is in no module", path, p.Path)
		}
		others["package "+path] = true
		others[fmt.Sprintf("module %s %s go%s", d.Module.Path, d.Module.Version, d.Module.GoVersion)] = true
		replaced := d.Module.Replace
		if d.Module.Version != "" && (replaced == nil || replaced.Version != "") {
			if replaced != nil {
				others[fmt.Sprintf("module %s is %s %s", d.Module.Path, replaced.Path, replaced.Version)] = true
			}
			continue // the files of a version never change
		}
		for _, names := range [][]string{d.GoFiles, d.SFiles, d.HFiles, d.CgoFiles, d.SysoFiles, d.EmbedFiles} {
			for _, name := range names {
				if !filepath.IsAbs(name) { // files that go list generates are absolute
					name = filepath.Join(d.Dir, name)
				}
				files[name] = true
			}
		}
	}
	p.files, p.others = slices.Sorted(maps.Keys(files)), slices.Sorted(maps.Keys(others))
	return nil
}

// key returns a digest of everything that is known before the package runs and decides about its result.
func (s *session) key(p *testee) (string, error) {
	if why, ok := never[s.short(p.Dir)]; ok {
		return "", errors.New(why)
	}
	all := sha256.New()
	fmt.Fprintf(all, "rest 1\n%s\n%q\n%q\n%q\n", s.host, p.Path, s.flags, p.others)
	for _, name := range p.files {
		digest, err := contents(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(all, "%s %s\n", s.short(name), digest)
	}
	return hex.EncodeToString(all.Sum(nil)), nil
}

// short returns a file's name relative to the repository's root, which is another folder in another clone.
func (s *session) short(name string) string {
	if in, ok := inside(s.root, name); ok {
		return in
	}
	return name
}

func inside(root, name string) (string, bool) {
	in, err := filepath.Rel(root, name)
	return filepath.ToSlash(in), err == nil && filepath.IsLocal(in)
}

// contents returns a digest of a file, or of the names and kinds in a folder. A missing file has a digest, too.
func contents(name string) (string, error) {
	info, err := os.Stat(name)
	switch {
	case errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
		return "absent", nil
	case err != nil:
		return "", err
	}
	all := sha256.New()
	switch {
	case info.IsDir():
		entries, err := os.ReadDir(name)
		if err != nil {
			return "", err
		}
		for _, e := range entries {
			fmt.Fprintf(all, "%q %v\n", e.Name(), e.Type())
		}
	case info.Mode().IsRegular():
		data, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		all.Write(data)
	}
	return fmt.Sprintf("%v %x", info.Mode(), all.Sum(nil)), nil
}

// host describes the parts of the machine that tests can see: kernel, CPU, user, Go and its settings, installed
// packages. A result does not count on another kernel, not even on another build of the same release.
func host(module string) (string, error) {
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		return "", err
	}
	said := []string{fmt.Sprintf("%s %s %s CPUs %d user %d", unix.ByteSliceToString(kernel.Release[:]),
		unix.ByteSliceToString(kernel.Version[:]), unix.ByteSliceToString(kernel.Machine[:]), runtime.NumCPU(), os.Geteuid())}
	for name, prefix := range map[string]string{"/proc/cpuinfo": "model name", "/proc/self/status": "CapEff", "/proc/cmdline": ""} {
		line, err := first(name, prefix)
		if err != nil {
			return "", err
		}
		said = append(said, line)
	}
	slices.Sort(said)
	installed, err := contents("/var/lib/dpkg/status") // a test that needs a program skips without it
	if err != nil {
		return "", err
	}
	settings, err := goes(module, "env", "GOVERSION", "GOFLAGS", "GOOS", "GOARCH", "GOAMD64", "GOARM64", "CGO_ENABLED", "GOEXPERIMENT", "GODEBUG")
	return strings.Join(append(said, installed, string(settings), "GODEBUG "+os.Getenv("GODEBUG")), "\n"), err
}

// first returns the first line of a file that begins with a prefix; empty: there is none.
func first(name, prefix string) (string, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), prefix) {
			return lines.Text(), nil
		}
	}
	return "", nil
}

func goes(module string, args ...string) ([]byte, error) {
	c := exec.Command(program(), args...)
	c.Dir, c.Stderr = module, os.Stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s in %s: %w", strings.Join(args[:min(2, len(args))], " "), module, err)
	}
	return out, nil
}

// program returns the go command, which the Makefile may set.
func program() string { return cmp.Or(os.Getenv("GO"), "go") }
