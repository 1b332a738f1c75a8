package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"golang.org/x/sys/unix"
)

// RunTime is what a program of a chain took while it was measured, without the programs that it
// handed packets on to.
type RunTime struct {
	// Packets are those that were measured: the first 256 of each CPU, then one in 16. 0: none came,
	// and the rest is unknown.
	Packets    uint64  `json:"packets"`
	PerPacketN float64 `json:"ns_per_packet"` // nanoseconds, on average, to a few
}

// The programs of bpf/lb/stopwatch.bpf.c, and its map of the measured ones.
const (
	lapFirst    = "sh_lap_first"
	lapNext     = "sh_lap_next"
	lapAfter    = "sh_lap_after"
	measuredMap = "sh_measured"
	lapsMap     = "sh_laps"
)

// measuredPrefix begins the name of a folder that is there while an interface's chain is measured.
// In it are pinned the map of the measured programs, and shunt's, which has had to leave its place;
// the program after is pinned anyway. So the next process after a measurement that was killed can
// put them back. The measuring process locks the folder.
const measuredPrefix = "measured-"

func measuredPath(root, instance, iface, name string) string {
	return filepath.Join(kernel.Directory(root, instance), measuredPrefix+kernel.ToPin(iface), name)
}

// The pins in that folder.
const (
	measuredPrograms = "programs"
	measuredNext     = "next"
)

// MeasureChains lists the chains of these interfaces of an instance, or without any those of all
// (Chains), with the times of their programs: measured from now on, for a time or until the context
// ends. Meanwhile a packet takes some tens of nanoseconds longer; none is lost. Another process that
// changes a chain, or calls this, ends the measurement early. It needs no daemon, but CAP_SYS_ADMIN.
func MeasureChains(ctx context.Context, opts Options, length time.Duration, interfaces ...string) ([]Chain, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	if len(interfaces) == 0 {
		var err error
		if interfaces, err = chained(opts); err != nil {
			return nil, err
		}
	}
	var all []*stopwatch
	for _, iface := range interfaces {
		all = append(all, &stopwatch{opts: opts, iface: iface})
	}
	measured, err := measure(ctx, all, length)
	for i := range measured {
		err = errors.Join(err, measured[i].meetGuest())
	}
	return measured, err
}

// ErrMeasured says that a process measures a chain now.
var ErrMeasured = errors.New("a process measures it now")

