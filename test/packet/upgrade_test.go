package packet_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/upgrade"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/test/next"
)

// runLinked is RunPacket with the interface's program.
func (w *world) runLinked(arm string, frame []byte) (out result) {
	l, err := link.LoadPinnedLink(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "link-"+arm), nil)
	if err != nil {
		return result{err: err}
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return result{err: err}
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return result{err: err}
	}
	defer program.Close()
	context := struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32 }{
		DataEnd: uint32(len(frame)), IngressIfindex: uint32(w.ifindex[arm])}
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: context}
	out.verdict, out.err = program.Run(&opts)
	out.frame = opts.DataOut
	return out
}

// crowd has flows that an upgrade must not disturb.
type crowd struct {
	w     *world
	flows []*conversation
	port  uint16
}

// join begins a flow of each kind and plays it until it is established.
func (c *crowd) join() {
	c.w.Helper()
	for _, k := range kinds {
		c.port++
		talk := c.w.converse(k, 20000+c.port)
		talk.say("cS", "bSA", "cA")
		c.flows = append(c.flows, talk)
	}
}

// talk makes the flows go on, both ways, as the same flows as before.
func (c *crowd) talk(where string, flows []*conversation) {
	c.w.Helper()
	for _, talk := range flows {
		before := talk.outer
		talk.say("cA+", "bA+")
		if talk.outer != before {
			c.w.Fatalf("%s: the flow from port %d was %s to its backend, and now is %s", where, talk.port, before, talk.outer)
		}
	}
}

// talkBack is talk for flows that are not carried yet: the old program handles them.
func (c *crowd) talkBack(flows []*conversation) {
	c.w.Helper()
	before := c.w.reasons()
	c.talk("before they are carried", flows)
	if moved := c.w.moved(before); moved["carrying"] != uint64(2*len(flows)) || len(moved) != 1 {
		c.w.Errorf("%d packets of flows that are not carried yet were counted as %v, want carrying", 2*len(flows), moved)
	}
}

// open opens the data plane as a version and attaches, on a thread of its own.
func (w *world) open(v *abi.Version) error {
	w.Helper()
	if w.d != nil {
		must(w, w.d.Close())
		w.d = nil
	}
	options := w.options
	options.Version = v
	var err error
	w.newRunner(1).do(func() {
		defer func() {
			if fault := recover(); fault != nil {
				err = fault.(error)
			}
		}()
		if w.d, err = datapath.Open(options); err != nil {
			return
		}
		for _, arm := range []string{armA, armC} {
			if _, err = w.d.Attach(arm, model.AttachAuto); err != nil {
				return
			}
		}
	})
	if w.Failed() {
		w.FailNow() // the failure was on another thread
	}
	return err
}

// pins lists the instance's directory.
func (w *world) pins() (names []string) {
	w.Helper()
	dir := filepath.Join(w.options.PinRoot, "shunt", w.options.Instance)
	for _, pattern := range []string{"abi-*", "abi-*/sh_switch", "abi-*/gate-*"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		must(w, err)
		for _, path := range found {
			names = append(names, strings.TrimPrefix(path, dir+"/"))
		}
	}
	return names
}

func (w *world) requirePins(want ...string) {
	w.Helper()
	if got := w.pins(); !slices.Equal(got, want) {
		w.Errorf("pinned are %q, want %q", got, want)
	}
}

func (w *world) contents() reconcile.Contents {
	w.Helper()
	c, err := w.d.Contents()
	must(w, err)
	return c
}

func (w *world) requireContents(want reconcile.Contents) {
	w.Helper()
	if diff := cmp.Diff(want, w.contents(), cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		w.Errorf("services, backends, slots, generations or addresses have changed (-before +after):\n%s", diff)
	}
}

