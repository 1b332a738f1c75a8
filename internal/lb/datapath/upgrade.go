package datapath

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/vishvananda/netlink"
)

// An upgrade from one ABI to another, while packets come. docs/design/20-upgrade.md says why it
// goes so:
//
//	maps      new ones where a step says so; all others are shared by both ABIs
//	copied    what they hold, while the old programs go on
//	gates     on each interface, a program that runs the old one or the new one, as sh_switch says
//	switched  sh_switch says new: all interfaces at once. Flows that are not carried yet are the
//	          old programs' still, to which the new ones hand their packets
//	carried   what changed since it was copied
//	done      sh_switch says so: the old programs are asked no more
//	removed   the old maps; then the gates
//
// Until it is switched, undo takes everything back. A process that is killed leaves one of the two
// in charge, and the next start goes on from there (finishUpgrade).

// upgrade is one that is under way.
type upgrade struct {
	opts        Options
	from        uint32
	conversions conversions
	lever       *lever
	old         map[string]*ebpf.Map // the maps that are carried
	gates       []*gate

	flows    *flowCarry
	counters map[string]map[string][][]byte // as copied: map, key, by CPU
}

// gate is one interface's.
type gate struct {
	attached
	pin     *ebpf.Map
	before  string        // where the program before it in the chain is pinned
	program *ebpf.Program // sh_gate; that of attached is the new sh_xdp
}

func noWay(opts Options, have uint32) error {
	own := opts.version.ABI
	if have > own {
		return fmt.Errorf("take over the data plane of instance %q: it has ABI %d, and this version of shunt has %d, which is older and cannot take over a newer one; nothing was changed. Run the newer version again, or `shunt detach` first (this ends connections)",
			opts.Instance, have, own)
	}
	return fmt.Errorf("take over the data plane of instance %q: it has ABI %d, and this version of shunt has %d and cannot upgrade from there; nothing was changed. Start a version in between first, or run `shunt detach` (this ends connections)",
		opts.Instance, have, own)
}

