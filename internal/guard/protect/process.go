package protect

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/process"
)

// passesMax limits the passes over all processes. Each pass except the last has found a change between reading and
// writing.
const passesMax = 1000

// giveRunning gives the running processes the trust and protection of the policy. The programs handle later processes:
// so it repeats until a pass finds nothing to change, and a process that forks passes its own on. If a process executes
// another program meanwhile, the next pass takes back trust that was given in error, before it counts. A program that
// executes a file removes its earlier trust before it reads the label, so if it reads the label before the label is
// written, a later pass gives the trust again.
func (l *labeler) giveRunning(maps map[string]*ebpf.Map) error {
	for range passesMax {
		changed, err := l.pass(maps)
		if err != nil || !changed {
			return err
		}
	}
	return fmt.Errorf("give processes their labels: new processes kept appearing in %d looks; try again", passesMax)
}

// running is a process and its state.
type running struct {
	judge.Process
	key    guardGuardProcess
	kernel guardGuardTrust    // the programs' part
	given  [2]guardGuardGiven // user space's part
}

func (l *labeler) pass(maps map[string]*ebpf.Map) (changed bool, err error) {
	all, err := lookAll(maps)
	if err != nil {
		return false, err
	}
	l.standings = l.standingsOf(all)
	side := l.generation & 1
	for id, p := range all {
		of := l.standings.Of(id)
		want, have := guardGuardGiven{Trusts: of.Trusts, Guards: of.Guards, Generation: l.generation}, p.given[side]
		if p.kernel.Generations[side] == l.generation {
			want.Trusts &^= p.kernel.Trusts[side]
			want.Guards &^= p.kernel.Guards[side]
		}
		if have == want || have.Generation != l.generation && want.Trusts|want.Guards == 0 {
			continue
		}
		changed = true
		if err := maps[givenMaps[side]].Put(&p.key, &want); err != nil {
			return false, fmt.Errorf("give process %d its label: %w", id, err)
		}
	}
	return changed, nil
}

// standingsOf finds the standing of processes by the policy. For a rule that trusts the same programs as one in force, the programs
// know which processes are trusted, and which lost the trust. For other rules /proc has to do.
func (l *labeler) standingsOf(all map[int]*running) *judge.Standings {
	find := func(id int) *judge.Process {
		if p := all[id]; p != nil {
			return &p.Process
		}
		return nil
	}
	return l.reading.Standings(find, func(id int, trusts uint64) uint64 {
		for now, before := range l.keeps {
			trusts &^= 1 << now
			if all[id].has(l.present).Trusts>>before&1 == 1 {
				trusts |= 1 << now
			}
		}
		return trusts
	})
}

// givenMaps are the maps of the two sides.
var givenMaps = [2]string{guardMapShG_given0, guardMapShG_given1}

// lookAll returns all processes by number.
func lookAll(maps map[string]*ebpf.Map) (map[int]*running, error) {
	ids, err := process.All()
	if err != nil {
		return nil, err
	}
	all := map[int]*running{}
	for _, id := range ids {
		p, err := look(id, maps)
		if err != nil {
			return nil, fmt.Errorf("look at process %d: %w", id, err)
		}
		if p != nil {
			all[id] = p
		}
	}
	return all, nil
}

// look returns a process with its state; nil: it has ended, or is a thread of the kernel.
func look(id int, maps map[string]*ebpf.Map) (*running, error) {
	now := judge.Look(id)
	if now == nil {
		return nil, nil
	}
	p := &running{Process: *now, key: guardGuardProcess{Id: uint64(id), Start: now.Start}}
	for _, of := range []struct {
		from string
		to   any
	}{{guardMapShG_tasks, &p.kernel}, {givenMaps[0], &p.given[0]}, {givenMaps[1], &p.given[1]}} {
		if err := maps[of.from].Lookup(&p.key, of.to); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
	}
	return p, nil
}

// forgetEnded removes the state of processes that have ended. The programs do that, too, but not while they write
// to the same map on the same CPU, and not for state that was given to a process while it ended.
func forgetEnded(maps map[string]*ebpf.Map) error {
	var errs []error
	for _, name := range []string{guardMapShG_tasks, givenMaps[0], givenMaps[1]} {
		var process guardGuardProcess
		var value []byte
		var ended []guardGuardProcess
		entries := maps[name].Iterate()
		for entries.Next(&process, &value) {
			if hasEnded(process) {
				ended = append(ended, process)
			}
		}
		errs = append(errs, entries.Err())
		for _, process := range ended {
			if err := maps[name].Delete(&process); !errors.Is(err, ebpf.ErrKeyNotExist) {
				errs = append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget processes that have ended: %w", err)
	}
	return nil
}

// hasEnded reports whether a process has ended, and another may have its number.
func hasEnded(p guardGuardProcess) bool {
	stat, err := process.ReadStat(int(p.Id))
	if err != nil {
		return true
	}
	start, err := stat.Number(process.StartTicks)
	return err != nil || start != p.Start
}

// has returns a process's standing in a generation.
func (p *running) has(generation uint64) (s judge.Standing) {
	side := generation & 1
	if p.kernel.Generations[side] == generation {
		s = judge.Standing{Trusts: p.kernel.Trusts[side], Guards: p.kernel.Guards[side]}
	}
	if p.given[side].Generation == generation {
		s.Trusts |= p.given[side].Trusts
		s.Guards |= p.given[side].Guards
	}
	return s
}
