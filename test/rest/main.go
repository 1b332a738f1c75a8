// Program rest runs `go test` for the packages whose result can differ from their last result. A package whose tests
// passed rests, and its output is printed again, until something changes that its tests can see. key.go and seen.go
// list the things that tests can see; lists.go has the packages that never rest.
//
//	go run ./test/rest [-all] [-n] [-C MODULE] PACKAGES... -- [FLAGS OF go test]
//
// Run it in the repository's root. The record (record.go) belongs to the user and the machine, and not to
// a clone: packages also rest in a fresh clone, and a new machine runs everything.
// With -all, and with SHUNT_RESTLESS set, no package rests; packages that pass are still recorded. With -n it runs
// nothing, and prints for each package whether it would rest, or why not. It ends with the CPU time of packages
// (child.go).
//
// The cache of `go test` is not enough: it compares the times of the files that a test opened, which are
// new in a fresh clone, and it does not look at the kernel, the user, or programs that tests start.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/test/unchanged"
)

func main() {
	if isChild() {
		becomeChild()
	}
	module := flag.String("C", ".", "the folder of the packages' Go module")
	all := flag.Bool("all", unchanged.Restless(), "let no package rest")
	dry := flag.Bool("n", false, "only print which packages would run, and why")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: go run ./test/rest [-all] [-n] [-C MODULE] PACKAGES... -- [FLAGS OF go test]")
		flag.PrintDefaults()
	}
	flag.Parse()
	patterns, flags := split(flag.Args())
	root, err := filepath.Abs(".")
	if err == nil && len(patterns) == 0 {
		err = errors.New("no packages are named: write ./... for all packages of a module")
	}
	if err == nil {
		err = (&session{root: root, module: *module, all: *all, dry: *dry, flags: flags, out: os.Stdout}).run(patterns)
	}
	var failed *exec.ExitError
	switch {
	case errors.As(err, &failed) && failed.ExitCode() > 0:
		os.Exit(failed.ExitCode()) // go test has printed the reason
	case err != nil:
		fmt.Fprintln(os.Stderr, "rest:", err)
		os.Exit(1)
	}
}

// split separates the packages from go test's flags at "--".
func split(args []string) (patterns, flags []string) {
	if i := slices.Index(args, "--"); i >= 0 {
		return args[:i], args[i+1:]
	}
	return args, nil
}

// session is one run: root is the repository's folder, module the folder of a Go module in it.
type session struct {
	root, module string
	all          bool // nothing rests
	dry          bool // nothing runs
	flags        []string
	out          io.Writer
	records      string // the folder; empty: there is none
	host         string // the result of host()
	began        time.Time
}

func (s *session) run(patterns []string) error {
	s.began = time.Now()
	var err error
	if s.host, err = host(s.module); err != nil {
		return err
	}
	if s.records, err = folder(); err != nil {
		fmt.Fprintf(s.out, "rest: every package runs, and none is recorded: %v\n", err)
	}
	if name := other(s.flags); name != "" {
		fmt.Fprintf(s.out, "rest: every package runs, and none is recorded, because of %s\n", name)
		s.records = ""
	}
	packages, err := list(s.module, patterns)
	if err != nil {
		return err
	}
	left, rested := s.resting(packages)
	fmt.Fprintf(s.out, "rest: %d packages rest: nothing that their tests can see has changed since they passed; %d run\n", rested, len(left)-without(left))
	if len(left) == 0 || s.dry {
		return nil
	}
	return s.test(left)
}

// other returns a flag of go test with which no package may rest: a flag that repeats tests, makes them write files, or
// is unknown here. Empty: there is none.
func other(flags []string) string {
	known := []string{"v", "run", "skip", "short", "timeout", "vet", "p", "parallel", "cpu", "tags", "failfast"}
	for _, flag := range flags {
		name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
		if strings.HasPrefix(flag, "-") && !slices.Contains(known, strings.TrimPrefix(name, "test.")) {
			return flag
		}
	}
	return ""
}

// without counts the packages that have no tests.
func without(packages []*testee) (count int) {
	for _, p := range packages {
		if !p.Tests {
			count++
		}
	}
	return count
}

// resting prints the recorded output of packages that need not run, and returns the other packages.
func (s *session) resting(packages []*testee) (left []*testee, rested int) {
	for _, p := range packages {
		if !p.Tests {
			left = append(left, p) // it is compiled
			continue
		}
		passed, err := s.passed(p)
		if s.dry {
			fmt.Fprintf(s.out, "%s: %v\n", p.Path, cmp.Or(err, errors.New("rests")))
		}
		if err != nil {
			left = append(left, p)
			continue
		}
		rested++
		if !s.dry {
			fmt.Fprintf(s.out, "%sok  \t%s\t(rests)\n", passed.Output, p.Path)
		}
	}
	return left, rested
}

// passed returns the record of a package that need not run, or the reason why it must run as an error.
func (s *session) passed(p *testee) (*record, error) {
	if s.records == "" {
		return nil, errors.New("there is no folder for records")
	}
	var err error
	if p.key, err = s.key(p); err != nil {
		return nil, err
	}
	if s.all {
		return nil, errors.New("-all lets no package rest")
	}
	r, err := read(s.records, p.key, s.began)
	if err != nil {
		return nil, err
	}
	return r, s.changed(r)
}

// test runs the packages, prints their output, and records each package that passes.
func (s *session) test(packages []*testee) error {
	dir, err := os.MkdirTemp("", "shunt-rest-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := append([]string{"test", "-C", s.module, "-count=1", fmt.Sprintf("-exec=%q %s %q", self, childArgument, dir)}, s.flags...)
	byPath := map[string]*testee{}
	for _, p := range packages {
		args = append(args, p.Path)
		byPath[p.Path] = p
	}
	c := exec.Command(program(), args...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	recorded, refused := 0, []string(nil)
	broken := passes(io.TeeReader(out, s.out), func(path, output string) {
		p := byPath[path]
		if p == nil || p.key == "" {
			return
		}
		if err := s.record(p, output, filepath.Join(dir, p.Dir, seenFile)); err != nil {
			refused = append(refused, fmt.Sprintf("rest: %s will run again: %v\n", path, err))
			return
		}
		recorded++
	})
	err = c.Wait()
	fmt.Fprint(s.out, strings.Join(refused, ""))
	used := c.ProcessState.UserTime() + c.ProcessState.SystemTime()
	fmt.Fprintf(s.out, "rest: %d of %d packages passed and are recorded; %.0f s of CPU time\n", recorded, len(packages)-without(packages), used.Seconds())
	s.tellUsed(dir, packages, used)
	return errors.Join(err, broken)
}

// stamp returns the time of the last change of a file, also of its times.
func stamp(info os.FileInfo) time.Time {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return info.ModTime()
	}
	return time.Unix(stat.Ctim.Unix())
}