// openUpgraded opens the data plane of another ABI as one of this version's.
func openUpgraded(opts Options, from uint32) (*Datapath, error) {
	w, ok := findConversions(opts.version.Steps, from, opts.version.ABI)
	if !ok {
		return nil, noWay(opts, from)
	}
	unlock, err := kernel.Lock(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := requireGates(opts, from); err != nil {
		return nil, err
	}
	opts.Log.Info("upgrading the data plane while it forwards", "instance", opts.Instance, "from_abi", from, "to_abi", opts.version.ABI)
	u := &upgrade{opts: opts, from: from, conversions: w, old: map[string]*ebpf.Map{}, counters: map[string]map[string][][]byte{}}
	defer u.close()
	d, err := u.run()
	if err == nil {
		return d, nil
	}
	err = fmt.Errorf("upgrade the data plane of instance %q from ABI %d to ABI %d: %w", opts.Instance, from, opts.version.ABI, err)
	if undone := u.back(d); undone != nil {
		err = errors.Join(err, undone)
	} else {
		err = fmt.Errorf("%w; the data plane of ABI %d goes on as it was: start the version that made it, or run `shunt detach` first (this ends connections)", err, from)
	}
	if d != nil {
		err = errors.Join(err, d.Close())
	}
	return nil, err
}

// requireGates refuses an upgrade where a program would go on without a gate, with the old flow table:
// at tc, and for VLANs at their parent.
func requireGates(opts Options, from uint32) error {
	there, err := pinnedSides(opts.PinRoot, opts.Instance)
	if err != nil {
		return err
	}
	if len(there) > 0 {
		return noGate(opts, from, there, "at tc", "another `attach` than tc")
	}
	vlans, err := pinnedTaken(opts, from)
	if err != nil || len(vlans) == 0 {
		return err
	}
	for _, t := range vlans {
		there = append(there, kernel.InterfaceName(t.ifindex))
	}
	slices.Sort(there)
	return noGate(opts, from, there, "in native mode at their parents", "`attach: generic`")
}

func noGate(opts Options, from uint32, there []string, where, other string) error {
	return fmt.Errorf("upgrade the data plane of instance %q from ABI %d to ABI %d: its programs on %s are %s, where an upgrade is not supported yet; nothing was changed. Start the version that made it, with %s for these interfaces, and then start this version; or run `shunt detach` first (this ends connections)",
		opts.Instance, from, opts.version.ABI, strings.Join(there, ", "), where, other)
}

// run is the whole. Where it fails, what it has of a data plane comes with the error.
func (u *upgrade) run() (d *Datapath, err error) {
	own, err := u.makeMaps()
	if err != nil {
		return nil, err
	}
	d = newDatapath(u.opts, own, true)
	if err := u.point(abi.PointMaps); err != nil {
		return d, err
	}
	if err := u.copy(d.maps); err != nil {
		return d, err
	}
	if err := d.prepare(); err != nil {
		return d, err
	}
	if err := u.point(abi.PointCopied); err != nil {
		return d, err
	}
	if err := u.makeGates(d); err != nil {
		return d, err
	}
	if err := u.flows.copy(); err != nil { // what came while the programs were loaded
		return d, err
	}
	for _, g := range u.gates {
		if err := g.install(); err != nil {
			return d, err
		}
		if err := u.point(abi.PointGate); err != nil {
			return d, err
		}
	}
	now, err := d.readClock(false)
	if err != nil {
		return d, err
	}
	atomic.StoreUint64(&u.lever.words[abi.SWITCH_SINCE], now.Jiffies)
	u.lever.set(abi.SWITCH_CARRYING)
	if err := d.grace.Wait(); err != nil { // no old program makes new flows any more
		return d, err
	}
	if err := u.point(abi.PointSwitched); err != nil {
		return d, err
	}
	if err := u.carryRest(d.maps, d.grace); err != nil {
		return d, err
	}
	if err := u.point(abi.PointCarried); err != nil {
		return d, err
	}
	u.lever.set(abi.SWITCH_DONE)
	// From here on there is no way back, and none is needed.
	err = u.point(abi.PointDone)
	if err == nil {
		err = finish(u.opts, u.opts.version.ABI)
	}
	if err != nil {
		u.opts.Log.Warn("cannot remove the rest of the old ABI's data plane; the next start removes it", "error", err)
	}
	u.opts.Log.Info("upgraded the data plane", "instance", u.opts.Instance, "abi", u.opts.version.ABI,
		"flow_entries", u.flows.entries, "late", u.flows.late, "lost", u.flows.lost)
	return d, nil
}

func (u *upgrade) point(p abi.Point) error { return u.opts.version.Reach(p) }

// back leaves the old ABI in charge.
func (u *upgrade) back(d *Datapath) error {
	if u.lever != nil && u.lever.state() != abi.SWITCH_OLD {
		u.opts.Log.Error("going back to the old ABI; connections begun in these last moments are lost")
		u.lever.set(abi.SWITCH_OLD)
		if err := d.grace.Wait(); err != nil {
			return err
		}
	}
	return undo(u.opts, u.opts.version.ABI)
}

func (u *upgrade) close() {
	for _, g := range u.gates {
		g.close()
	}
	kernel.CloseMaps(u.old)
	if u.lever != nil {
		u.lever.close()
	}
}

// makeMaps makes the new ABI's maps, or shares the old one's. The switch is the first, so that
// a process that is killed leaves nothing that looks like a data plane.
func (u *upgrade) makeMaps() (own map[string]*ebpf.Map, err error) {
	set, err := u.opts.mapSet()
	if err != nil {
		return nil, err
	}
	for name := range u.conversions {
		if manners[name] == mannerRefused {
			return nil, fmt.Errorf("carry %s over: a running data plane cannot have its layout changed yet", name)
		}
	}
	if err := set.MakeDirectory(); err != nil {
		return nil, err
	}
	own = map[string]*ebpf.Map{}
	defer func() {
		if err != nil {
			kernel.CloseMaps(own)
			own = nil
		}
	}()
	gateSpec, err := u.opts.version.Spec(abi.ObjectGate)
	if err != nil {
		return own, err
	}
	m, err := kernel.MakeMap(gateSpec.Maps[switchMap], set.Path(switchMap))
	if err != nil {
		return own, err
	}
	if u.lever, err = newLever(m); err != nil {
		return own, err
	}
	for _, name := range set.Names() {
		if own[name], err = u.makeMap(set, name); err != nil {
			delete(own, name)
			return own, err
		}
	}
	return own, nil
}

// makeMap makes one, or shares the old one.
func (u *upgrade) makeMap(set *kernel.MapSet, name string) (*ebpf.Map, error) {
	oldPath := filepath.Join(u.opts.mapDir(u.from), name)
	old, err := kernel.OpenMap(oldPath)
	if errors.Is(err, os.ErrNotExist) {
		return set.Make(name)
	}
	if err != nil {
		return nil, err
	}
	if _, ok := u.conversions[name]; ok {
		u.old[name] = old
		return set.Make(name)
	}
	defer old.Close()
	if err := set.Check(old, name, oldPath); err != nil {
		return nil, err
	}
	shared, err := old.Clone() // to pin an opened one again would move its pin
	if err != nil {
		return nil, fmt.Errorf("share map %s: %w", name, err)
	}
	if err := shared.Pin(set.Path(name)); err != nil {
		return nil, errors.Join(fmt.Errorf("pin map %s at %s: %w", name, set.Path(name), err), shared.Close())
	}
	return shared, nil
}

// makeGates loads the new programs, and a gate for each interface that runs an old one.
func (u *upgrade) makeGates(d *Datapath) error {
	found, err := pinnedLinks(u.opts.PinRoot, u.opts.Instance)
	if err != nil {
		return err
	}
	d.features |= abi.FEATURE_CARRY
	defer func() { d.features &^= abi.FEATURE_CARRY }()
	for _, iface := range slices.Sorted(maps.Keys(found)) {
		g := &gate{attached: attached{Attachment: kernel.Attachment{Interface: iface}}, before: PositionBefore.path(d.root, d.instance, iface)}
		u.gates = append(u.gates, g)
		ok, err := u.makeGate(d, g)
		if err != nil {
			return fmt.Errorf("prepare interface %s: %w", iface, err)
		}
		if !ok {
			u.gates = u.gates[:len(u.gates)-1]
			g.close()
		}
	}
	return nil
}

// makeGate fills a gate; false where its interface has gone, and with it what ran there.
func (u *upgrade) makeGate(d *Datapath, g *gate) (bool, error) {
	var err error
	if g.link, err = link.LoadPinnedLink(linkPath(d.root, d.instance, g.Interface), nil); err != nil {
		return false, fmt.Errorf("open its link: %w", err)
	}
	info, err := g.link.Info()
	if err != nil {
		return false, fmt.Errorf("look at its link: %w", err)
	}
	if info.XDP() == nil || info.XDP().Ifindex == 0 {
		return false, nil
	}
	dev, err := netlink.LinkByIndex(int(info.XDP().Ifindex))
	if err != nil {
		return false, fmt.Errorf("find it in this network namespace: %w; start shunt in the network namespace of the interface, or take the program off with `shunt detach` first", err)
	}
	g.ifindex, g.Mode, g.redirectBack = dev.Attrs().Index, kernel.ModeOf(dev), redirectsBack(dev)
	index, ok := d.indexOf(g.ifindex)
	if !ok {
		return false, errors.New("the maps do not know it: run `shunt detach` first (this ends connections)")
	}
	g.index = index
	if g.chain, _, err = d.openChain(g.Interface); err != nil {
		return false, err
	}
	var before *ebpf.Program
	if err := g.chain.Lookup(uint32(abi.CHAIN_NEXT), &before); err != nil {
		return false, fmt.Errorf("find the old program: %w", err)
	}
	defer before.Close()
	spec, err := d.version.Spec(abi.ObjectGate)
	if err != nil {
		return false, err
	}
	path := filepath.Join(u.opts.mapDir(u.opts.version.ABI), gatePrefix+kernel.ToPin(g.Interface))
	if g.pin, err = kernel.MakeMap(spec.Maps[gatesMap], path); err != nil {
		return false, err
	}
	if err := g.pin.Put(uint32(abi.GATE_OLD), before); err != nil {
		return false, fmt.Errorf("put the old program behind its gate: %w", err)
	}
	if err := u.loadCarrying(d, g); err != nil {
		return false, err
	}
	return true, u.loadGate(d, g)
}

// loadCarrying loads the interface's new program, with a view of the old flow table and the way
// back to the old program.
func (u *upgrade) loadCarrying(d *Datapath, g *gate) error {
	const oldFlows = "sh_flows_old"
	more := map[string]*ebpf.Map{switchMap: u.lever.m, gatesMap: g.pin}
	if u.old[abi.MapFlows] == nil {
		return d.loadProgram(&g.attached, more) // both ABIs have one flow table: nothing is due
	}
	more[oldFlows] = u.old[abi.MapFlows]
	return d.loadProgramWith(&g.attached, more, func(spec *ebpf.CollectionSpec) {
		m := spec.Maps[oldFlows]
		m.ValueSize, m.MaxEntries = more[oldFlows].ValueSize(), more[oldFlows].MaxEntries()
		m.Value = nil // BTF of the new one
	})
}

// loadGate loads the gate, before both programs.
func (u *upgrade) loadGate(d *Datapath, g *gate) error {
	if err := g.pin.Put(uint32(abi.GATE_NEW), g.programs[0]); err != nil {
		return fmt.Errorf("put the new program behind its gate: %w", err)
	}
	coll, err := d.loadOnto(map[string]*ebpf.Map{gatesMap: g.pin, switchMap: u.lever.m}, d.version.Loader(abi.ObjectGate), nil)
	if err != nil {
		return fmt.Errorf("load its gate: %w", err)
	}
	defer coll.Close()
	g.program, err = kernel.TakeProgram(coll, "sh_gate")
	return err
}

// install puts the gate into the old program's place, which it then runs.
func (g *gate) install() error {
	if err := putNext(g.chain, g.program, g.Interface); err != nil {
		return err
	}
	if err := runFirst(g.chain, g.program, g.before, g.link.Update); err != nil {
		return fmt.Errorf("put a gate on interface %s: %w", g.Interface, err)
	}
	return nil
}

func (g *gate) close() {
	if g.program != nil {
		_ = g.program.Close()
	}
	_ = g.closePrograms()
	for _, m := range []*ebpf.Map{g.pin, g.chain} {
		if m != nil {
			_ = m.Close()
		}
	}
	if g.link != nil {
		_ = g.link.Close()
	}
}
