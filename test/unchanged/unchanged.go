// Package unchanged lets a long test rest while the files that it depends on are the same as when it last passed. A
// test of tests is such a test: it breaks the product on purpose and checks that another test notices. Another
// repeats tests in a way whose result depends on the same files only. Each takes a minute or more, and its result is
// the same until one of these files changes.
//
// passed.txt, which is committed, has a digest of these files for each such test, from its last pass under
// `make test-rested`, which is part of `make soak`. A test whose files give another digest, or that is not in the file,
// runs: so after a change of its files it runs in each `make test` until somebody commits the new digest, and only a
// pass can make it rest. Whole packages rest by themselves, on the machine where they passed: test/rest.
package unchanged

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Record is the file of the digests, from the repository's root.
const Record = "test/unchanged/passed.txt"

// record is Record, seen from a package two folders below the root.
const record = "../../" + Record

const head = `# Digests of long tests that rest while the files that they depend on are as they were at the last pass: package, test,
# kernel, and digest of these files. make test-rested writes this file; see unchanged.go.
`

// Rests reports whether the test need not run now. patterns name the files that it depends on, as filepath.Glob has
// them; of a folder, all files below. With SHUNT_RESTLESS set no test rests, and each pass is recorded.
func Rests(t *testing.T, patterns ...string) bool {
	t.Helper()
	digest, err := Digest("", patterns...)
	if err != nil {
		t.Fatal(err)
	}
	name, err := nameOf(t)
	if err != nil {
		t.Fatal(err)
	}
	if !Restless() {
		passed, err := Passed(record, name, digest)
		if err != nil {
			t.Fatal(err)
		}
		if passed {
			t.Logf("%s rests: its files are unchanged since it passed; make test-rested runs it", name)
			return true
		}
		t.Logf("%s runs: its files have changed since it was recorded; make test-rested records that it passes", name)
		return false
	}
	t.Cleanup(func() {
		if t.Failed() || t.Skipped() {
			return
		}
		if err := Write(record, name, digest); err != nil {
			t.Error(err)
		}
	})
	return false
}

// Restless reports whether no test rests, and tests that pass are recorded.
func Restless() bool { return os.Getenv("SHUNT_RESTLESS") != "" }

// Passed reports whether a test is in a record with this digest.
func Passed(record, name, digest string) (bool, error) {
	passed, err := read(record)
	return passed[name] == digest, err
}

// nameOf is "load/TestX@6.18-amd64".
func nameOf(t *testing.T) (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	return Here(filepath.Base(dir) + "/" + t.Name())
}

// Here is a test's name in a record, with this kernel's series and architecture: a pass under one kernel says
// nothing about another.
func Here(test string) (string, error) {
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		return "", err
	}
	series := strings.SplitN(unix.ByteSliceToString(kernel.Release[:]), ".", 3)
	return fmt.Sprintf("%s@%s-%s", test, strings.Join(series[:min(2, len(series))], "."), runtime.GOARCH), nil
}

// Digest returns a digest of the names and contents of all files that the patterns name, seen from a folder ("": the
// present one). A pattern that names no file is an error: files have moved, and the digest would cover nothing.
func Digest(folder string, patterns ...string) (string, error) {
	var files []string
	for _, pattern := range patterns {
		names, err := filepath.Glob(filepath.Join(folder, pattern))
		if err != nil {
			return "", err
		}
		before := len(files)
		for _, name := range names {
			err := filepath.WalkDir(name, func(path string, entry fs.DirEntry, err error) error {
				if err == nil && entry.Type().IsRegular() {
					files = append(files, path)
				}
				return err
			})
			if err != nil {
				return "", err
			}
		}
		if len(files) == before {
			return "", fmt.Errorf("no file matches %s: name the present path of the files that the test depends on", pattern)
		}
	}
	slices.Sort(files)
	all := sha256.New()
	for _, name := range slices.Compact(files) {
		data, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		shown, err := filepath.Rel(filepath.Clean(folder), name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(all, "%s %d\n", filepath.ToSlash(shown), len(data))
		all.Write(data)
	}
	return hex.EncodeToString(all.Sum(nil)), nil
}

func read(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	passed := map[string]string{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s: %q: want a test and a digest", path, line)
		}
		passed[fields[0]] = fields[1]
	}
	return passed, nil
}

// Write puts a test that passed into a record.
func Write(path, name, digest string) error {
	passed, err := read(path)
	if err != nil {
		return err
	}
	passed[name] = digest
	text := head
	for _, name := range slices.Sorted(maps.Keys(passed)) {
		text += name + " " + passed[name] + "\n"
	}
	return os.WriteFile(path, []byte(text), 0o644)
}
