package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// deliverPrefix begins the names of pins of deliveries, like tcPrefix for directions.
const deliverPrefix = "deliver-"

// deliveries are the programs at tc beside the program at XDP, if another interface of the instance is at tc:
// sh_deliver (bpf/lb/mark.h) sends the packets that come in and leave there, and the host's answers pass the
// balancer's stages.
var deliveries = [len(directions)]direction{
	{deliverPrefix, "in", "sh_deliver", false, filterHandle + 1},
	{deliverPrefix, "out", "sh_tc_out", true, filterHandle + 1},
}

// deliveredTo returns the outgoing interfaces that need sh_deliver for packets from the program of an interface. In
// generic mode the kernel sends through any interface by itself (generic_xdp_tx in net/core/dev.c), and a mark
// would not be found: a frame at tc begins with the network header there (docs/design/40-xdp-to-tc.md).
func (d *Plane) deliveredTo(a *attached) uint64 {
	if a.Mode != kernel.ModeNative {
		return 0
	}
	return d.tcInterfaces | d.podInterfaces
}

// ExpectPods tells the programs beforehand that interfaces which come later are veths of pods at tc, or that they are not. Then such a
// veth comes and goes while the programs on other interfaces stay. All indices that are free, or of such a veth, are
// kept for pods; an interface of another kind takes its index back when it is attached.
func (d *Plane) ExpectPods(are bool) error {
	if are {
		if err := d.require(featuresAt(model.AttachTC, false)); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var kept uint64
	if are {
		for index := range uint32(abi.INTERFACE_MAX) {
			if _, taken := d.IfindexAt(index); !taken || d.tcInterfaces>>index&1 != 0 && d.leadsToPod(index) {
				kept |= 1 << index
			}
		}
	}
	return d.setInterfaces(d.tcInterfaces, kept)
}

// setInterfaces tells the programs at XDP which indices are interfaces at tc, and which of these are kept for pods. If it fails, both
// stay as they were.
func (d *Plane) setInterfaces(tc, pods uint64) error {
	tcBefore, podsBefore := d.tcInterfaces, d.podInterfaces
	d.tcInterfaces, d.podInterfaces = tc, pods
	if tc|pods == tcBefore|podsBefore && pods == podsBefore {
		return nil
	}
	if err := d.renewAll((*attached).runsXDP); err != nil {
		d.tcInterfaces, d.podInterfaces = tcBefore, podsBefore
		return fmt.Errorf("tell the programs at XDP which interfaces are at tc: %w", err)
	}
	return nil
}

// interfacesAtTC returns the interfaces that a predecessor has at tc.
func (d *Plane) interfacesAtTC() (at uint64, err error) {
	names, err := pinnedSides(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		if index, ok := d.IndexOf(kernel.InterfaceIndex(name)); ok {
			at |= 1 << index
		}
	}
	return at, nil
}

// setAtTC tells the programs at XDP whether the interface of this index is at tc.
func (d *Plane) setAtTC(index uint32, is bool) error {
	tc, pods := d.tcInterfaces&^(1<<index), d.podInterfaces
	if is {
		tc |= 1 << index
	}
	if !is || !d.leadsToPod(index) {
		pods &^= 1 << index
	}
	return d.setInterfaces(tc, pods)
}

// runsXDP reports whether the interface exists, and has the program at XDP.
func (a *attached) runsXDP() bool {
	return a.isThere() && !a.Mode.AtTC()
}

// isThere is whether the interface has not gone.
func (a *attached) isThere() bool {
	_, err := netlink.LinkByIndex(a.ifindex)
	return err == nil
}

// clearAtTC does the same as setAtTC for an interface that is detached. Programs that still send to it drop
// these packets, as they would otherwise.
func (d *Plane) clearAtTC(index uint32) {
	if err := d.setInterfaces(d.tcInterfaces&^(1<<index), d.podInterfaces); err != nil {
		d.log.Warn("programs at XDP go on sending to an interface that is detached", "error", err)
	}
}

// loadDeliveries loads the programs that deliver will attach, to shorten the moment in which the program at XDP
// marks frames and no program takes them.
func (d *Plane) loadDeliveries(a *attached) error {
	if err := a.closeDeliveries(); err != nil { // of a mode that was tried before
		return err
	}
	if d.deliveredTo(a) == 0 {
		return nil
	}
	for i, at := range deliveries {
		if i == 0 && a.vlan != nil { // its frames come in by its parent
			continue
		}
		var err error
		if a.deliveries[i], err = d.loadDelivery(a, at); err != nil {
			return errors.Join(err, a.closeDeliveries())
		}
	}
	return nil
}

// deliver attaches the deliveries beside the program at XDP, or replaces them; or removes them if nothing needs
// them.
func (d *Plane) deliver(a *attached) error {
	if a.Mode.AtTC() {
		return nil
	}
	if d.deliveredTo(a) == 0 {
		return dropSides(d.opts.PinRoot, d.opts.Instance, a.Interface, a.ifindex, deliveries)
	}
	for i, p := range a.deliveries {
		if p == nil {
			continue
		}
		s, _, err := d.putSide(a, deliveries[i], p)
		if s != nil {
			err = errors.Join(err, s.Close())
		}
		if err != nil {
			return errors.Join(err, a.closeDeliveries())
		}
	}
	return a.closeDeliveries()
}

func (a *attached) closeDeliveries() error {
	var errs []error
	for i, p := range a.deliveries {
		if p != nil {
			errs = append(errs, p.Close())
			a.deliveries[i] = nil
		}
	}
	return errors.Join(errs...)
}

func (d *Plane) loadDelivery(a *attached, at direction) (*ebpf.Program, error) {
	if at.outbound {
		return d.loadStages(a, at)
	}
	constants := d.constants(a)
	constants["tc_peers"] = d.tcPeers()
	coll, err := d.LoadOnto(nil, d.opts.Version.Loader(abi.ObjectDeliver), constants)
	if err != nil {
		return nil, fmt.Errorf("load %s for interface %s: %w", at.program, a.Interface, err)
	}
	defer coll.Close()
	return kernel.TakeProgram(coll, abi.ProgramDeliver)
}

// tcPeers returns the interfaces at tc that are veths whose other ends are in other network namespaces, as
// bpf_redirect_peer needs.
func (d *Plane) tcPeers() uint64 {
	peers := d.podInterfaces
	for index := range uint32(abi.INTERFACE_MAX) {
		if d.tcInterfaces&^d.podInterfaces>>index&1 != 0 && d.leadsToPod(index) {
			peers |= 1 << index
		}
	}
	return peers
}

// leadsToPod reports whether an interface of ours is such a veth.
func (d *Plane) leadsToPod(index uint32) bool {
	ifindex, ok := d.IfindexAt(index)
	if !ok {
		return false
	}
	dev, err := netlink.LinkByIndex(ifindex)
	return err == nil && kernel.LeadsAway(dev)
}

// removeDeliveries detaches the programs beside programs at XDP that the pins name.
func removeDeliveries(opts store.Options) error {
	var errs []error
	for _, at := range deliveries {
		names, err := pinnedAt(opts.PinRoot, opts.Instance, at)
		errs = append(errs, err)
		for _, name := range names {
			if err := removeSides(opts, name, deliveries); err != nil {
				errs = append(errs, fmt.Errorf("detach from interface %s at tc: %w; the maps are kept while it runs", name, err))
			}
		}
	}
	return errors.Join(errs...)
}
