package protect

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// inode identifies a file as stat(2) does. It compares files that exist at the same time.
type inode struct{ device, number uint64 }

// labeler writes the labels of a generation.
type labeler struct {
	key        *ebpf.Program // sh_key; nil: nothing is written into the kernel, and marks has all files
	labels     *ebpf.Map     // by inode, of the generation's side
	files      *ebpf.Map     // by guard_file, of the generation's side
	generation uint64
	objects    map[inode]protected                            // that the rules protect
	marks      map[inode]marks                                // of executables
	pids       map[int]marks                                  // of processes that a rule names by number
	paths      map[string]inode                               // of executables
	children   uint64                                         // rules that trust children
	narrows    narrows                                        // as which user and in which cgroup rules trust programs
	groups     narrows                                        // the cgroups whose processes rules protect
	carriers   map[uint64][]carrier                           // by the rule's bit
	keeps      map[int]int                                    // rules that trust the same programs as one in force, with that one's number
	present    uint64                                         // the generation in force; 0: none
	standings  map[int]standing                               // of running processes
	visit      func(path string, d fs.DirEntry, rules uint64) // called for each labelled file of a folder; nil: not called
}

// marks are a policy's marks of an inode: each is a mask of rules, as in guard_side.
type marks struct{ rules, above, trusts, guards, interprets uint64 }

func (m marks) and(n marks) marks {
	return marks{m.rules | n.rules, m.above | n.above, m.trusts | n.trusts, m.guards | n.guards, m.interprets | n.interprets}
}

// Maps of the two sides.
var (
	labelMaps = [2]string{guardMapShG_labels0, guardMapShG_labels1}
	fileMaps  = [2]string{guardMapShG_files0, guardMapShG_files1}
)

// label adds marks to the label of an open file.
func (l *labeler) label(fd int, add marks) (guardGuardFile, error) {
	file, err := l.identity(fd)
	if err != nil {
		return file, err
	}
	var side guardGuardSide
	if err := l.files.Lookup(&file, &side); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return file, fmt.Errorf("read its label: %w", err)
	}
	if side.Generation == l.generation {
		add = add.and(marks{side.Rules, side.Above, side.Trusts, side.Guards, side.Interprets})
	}
	side.Generation = l.generation
	side.Rules, side.Above, side.Trusts, side.Guards, side.Interprets = add.rules, add.above, add.trusts, add.guards, add.interprets
	err = l.files.Put(&file, &side)
	if errors.Is(err, unix.E2BIG) {
		return file, fmt.Errorf("keep its label: %d files are protected, and there is no room for more; name fewer or smaller folders", guardGuardConstantGUARD_FILES_MAX)
	}
	if err == nil {
		err = l.labels.Put(uint32(fd), &side)
	}
	if err != nil {
		return file, fmt.Errorf("keep its label: %w", err)
	}
	return file, nil
}

// identity returns the identity of an open file, as the programs see it.
func (l *labeler) identity(fd int) (guardGuardFile, error) {
	ask := guardGuardKey{Fd: uint64(fd)}
	if _, err := l.key.Run(&ebpf.RunOptions{Context: &ask, ContextOut: &ask}); err != nil {
		return ask.File, fmt.Errorf("ask the kernel for its identity: %w", err)
	}
	if ask.File == (guardGuardFile{}) {
		return ask.File, errors.New("ask the kernel for its identity: the kernel has none")
	}
	return ask.File, nil
}

