package judge

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Inode identifies a file as stat(2) does. It compares files that exist at the same time.
type Inode struct{ Device, Number uint64 }

// InodeOf returns the inode in an answer of stat(2).
func InodeOf(stat unix.Stat_t) Inode { return Inode{stat.Dev, stat.Ino} }

// Marks are a policy's marks of an inode: each is a mask of rules, as in guard_side of bpf/guard/guard.h.
type Marks struct {
	Rules      uint64 // that protect the file
	Above      uint64 // that protect something in this folder
	Trusts     uint64 // that trust it as a program
	Guards     uint64 // that protect its processes, or deny something only to them
	Interprets uint64 // for which it is an interpreter, and passes no trust on
}

// And returns the marks of both.
func (m Marks) And(n Marks) Marks {
	return Marks{m.Rules | n.Rules, m.Above | n.Above, m.Trusts | n.Trusts, m.Guards | n.Guards, m.Interprets | n.Interprets}
}

// File is a protected file.
type File struct {
	Name  string // one of its names
	Rules uint64 // that protect it
}

// Reading is a policy as it was read on this machine: the files, programs and processes of its rules.
type Reading struct {
	Files       map[Inode]File   // that rules protect
	Executables map[string]Inode // by path
	Marks       map[Inode]Marks  // of all files; of executables alone, if a Writer has the others
	PIDs        map[int]Marks    // of processes that a rule names by number
	Children    uint64           // rules that trust children
	Scopes      Scopes           // as which user and in which cgroup rules trust programs
	Groups      Scopes           // the cgroups whose processes rules protect

	write Writer
	visit func(path string, d fs.DirEntry)
}

// Writer takes the marks of a file over from a Reading. It may get several marks of one file, each of which is added to the others.
type Writer func(fd int, add Marks) error

// NewReading returns a reading without rules. write may be nil; then the reading has all marks.
func NewReading(write Writer) *Reading {
	return &Reading{Files: map[Inode]File{}, Executables: map[string]Inode{}, Marks: map[Inode]Marks{}, PIDs: map[int]Marks{}, write: write}
}

// Read reads a policy with /proc and files alone. visit, if any, is called with each file that rules protect, with a folder before it is read.
// The caller sets the book's Label and Has.
func Read(p policy.Policy, visit func(path string, d fs.DirEntry)) (*Reading, *Book, error) {
	if err := Check(p); err != nil {
		return nil, nil, err
	}
	r := NewReading(nil)
	r.visit = visit
	b := &Book{Masks: MasksOf(p.Enforced())}
	for i, rule := range p.Enforced() {
		b.Names[i] = rule.Name
		if _, err := r.Rule(i, rule); err != nil {
			return nil, nil, err
		}
	}
	b.Children, b.Scopes, b.Groups = r.Children, r.Scopes, r.Groups
	return r, b, nil
}

