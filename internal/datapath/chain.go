package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"golang.org/x/sys/unix"
)

// Position is where somebody else's program runs on an interface.
type Position string

// The positions. Before is what the interface runs, and calls shunt's program; after gets what
// shunt passes to the stack.
const (
	PositionBefore Position = "before"
	PositionAfter  Position = "after"
)

// Positions are all of them, in a packet's order.
var Positions = []Position{PositionBefore, PositionAfter}

func (p Position) index() uint32 {
	if p == PositionBefore {
		return uint32(abiChainPositionCHAIN_BEFORE)
	}
	return uint32(abiChainPositionCHAIN_AFTER)
}

// Chained is a program of a chain.
type Chained struct {
	ID   uint32 `json:"id"`
	Name string `json:"name"` // at most 15 characters
	Tag  string `json:"tag"`  // hash of its instructions
}

func (c Chained) String() string { return fmt.Sprintf("%q (program %d)", c.Name, c.ID) }

// Chain is what runs on an interface, in a packet's order.
type Chain struct {
	Interface string   `json:"interface"`
	Map       string   `json:"map"` // the file of the map that a program before calls on
	Before    *Chained `json:"before"`
	Shunt     *Chained `json:"shunt"`
	After     *Chained `json:"after"`
	// Attached is the number of the program that the interface runs: Before's, else Shunt's. It
	// differs while a change is being made, or when one was cut short; attaching repairs that.
	Attached uint32 `json:"attached"`
	// Time is that of all programs of the chain together.
	Time RunTime `json:"time"`
}

// RunTime is what the kernel measured (BPF_ENABLE_STATS) since the program was loaded, or
// within a measurement. The kernel counts a program and all that it calls as one.
type RunTime struct {
	Packets    uint64  `json:"packets"`       // 0: nothing was measured
	PerPacketN float64 `json:"ns_per_packet"` // nanoseconds
}

const (
	chainMap    = "sh_chain"
	chainPrefix = "chain-"
	// beforePrefix names pins of programs before. Who may not turn a number of the chain into
	// a program, which takes CAP_SYS_ADMIN, opens the pin.
	beforePrefix = "before-"
)

func chainPath(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), chainPrefix+kernel.ToPin(iface))
}

// openChain opens an interface's chain; fresh is whether it had to be made.
func (d *Datapath) openChain(iface string) (m *ebpf.Map, fresh bool, err error) {
	path := chainPath(d.root, d.instance, iface)
	m, err = ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if m.Type() != ebpf.ProgramArray || m.MaxEntries() != uint32(abiChainPositionCHAIN_COUNT) {
			_ = m.Close()
			return nil, false, fmt.Errorf("the map pinned at %s is not a chain of this version: run `shunt detach` with the version that made it, or remove the file", path)
		}
		return m, false, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, false, fmt.Errorf("open the chain pinned at %s: %w", path, err)
	}
	m, err = ebpf.NewMap(&ebpf.MapSpec{Name: chainMap, Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: uint32(abiChainPositionCHAIN_COUNT)})
	if err != nil {
		return nil, false, fmt.Errorf("make the chain of interface %s: %w", iface, err)
	}
	if err := m.Pin(path); err != nil {
		_ = m.Close()
		return nil, false, fmt.Errorf("pin the chain at %s: %w", path, err)
	}
	return m, true, nil
}

// removeChain takes an interface's chain away; with it go the programs in it. That there is
// none is success.
func removeChain(root, instance, iface string) error {
	for _, path := range []string{beforePath(root, instance, iface), chainPath(root, instance, iface)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the chain of interface %s: %w", iface, err)
		}
	}
	return nil
}

func beforePath(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), beforePrefix+kernel.ToPin(iface))
}

// entry is what an interface is to run: the program before, or else shunt's own. The caller
// closes it.
func entry(chain *ebpf.Map, own *ebpf.Program, pin string) (*ebpf.Program, error) {
	var id uint32
	err := chain.Lookup(uint32(abiChainPositionCHAIN_BEFORE), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return own.Clone()
	}
	if pinned, err := ebpf.LoadPinnedProgram(pin, nil); err == nil {
		if info, err := pinned.Info(); err == nil {
			if is, known := info.ID(); known && uint32(is) == id {
				return pinned, nil
			}
		}
		_ = pinned.Close() // of a change that was cut short
	}
	var before *ebpf.Program
	if err == nil {
		err = chain.Lookup(uint32(abiChainPositionCHAIN_BEFORE), &before)
	}
	if err != nil {
		return nil, fmt.Errorf("open the program that runs before shunt's: %w", err)
	}
	return before, nil
}

