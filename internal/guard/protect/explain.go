package protect

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Explain answers by the policy in force, even if no process listens; nil: no policy is in force.
func Explain(root, path string, process int) (*judge.Explanation, error) {
	maps, err := pinned(root)
	if maps == nil || err != nil {
		return nil, err
	}
	defer kernel.CloseMaps(maps)
	key, err := loadKey()
	if err != nil {
		return nil, err
	}
	defer key.Close() //nolint:errcheck // only run
	for range explainTries {
		var before, after guardGuardState
		if err := maps[guardMapShG_state].Lookup(uint32(0), &before); err != nil {
			return nil, fmt.Errorf("read the policy in force: %w", err)
		}
		if before.Generation == 0 {
			return nil, nil
		}
		b, err := bookOf(maps, key, before.Generation)
		if err != nil {
			return nil, err
		}
		e, err := b.Explain(path, process)
		if err != nil {
			return nil, err
		}
		if err := maps[guardMapShG_state].Lookup(uint32(0), &after); err != nil {
			return nil, fmt.Errorf("read the policy in force: %w", err)
		}
		if after != before {
			continue // half of it may belong to another policy
		}
		e.From, e.Policy, e.Enforced = judge.FromKernel, before.Generation, true
		if links, _ := filepath.Glob(filepath.Join(linksFolder(root), "*", "*")); len(links) == 0 { // the pattern is correct
			e.Enforced, e.Why = false, "no program of the guard is attached: run `shunt guard run` again"
		}
		return e, nil
	}
	return nil, fmt.Errorf("explain: the policy was changed %d times meanwhile; ask again", explainTries)
}

// explainTries limits the number of times that Explain begins again because the policy has changed.
const explainTries = 5

// loadKey loads the program that returns a file's identity. It needs no BPF LSM.
func loadKey() (*ebpf.Program, error) {
	spec, err := loadGuard()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object of the guard: %w", err)
	}
	program, err := ebpf.NewProgram(spec.Programs[guardProgShKey])
	if err != nil {
		return nil, fmt.Errorf("load the program that reads a file's identity: %w", err)
	}
	return program, nil
}

// bookOf reads a generation from the kernel.
func bookOf(maps map[string]*ebpf.Map, key *ebpf.Program, generation uint64) (*judge.Book, error) {
	side := generation & 1
	b := &judge.Book{Masks: map[string]judge.Masks{}}
	for i := range uint32(policy.RulesMax) {
		r, err := ruleOf(maps[guardMapShG_rules], generation, i)
		if err != nil {
			return nil, err
		}
		b.Names[i] = r.Name
	}
	var moved uint64
	err := errors.Join(maps[guardMapShG_children].Lookup(uint32(side), &b.Children), maps[guardMapShG_moved].Lookup(uint32(0), &moved))
	for operation, op := range operations {
		var masks guardGuardMasks
		err = errors.Join(err, maps[guardMapShG_ops].Lookup(opKey(side, op), &masks))
		b.Masks[operation] = judge.Masks{Denied: masks.Denied, Audited: masks.Audited, Only: masks.Only}
	}
	if err != nil {
		return nil, fmt.Errorf("read the operations that the rules in force forbid: %w", err)
	}
	b.Moved = moved > 0
	if b.Scopes, err = readScopes(maps, uint32(side), trustScopes); err != nil {
		return nil, err
	}
	if b.Groups, err = readScopes(maps, uint32(side), processScopes); err != nil {
		return nil, err
	}
	l := &labeler{key: key, labels: maps[labelMaps[side]], files: maps[fileMaps[side]], generation: generation}
	b.Label = func(path string) (m judge.Marks, err error) {
		err = judge.Opened(path, func(fd int) error {
			m, err = l.labelled(fd)
			return err
		})
		return m, err
	}
	b.Has = func(id int) (judge.Standing, error) {
		p, err := look(id, maps)
		if err != nil || p == nil {
			return judge.Standing{}, err
		}
		return p.has(generation), nil
	}
	return b, nil
}

// labelled returns the kernel's label of an inode, as its programs look it up.
func (l *labeler) labelled(fd int) (judge.Marks, error) {
	var side guardGuardSide
	err := l.labels.Lookup(uint32(fd), &side)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		var file guardGuardFile
		if file, err = l.identity(fd); err == nil {
			err = l.files.Lookup(&file, &side)
		}
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return judge.Marks{}, fmt.Errorf("read its label: %w", err)
	}
	if err != nil || side.Generation != l.generation {
		return judge.Marks{}, nil
	}
	return marksIn(side), nil
}

// ExplainPolicy is judge.ExplainPolicy for a policy that is not in force. Why has the kernel's reason, if it would refuse the policy.
func ExplainPolicy(p policy.Policy, path string, process int) (*judge.Explanation, error) {
	e, err := judge.ExplainPolicy(p, path, process)
	if err != nil {
		return nil, err
	}
	e.Why = "the answer comes from the file alone, and `shunt guard run` makes the kernel enforce it"
	var refused *Refusal
	if err := Enforces(); errors.As(err, &refused) {
		e.Why = fmt.Sprintf("this kernel does not let BPF programs decide (BPF LSM): %s. What to do: %s", refused.Reason, refused.Remedy)
	} else if err != nil {
		e.Why = err.Error()
	}
	return e, nil
}
