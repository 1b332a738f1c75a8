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

// deliverPrefix begins the names of pins of deliveries, as tcPrefix those of directions.
const deliverPrefix = "deliver-"

// deliveries are the programs at tc beside the one at XDP, where another interface of the instance is at tc:
// what comes in and goes out there is sent by sh_deliver (bpf/lb/mark.h), and what the host answers meets the
// balancer's stages.
var deliveries = [len(directions)]direction{
	{deliverPrefix, "in", "sh_deliver", false, filterHandle + 1},
	{deliverPrefix, "out", "sh_tc_out", true, filterHandle + 1},
}

// waysOf are the ways out that need sh_deliver for what the program of an interface sends. In generic mode the
// kernel sends out of any interface by itself (generic_xdp_tx in net/core/dev.c), and a mark would not be found:
// what tc sees there begins with the network header (docs/design/40-xdp-to-tc.md).
func (d *Plane) waysOf(a *attached) uint64 {
	if a.Mode != kernel.ModeNative {
		return 0
	}
	return d.tcWays | d.podWays
}

// ExpectPods has the programs know beforehand that interfaces which come later are veths of pods at tc, or know so no longer. Then such a
// one comes and goes without the programs on other interfaces being loaded anew. All indices that are free, or of such a veth, are
// kept for them; an interface that is another kind of way takes its index back when it is attached.
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
			if _, taken := d.IfindexAt(index); !taken || d.tcWays>>index&1 != 0 && d.leadsToPod(index) {
				kept |= 1 << index
			}
		}
	}
	return d.setWays(d.tcWays, kept)
}

// setWays has the programs at XDP know which indices are ways at tc, and which of these are kept for pods. What they cannot be told
// stays as it was.
func (d *Plane) setWays(tc, pods uint64) error {
	tcBefore, podsBefore := d.tcWays, d.podWays
	d.tcWays, d.podWays = tc, pods
	if tc|pods == tcBefore|podsBefore && pods == podsBefore {
		return nil
	}
	if err := d.renewAll((*attached).runsXDP); err != nil {
		d.tcWays, d.podWays = tcBefore, podsBefore
		return fmt.Errorf("have the programs at XDP know which interfaces are at tc: %w", err)
	}
	return nil
}

// tcWaysInUse are the interfaces that a predecessor has at tc.
func (d *Plane) tcWaysInUse() (ways uint64, err error) {
	names, err := pinnedSides(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		if index, ok := d.IndexOf(kernel.InterfaceIndex(name)); ok {
			ways |= 1 << index
		}
	}
	return ways, nil
}

// setTCWay has the programs at XDP know whether the interface of this index is at tc.
func (d *Plane) setTCWay(index uint32, is bool) error {
	tc, pods := d.tcWays&^(1<<index), d.podWays
	if is {
		tc |= 1 << index
	}
	if !is || !d.leadsToPod(index) {
		pods &^= 1 << index
	}
	return d.setWays(tc, pods)
}

// runsXDP is whether the interface is there, and has the program at XDP.
func (a *attached) runsXDP() bool {
	return a.isThere() && !a.Mode.AtTC()
}

// isThere is whether the interface has not gone.
func (a *attached) isThere() bool {
	_, err := netlink.LinkByIndex(a.ifindex)
	return err == nil
}

// endTCWay is setTCWay for an interface that is left. Programs that still take it for a way drop what they
// have for it, as they would otherwise.
func (d *Plane) endTCWay(index uint32) {
	if err := d.setWays(d.tcWays&^(1<<index), d.podWays); err != nil {
		d.log.Warn("programs at XDP go on sending to an interface that is detached", "error", err)
	}
}

// loadDeliveries loads what deliver will attach, so that the moment in which the program at XDP marks frames and
// nobody takes them is short.
func (d *Plane) loadDeliveries(a *attached) error {
	if err := a.closeDeliveries(); err != nil { // of a mode that was tried before
		return err
	}
	if d.waysOf(a) == 0 {
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

// deliver puts the deliveries beside the program at XDP, or new ones in their places; or takes them away
// where nothing needs them.
func (d *Plane) deliver(a *attached) error {
	if a.Mode.AtTC() {
		return nil
	}
	if d.waysOf(a) == 0 {
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

// tcPeers are those of the interfaces at tc that are veths whose other ends are in other network
// namespaces, as bpf_redirect_peer needs it.
func (d *Plane) tcPeers() uint64 {
	peers := d.podWays
	for index := range uint32(abi.INTERFACE_MAX) {
		if d.tcWays&^d.podWays>>index&1 != 0 && d.leadsToPod(index) {
			peers |= 1 << index
		}
	}
	return peers
}

// leadsToPod is whether an interface of ours is such a veth.
func (d *Plane) leadsToPod(index uint32) bool {
	ifindex, ok := d.IfindexAt(index)
	if !ok {
		return false
	}
	dev, err := netlink.LinkByIndex(ifindex)
	return err == nil && dev.Type() == "veth" && dev.Attrs().NetNsID >= 0
}

// removeDeliveries takes off what the pins say is beside programs at XDP.
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
