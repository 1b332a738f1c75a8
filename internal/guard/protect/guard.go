package protect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Guard is protection at work, and this process listens to it.
type Guard struct {
	maps   map[string]*ebpf.Map
	coll   *ebpf.Collection
	reader *event.Reader
	rules  []policy.Rule
	number uint64 // the generation
	unlock func()

	Adopted bool      // there was protection before
	Files   int       // inodes that are protected
	Mapped  []Mapping // what can still be written
	Unheard uint64    // events before this process that nobody has read
}

// ErrListening is in the error of Start if another process listens.
var ErrListening = errors.New("another `shunt guard run` is at work")

// Start protects what the policy says: it takes over what is protected already, and switches to the policy
// at once. If it fails, what was protected before is protected as before. root is a bpffs. A *Refusal is
// in the error if this kernel does not enforce policies.
func Start(root string, p policy.Policy, log *slog.Logger) (*Guard, error) {
	if r := activeModules().inactive(); r != nil {
		return nil, r
	}
	for _, r := range p.Rules {
		for _, path := range slices.Concat(r.Paths, r.Programs) {
			if err := straight(r, path); err != nil {
				return nil, err
			}
		}
	}
	if err := kernel.Mount(root, log); err != nil {
		return nil, err
	}
	set, err := pins(root)
	if err != nil {
		return nil, err
	}
	if err := set.MakeDirectory(); err != nil {
		return nil, err
	}
	unlock, err := kernel.TryLock(kernel.Directory(root, product))
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("%w. There is one a machine: end the other one, which leaves everything protected, and start again", ErrListening)
	}
	if err != nil {
		return nil, err
	}
	g := &Guard{rules: p.Rules, unlock: unlock}
	if err := g.start(root, set); err != nil {
		g.Close()
		if !g.Adopted { // nothing was protected before: leave nothing behind
			_, stopErr := Stop(root)
			err = errors.Join(err, stopErr)
		}
		return nil, err
	}
	return g, nil
}

func (g *Guard) start(root string, set *kernel.MapSet) (err error) {
	if g.maps, g.Adopted, err = set.Open(); err != nil {
		return err
	}
	var state guardGuardState
	if err := g.maps[guardMapShG_state].Lookup(uint32(0), &state); err != nil {
		return fmt.Errorf("read which policy is in force: %w", err)
	}
	g.Adopted = state.Generation > 0
	if g.coll, err = load(g.maps); err != nil {
		return err
	}
	if g.reader, err = event.NewReader(g.coll.Maps[event.MapEvents], g.coll.Maps[event.MapSequence]); err != nil {
		return err
	}
	if err := g.takeOver(state.Generation); err != nil {
		return err
	}
	if err := attach(root, g.coll); err != nil {
		return err
	}
	return g.apply()
}

// takeOver counts what nobody has read, and takes a number for the next generation: one of the side that is
// not in force, and that no labels have yet. A start that failed may have left some.
func (g *Guard) takeOver(present uint64) error {
	counts, err := countsOf(g.maps)
	if err != nil {
		return err
	}
	agent, err := agentOf(g.maps)
	if err != nil {
		return err
	}
	total := counts.Denied + counts.Audited
	g.Unheard = total - min(total, agent.Heard)
	if agent.BeganNs == 0 {
		agent.BeganNs = bootNow()
	}
	g.number = present + 1
	for g.number <= agent.Prepared {
		g.number += 2
	}
	agent.Heard, agent.HeardNs, agent.Prepared = total, bootNow(), g.number
	return g.setAgent(agent)
}

func (g *Guard) setAgent(agent guardGuardAgent) error {
	if err := g.maps[guardMapShG_agent].Put(uint32(0), &agent); err != nil {
		return fmt.Errorf("note what was heard: %w", err)
	}
	return nil
}

// apply labels everything for the next generation, and switches to it.
func (g *Guard) apply() error {
	l := &labeler{key: g.coll.Programs[guardProgShKey], labels: g.maps[guardMapShG_labels], files: g.maps[guardMapShG_files],
		generation: g.number, writes: map[place]string{}, programs: map[place]uint64{}}
	if err := g.writeRules(); err != nil {
		return err
	}
	for i, rule := range g.rules {
		if err := l.rule(i, rule); err != nil {
			return err
		}
	}
	if err := l.trustRunning(g.maps[guardMapShG_tasks]); err != nil {
		return err
	}
	state := guardGuardState{Generation: g.number, LoadedNs: bootNow()}
	if err := g.maps[guardMapShG_state].Put(uint32(0), &state); err != nil {
		return fmt.Errorf("switch to the policy: %w", err)
	}
	g.Files = len(l.writes)
	var err error
	if g.Mapped, err = l.mappings(); err != nil {
		return err
	}
	return l.forget()
}

