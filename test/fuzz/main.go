// Program fuzz runs the fuzz targets of the repository, one after another. With -changed it leaves out
// the targets that passed with the present state of the files that they depend on (test/unchanged).
package main

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/test/unchanged"
)

// target is a fuzz target: the folder of its package, from the repository's root, and its function.
type target struct{ Folder, Name string }

func main() {
	fuzzTime := flag.String("time", "10000x", "how long each target runs, as with `go test -fuzztime`")
	changed := flag.Bool("changed", false, "leave out targets that are recorded as passed with the present files; with SHUNT_RESTLESS, also record the targets that pass")
	flag.Parse()
	if err := run(*fuzzTime, *changed); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

func run(fuzzTime string, changed bool) error {
	targets, err := find(".")
	if err != nil {
		return err
	}
	if len(targets) == 0 {
		return fmt.Errorf("the present folder has no fuzz target below it: run this in the repository's root")
	}
	for _, t := range targets {
		if !changed {
			if err := t.fuzz(fuzzTime); err != nil {
				return err
			}
			continue
		}
		if err := t.fuzzIfChanged(fuzzTime); err != nil {
			return err
		}
	}
	return nil
}

var function = regexp.MustCompile(`(?m)^func (Fuzz[A-Za-z0-9_]*)\(`)

// find lists the targets below a folder, sorted. Folders that begin with a dot are not searched.
func find(root string) ([]target, error) {
	var found []target
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != root && strings.HasPrefix(entry.Name(), "."):
			return filepath.SkipDir
		case entry.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range function.FindAllSubmatch(text, -1) {
			found = append(found, target{Folder: filepath.ToSlash(filepath.Dir(path)), Name: string(match[1])})
		}
		return nil
	})
	slices.SortFunc(found, func(a, b target) int { return strings.Compare(a.String(), b.String()) })
	return found, err
}

// String is "internal/packet=FuzzParse".
func (t target) String() string { return t.Folder + "=" + t.Name }

func (t target) fuzz(fuzzTime string) error {
	fmt.Println("fuzz:", t)
	cmd := exec.Command("go", "test", "-run", "^$", "-fuzz", "^"+t.Name+"$", "-fuzztime", fuzzTime, "-fuzzminimizetime", "100x", ".")
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.Folder, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", t, err)
	}
	return nil
}

// fuzzIfChanged runs the target unless it is recorded with the files that it depends on, and records
// it if unchanged.Restless.
func (t target) fuzzIfChanged(fuzzTime string) error {
	files, err := t.files()
	if err != nil {
		return err
	}
	digest, err := unchanged.Digest("", files...)
	if err != nil {
		return err
	}
	name, err := unchanged.Here("fuzz/" + t.String())
	if err != nil {
		return err
	}
	passed, err := unchanged.Passed(unchanged.Record, name, digest)
	if err != nil {
		return err
	}
	if passed {
		fmt.Printf("fuzz: %s rests: its files are unchanged since it passed\n", t)
		return nil
	}
	fmt.Printf("fuzz: %s runs: its files have changed since it was recorded; make test-rested records that it passes\n", t)
	if err := t.fuzz(fuzzTime); err != nil || !unchanged.Restless() {
		return err
	}
	return unchanged.Write(unchanged.Record, name, digest)
}

// files are the files that decide whether the target passes: of each package of this repository that its
// test binary has, the files in the package's folder; the package's own testdata; and the versions of
// all other modules. The record itself decides nothing.
func (t target) files() ([]string, error) {
	list := exec.Command("go", "list", "-deps", "-test", "-f", "{{.Dir}}", ".")
	list.Dir, list.Stderr = t.Folder, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages that %s depends on: %w", t, err)
	}
	root, err := filepath.Abs(".")
	if err != nil {
		return nil, err
	}
	files := []string{"go.sum"}
	for line := range strings.Lines(string(out)) {
		folder, err := filepath.Rel(root, strings.TrimSpace(line))
		if err != nil || !filepath.IsLocal(folder) {
			continue // a file of another module
		}
		entries, err := os.ReadDir(folder)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if name := filepath.Join(folder, e.Name()); e.Type().IsRegular() && name != filepath.FromSlash(unchanged.Record) {
				files = append(files, name)
			}
		}
	}
	for _, name := range []string{"testdata", "go.sum"} {
		if own := filepath.Join(t.Folder, name); exists(own) {
			files = append(files, own)
		}
	}
	return files, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
