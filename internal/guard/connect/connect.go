package connect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Options select the processes whose connections are denied.
type Options struct {
	Root   string // a bpffs
	Cgroup string // only to processes in it and in cgroups below it; "": to all
	Way    Way    // "": the best one that works
	Log    *slog.Logger
}

// Denial has the programs that this process has loaded for a policy's rules of connections.
type Denial struct {
	coll     *ebpf.Collection
	reader   *event.Readers
	rules    []policy.Connection
	options  Options
	folder   string // of the pins
	coverage Coverage
	lost     [2]atomic.Uint64 // events of denied operations, and of audited ones
}

// Open attaches the programs of a policy, which deny nothing yet: Take brings the policy into force, Drop removes the programs
// again. If the policy must be enforced and the kernel cannot, the error has a *NotEnforced.
func Open(p policy.Policy, o Options) (*Denial, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if err := kernel.Mount(o.Root, o.Log); err != nil {
		return nil, err
	}
	earlier, err := generations(o.Root)
	if err != nil {
		return nil, err
	}
	number := 1
	if len(earlier) > 0 {
		number = earlier[len(earlier)-1] + 1
	}
	d := &Denial{rules: p.Connections, options: o, folder: generation(o.Root, number)}
	if err := d.open(p); err != nil {
		return nil, errors.Join(err, d.Drop())
	}
	return d, nil
}

func (d *Denial) open(p policy.Policy) (err error) {
	before, _, err := inForce(d.options.Root) // a policy that was never in force may not know all processes
	if err != nil {
		return err
	}
	defer kernel.CloseMaps(before)
	if d.coll, d.coverage, err = load(p.Connections, d.options, before); err != nil {
		return err
	}
	if err := d.coverage.suffices(p); err != nil {
		return err
	}
	children, err := fill(d.coll, p.Connections)
	if err != nil {
		return err
	}
	if err := d.coll.Maps[connectMapShC_policy].Put(uint32(0), &connectConnectPolicy{Children: children}); err != nil {
		return fmt.Errorf("write the rules with children: %w", err)
	}
	denied, audited := event.Stream{Events: d.coll.Maps[event.MapEvents], Sequence: d.coll.Maps[event.MapSequence]}, event.Stream{Events: d.coll.Maps[connectMapShC_audits], Sequence: d.coll.Maps[connectMapShC_auditsSeq]}
	if d.reader, err = event.NewReaders(denied, audited); err != nil {
		return err
	}
	if err := pinMaps(d.coll, d.folder); err != nil {
		return err
	}
	where := ""
	if d.coverage.Way == Cgroup {
		if where = d.options.Cgroup; where == "" {
			if where = cgroup.Root(); where == "" {
				return errors.New("deny connections at a cgroup: cgroup v2 is not mounted. Mount it: mount -t cgroup2 none /sys/fs/cgroup")
			}
		}
	}
	if err := attach(d.coll, d.folder, trackers, where); err != nil {
		return err
	}
	if children != 0 {
		if err := d.track(before); err != nil {
			return err
		}
	}
	return attach(d.coll, d.folder, decide(d.coverage.Way, d.rules), where)
}

// Take brings the policy into force in one step, and ends earlier ones. The policy is in force even after an error.
func (d *Denial) Take() error {
	inForce := policyOf(d.rules)
	if err := d.coll.Maps[connectMapShC_policy].Put(uint32(0), &inForce); err != nil {
		return fmt.Errorf("bring the rules of connections into force: %w", err)
	}
	all, err := generations(d.options.Root)
	if err != nil {
		return err
	}
	var errs []error
	for _, number := range all {
		if folder := generation(d.options.Root, number); folder != d.folder {
			errs = append(errs, end(folder))
		}
	}
	return errors.Join(errs...)
}

// Drop removes the programs, and closes everything.
func (d *Denial) Drop() error {
	err := end(d.folder)
	d.Close()
	removeEmpty(d.options.Root)
	return err
}

// Close closes this process's descriptors. A policy that is in force stays: see Stop.
func (d *Denial) Close() {
	_, _ = d.reader.Close(nil)
	if d.coll != nil {
		d.coll.Close()
	}
}

// Coverage returns where the kernel is asked.
func (d *Denial) Coverage() Coverage { return d.coverage }

// Missing returns operations that the kernel does not deny, or not every time.
func (d *Denial) Missing() []policy.Gap { return d.coverage.Missing(d.rules) }

// Lost returns the numbers of attempts without an event, for want of room, as far as Listen knows. Audited operations take no room from denied ones.
func (d *Denial) Lost() (denied, audited uint64) { return d.lost[0].Load(), d.lost[1].Load() }

