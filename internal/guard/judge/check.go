package judge

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/host"
)

// SeesProcesses returns an error unless /proc shows this process the machine's processes, with the numbers and start times that the kernel's programs see.
func SeesProcesses() error { return firstNamespaces("/proc/self/ns") }

// firstNamespaces refuses to work in namespaces in which /proc gives processes other numbers or start times than the
// programs see.
func firstNamespaces(folder string) error {
	for _, name := range []string{"pid", "time"} {
		number, err := host.NamespaceIn(folder, name)
		if errors.Is(err, unix.ENOENT) && name == "time" { // the kernel has no such namespace
			continue
		}
		if err != nil {
			return err
		}
		if !host.IsFirst(name, number) {
			return fmt.Errorf("this is not the machine's initial %s namespace, so shunt cannot recognise the machine's processes from here. Run shunt on the machine itself, or in a container with its processes (--pid=host, hostPID: true)", name)
		}
	}
	return nil
}

// Check refuses paths of a policy that do not exist or lead through a symbolic link, and folders in the place of files.
func Check(p policy.Policy) error {
	for _, r := range p.Enforced() {
		paths := slices.Concat(r.Paths, r.By, r.Trust.Interpreters)
		for _, program := range r.Trust.Programs {
			paths = append(paths, program.Path)
		}
		if r.Program != "" {
			paths = append(paths, r.Program)
		}
		for _, path := range paths {
			if err := straight(r, path); err != nil {
				return err
			}
		}
		if err := onlyFiles(r); err != nil {
			return err
		}
	}
	return nil
}

// onlyFiles refuses folders in a rule of detection, whose condition is about one file: a folder's label would deny everything below it.
func onlyFiles(r policy.Rule) error {
	if !r.IsDetected {
		return nil
	}
	for _, path := range slices.Concat(r.Paths, r.By) {
		if info, err := os.Lstat(path); err == nil && info.IsDir() {
			return fmt.Errorf("rule %q at %s: %s is a folder, but a condition names a file. Write a rule of protect: for the folder", r.Name, r.At, path)
		}
	}
	return nil
}

// straight refuses a path with symbolic links: changing a link would change which file is protected.
func straight(r policy.Rule, path string) error {
	real, err := filepath.EvalSymlinks(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("rule %q at %s: %s does not exist. Make it first, or remove it from the policy: shunt protects inodes, and a missing file has none", r.Name, r.At, path)
	case err != nil:
		return fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	case real != path:
		return fmt.Errorf("rule %q at %s: the path %s leads through a symbolic link. Write %s", r.Name, r.At, path, real)
	}
	return nil
}

// The advice for a script that should be trusted, and for one whose processes should be protected.
const (
	trustOfScripts  = "start it from a program that is trusted with children: true"
	processOfScript = "name the interpreter, which is the program of all its scripts, or one process by pid-file"
)

var errScript = errors.New("is a script, and the program that runs is its interpreter, which opens the script by its name")

// Script is a script in the place of a program in a rule.
type Script struct {
	At      string // the rule's position: FILE:LINE
	Problem string
	Remedy  string
}

// Scripts returns the scripts of a policy, as far as its files are on this machine.
func Scripts(p policy.Policy) (all []Script) {
	for _, r := range p.Enforced() {
		advice := map[string]string{}
		for _, program := range r.Trust.Programs {
			advice[program.Path] = trustOfScripts
		}
		for _, path := range append(slices.Clone(r.By), r.Program) {
			advice[path] = processOfScript
		}
		for _, path := range slices.Sorted(maps.Keys(advice)) {
			if err := examine(policy.Program{Path: path}, advice[path]); errors.Is(err, errScript) {
				all = append(all, Script{r.At, fmt.Sprintf("rule %q: %s %v", r.Name, path, errScript), advice[path]})
			}
		}
	}
	return all
}

// examine refuses a program without an identity of its own, or with another digest than the rule's; advice is for a script.
func examine(program policy.Program, advice string) error {
	f, err := os.Open(program.Path)
	if err != nil {
		return fmt.Errorf("look at the program: %w", err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no program: it is not a regular file", program.Path)
	}
	contents := bufio.NewReader(f)
	if begin, _ := contents.Peek(2); string(begin) == "#!" {
		return fmt.Errorf("%s %w: %s", program.Path, errScript, advice)
	}
	if program.SHA256 == "" {
		return nil
	}
	digest := sha256.New()
	if _, err := io.Copy(digest, contents); err != nil {
		return fmt.Errorf("look at the program: %w", err)
	}
	if have := hex.EncodeToString(digest.Sum(nil)); have != program.SHA256 {
		return fmt.Errorf("%s is not the program that the policy trusts: its SHA-256 is %s. If it was changed on purpose, write this digest into the policy", program.Path, have)
	}
	return nil
}

// interpreters returns this machine's interpreters that are not listed. The loader is one: it runs the file it is given.
func interpreters(listed []string) (paths []string) {
	var patterns []string
	for _, folder := range []string{"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"} {
		for _, name := range policy.Interpreters {
			patterns = append(patterns, filepath.Join(folder, name), filepath.Join(folder, name+"[0-9]*"))
		}
	}
	patterns = append(patterns, "/lib*/ld-*.so*", "/lib/*/ld-*.so*", "/usr/lib*/ld-*.so*", "/usr/lib/*/ld-*.so*")
	for _, pattern := range patterns {
		found, _ := filepath.Glob(pattern) // the patterns are correct
		for _, path := range found {
			real, err := filepath.EvalSymlinks(path)
			if err == nil && !slices.Contains(paths, real) && !slices.Contains(listed, real) {
				paths = append(paths, real)
			}
		}
	}
	return paths
}