// operations are the words' numbers.
var operations = map[string]guardGuardOp{
	policy.Write: guardGuardOpGUARD_WRITE, policy.Create: guardGuardOpGUARD_CREATE, policy.Delete: guardGuardOpGUARD_DELETE,
	policy.Rename: guardGuardOpGUARD_RENAME, policy.Link: guardGuardOpGUARD_LINK, policy.Chmod: guardGuardOpGUARD_CHMOD,
	policy.Mount: guardGuardOpGUARD_MOUNT,
}

// masksOf are what rules forbid, by operation. Every rule protects the programs that it trusts.
func masksOf(rules []policy.Rule) (masks [guardGuardOpGUARD_OP_COUNT]guardGuardMasks) {
	for i, r := range rules {
		forbids := []guardGuardOp{guardGuardOpGUARD_PROGRAM, guardGuardOpGUARD_TRACE}
		for _, word := range r.Deny {
			forbids = append(forbids, operations[word])
		}
		for _, op := range forbids {
			if r.Mode == policy.Deny {
				masks[op].Denied |= 1 << i
			} else {
				masks[op].Audited |= 1 << i
			}
		}
	}
	return masks
}

// writeRules writes the side of the next generation.
func (g *Guard) writeRules() error {
	side := uint32(g.number & 1)
	for op, masks := range masksOf(g.rules) {
		if err := g.maps[guardMapShG_ops].Put(side*uint32(guardGuardOpGUARD_OP_COUNT)+uint32(op), &masks); err != nil {
			return fmt.Errorf("write what the rules forbid: %w", err)
		}
	}
	for i := range uint32(policy.RulesMax) {
		var text guardGuardRule
		if int(i) < len(g.rules) {
			put(text.Name[:], g.rules[i].Name)
			put(text.Text[:], g.rules[i].String())
		}
		if err := g.maps[guardMapShG_rules].Put(side*policy.RulesMax+i, &text); err != nil {
			return fmt.Errorf("write what the rules are called: %w", err)
		}
	}
	return nil
}

// put writes text, cut so that a zero follows.
func put(to []int8, text string) {
	for i := range min(len(text), len(to)-1) {
		to[i] = int8(text[i])
	}
}

// Listen hands on what programs were refused, or would have been, until ctx ends. The protection goes on.
func (g *Guard) Listen(ctx context.Context, tell func(Attempt) error) error {
	names := newNames(g.maps[guardMapShG_rules])
	agent, err := agentOf(g.maps)
	if err != nil {
		return err
	}
	take := func(deadline time.Time) error {
		e, err := g.reader.Read(deadline)
		if err != nil {
			return err
		}
		attempt, err := names.attempt(e)
		if err != nil {
			return err
		}
		agent.Heard++
		return tell(attempt)
	}
	for ctx.Err() == nil {
		err := take(time.Now().Add(time.Second / 4))
		if errors.Is(err, event.ErrTimeout) {
			agent.HeardNs = bootNow()
			err = g.setAgent(agent)
		}
		if err != nil {
			return err
		}
	}
	for range untoldMax { // what is there by now
		if err := take(time.Time{}); errors.Is(err, event.ErrTimeout) {
			break
		} else if err != nil {
			return err
		}
	}
	agent.HeardNs = bootNow()
	return g.setAgent(agent)
}

// untoldMax bounds the events that are told after the end, where they go on coming.
const untoldMax = 10000

// Summary is how the stream went so far.
func (g *Guard) Summary() event.Summary { return g.reader.Summary() }

// Close lets go of what this process has. The protection stays: see Stop.
func (g *Guard) Close() {
	if g.reader != nil {
		_, _ = g.reader.Close(nil)
	}
	if g.coll != nil {
		g.coll.Close()
	}
	kernel.CloseMaps(g.maps)
	g.unlock()
}

// Running is whether a process listens.
func Running(root string) (bool, error) {
	unlock, err := kernel.TryLock(kernel.Directory(root, product))
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return true, nil
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	unlock()
	return false, nil
}

func bootNow() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail with this clock
	return uint64(now.Nano())
}

// Warn writes what is not protected though a rule is about it.
func (g *Guard) Warn(w io.Writer) {
	for _, m := range g.Mapped {
		fmt.Fprintf(w, "warning: process %d (%s) has mapped %s to write to it, since before the policy. No hook sees that: end the process, or trust it\n", m.PID, m.Program, m.Path)
	}
}
