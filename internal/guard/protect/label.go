package protect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// place is a file as stat(2) names it. It is for comparing files that exist at the same time.
type place struct{ device, inode uint64 }

// labeler writes the labels of a generation.
type labeler struct {
	key        *ebpf.Program // sh_key
	labels     *ebpf.Map     // by inode
	files      *ebpf.Map     // by guard_file
	generation uint64
	writes     map[place]string // files that must not be written, and a name of each
	programs   map[place]uint64 // executables, and the rules that trust them
}

// label adds rules to the label of what an open descriptor is of.
func (l *labeler) label(fd int, rules, above, trusts uint64) error {
	ask := guardGuardKey{Fd: uint64(fd)}
	if _, err := l.key.Run(&ebpf.RunOptions{Context: &ask, ContextOut: &ask}); err != nil {
		return fmt.Errorf("ask the kernel which file it is: %w", err)
	}
	if ask.File == (guardGuardFile{}) {
		return errors.New("ask the kernel which file it is: it knows none")
	}
	var label guardGuardLabel
	if err := l.files.Lookup(&ask.File, &label); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("look for its label: %w", err)
	}
	side := &label.Sides[l.generation&1]
	if side.Generation != l.generation {
		side.Rules, side.Above, side.Trusts, side.Generation = 0, 0, 0, l.generation
	}
	side.Rules, side.Above, side.Trusts = side.Rules|rules, side.Above|above, side.Trusts|trusts
	err := l.files.Put(&ask.File, &label)
	if errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("keep its label: there are %d files, and more cannot be protected; name fewer or smaller folders", guardGuardConstantGUARD_FILES_MAX)
	}
	if err == nil {
		err = l.labels.Put(uint32(fd), &label)
	}
	if err != nil {
		return fmt.Errorf("keep its label: %w", err)
	}
	return nil
}

// labelPath is label for what a path leads to, without following a last symbolic link.
func (l *labeler) labelPath(path string, rules, above, trusts uint64) (place, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return place{}, &fs.PathError{Op: "protect", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return place{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if err := l.label(fd, rules, above, trusts); err != nil {
		return place{}, fmt.Errorf("protect %s: %w", path, err)
	}
	return place{stat.Dev, stat.Ino}, nil
}

// rule labels everything that a rule is about.
func (l *labeler) rule(number int, r policy.Rule) error {
	bit := uint64(1) << number
	for _, path := range r.Paths {
		for folder := filepath.Dir(path); folder != "/"; folder = filepath.Dir(folder) {
			if _, err := l.labelPath(folder, 0, bit, 0); err != nil {
				return fmt.Errorf("rule %q: %w", r.Name, err)
			}
		}
		if err := l.tree(path, bit); err != nil {
			return fmt.Errorf("rule %q: %w", r.Name, err)
		}
	}
	for _, program := range r.Programs {
		at, err := l.labelPath(program, 0, 0, bit)
		if err != nil {
			return fmt.Errorf("rule %q: %w", r.Name, err)
		}
		l.programs[at] |= bit
	}
	return nil
}

// straight refuses a path that symbolic links are in: who changes a link changes what is protected.
func straight(r policy.Rule, path string) error {
	real, err := filepath.EvalSymlinks(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("rule %q at %s: %s does not exist. Make it first, or take it out of the policy: what does not exist has no identity that could be protected", r.Name, r.At, path)
	case err != nil:
		return fmt.Errorf("rule %q at %s: %w", r.Name, r.At, err)
	case real != path:
		return fmt.Errorf("rule %q at %s: the path %s leads through a symbolic link. Write %s", r.Name, r.At, path, real)
	}
	return nil
}

// tree labels a file, or a folder with all below it. A folder is labelled before it is read: what is made in
// it after that is labelled by the programs.
func (l *labeler) tree(path string, bit uint64) error {
	return filepath.WalkDir(path, func(name string, _ fs.DirEntry, err error) error {
		var at place
		if err == nil {
			at, err = l.labelPath(name, bit, 0, 0)
		}
		if errors.Is(err, os.ErrNotExist) && name != path {
			return nil // it was deleted meanwhile
		}
		if err != nil {
			return err
		}
		l.writes[at] = name
		return nil
	})
}

// forget takes away the labels that the generation in force has not.
func (l *labeler) forget() error {
	var file guardGuardFile
	var label guardGuardLabel
	var old []guardGuardFile
	entries := l.files.Iterate()
	for entries.Next(&file, &label) {
		if label.Sides[l.generation&1].Generation != l.generation {
			old = append(old, file)
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("look for labels of the policy before: %w", err)
	}
	for _, file := range old {
		if err := l.files.Delete(&file); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget a label of the policy before: %w", err)
		}
	}
	return nil
}