// TestUpgrade sends packets at every point of an upgrade to another ABI, through the interfaces'
// programs at that point. Flows that the second copy has not seen go through the old program
// between the switch and the end of the carrying.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := &crowd{w: w}
	c.join()
	closed := w.converse(kinds[0], 30000)
	closed.say("cS", "bSA", "cA", "cFA", "bFA", "cA")
	want, before := w.contents(), w.reasons()
	owner := w.options
	w.linked = true
	v := next.Version()
	late, seen := 0, []abi.Point{}
	v.At = func(p abi.Point) error {
		if !slices.Contains(seen, p) {
			seen = append(seen, p)
		}
		if p == abi.PointGate && late == 0 {
			late = len(c.flows)
		}
		if p == abi.PointSwitched {
			c.talk(string(p), c.flows[:late])
			c.talkBack(c.flows[late:])
			c.join() // new flows of the new ABI
			return nil
		}
		c.talk(string(p), c.flows)
		c.join()
		return nil
	}
	must(t, w.open(v))
	if !slices.Equal(seen, abi.Points) {
		t.Errorf("the upgrade passed %v, want %v", seen, abi.Points)
	}
	w.requirePins("abi-2")
	c.talk("afterwards, by the gates' programs", c.flows)
	w.linked = false
	c.talk("afterwards", c.flows)
	c.join()
	w.requireContents(want)
	moved := w.moved(before)
	delete(moved, "carrying")
	if len(moved) != 0 {
		t.Errorf("beside carrying, this was counted: %v", moved)
	}
	if created := w.created(); created != uint64(len(c.flows)+1) {
		t.Errorf("%d flows were counted over both ABIs, want %d", created, len(c.flows)+1)
	}
	if err := w.open(nil); err == nil || !strings.Contains(err.Error(), "has ABI 2, and this version of shunt has 1") ||
		!strings.Contains(err.Error(), "`shunt detach`") {
		t.Errorf("the version before was answered %v: it must be refused with both numbers and the way out", err)
	}
	if _, err := datapath.OpenReadOnly(owner); !errors.Is(err, upgrade.ErrOtherABI) {
		t.Errorf("the version before, looking, was answered %v", err)
	}
	w.requirePins("abi-2")
	w.linked = true
	c.talk("after the version before was refused", c.flows)
	w.linked = false
	must(t, w.open(next.Version()))
	c.talk("after a restart", c.flows)
}

// TestUpgradePorts: source ports that were claimed too late to be copied are not claimed again by
// the new programs, and a port that was handed on too late is not rewritten to its old flow.
func TestUpgradePorts(t *testing.T) {
	t.Parallel()
	const count = 8
	w := newWorld(t, withPorts(value.PortRange{First: 1024, Last: 1024 + count - 1}))
	c := &crowd{w: w}
	first := w.converse(kinds[0], 20000)
	first.say("cS", "bSA", "cA", "cA+", "bA+")
	heir := w.converse(kinds[0], 20001)
	w.linked = true
	v := next.Version()
	v.At = func(p abi.Point) error {
		switch p {
		case abi.PointGate:
			if len(c.flows) > 0 {
				return nil // the other interface's
			}
			for i := range count - 1 {
				talk := w.converse(kinds[0], 20002+uint16(i))
				talk.say("cS", "bSA", "cA")
				c.flows = append(c.flows, talk)
			}
			first.say("cFA", "bFA", "cA")
			heir.say("cS", "bSA", "cA") // only the closed flow's port is left
			if heir.outer != first.outer {
				t.Fatalf("the test needs port %s to be handed on, and %s was taken", first.outer, heir.outer)
			}
			c.flows = append(c.flows, heir)
		case abi.PointSwitched:
			c.talkBack(c.flows)
			before := w.reasons()
			if out, ok := w.try(armA, kinds[0].fromClient(20100, portNAT, "S")); ok {
				t.Errorf("all ports are claimed, yet one was claimed again: %s", out)
			}
			if moved := w.moved(before); moved["ports_exhausted"] != 1 {
				t.Errorf("a flow for which there is no port was counted as %v", moved)
			}
		}
		return nil
	}
	must(t, w.open(v))
	c.talk("afterwards", c.flows)
	w.linked = false
	c.talk("afterwards", c.flows)
	if n := len(w.pinnedKeys("sh_flows")); n != 2*count {
		t.Errorf("%d entries are in the new table, want %d: those of flows that have ended are gone", n, 2*count)
	}
}

// pinnedKeys are the keys of a map of the next version.
func (w *world) pinnedKeys(name string) (keys []string) {
	w.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, fmt.Sprintf("abi-%d", next.ABI), name), nil)
	must(w, err)
	defer m.Close()
	var key, value []byte
	all := m.Iterate()
	for all.Next(&key, &value) {
		keys = append(keys, string(key))
	}
	must(w, all.Err())
	return keys
}

var errKilled = errors.New("killed")

