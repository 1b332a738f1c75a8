package attach

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// gatePrefix begins the names of the pins of sh_gates, one for each interface.
const gatePrefix = "gate-"

// Gate is a program on an interface, in front of a program of another ABI and one of this version. It runs one
// of them, as sh_switch says (bpf/lb/gate.bpf.c).
type Gate struct {
	attached
	pin     *ebpf.Map
	before  string        // where the program before it in the chain is pinned
	program *ebpf.Program // sh_gate; the program of attached is the new sh_xdp
}

// RequireGates refuses an upgrade if a program would continue without a gate, with the old flow table: at tc,
// and for VLANs at their parent.
func RequireGates(opts store.Options, from uint32) error {
	there, err := pinnedSides(opts.PinRoot, opts.Instance)
	if err != nil {
		return err
	}
	if len(there) > 0 {
		return noGate(opts, from, there, "at tc", "another `attach` than tc")
	}
	vlans, err := store.PinnedVLANs(opts, from)
	if err != nil || len(vlans) == 0 {
		return err
	}
	for _, t := range vlans {
		there = append(there, kernel.InterfaceName(t.Ifindex))
	}
	slices.Sort(there)
	return noGate(opts, from, there, "in native mode at their parents", "`attach: generic`")
}

func noGate(opts store.Options, from uint32, there []string, where, other string) error {
	return fmt.Errorf("upgrade the data plane of instance %q from ABI %d to ABI %d: its programs on %s are %s, where an upgrade is not supported yet; nothing was changed. Start the version that made it, with %s for these interfaces, and then start this version; or run `shunt detach` first (this ends connections)",
		opts.Instance, from, opts.Version.ABI, strings.Join(there, ", "), where, other)
}

// Gates loads this version's programs, and a gate for each interface that runs a program of another ABI. lever
// is sh_switch, and oldFlows the other ABI's flow table; nil if both ABIs have the same table. The gates are
// pinned in dir. With an error Gates also returns the gates that were made. The caller closes them.
func (d *Plane) Gates(lever, oldFlows *ebpf.Map, dir string) (gates []*Gate, err error) {
	found, err := pinnedLinks(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return nil, err
	}
	d.features |= abi.FEATURE_CARRY
	defer func() { d.features &^= abi.FEATURE_CARRY }()
	for _, iface := range slices.Sorted(maps.Keys(found)) {
		g := &Gate{attached: attached{Attachment: kernel.Attachment{Interface: iface}}, before: PositionBefore.path(d.opts.PinRoot, d.opts.Instance, iface)}
		ok, err := d.fillGate(g, lever, oldFlows, filepath.Join(dir, gatePrefix+kernel.ToPin(iface)))
		if !ok {
			g.Close()
		}
		if err != nil {
			return gates, fmt.Errorf("prepare interface %s: %w", iface, err)
		}
		if ok {
			gates = append(gates, g)
		}
	}
	return gates, nil
}

// fillGate returns false if the gate's interface has gone, and with it the program that ran there.
func (d *Plane) fillGate(g *Gate, lever, oldFlows *ebpf.Map, path string) (bool, error) {
	var err error
	if g.link, err = link.LoadPinnedLink(linkPath(d.opts.PinRoot, d.opts.Instance, g.Interface), nil); err != nil {
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
		return false, fmt.Errorf("find it in this network namespace: %w; start shunt in the network namespace of the interface, or remove the program with `shunt detach` first", err)
	}
	g.ifindex, g.Mode, g.redirectBack = dev.Attrs().Index, kernel.ModeOf(dev), redirectsBack(dev)
	index, ok := d.IndexOf(g.ifindex)
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
	spec, err := d.opts.Version.Spec(abi.ObjectGate)
	if err != nil {
		return false, err
	}
	if g.pin, err = kernel.MakeMap(spec.Maps[abi.MapGates], path); err != nil {
		return false, err
	}
	if err := g.pin.Put(uint32(abi.GATE_OLD), before); err != nil {
		return false, fmt.Errorf("put the old program behind its gate: %w", err)
	}
	if err := d.loadCarrying(g, lever, oldFlows); err != nil {
		return false, err
	}
	if err := d.loadGate(g, lever); err != nil {
		return false, err
	}
	return true, nil
}

