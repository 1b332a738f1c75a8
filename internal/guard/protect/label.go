package protect

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// labeler writes the labels of a generation.
type labeler struct {
	key        *ebpf.Program // sh_key
	labels     *ebpf.Map     // by inode, of the generation's side
	files      *ebpf.Map     // by guard_file, of the generation's side
	generation uint64
	reading    *judge.Reading
	keeps      map[int]int      // rules that trust the same programs as one in force, with that one's number
	present    uint64           // the generation in force; 0: none
	standings  *judge.Standings // of running processes
}

// The limits of user space are those of the programs.
var (
	_ = [1]struct{}{}[policy.RulesMax-int(guardGuardConstantGUARD_RULES_MAX)]
	_ = [1]struct{}{}[policy.FilesMax-int(guardGuardConstantGUARD_FILES_MAX)]
	_ = [1]struct{}{}[policy.CgroupDepthMax-int(guardGuardConstantGUARD_CGROUP_DEPTH_MAX)]
)

// Maps of the two sides.
var (
	labelMaps = [2]string{guardMapShG_labels0, guardMapShG_labels1}
	fileMaps  = [2]string{guardMapShG_files0, guardMapShG_files1}
)

// marksIn returns the marks of a label.
func marksIn(side guardGuardSide) judge.Marks {
	return judge.Marks{Rules: side.Rules, Above: side.Above, Trusts: side.Trusts, Guards: side.Guards, Interprets: side.Interprets}
}

// label adds marks to the label of an open file.
func (l *labeler) label(fd int, add judge.Marks) error {
	file, err := l.identity(fd)
	if err != nil {
		return err
	}
	var side guardGuardSide
	if err := l.files.Lookup(&file, &side); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read its label: %w", err)
	}
	if side.Generation == l.generation {
		add = add.And(marksIn(side))
	}
	side.Generation = l.generation
	side.Rules, side.Above, side.Trusts, side.Guards, side.Interprets = add.Rules, add.Above, add.Trusts, add.Guards, add.Interprets
	err = l.files.Put(&file, &side)
	if errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("keep its label: %d files are protected, and there is no room for more; name fewer or smaller folders", policy.FilesMax)
	}
	if err == nil {
		err = l.labels.Put(uint32(fd), &side)
	}
	if err != nil {
		return fmt.Errorf("keep its label: %w", err)
	}
	return nil
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

// digestOf identifies the trust of a rule: two rules with the same digest trust the same paths.
func digestOf(t policy.Trust, carriers []judge.Carrier) uint64 {
	digest := fnv.New64a()
	note := func(interprets bool) {
		for _, c := range carriers {
			if c.Interprets == interprets {
				fmt.Fprintf(digest, "%s\x00%v\x00", c.Path, interprets)
			}
		}
	}
	note(false)
	fmt.Fprint(digest, t.IsInit, t.Children)
	note(true)
	return digest.Sum64()
}

// carries reports whether a rule in force trusts the files at the paths of a rule's programs: it was loaded with them, or
// updaters have put them there since. Then the two rules trust the same programs.
func carries(carriers []judge.Carrier, old int, inForce *labeler) (bool, error) {
	for _, c := range carriers {
		var has judge.Marks
		err := judge.Opened(c.Path, func(fd int) (err error) {
			has, err = inForce.labelled(fd)
			return err
		})
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if of := map[bool]uint64{false: has.Trusts, true: has.Interprets}[c.Interprets]; of>>old&1 == 0 {
			return false, nil
		}
	}
	return true, nil
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
