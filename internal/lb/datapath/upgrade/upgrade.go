// Package upgrade takes over a data plane of another ABI while packets come: it makes the maps whose layout or meaning
// differs, has every interface run both programs behind a gate, switches all of them at once, and carries over all that
// changed meanwhile. docs/design/20-upgrade.md has the reasons.
package upgrade

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// An upgrade from one ABI to another, while packets come. docs/design/20-upgrade.md gives the
// reasons. Its points:
//
//	maps      a step names the maps that are made anew; both ABIs share all others
//	copied    the contents of these maps, while the old programs go on
//	gates     on each interface, a program that runs the old or the new program, as sh_switch says
//	switched  sh_switch says new, for all interfaces at once. The old programs still have the flows
//	          that are not carried yet: the new programs hand the packets of these flows to them
//	carried   the elements that changed after they were copied
//	done      sh_switch says so: the new programs no longer use the old ones
//	removed   the old maps; then the gates
//
// Until it is switched, undo takes everything back. A process that is killed leaves one of the two
// ABIs in charge, and the next start goes on from there (Finish).

// upgrade is an upgrade under way.
type upgrade struct {
	opts        store.Options
	from        uint32
	conversions conversions
	lever       *lever
	old         map[string]*ebpf.Map // the maps that are carried
	w           *store.Writer        // of the new maps; nil until they are made
	own         map[string]*ebpf.Map // its maps
	d           *attach.Plane        // nil until the copy is made
	gates       []*attach.Gate

	flows    *flowCarry
	counters map[string]map[string][][]byte // as copied: map, key, by CPU
}

func noSteps(opts store.Options, have uint32) error {
	own := opts.Version.ABI
	if have > own {
		return fmt.Errorf("take over the data plane of instance %q: it has ABI %d, and this version of shunt has %d, which is older and cannot take over a newer one; nothing was changed. Run the newer version again, or `shunt detach` first (this ends connections)",
			opts.Instance, have, own)
	}
	return fmt.Errorf("take over the data plane of instance %q: it has ABI %d, and this version of shunt has %d and cannot upgrade from there; nothing was changed. Start a version in between first, or run `shunt detach` (this ends connections)",
		opts.Instance, have, own)
}