// Listen passes on the operations that programs were refused, or would have been, until ctx ends. The policy stays in force.
func (d *Denial) Listen(ctx context.Context, tell func(Attempt) error) error {
	take := func(deadline time.Time) error {
		e, err := d.reader.Read(deadline)
		for i, of := range d.reader.By() {
			d.lost[i].Store(of.Lost)
		}
		if err != nil {
			return err
		}
		a, err := attemptOf(e, d.rules)
		if err != nil {
			return err
		}
		return tell(a)
	}
	for ctx.Err() == nil {
		if err := take(time.Now().Add(time.Second / 4)); err != nil && !errors.Is(err, event.ErrTimeout) {
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
	return nil
}

// untoldMax limits the events that are passed on after the end, while more keep coming.
const untoldMax = 10000

// passesMax limits the passes over all processes. Each pass except the last has found a process that was started between reading
// and writing.
const passesMax = 1000

// track gives the running processes the rules of their programs that also hold for children. The programs track later processes,
// so it repeats until a pass finds nothing to change.
func (d *Denial) track(before map[string]*ebpf.Map) error {
	iterator, err := kernel.AttachIter(d.coll.Programs[connectProgShWalk], connectProgShWalk)
	if err != nil {
		return err
	}
	defer iterator.Close() //nolint:errcheck // the iterator has no pin
	for range passesMax {
		handed, err := handOn(before, d.coll, d.rules)
		if err != nil {
			return err
		}
		found, err := walk(iterator, d.coll.Maps[connectMapShC_counts])
		if err != nil {
			return err
		}
		if !handed && !found {
			return nil
		}
	}
	return fmt.Errorf("find the processes under rules of connections: new processes kept appearing in %d looks; try again", passesMax)
}

type opener interface{ Open() (io.ReadCloser, error) }

// walk runs the program on all processes, and reports whether it has changed something.
func walk(iterator opener, counts *ebpf.Map) (changed bool, err error) {
	before, err := countsOf(counts)
	if err != nil {
		return false, err
	}
	if err := kernel.RunIter(iterator); err != nil {
		return false, fmt.Errorf("look at all processes: %w", err)
	}
	after, err := countsOf(counts)
	return after.Changed != before.Changed, err
}

// handOn gives processes that were under a rule of an earlier policy the equal rule of this one.
func handOn(before map[string]*ebpf.Map, coll *ebpf.Collection, rules []policy.Connection) (changed bool, err error) {
	old := before[connectMapShC_tasks]
	if old == nil {
		return false, nil
	}
	bits, err := sameRules(before[connectMapShC_rules], rules)
	if err != nil {
		return false, err
	}
	var process connectGuardProcess
	var had uint64
	for entries := old.Iterate(); ; {
		if !entries.Next(&process, &had) {
			if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
				return changed, fmt.Errorf("read the processes of the earlier policy: %w", err)
			}
			return changed, nil
		}
		var want, have uint64
		for from, to := range bits {
			want |= had >> from & 1 << to
		}
		tasks := coll.Maps[connectMapShC_tasks]
		if err := tasks.Lookup(&process, &have); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return changed, fmt.Errorf("look a process up: %w", err)
		}
		if want&^have == 0 {
			continue
		}
		changed, want = true, want|have
		if err := tasks.Put(&process, &want); err != nil {
			return changed, fmt.Errorf("move a process to the next policy: %w", err)
		}
	}
}

// sameRules returns the numbers of an earlier policy's rules, each with the number of the equal rule in this one.
func sameRules(old *ebpf.Map, rules []policy.Connection) (map[int]int, error) {
	bits := map[int]int{}
	for from := range uint32(policy.RulesMax) {
		var r connectGuardRule
		if err := old.Lookup(from, &r); err != nil {
			return nil, fmt.Errorf("read the earlier rules: %w", err)
		}
		for to, now := range rules {
			if now.Children && event.Text(r.Name[:]) == now.Name && r.Trust == digest(now) {
				bits[int(from)] = to
			}
		}
	}
	return bits, nil
}

func bootNow() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail with this clock
	return uint64(now.Nano())
}

// Stop ends every policy in force, also of versions with another layout; false: there was none.
func Stop(root string) (bool, error) {
	foreign, err := others(root)
	if err != nil {
		return false, err
	}
	for _, folder := range foreign { // without the pin of its link a program is detached
		if err := os.RemoveAll(folder); err != nil {
			return true, fmt.Errorf("remove the programs of another version from the kernel: %w", err)
		}
	}
	all, err := generations(root)
	if err != nil || len(all)+len(foreign) == 0 {
		return false, err
	}
	var errs []error
	for _, number := range all {
		errs = append(errs, end(generation(root, number)))
	}
	removeEmpty(root)
	return true, errors.Join(errs...)
}

func removeEmpty(root string) {
	_ = os.Remove(filepath.Join(kernel.Directory(root, product), layout))
	_ = os.Remove(kernel.Directory(root, product))
	_ = os.Remove(kernel.Home(root)) // it is removed if it is empty
}
