package protect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Guard is the protection at work, with this process as its listener.
type Guard struct {
	maps   map[string]*ebpf.Map
	coll   *ebpf.Collection
	reader *event.Readers
	grace  *kernel.Grace
	rules  []policy.Rule
	number uint64 // of the generation
	noting sync.Mutex
	lost   [2]atomic.Uint64 // events of denied operations, and of audited ones
	unlock func()
	links  string // folder of the pins

	Adopted bool      // there was protection before
	Files   int       // number of protected inodes
	Mapped  []Mapping // mappings by which files can still be written, or read
	Unheard uint64    // events before this process that were never read
}

// ErrListening is in the error of Start if another process listens.
var ErrListening = errors.New("another `shunt guard run` is running")

// Alone takes the lock of a folder, which must exist, for the only `shunt guard run` of a machine. If another process has it, the error
// has ErrListening.
func Alone(folder string) (unlock func(), err error) {
	unlock, err = kernel.TryLock(folder)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("%w. A machine can have one: end the other, which leaves everything protected, and start again", ErrListening)
	}
	return unlock, err
}

// Start enforces the policy: it takes over existing protection, and switches to the policy at once. If it fails,
// the protection stays as before. root is a bpffs. If this kernel does not enforce policies, the error has a
// *Refusal.
func Start(root string, p policy.Policy, log *slog.Logger) (*Guard, error) {
	if r := activeModules().inactive(); r != nil {
		return nil, r
	}
	if err := judge.Check(p); err != nil {
		return nil, err
	}
	if err := judge.SeesProcesses(); err != nil {
		return nil, err
	}
	if err := kernel.Mount(root, log); err != nil {
		return nil, err
	}
	if err := oneLayout(root); err != nil {
		return nil, err
	}
	set, err := pins(root)
	if err != nil {
		return nil, err
	}
	if err := set.MakeDirectory(); err != nil {
		return nil, err
	}
	unlock, err := Alone(kernel.Directory(root, product))
	if err != nil {
		return nil, err
	}
	g := &Guard{rules: p.Enforced(), unlock: unlock}
	if err := g.start(root, set); err != nil {
		g.Close()
		if !g.Adopted { // there was no protection before: leave nothing behind
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
		return fmt.Errorf("read the policy in force: %w", err)
	}
	g.Adopted = state.Generation > 0
	if g.coll, err = load(g.maps); err != nil {
		return err
	}
	denied, audited := event.Stream{Events: g.coll.Maps[event.MapEvents], Sequence: g.coll.Maps[event.MapSequence]}, event.Stream{Events: g.coll.Maps[guardMapShG_audits], Sequence: g.coll.Maps[guardMapShG_auditsSeq]}
	if g.reader, err = event.NewReaders(denied, audited); err != nil {
		return err
	}
	if g.grace, err = kernel.NewGrace(); err != nil {
		return err
	}
	if err := g.takeOver(state.Generation); err != nil {
		return err
	}
	before, err := maskOf(g.maps, uint32(state.Generation&1), processScopes)
	if err != nil {
		return err
	}
	if g.links, err = attach(root, g.coll, state.Generation > 0 && before != 0); err != nil {
		return err
	}
	if err := g.settle(); err != nil {
		return err
	}
	return g.apply(state.Generation)
}

// takeOver counts unread events, and takes a number for the next generation.
func (g *Guard) takeOver(present uint64) error {
	counts, err := countsOf(g.maps)
	if err != nil {
		return err
	}
	return g.note(func(agent *guardGuardAgent) {
		total := counts.Denied + counts.Audited
		g.Unheard = total - min(total, agent.Heard)
		if agent.BeganNs == 0 {
			agent.BeganNs = bootNow()
		}
		g.number = next(present, agent)
		agent.Heard, agent.HeardNs = total, bootNow()
	})
}

// note changes the record of agents. Listen and Apply may do it at the same time.
func (g *Guard) note(change func(*guardGuardAgent)) error {
	g.noting.Lock()
	defer g.noting.Unlock()
	agent, err := agentOf(g.maps)
	if err != nil {
		return err
	}
	change(&agent)
	if err := g.maps[guardMapShG_agent].Put(uint32(0), &agent); err != nil {
		return fmt.Errorf("write the agent's record in the kernel: %w", err)
	}
	return nil
}

// Apply switches to another policy at once: until then the earlier policy is enforced, and if Apply fails, it stays
// enforced. When Apply returns, no operation is judged by the earlier policy any more.
func (g *Guard) Apply(p policy.Policy) error {
	if err := judge.Check(p); err != nil {
		return err
	}
	var state guardGuardState
	if err := g.maps[guardMapShG_state].Lookup(uint32(0), &state); err != nil {
		return fmt.Errorf("read the policy in force: %w", err)
	}
	if err := g.note(func(agent *guardGuardAgent) { g.number = next(state.Generation, agent) }); err != nil {
		return err
	}
	g.rules = p.Enforced()
	return g.apply(state.Generation)
}

// next returns a number for a generation: one of the side that is not in force, and that no labels have yet. A
// failed start may have left some.
func next(present uint64, agent *guardGuardAgent) uint64 {
	number := present + 1
	for number <= agent.Prepared {
		number += 2
	}
	agent.Prepared = number
	return number
}

// apply brings the policy into force. If a program is replaced after it was labelled, and before the label counts, the
// new file has no label: then apply begins again.
func (g *Guard) apply(present uint64) error {
	for range judge.RereadMax {
		l, err := g.load(present)
		if err != nil || !l.reading.IsReplaced() {
			return err
		}
		present = g.number
		if err := g.note(func(agent *guardGuardAgent) { g.number = next(present, agent) }); err != nil {
			return err
		}
	}
	return nil
}

// load labels all files for the next generation, and switches to it.
func (g *Guard) load(present uint64) (*labeler, error) {
	side := g.number & 1
	l := &labeler{key: g.coll.Programs[guardProgShKey], labels: g.maps[labelMaps[side]], files: g.maps[fileMaps[side]], generation: g.number, present: present, keeps: map[int]int{}}
	l.reading = judge.NewReading(l.label)
	before, err := g.trustsOf(present)
	if err != nil {
		return nil, err
	}
	inForce := &labeler{key: l.key, labels: g.maps[labelMaps[present&1]], files: g.maps[fileMaps[present&1]], generation: present}
	digests := make([]uint64, len(g.rules))
	for i, rule := range g.rules {
		carriers, err := l.reading.Rule(i, rule)
		if err != nil {
			return nil, err
		}
		digests[i] = digestOf(rule.Trust, carriers)
		old, is := before[known{rule.Name, digests[i]}]
		if is {
			if is, err = carries(carriers, old, inForce); err != nil {
				return nil, fmt.Errorf("rule %q: %w", rule.Name, err)
			}
		}
		if is {
			l.keeps[i] = old
		}
	}
	if err := g.writeRules(digests, l.reading.Children); err != nil {
		return nil, err
	}
	if _, err := writeScopes(&l.reading.Scopes, g.maps, uint32(side), trustScopes); err != nil {
		return nil, err
	}
	grouped, err := writeScopes(&l.reading.Groups, g.maps, uint32(side), processScopes)
	if err != nil {
		return nil, err
	}
	if err := l.giveRunning(g.maps); err != nil {
		return nil, err
	}
	isGrouped := grouped != 0
	if isGrouped { // before its rules count
		if err := g.watchGroups(true); err != nil {
			return nil, err
		}
	}
	state := guardGuardState{Generation: g.number, LoadedNs: bootNow()}
	if err := g.maps[guardMapShG_state].Put(uint32(0), &state); err != nil {
		return nil, fmt.Errorf("switch to the policy: %w", err)
	}
	if err := errors.Join(g.settle(), g.watchGroups(isGrouped)); err != nil {
		return nil, err
	}
	g.Files = len(l.reading.Files)
	masks := judge.MasksOf(g.rules)
	forbid := func(operation string) uint64 {
		of := masks[operation]
		return (of.Denied | of.Audited) &^ of.Only
	}
	if g.Mapped, err = l.mappings(forbid(policy.Write), forbid(policy.Read)); err != nil {
		return nil, err
	}
	if err := forgetEnded(g.maps); err != nil {
		return nil, err
	}
	return l, l.forget([2]*ebpf.Map{g.maps[fileMaps[0]], g.maps[fileMaps[1]]})
}

// known identifies a rule by its name and a digest of its trust.
type known struct {
	name   string
	digest uint64
}

// trustsOf returns the numbers of a generation's rules.
func (g *Guard) trustsOf(generation uint64) (map[known]int, error) {
	all := map[known]int{}
	for i := range uint32(policy.RulesMax) {
		var r guardGuardRule
		if err := g.maps[guardMapShG_rules].Lookup(uint32(generation&1)*policy.RulesMax+i, &r); err != nil {
			return nil, fmt.Errorf("read the rules in force: %w", err)
		}
		if name := event.Text(r.Name[:]); name != "" && generation > 0 {
			all[known{name, r.Trust}] = int(i)
		}
	}
	return all, nil
}

// settle waits until all programs that run at a hook have begun after now. An earlier one has read the number of the
// earlier generation; it could find its side of a label overwritten for the next one, and miss the label.
func (g *Guard) settle() error {
	if err := g.grace.Wait(); err != nil {
		return fmt.Errorf("wait for operations that are being judged: %w", err)
	}
	return nil
}

// operations maps the words to their numbers.
var operations = map[string]guardGuardOp{
	policy.Write: guardGuardOpGUARD_WRITE, policy.Create: guardGuardOpGUARD_CREATE, policy.Delete: guardGuardOpGUARD_DELETE,
	policy.Rename: guardGuardOpGUARD_RENAME, policy.Link: guardGuardOpGUARD_LINK, policy.Chmod: guardGuardOpGUARD_CHMOD,
	policy.Mount: guardGuardOpGUARD_MOUNT, judge.WriteProgram: guardGuardOpGUARD_PROGRAM, judge.Trace: guardGuardOpGUARD_TRACE, policy.Kill: guardGuardOpGUARD_KILL,
	policy.Read: guardGuardOpGUARD_READ, policy.Exec: guardGuardOpGUARD_EXEC, policy.AnyMount: guardGuardOpGUARD_MOUNT_ANY, policy.Module: guardGuardOpGUARD_MODULE,
	policy.BPF: guardGuardOpGUARD_BPF, policy.AnyTrace: guardGuardOpGUARD_TRACE_ANY, policy.Move: guardGuardOpGUARD_MOVE,
}

// opKey is the key of an operation's masks.
func opKey(generation uint64, op guardGuardOp) uint32 {
	return uint32(generation&1)*uint32(guardGuardOpGUARD_OP_COUNT) + uint32(op)
}

// writeRules writes the rules of the next generation's side.
func (g *Guard) writeRules(digests []uint64, children uint64) error {
	side := uint32(g.number & 1)
	var renews guardGuardRenews
	renews.By, renews.Rules = policy.Renewed(g.rules)
	if err := g.maps[guardMapShG_renews].Put(side, &renews); err != nil {
		return fmt.Errorf("write the updaters: %w", err)
	}
	if err := g.maps[guardMapShG_children].Put(side, &children); err != nil {
		return fmt.Errorf("write the rules that trust children: %w", err)
	}
	masks := judge.MasksOf(g.rules)
	for operation, op := range operations { // all of them, as the side has the masks of an earlier policy
		of := guardGuardMasks{Denied: masks[operation].Denied, Audited: masks[operation].Audited, Only: masks[operation].Only}
		if err := g.maps[guardMapShG_ops].Put(opKey(g.number, op), &of); err != nil {
			return fmt.Errorf("write the operations that the rules forbid: %w", err)
		}
	}
	for i := range uint32(policy.RulesMax) {
		var text guardGuardRule
		if int(i) < len(g.rules) {
			put(text.Name[:], g.rules[i].Name)
			put(text.Text[:], g.rules[i].String())
			put(text.Severity[:], g.rules[i].Severity)
			put(text.Mitre[:], strings.Join(g.rules[i].Mitre, " "))
			text.Trust = digests[i]
		}
		if err := g.maps[guardMapShG_rules].Put(side*policy.RulesMax+i, &text); err != nil {
			return fmt.Errorf("write the names of the rules: %w", err)
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

// Listen passes on the operations that were or would have been denied to programs, until ctx ends. The protection goes
// on.
func (g *Guard) Listen(ctx context.Context, tell func(judge.Attempt) error) error {
	names := newNames(g.maps[guardMapShG_rules])
	heard := uint64(0) // read, and not noted yet
	take := func(deadline time.Time) error {
		e, err := g.reader.Read(deadline)
		for i, of := range g.reader.By() {
			g.lost[i].Store(of.Lost)
		}
		if err != nil {
			return err
		}
		attempt, err := names.attempt(e)
		if err != nil {
			return err
		}
		heard++
		return tell(attempt)
	}
	note := func() error {
		return g.note(func(agent *guardGuardAgent) {
			agent.Heard, agent.HeardNs = agent.Heard+heard, bootNow()
			heard = 0
		})
	}
	for ctx.Err() == nil {
		err := take(time.Now().Add(time.Second / 4))
		if errors.Is(err, event.ErrTimeout) {
			err = note()
		}
		if err != nil {
			return err
		}
	}
	for range untoldMax { // the events that are there by now
		if err := take(time.Time{}); errors.Is(err, event.ErrTimeout) {
			break
		} else if err != nil {
			return err
		}
	}
	return note()
}

// untoldMax limits the events that are passed on after the end, while more keep coming.
const untoldMax = 10000

// Lost returns the numbers of attempts without an event, for want of room, as far as Listen knows. Audited operations take no room from denied ones.
func (g *Guard) Lost() (denied, audited uint64) { return g.lost[0].Load(), g.lost[1].Load() }

// Close closes this process's descriptors. The protection stays: see Stop.
func (g *Guard) Close() {
	_, _ = g.reader.Close(nil)
	if g.coll != nil {
		g.coll.Close()
	}
	if g.grace != nil {
		_ = g.grace.Close()
	}
	kernel.CloseMaps(g.maps)
	g.unlock()
}

// Running reports whether a process listens.
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

// Warn writes warnings of mappings by which protected files can still be changed or read.
func (g *Guard) Warn(w io.Writer) {
	for _, m := range g.Mapped {
		fmt.Fprintf(w, "warning: process %d (%s) mapped %s before the policy was in force, and can still %s it, which no hook sees: end the process, or trust its program\n", m.PID, m.Program, m.Path, m.Can)
	}
}