// Run opens the data plane of another ABI as one of this version's.
func Run(opts store.Options, from uint32) (*attach.Plane, error) {
	w, ok := findConversions(opts.Version.Steps, from, opts.Version.ABI)
	if !ok {
		return nil, noSteps(opts, from)
	}
	unlock, err := kernel.Lock(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := attach.RequireGates(opts, from); err != nil {
		return nil, err
	}
	opts.Log.Info("upgrading the data plane while it forwards", "instance", opts.Instance, "from_abi", from, "to_abi", opts.Version.ABI)
	u := &upgrade{opts: opts, from: from, conversions: w, old: map[string]*ebpf.Map{}, counters: map[string]map[string][][]byte{}}
	defer u.close()
	err = u.run()
	if err == nil {
		return u.d, nil
	}
	err = fmt.Errorf("upgrade the data plane of instance %q from ABI %d to ABI %d: %w", opts.Instance, from, opts.Version.ABI, err)
	if undone := u.back(); undone != nil {
		err = errors.Join(err, undone)
	} else {
		err = fmt.Errorf("%w; the data plane of ABI %d goes on as it was: start the version that made it, or run `shunt detach` first (this ends connections)", err, from)
	}
	switch {
	case u.d != nil:
		err = errors.Join(err, u.d.Close())
	case u.w != nil:
		err = errors.Join(err, u.w.Close())
	}
	return nil, err
}

// run performs the whole upgrade.
func (u *upgrade) run() error {
	if err := u.makeMaps(); err != nil {
		return err
	}
	u.w = store.New(u.opts, u.own)
	if err := u.point(abi.PointMaps); err != nil {
		return err
	}
	if err := u.copy(u.own); err != nil {
		return err
	}
	if err := u.w.Adopt(); err != nil {
		return err
	}
	var err error
	if u.d, err = attach.New(u.w); err != nil {
		return err
	}
	if err := u.point(abi.PointCopied); err != nil {
		return err
	}
	if u.gates, err = u.d.Gates(u.lever.m, u.old[abi.MapFlows], u.opts.MapDir(u.opts.Version.ABI)); err != nil {
		return err
	}
	if err := u.flows.copy(); err != nil { // entries that came while the programs were loaded
		return err
	}
	for _, g := range u.gates {
		if err := g.Install(); err != nil {
			return err
		}
		if err := u.point(abi.PointGate); err != nil {
			return err
		}
	}
	now, err := u.d.Jiffies()
	if err != nil {
		return err
	}
	u.lever.take(now)
	if err := u.d.Grace(); err != nil { // no old program makes new flows any more
		return err
	}
	if err := u.point(abi.PointSwitched); err != nil {
		return err
	}
	if err := u.carryRest(u.own, u.d.Grace); err != nil {
		return err
	}
	if err := u.point(abi.PointCarried); err != nil {
		return err
	}
	u.lever.set(abi.SWITCH_DONE)
	// From here on there is no return, and none is needed.
	err = u.point(abi.PointDone)
	if err == nil {
		err = finish(u.opts, u.opts.Version.ABI)
	}
	if err != nil {
		u.opts.Log.Warn("cannot remove the rest of the old ABI's data plane; the next start removes it", "error", err)
	}
	u.opts.Log.Info("upgraded the data plane", "instance", u.opts.Instance, "abi", u.opts.Version.ABI,
		"flow_entries", u.flows.entries, "late", u.flows.late, "lost", u.flows.lost)
	return nil
}

func (u *upgrade) point(p abi.Point) error { return u.opts.Version.Reach(p) }

// back puts the old ABI in charge again.
func (u *upgrade) back() error {
	if u.lever != nil && u.lever.state() != abi.SWITCH_OLD {
		u.opts.Log.Error("going back to the old ABI; connections begun in these last moments are lost")
		u.lever.set(abi.SWITCH_OLD)
		if err := u.d.Grace(); err != nil {
			return err
		}
	}
	return undo(u.opts, u.opts.Version.ABI)
}

func (u *upgrade) close() {
	for _, g := range u.gates {
		g.Close()
	}
	kernel.CloseMaps(u.old)
	if u.lever != nil {
		u.lever.close()
	}
}

// makeMaps makes the new ABI's maps, or shares the old one's. The switch is the first, so that
// a process that is killed leaves nothing that looks like a data plane.
func (u *upgrade) makeMaps() (err error) {
	set, err := u.opts.MapSet()
	if err != nil {
		return err
	}
	for name := range u.conversions {
		if manners[name] == mannerRefused {
			return fmt.Errorf("carry %s over: the layout of a running data plane cannot change yet", name)
		}
	}
	if err := set.MakeDirectory(); err != nil {
		return err
	}
	own := map[string]*ebpf.Map{}
	defer func() {
		if err != nil {
			kernel.CloseMaps(own)
		}
	}()
	gateSpec, err := u.opts.Version.Spec(abi.ObjectGate)
	if err != nil {
		return err
	}
	m, err := kernel.MakeMap(gateSpec.Maps[abi.MapSwitch], set.Path(abi.MapSwitch))
	if err != nil {
		return err
	}
	if u.lever, err = newLever(m); err != nil {
		return err
	}
	for _, name := range set.Names() {
		m, err := u.makeMap(set, name)
		if err != nil {
			return err
		}
		own[name] = m
	}
	u.own = own
	return nil
}

// makeMap makes one map, or shares the old one.
func (u *upgrade) makeMap(set *kernel.MapSet, name string) (*ebpf.Map, error) {
	oldPath := filepath.Join(u.opts.MapDir(u.from), name)
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
