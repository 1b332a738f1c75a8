package attach

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// decapReasons is the map with the counters of sh_decap (bpf/lb/decap/tunnel.h).
const decapReasons = "sh_dc_reasons"

// Decapsulate makes an interface's program pass packets that may belong to a tunnel to a program of another
// package, by a tail call; it replaces an earlier such program in one step. load loads that program onto the
// given maps: the chain of the interface, the counters of reasons, and the programs for packets out of tunnels. With tunnelled, such a
// program is at the given index when load is called. The caller of Decapsulate keeps ownership of the loaded program.
func (d *Plane) Decapsulate(iface string, tunnelled bool, load func(shared map[string]*ebpf.Map, index uint32) (*ebpf.Program, error)) error {
	d.mu.Lock()
	a := d.attached[iface]
	d.mu.Unlock()
	switch {
	case a == nil:
		return fmt.Errorf("decapsulate on interface %s: shunt is not attached to it", iface)
	case a.Mode.AtTC():
		return fmt.Errorf("decapsulate on interface %s: it has attach: tc, and decapsulation is at XDP; use attach: native, generic or auto", iface)
	case a.vlan != nil:
		return fmt.Errorf("decapsulate on interface %s: its frames come in by %s in native mode, which is not supported; use attach: generic for it", iface, a.vlan.parent.Interface)
	}
	path := chainPath(d.opts.PinRoot, d.opts.Instance, iface)
	chain, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return fmt.Errorf("decapsulate on interface %s: open the chain pinned at %s: %w", iface, path, err)
	}
	defer chain.Close()
	if tunnelled {
		if err := d.beginTunnelled(iface); err != nil {
			return err
		}
	}
	program, err := load(map[string]*ebpf.Map{chainMap: chain, kernel.GuestMap: a.guests.Array(), decapReasons: d.Reasons(), abi.MapTunnelProgs: d.TunnelPrograms()}, a.index)
	if err != nil {
		return err
	}
	if err := d.PutDecap(a.index, program); err != nil {
		return fmt.Errorf("put the program that decapsulates for interface %s into %s: %w", iface, abi.MapDecapProgs, err)
	}
	if !tunnelled {
		if err := d.endTunnelled(iface); err != nil {
			return err
		}
	}
	return d.require(abi.FEATURE_DECAP)
}

// beginTunnelled gives an interface its program for packets out of tunnels, and has it follow the interface's other program from then on.
func (d *Plane) beginTunnelled(iface string) error {
	if err := d.require(abi.FEATURE_TUNNELLED); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.attached[iface]
	if a == nil {
		return fmt.Errorf("decapsulate on interface %s: it has just been detached", iface)
	}
	unlock, err := kernel.Lock(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return err
	}
	defer unlock()
	if err := d.loadTunnelled(a); err != nil {
		return err
	}
	a.tunnelled = true
	return nil
}

// loadTunnelled loads the program for packets that come out of an interface's tunnels, and puts it in the place of an earlier one. The
// map keeps it.
func (d *Plane) loadTunnelled(a *attached) error {
	path := chainPath(d.opts.PinRoot, d.opts.Instance, a.Interface)
	chain, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return fmt.Errorf("open the chain of interface %s pinned at %s: %w", a.Interface, path, err)
	}
	defer chain.Close()
	coll, err := d.LoadOnto(map[string]*ebpf.Map{chainMap: chain}, d.opts.Version.Loader(abi.ObjectTunnelled), d.constants(a))
	if err != nil {
		return fmt.Errorf("load the program for packets out of tunnels of interface %s: %w", a.Interface, err)
	}
	defer coll.Close()
	if err := d.PutTunnelled(a.index, coll.Programs[abi.ProgramTunnelled]); err != nil {
		return fmt.Errorf("put the program for packets out of tunnels of interface %s into %s: %w", a.Interface, abi.MapTunnelProgs, err)
	}
	return nil
}

// endTunnelled takes the program of loadTunnelled away. Nothing may call it any more.
func (d *Plane) endTunnelled(iface string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if a := d.attached[iface]; a != nil {
		a.tunnelled = false
		return d.ClearTunnelled(a.index)
	}
	return nil
}

// StopDecapsulating undoes Decapsulate. It succeeds if there is nothing to undo.
func (d *Plane) StopDecapsulating(iface string) error {
	d.mu.Lock()
	a := d.attached[iface]
	d.mu.Unlock()
	if a == nil {
		return nil // its records went with it
	}
	if err := d.ClearDecap(a.index); err != nil {
		return err
	}
	return d.endTunnelled(iface)
}

// Decapsulates reports whether a balancer, whose daemon need not run, passes tunnels' packets of an interface
// to a program that decapsulates them. The interface is in the calling thread's network namespace.
func Decapsulates(iface string) (bool, error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return false, fmt.Errorf("look for a program on interface %s: %w", iface, err)
	}
	xdp := dev.Attrs().Xdp
	if xdp == nil || !xdp.Attached {
		return false, nil
	}
	instances, err := Instances()
	if err != nil {
		return false, err
	}
	for _, instance := range instances {
		l, err := link.LoadPinnedLink(linkPath(kernel.DefaultPinRoot, instance, iface), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("open the link of instance %q on interface %s: %w", instance, iface, err)
		}
		info, err := l.Info()
		_ = l.Close()
		// Other namespaces have interfaces of this name and index, but no program with this id.
		if err != nil || uint32(info.Program) != xdp.ProgId {
			continue
		}
		return store.PinnedDecap(kernel.MapDirectory(kernel.DefaultPinRoot, instance, abi.Built().ABI), uint32(dev.Attrs().Index))
	}
	return false, nil
}