// TestUpgradeFails: after any failure at any point, the old data plane goes on, and is taken over
// as usual.
func TestUpgradeFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := &crowd{w: w}
	c.join()
	c.join()
	c.join()
	want, entries := w.contents(), 2*len(c.flows)
	errHere, switched := errors.New("a fault of the test"), false
	faults := map[string]func(v *abi.Version){}
	for _, p := range abi.Points {
		if p == abi.PointDone || p == abi.PointRemoved {
			continue // there is no way back
		}
		faults["at "+string(p)] = func(v *abi.Version) {
			v.At = func(at abi.Point) error {
				if at == p {
					return errHere
				}
				return nil
			}
		}
	}
	breaking := func(after int, fault func() error) func(v *abi.Version) {
		return func(v *abi.Version) {
			step, n := next.Step(), 0
			step.Maps["sh_flows"] = func(key, value []byte) ([]byte, []byte, error) {
				if n++; n > after {
					if err := fault(); err != nil {
						return nil, nil, err
					}
				}
				return next.ConvertFlow(key, value)
			}
			v.Steps = []abi.Step{step}
		}
	}
	fails := func() error { return errHere }
	panics := func() error { panic(errHere) }
	faults["the first conversion fails"] = breaking(0, fails)
	faults["a conversion fails half-way"] = breaking(10, fails)
	faults["a conversion panics half-way"] = breaking(10, panics)
	for name, fault := range map[string]func() error{"fails": fails, "panics": panics} {
		faults["a conversion after the switch "+name] = func(v *abi.Version) {
			breaking(2*entries+1, fault)(v) // two copies come before
			v.At = func(p abi.Point) error { switched = switched || p == abi.PointSwitched; return nil }
		}
	}
	faults["a value of a wrong size"] = func(v *abi.Version) {
		step := next.Step()
		step.Maps["sh_flows"] = func(key, value []byte) ([]byte, []byte, error) { return key, value, nil }
		v.Steps = []abi.Step{step}
	}
	for _, name := range slices.Sorted(maps.Keys(faults)) {
		v := next.Version()
		switched = false
		faults[name](v)
		w.linked = true
		err := w.open(v)
		if err == nil || !strings.Contains(err.Error(), "the data plane of ABI 1 goes on as it was") {
			t.Fatalf("%s: the upgrade was answered %v", name, err)
		}
		if strings.Contains(name, "after the switch") && !switched {
			t.Errorf("%s: it failed before", name)
		}
		w.requirePins("abi-1")
		c.talk("after "+name, c.flows)
	}
	must(t, w.open(nil))
	w.requireContents(want)
	c.talk("under the old version again", c.flows)
	w.linked = false
	w.soundTable()
	must(t, w.open(next.Version()))
	c.talk("after an upgrade that worked", c.flows)
}

// TestUpgradeKilled: a process that is killed leaves one of the two ABIs in charge, which goes on,
// and both versions continue correctly.
func TestUpgradeKilled(t *testing.T) {
	t.Parallel()
	for _, points := range [][]abi.Point{
		// the last is followed by the new version, all others by the old one
		{abi.PointMaps, abi.PointCopied, abi.PointGate, abi.PointSwitched},
		{abi.PointGate}, {abi.PointCarried}, {abi.PointDone}, {abi.PointRemoved},
	} {
		t.Run(fmt.Sprint(points), func(t *testing.T) {
			w := newWorld(t)
			c := &crowd{w: w}
			c.join()
			w.linked = true
			for _, p := range points[:len(points)-1] {
				w.killedAt(c, p)
				must(t, w.open(nil))
				w.requirePins("abi-1")
				c.talk("under the old version", c.flows)
			}
			p := points[len(points)-1]
			w.killedAt(c, p)
			if p != abi.PointGate {
				err := w.open(nil)
				if err == nil || !strings.Contains(err.Error(), "ABI 2") || !strings.Contains(err.Error(), "`shunt detach`") {
					t.Errorf("the old version was answered %v", err)
				}
			}
			must(t, w.open(next.Version()))
			w.requirePins("abi-2")
			c.talk("under the new version", c.flows)
			w.linked = false
			c.talk("under the new version's own programs", c.flows)
		})
	}
}

// TestUpgradeKilledAndDetached: `shunt detach` removes everything that a killed upgrade has left.
func TestUpgradeKilledAndDetached(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := &crowd{w: w}
	c.join()
	w.linked = true
	w.killedAt(c, abi.PointSwitched)
	must(t, attach.RemoveFrom(w.options))
	if _, err := os.Stat(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something is still pinned: %v", err)
	}
	w.cpu.do(func() {
		for _, arm := range []string{armA, armC} {
			dev, err := netlink.LinkByName(arm)
			if err != nil || dev.Attrs().Xdp != nil && dev.Attrs().Xdp.Attached {
				t.Errorf("%s still has a program, or is gone: %v", arm, err)
			}
		}
	})
}

// killedAt upgrades, and is killed at a point. Some flows begin so late that they are carried last.
func (w *world) killedAt(c *crowd, p abi.Point) {
	w.Helper()
	late := 0
	v := next.Version()
	v.At = func(at abi.Point) error {
		if at == abi.PointGate && late == 0 {
			late = len(c.flows)
			c.join()
		}
		if at == p {
			panic(errKilled)
		}
		return nil
	}
	if err := w.open(v); !errors.Is(err, errKilled) {
		w.Fatalf("the upgrade was answered %v", err)
	}
	if p == abi.PointSwitched {
		c.talk("while nobody is there", c.flows[:late])
		c.talkBack(c.flows[late:])
	} else {
		c.talk("while nobody is there", c.flows)
	}
	c.join()
}