// loadCarrying loads the interface's new program, with a view of the old flow table and a reference to the old
// program.
func (d *Plane) loadCarrying(g *Gate, lever, oldFlows *ebpf.Map) error {
	const name = "sh_flows_old"
	more := map[string]*ebpf.Map{abi.MapSwitch: lever, abi.MapGates: g.pin}
	if oldFlows == nil {
		return d.loadProgram(&g.attached, more) // both ABIs have one flow table: nothing is due
	}
	more[name] = oldFlows
	return d.loadProgramWith(&g.attached, more, func(spec *ebpf.CollectionSpec) {
		m := spec.Maps[name]
		m.ValueSize, m.MaxEntries = oldFlows.ValueSize(), oldFlows.MaxEntries()
		m.Value = nil // BTF of the new one
	})
}

// loadGate loads the gate, before both programs.
func (d *Plane) loadGate(g *Gate, lever *ebpf.Map) error {
	if err := g.pin.Put(uint32(abi.GATE_NEW), g.programs[0]); err != nil {
		return fmt.Errorf("put the new program behind its gate: %w", err)
	}
	coll, err := d.LoadOnto(map[string]*ebpf.Map{abi.MapGates: g.pin, abi.MapSwitch: lever}, d.opts.Version.Loader(abi.ObjectGate), nil)
	if err != nil {
		return fmt.Errorf("load its gate: %w", err)
	}
	defer coll.Close()
	g.program, err = kernel.TakeProgram(coll, "sh_gate")
	return err
}

// Install replaces the old program by the gate, which then runs the old program.
func (g *Gate) Install() error {
	if err := putNext(g.chain, g.program, g.Interface); err != nil {
		return err
	}
	if err := runFirst(g.chain, g.program, g.before, g.link.Update); err != nil {
		return fmt.Errorf("put a gate on interface %s: %w", g.Interface, err)
	}
	return nil
}

// Close closes the gate. A gate that is installed continues to run.
func (g *Gate) Close() {
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

// PassGates replaces each gate that is pinned in dir by the program behind it, of the old or the new ABI.
func PassGates(opts store.Options, dir string, which abi.Gate) error {
	gates, err := filepath.Glob(filepath.Join(dir, gatePrefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range gates {
		iface := kernel.FromPin(strings.TrimPrefix(filepath.Base(path), gatePrefix))
		if err := passGate(opts, iface, path, which); err != nil {
			return fmt.Errorf("replace the gate of interface %s by its program: %w", iface, err)
		}
	}
	return nil
}

func passGate(opts store.Options, iface, path string, which abi.Gate) error {
	gates, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return err
	}
	defer gates.Close()
	var program *ebpf.Program
	if err := gates.Lookup(uint32(which), &program); errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil // killed before it was filled, and so before it was used
	} else if err != nil {
		return err
	}
	defer program.Close()
	return runOwn(opts.PinRoot, opts.Instance, iface, program)
}

// RemoveGates removes the pins of the gates in dir.
func RemoveGates(dir string) error {
	gates, err := filepath.Glob(filepath.Join(dir, gatePrefix+"*"))
	for _, path := range gates {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// runOwn makes the pinned link of an interface run the programs of its chain, with program as shunt's, and then
// puts program into the chain. An interface that was detached stays detached.
func runOwn(root, instance, iface string, program *ebpf.Program) error {
	l, err := link.LoadPinnedLink(linkPath(root, instance, iface), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer l.Close()
	chain, err := ebpf.LoadPinnedMap(chainPath(root, instance, iface), nil)
	if err != nil {
		return err
	}
	defer chain.Close()
	if err := runFirst(chain, program, PositionBefore.path(root, instance, iface), l.Update); err != nil && !errors.Is(err, unix.ENOLINK) { // the interface has gone
		return err
	}
	return putNext(chain, program, iface)
}