// chainAt opens the chain of an interface that some process has attached to, with its link.
func chainAt(opts Options, iface string) (*ebpf.Map, link.Link, error) {
	path := chainPath(opts.PinRoot, opts.Instance, iface)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, notChained(opts, iface)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open the chain pinned at %s: %w", path, err)
	}
	l, err := link.LoadPinnedLink(linkPath(opts.PinRoot, opts.Instance, iface), nil)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open the link of interface %s: %w; `shunt run` attaches", iface, err), m.Close())
	}
	return m, l, nil
}

// notChained says why an interface has no chain.
func notChained(opts Options, iface string) error {
	links, err := pinnedLinks(opts.PinRoot, opts.Instance)
	names := slices.Sorted(maps.Keys(links))
	sides, sidesErr := pinnedSides(opts.PinRoot, opts.Instance)
	switch {
	case err != nil || sidesErr != nil:
		return errors.Join(err, sidesErr)
	case slices.Contains(sides, iface):
		return fmt.Errorf("look for the chain of interface %s: shunt is attached there at tc, which runs programs one after the other without a chain: `bpftool net` lists them", iface)
	case len(names) == 0:
		return fmt.Errorf("look for the chain of interface %s: instance %q is attached to no interface; `shunt run` attaches", iface, opts.Instance)
	case slices.Contains(names, iface):
		return fmt.Errorf("look for the chain of interface %s: the version that attached there has none; start `shunt run` of this version again", iface)
	}
	return fmt.Errorf("look for the chain of interface %s: instance %q is not attached to it, but to %s", iface, opts.Instance, strings.Join(names, ", "))
}

// Chains lists what runs on each interface of an instance, by name, with or without a daemon.
// ErrNotLoaded when it is attached nowhere.
func Chains(opts Options) ([]Chain, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	found, err := pinnedLinks(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	if sides, err := pinnedSides(opts.PinRoot, opts.Instance); len(found) == 0 && (err != nil || len(sides) > 0) {
		return nil, err // attached, and without chains
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("list the chains of instance %q: %w; start it with `shunt run`", opts.Instance, ErrNotLoaded)
	}
	var all []Chain
	for _, iface := range slices.Sorted(maps.Keys(found)) {
		c, err := readChain(opts, iface)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

func readChain(opts Options, iface string) (Chain, error) {
	c := Chain{Interface: iface, Map: chainPath(opts.PinRoot, opts.Instance, iface)}
	m, l, err := chainAt(opts, iface)
	if err != nil {
		return c, err
	}
	defer m.Close()
	defer l.Close()
	for index, to := range map[uint32]**Chained{
		uint32(abiChainPositionCHAIN_BEFORE): &c.Before,
		uint32(abiChainPositionCHAIN_NEXT):   &c.Shunt,
		uint32(abiChainPositionCHAIN_AFTER):  &c.After,
	} {
		if *to, err = chainedAt(m, index); err != nil {
			return c, fmt.Errorf("read the chain of interface %s: %w", iface, err)
		}
	}
	info, err := l.Info()
	if err != nil {
		return c, fmt.Errorf("look at the link of interface %s: %w", iface, err)
	}
	c.Attached = uint32(info.Program)
	c.Time, err = runTime(info.Program)
	return c, err
}

// chainedAt is the program at a place of the chain; nil when that is empty.
func chainedAt(chain *ebpf.Map, index uint32) (*Chained, error) {
	var p *ebpf.Program
	err := chain.Lookup(index, &p)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	id, _ := info.ID()
	return &Chained{uint32(id), info.Name, info.Tag}, nil
}

// runTime reads what the kernel has measured of a program.
func runTime(id ebpf.ProgramID) (RunTime, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return RunTime{}, fmt.Errorf("open program %d: %w", id, err)
	}
	defer p.Close()
	s, err := p.Stats()
	if err != nil || s.RunCount == 0 {
		return RunTime{}, err
	}
	return RunTime{s.RunCount, float64(s.Runtime.Nanoseconds()) / float64(s.RunCount)}, nil
}

// MeasureChains lists the chains with what the kernel measures from now on, for a time or until
// the context ends. Measuring takes every BPF program of the machine some nanoseconds a run.
func MeasureChains(ctx context.Context, opts Options, length time.Duration) ([]Chain, error) {
	stop, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("have the kernel measure programs: %w", err)
	}
	defer stop.Close() //nolint:errcheck // it only ends the measurement
	before, err := Chains(opts)
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
	case <-time.After(length):
	}
	after, err := Chains(opts)
	for i := range after {
		for _, b := range before {
			if b.Attached == after[i].Attached {
				after[i].Time = after[i].Time.since(b.Time)
			}
		}
	}
	return after, err
}

// since is what was measured after an earlier look.
func (t RunTime) since(before RunTime) RunTime {
	n := t.Packets - before.Packets
	if n == 0 {
		return RunTime{}
	}
	return RunTime{n, (t.PerPacketN*float64(t.Packets) - before.PerPacketN*float64(before.Packets)) / float64(n)}
}