// labelPath is label for the file that a path leads to, without following a last symbolic link.
func (l *labeler) labelPath(path string, add marks) (inode, guardGuardFile, error) {
	var file guardGuardFile
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return inode{}, file, &fs.PathError{Op: "protect", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return inode{}, file, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	at := inode{stat.Dev, stat.Ino}
	if l.key == nil {
		l.marks[at] = l.marks[at].and(add)
		return at, file, nil
	}
	if file, err = l.label(fd, add); err != nil {
		return inode{}, file, fmt.Errorf("protect %s: %w", path, err)
	}
	return at, file, nil
}

// executable is labelPath for a program.
func (l *labeler) executable(path string, add marks) error {
	at, _, err := l.labelPath(path, add)
	l.marks[at] = l.marks[at].and(add)
	if l.paths != nil {
		l.paths[path] = at
	}
	return err
}

// carrier is an executable that a rule trusts, or an interpreter that does not pass trust on.
type carrier struct {
	path       string
	interprets bool
}

// carries reports whether a rule in force trusts the files at the paths of a rule's programs: it was loaded with them, or
// updaters have put them there since. Then the two rules trust the same programs.
func (l *labeler) carries(bit uint64, old int, inForce *labeler) (bool, error) {
	for _, c := range l.carriers[bit] {
		var has marks
		err := opened(c.path, func(fd int) (err error) {
			has, err = inForce.labelled(fd)
			return err
		})
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if of := map[bool]uint64{false: has.trusts, true: has.interprets}[c.interprets]; of>>old&1 == 0 {
			return false, nil
		}
	}
	return true, nil
}

// isReplaced reports whether another file has taken the place of an executable since it was labelled.
func (l *labeler) isReplaced() bool {
	for path, at := range l.paths {
		var stat unix.Stat_t
		if unix.Lstat(path, &stat) == nil && at != (inode{stat.Dev, stat.Ino}) {
			return true
		}
	}
	return false
}

// rule labels all files of a rule, and returns a digest of its trust.
func (l *labeler) rule(number int, r policy.Rule) (digest uint64, err error) {
	bit := uint64(1) << number
	for _, path := range r.Paths {
		for folder := filepath.Dir(path); folder != "/"; folder = filepath.Dir(folder) {
			if _, _, err := l.labelPath(folder, marks{above: bit}); err != nil {
				return 0, fmt.Errorf("rule %q: %w", r.Name, err)
			}
		}
		if err := l.tree(path, bit); err != nil {
			return 0, fmt.Errorf("rule %q: %w", r.Name, err)
		}
	}
	if err := l.guarded(bit, r); err != nil {
		return 0, fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	}
	if l.groups[number], err = groupOf(r); err != nil {
		return 0, fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	}
	if slices.Contains(r.Deny, policy.BPF) { // it loads programs itself, and could not any more
		own, err := os.Executable()
		if err != nil {
			return 0, fmt.Errorf("rule %q at %s: find the shunt binary, which may load programs: %w", r.Name, r.At, err)
		}
		r.Trust.Programs = append(slices.Clone(r.Trust.Programs), policy.Program{Path: own})
	}
	if l.narrows[number], err = narrowOf(r.Trust); err != nil {
		return 0, fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	}
	if digest, err = l.trusted(bit, r.Trust); err != nil {
		return 0, fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	}
	return digest, nil
}

// guarded marks the processes that a rule protects.
func (l *labeler) guarded(bit uint64, r policy.Rule) error {
	programs := r.By // masksOf denies them operations instead of protecting them
	if r.Program != "" {
		programs = []string{r.Program}
	}
	for _, program := range programs {
		if err := examine(policy.Program{Path: program}, processOfScript); err != nil {
			return err
		}
		if err := l.executable(program, marks{guards: bit}); err != nil {
			return err
		}
	}
	if r.IsSelf && l.key != nil { // this process is the guard's
		l.pids[os.Getpid()] = l.pids[os.Getpid()].and(marks{guards: bit})
	}
	if r.PIDFile == "" {
		return nil
	}
	text, err := os.ReadFile(r.PIDFile)
	if err != nil {
		return fmt.Errorf("find the process to protect: %w. Start it first", err)
	}
	id, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err == nil {
		err = unix.Kill(id, 0)
	}
	if err != nil || id <= 0 {
		return fmt.Errorf("find the process to protect: %s has %q in it, and no such process runs. Start it first", r.PIDFile, event.Printable(string(text[:min(len(text), 20)])))
	}
	l.pids[id] = l.pids[id].and(marks{guards: bit})
	return nil
}

// trusted marks the programs that a rule trusts, and the interpreters that get no trust.
func (l *labeler) trusted(bit uint64, t policy.Trust) (uint64, error) {
	digest := fnv.New64a()
	note := func(path string, interprets bool) {
		fmt.Fprintf(digest, "%s\x00%v\x00", path, interprets)
		if l.carriers != nil {
			l.carriers[bit] = append(l.carriers[bit], carrier{path, interprets})
		}
	}
	for _, program := range t.Programs {
		if err := examine(program, trustOfScripts); err != nil {
			return 0, err
		}
		if err := l.executable(program.Path, marks{trusts: bit}); err != nil {
			return 0, err
		}
		note(program.Path, false)
	}
	fmt.Fprint(digest, t.IsInit, t.Children)
	if t.IsInit {
		l.pids[1] = l.pids[1].and(marks{trusts: bit})
	}
	if !t.Children {
		return digest.Sum64(), nil
	}
	l.children |= bit
	for _, path := range interpreters(t.Interpreters) {
		err := l.executable(path, marks{interprets: bit})
		if errors.Is(err, os.ErrNotExist) {
			continue // the file was removed meanwhile
		}
		if err != nil {
			return 0, err
		}
		note(path, true)
	}
	return digest.Sum64(), nil
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

// tree labels a file, or a folder with everything below it. It labels a folder before it reads it: files that are made in
// it after that are labelled by the programs.
func (l *labeler) tree(path string, bit uint64) error {
	return filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		var at inode
		if err == nil {
			if l.visit != nil {
				l.visit(name, d, bit)
			}
			at, _, err = l.labelPath(name, marks{rules: bit})
		}
		if errors.Is(err, os.ErrNotExist) && name != path {
			return nil // the file was deleted meanwhile
		}
		if err != nil {
			return err
		}
		l.objects[at] = protected{name, l.objects[at].rules | bit}
		return nil
	})
}

// forget removes the labels of generations that are not in force.
func (l *labeler) forget(both [2]*ebpf.Map) error {
	var errs []error
	for _, files := range both {
		errs = append(errs, l.forgetIn(files))
	}
	return errors.Join(errs...)
}

func (l *labeler) forgetIn(files *ebpf.Map) error {
	var file guardGuardFile
	var side guardGuardSide
	var old []guardGuardFile
	entries := files.Iterate()
	for entries.Next(&file, &side) {
		if side.Generation != l.generation {
			old = append(old, file)
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("look for labels of the earlier policy: %w", err)
	}
	for _, file := range old {
		if err := files.Delete(&file); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget a label of the earlier policy: %w", err)
		}
	}
	return nil
}