// MeasureOthers is MeasureChains of the interfaces on which programs of others run beside shunt's. It
// leaves a measurement of another process alone, with ErrMeasured, and does not need CAP_SYS_ADMIN.
func (d *Datapath) MeasureOthers(ctx context.Context, length time.Duration) ([]Chain, error) {
	all, err := d.beside()
	defer func() {
		for _, s := range all {
			_ = s.own.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	return measure(ctx, all, length)
}

// beside are stopwatches for the interfaces of this process with programs of others. The caller
// closes own of each.
func (d *Datapath) beside() (all []*stopwatch, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, iface := range slices.Sorted(maps.Keys(d.attached)) {
		if d.attached[iface].link == nil {
			continue // at tc
		}
		chain, err := ebpf.LoadPinnedMap(chainPath(d.root, d.instance, iface), nil)
		if err != nil {
			return all, fmt.Errorf("open the chain of interface %s: %w", iface, err)
		}
		others, err := hasOthers(chain)
		_ = chain.Close()
		if err != nil {
			return all, fmt.Errorf("read the chain of interface %s: %w", iface, err)
		}
		if !others {
			continue
		}
		p, err := d.attached[iface].programs[0].Clone()
		if err != nil {
			return all, err
		}
		all = append(all, &stopwatch{opts: Options{PinRoot: d.root, Instance: d.instance}, iface: iface, own: p, yields: true})
	}
	return all, nil
}

func hasOthers(chain *ebpf.Map) (bool, error) {
	for _, position := range Positions {
		var id uint32
		err := chain.Lookup(position.index(), &id)
		if err == nil || !errors.Is(err, ebpf.ErrKeyNotExist) {
			return true, err
		}
	}
	return false, nil
}

// measure starts stopwatches together, and stops them.
func measure(ctx context.Context, all []*stopwatch, length time.Duration) (chains []Chain, err error) {
	var errs []error
	running := all
	for i, s := range all {
		if err := s.start(); err != nil {
			errs = append(errs, fmt.Errorf("measure the programs on interface %s: %w", s.iface, err))
			running = all[:i]
			break
		}
	}
	if len(errs) == 0 && len(running) > 0 {
		select {
		case <-ctx.Done():
		case <-time.After(length):
		}
	}
	for _, s := range running {
		if err := s.stop(); err != nil {
			errs = append(errs, fmt.Errorf("end the measurement on interface %s: %w", s.iface, err))
		}
		chains = append(chains, s.chain)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return chains, nil
}

// stopwatch measures the programs of an interface's chain.
type stopwatch struct {
	opts   Options
	iface  string
	own    *ebpf.Program // shunt's, as for openPrograms
	yields bool          // to a measurement of another process

	chain  Chain // as it was at the start; stop adds the times
	coll   *ebpf.Collection
	unlock func() // the folder
}

// start puts the measuring programs between those of the chain.
func (s *stopwatch) start() error {
	unlock, err := kernel.Lock(s.opts.PinRoot, s.opts.Instance)
	if err != nil {
		return err
	}
	defer unlock()
	if s.yields && s.measuredElsewhere() {
		return ErrMeasured
	}
	if err := s.endMeasurement(); err != nil {
		return err
	}
	chain, l, err := chainAt(s.opts, s.iface)
	if err != nil {
		return err
	}
	defer chain.Close()
	defer l.Close()
	programs, err := openPrograms(s.opts, chain, s.iface, s.own)
	if err != nil {
		return err
	}
	defer programs.close()
	if s.chain, err = programs.describe(s.opts, s.iface); err != nil {
		return err
	}
	if s.chain.Shunt == nil {
		return errors.New("shunt's own program is not in the chain: start `shunt run` again, which puts it there")
	}
	first := PositionShunt
	if s.chain.Before != nil {
		first = PositionBefore
	}
	spec, err := loadStopwatch()
	if err != nil {
		return err
	}
	if s.coll, err = kernel.Load(spec, map[string]any{"first": first.index()}, nil); err != nil {
		return fmt.Errorf("load the programs that measure: %w", err)
	}
	if err := s.install(chain, l, programs.at); err != nil {
		s.close()
		return errors.Join(err, s.endMeasurement())
	}
	return nil
}

// path is measuredPath.
func (s *stopwatch) path(name string) string {
	return measuredPath(s.opts.PinRoot, s.opts.Instance, s.iface, name)
}

func (s *stopwatch) endMeasurement() error {
	return endMeasurement(s.opts.PinRoot, s.opts.Instance, s.iface)
}

func (s *stopwatch) measuredElsewhere() bool {
	unlock, err := kernel.TryLock(s.path(""))
	if err == nil {
		unlock() // that process was killed
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}

func (s *stopwatch) close() {
	s.coll.Close()
	if s.unlock != nil {
		s.unlock()
	}
}

// install notes the programs of the chain, and then has the measuring ones lead to them: the last
// in a packet's order first, so that none leads to nothing.
func (s *stopwatch) install(chain *ebpf.Map, l link.Link, programs [abiChainPositionCHAIN_COUNT]*ebpf.Program) error {
	measured := s.coll.Maps[measuredMap]
	for position, p := range programs {
		if p == nil {
			continue
		}
		if err := measured.Put(uint32(position), p); err != nil {
			return fmt.Errorf("note a program to measure: %w", err)
		}
	}
	if err := s.keep(measured, programs[abiChainPositionCHAIN_NEXT], programs[abiChainPositionCHAIN_AFTER]); err != nil {
		return fmt.Errorf("pin the programs to measure: %w", err)
	}
	if s.chain.After != nil {
		if err := chain.Put(PositionAfter.index(), s.coll.Programs[lapAfter]); err != nil {
			return fmt.Errorf("measure the program after: %w", err)
		}
	}
	if s.chain.Before != nil {
		if err := chain.Put(PositionShunt.index(), s.coll.Programs[lapNext]); err != nil {
			return fmt.Errorf("measure shunt's program: %w", err)
		}
	}
	if err := l.Update(s.coll.Programs[lapFirst]); err != nil {
		return fmt.Errorf("have the interface run the programs that measure: %w", err)
	}
	return nil
}

// keep pins what endMeasurement needs. The pin of next comes last: it says that all are there.
func (s *stopwatch) keep(measured *ebpf.Map, next, after *ebpf.Program) (err error) {
	if err := os.Mkdir(s.path(""), 0o700); err != nil {
		return err
	}
	if s.unlock, err = kernel.TryLock(s.path("")); err != nil {
		return err
	}
	if err := measured.Pin(s.path(measuredPrograms)); err != nil {
		return err
	}
	pin := PositionAfter.path(s.opts.PinRoot, s.opts.Instance, s.iface)
	if after == nil { // a pin is of a change that was cut short
		if err := forgetProgram(pin); err != nil {
			return err
		}
	} else if err := keepProgram(after, pin); err != nil {
		return err
	}
	return keepProgram(next, s.path(measuredNext))
}

// stop ends the measurement, if nobody else has, and adds its times to the chain.
func (s *stopwatch) stop() error {
	defer s.close()
	err := s.uninstall()
	var perCPU []stopwatchLaps
	if failed := s.coll.Maps[lapsMap].Lookup(uint32(0), &perCPU); failed != nil {
		return errors.Join(err, fmt.Errorf("read %s: %w", lapsMap, failed))
	}
	for _, place := range s.chain.Places() {
		if place.Program != nil {
			place.Program.Time = runTime(perCPU, place.Position)
		}
	}
	return err
}

// runTime is the time of the program in a position, without that of the clock.
func runTime(perCPU []stopwatchLaps, position Position) *RunTime {
	var packets, took, measured, clock uint64
	for _, laps := range perCPU {
		packets += laps.Packets[position.index()]
		took += laps.Time[position.index()]
		measured += laps.Measured
		clock += laps.Clock
	}
	if packets == 0 {
		return &RunTime{}
	}
	each := float64(took)/float64(packets) - float64(clock)/float64(measured)
	return &RunTime{packets, max(each, 1)} // less than the clock can tell
}

// uninstall gives the programs their places back, unless somebody else has done so and perhaps
// begun a measurement.
func (s *stopwatch) uninstall() error {
	unlock, err := kernel.Lock(s.opts.PinRoot, s.opts.Instance)
	if errors.Is(err, os.ErrNotExist) {
		return nil // detached
	}
	if err != nil {
		return err
	}
	defer unlock()
	pinned, err := ebpf.LoadPinnedMap(s.path(measuredPrograms), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer pinned.Close()
	if same, err := sameMap(pinned, s.coll.Maps[measuredMap]); err != nil || !same {
		return err
	}
	return s.endMeasurement()
}

func sameMap(a, b *ebpf.Map) (bool, error) {
	idA, errA := mapID(a)
	idB, errB := mapID(b)
	return idA == idB, errors.Join(errA, errB)
}

// endMeasurement gives the programs of a chain their places back, if it is being measured or a
// measurement was killed. The caller holds the instance's lock.
func endMeasurement(root, instance, iface string) error {
	path := func(name string) string { return measuredPath(root, instance, iface, name) }
	if _, err := os.Stat(path("")); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	next, err := pinnedProgram(path(measuredNext))
	if err != nil {
		return err
	}
	if next == nil { // it was killed before it put anything into the chain, or after it took all out
		return os.RemoveAll(path(""))
	}
	defer next.Close()
	if err := replaceMeasuring(root, instance, iface, next); err != nil {
		return fmt.Errorf("give the measured programs on interface %s their places back: %w", iface, err)
	}
	// Packets may still be with the measuring programs, and the map goes with its pin.
	grace, err := kernel.NewGrace()
	if err != nil {
		return err
	}
	if err := errors.Join(grace.Wait(), grace.Close()); err != nil {
		return err
	}
	return os.RemoveAll(path(""))
}

// replaceMeasuring goes in a packet's order, so that what is still measured is so without fault.
func replaceMeasuring(root, instance, iface string, next *ebpf.Program) error {
	if err := runOwn(root, instance, iface, next); err != nil {
		return err
	}
	after, err := pinnedProgram(PositionAfter.path(root, instance, iface))
	if err != nil || after == nil {
		return err
	}
	defer after.Close()
	chain, err := ebpf.LoadPinnedMap(chainPath(root, instance, iface), nil)
	if err != nil {
		return err
	}
	defer chain.Close()
	return chain.Put(PositionAfter.index(), after)
}

// pinnedProgram is the program pinned at a path; nil if there is no such file.
func pinnedProgram(path string) (*ebpf.Program, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the program pinned at %s: %w", path, err)
	}
	return p, nil
}