// mark adds marks to the file that a path leads to, without following a last symbolic link.
func (r *Reading) mark(path string, add Marks) (Inode, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Inode{}, &fs.PathError{Op: "protect", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return Inode{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	at := InodeOf(stat)
	if r.write == nil {
		r.Marks[at] = r.Marks[at].And(add)
		return at, nil
	}
	if err := r.write(fd, add); err != nil {
		return Inode{}, fmt.Errorf("protect %s: %w", path, err)
	}
	return at, nil
}

// executable is mark for a program.
func (r *Reading) executable(path string, add Marks) error {
	at, err := r.mark(path, add)
	if err != nil {
		return err
	}
	r.Marks[at] = r.Marks[at].And(add)
	r.Executables[path] = at
	return nil
}

// RereadMax limits the number of times that a policy is read again because a program was upgraded meanwhile (IsReplaced).
const RereadMax = 3

// IsReplaced reports whether another file has taken the place of an executable since it was read.
func (r *Reading) IsReplaced() bool {
	for path, at := range r.Executables {
		var stat unix.Stat_t
		if unix.Lstat(path, &stat) == nil && at != InodeOf(stat) {
			return true
		}
	}
	return false
}

// Carrier is an executable that a rule trusts, or an interpreter that does not pass trust on.
type Carrier struct {
	Path       string
	Interprets bool
}

// Rule reads a rule: it marks its files, and returns the executables on which its trust depends.
func (r *Reading) Rule(number int, rule policy.Rule) (carriers []Carrier, err error) {
	bit := uint64(1) << number
	for _, path := range rule.Paths {
		for folder := filepath.Dir(path); folder != "/"; folder = filepath.Dir(folder) {
			if _, err := r.mark(folder, Marks{Above: bit}); err != nil {
				return nil, fmt.Errorf("rule %q: %w", rule.Name, err)
			}
		}
		if err := r.tree(path, bit); err != nil {
			return nil, fmt.Errorf("rule %q: %w", rule.Name, err)
		}
	}
	refuse := func(err error) ([]Carrier, error) {
		return nil, fmt.Errorf("rule %q at %s: %w", rule.Name, rule.At, err)
	}
	if err := r.guarded(bit, rule); err != nil {
		return refuse(err)
	}
	if r.Groups[number], err = scopeOfProcesses(rule); err != nil {
		return refuse(err)
	}
	if slices.Contains(rule.Deny, policy.BPF) { // it loads programs itself, and could not any more
		own, err := os.Executable()
		if err != nil {
			return refuse(fmt.Errorf("find the shunt binary, which may load programs: %w", err))
		}
		rule.Trust.Programs = append(slices.Clone(rule.Trust.Programs), policy.Program{Path: own})
	}
	if r.Scopes[number], err = scopeOfTrust(rule.Trust); err != nil {
		return refuse(err)
	}
	if carriers, err = r.trusted(bit, rule.Trust); err != nil {
		return refuse(err)
	}
	return carriers, nil
}

// guarded marks the processes that a rule protects.
func (r *Reading) guarded(bit uint64, rule policy.Rule) error {
	programs := rule.By // MasksOf denies them operations instead of protecting them
	if rule.Program != "" {
		programs = []string{rule.Program}
	}
	for _, program := range programs {
		if err := examine(policy.Program{Path: program}, processOfScript); err != nil {
			return err
		}
		if err := r.executable(program, Marks{Guards: bit}); err != nil {
			return err
		}
	}
	if rule.IsSelf && r.write != nil { // this process is the guard's
		r.PIDs[os.Getpid()] = r.PIDs[os.Getpid()].And(Marks{Guards: bit})
	}
	if rule.PIDFile == "" {
		return nil
	}
	text, err := os.ReadFile(rule.PIDFile)
	if err != nil {
		return fmt.Errorf("find the process to protect: %w. Start it first", err)
	}
	id, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err == nil {
		err = unix.Kill(id, 0)
	}
	if err != nil || id <= 0 {
		return fmt.Errorf("find the process to protect: %s has %q in it, and no such process runs. Start it first", rule.PIDFile, event.Printable(string(text[:min(len(text), 20)])))
	}
	r.PIDs[id] = r.PIDs[id].And(Marks{Guards: bit})
	return nil
}

// trusted marks the programs that a rule trusts, and the interpreters that get no trust.
func (r *Reading) trusted(bit uint64, t policy.Trust) (carriers []Carrier, err error) {
	for _, program := range t.Programs {
		if err := examine(program, trustOfScripts); err != nil {
			return nil, err
		}
		if err := r.executable(program.Path, Marks{Trusts: bit}); err != nil {
			return nil, err
		}
		carriers = append(carriers, Carrier{Path: program.Path})
	}
	if t.IsInit {
		r.PIDs[1] = r.PIDs[1].And(Marks{Trusts: bit})
	}
	if !t.Children {
		return carriers, nil
	}
	r.Children |= bit
	for _, path := range interpreters(t.Interpreters) {
		err := r.executable(path, Marks{Interprets: bit})
		if errors.Is(err, os.ErrNotExist) {
			continue // the file was removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		carriers = append(carriers, Carrier{path, true})
	}
	return carriers, nil
}

// tree marks a file, or a folder with everything below it. It marks a folder before it reads it: with a Writer, the kernel's programs label files that are made in
// it after that.
func (r *Reading) tree(path string, bit uint64) error {
	return filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		var at Inode
		if err == nil {
			if r.visit != nil {
				r.visit(name, d)
			}
			at, err = r.mark(name, Marks{Rules: bit})
		}
		if errors.Is(err, os.ErrNotExist) && name != path {
			return nil // the file was deleted meanwhile
		}
		if err != nil {
			return err
		}
		r.Files[at] = File{name, r.Files[at].Rules | bit}
		return nil
	})
}

// Opened calls do with a descriptor of the file that a path leads to.
func Opened(path string, do func(fd int) error) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "look at", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	return do(fd)
}
