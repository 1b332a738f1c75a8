package attach

import (
	"errors"
	"fmt"
	"slices"

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

// delivers reports whether the program of an interface marks packets for sh_deliver, which sends them out of interfaces at tc. In
// generic mode the kernel sends through any interface by itself (generic_xdp_tx in net/core/dev.c). The mark
// would not be found there, because a frame at tc begins with the network header (docs/design/40-xdp-to-tc.md).
func (d *Plane) delivers(a *attached) bool {
	return a.Mode == kernel.ModeNative && d.atTC.any()
}

// tcInterfaces are the interfaces at tc. XDP cannot send out of them.
type tcInterfaces struct {
	at       [abi.INDEX_MAX / wordBits]uint64 // bit index%64 of word index/64
	expected bool                             // pods come and go (ExpectPods)
}

const wordBits = 64

// The first word has the interfaces that are not pods' (bpf/lb/config.h), and the other words have those of pods.
var _ = [1]struct{}{}[abi.INTERFACE_MAX-wordBits]

func (s *tcInterfaces) named() uint64 { return s.at[0] }

func (s *tcInterfaces) any() bool { return s.named() != 0 || s.leadIntoPods() }

// leadIntoPods reports whether interfaces of pods are at tc, or will be. The programs at XDP need not know which ones.
func (s *tcInterfaces) leadIntoPods() bool {
	return s.expected || slices.ContainsFunc(s.at[1:], func(word uint64) bool { return word != 0 })
}

// with returns a copy in which the interface of this index is at tc, or is not.
func (s tcInterfaces) with(index uint32, is bool) tcInterfaces {
	word, bit := &s.at[index/wordBits], uint64(1)<<(index%wordBits)
	if *word &^= bit; is {
		*word |= bit
	}
	return s
}

// ExpectPods tells the programs beforehand that interfaces of pods come (AttachPod), or that they do not. Then a pod's interface comes and
// goes while the programs on other interfaces stay, and finds its own programs loaded.
func (d *Plane) ExpectPods(are bool) error {
	if are {
		if err := d.require(featuresAt(model.AttachTC, false)); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	next := d.atTC
	next.expected = are
	if err := d.setTCInterfaces(next); err != nil {
		return err
	}
	if are {
		return d.loadShared()
	}
	if !next.leadIntoPods() {
		return d.closeShared()
	}
	return nil
}

// setTCInterfaces tells the programs at XDP which interfaces are at tc. If it fails, all stays as it was.
func (d *Plane) setTCInterfaces(next tcInterfaces) error {
	before := d.atTC
	d.atTC = next
	if next.named() == before.named() && next.leadIntoPods() == before.leadIntoPods() {
		return nil
	}
	if err := d.renewThese(func(a *attached) bool { return !a.Mode.AtTC() }); err != nil {
		d.atTC = before
		return fmt.Errorf("write the interfaces at tc for the programs at XDP: %w", err)
	}
	return nil
}

// interfacesAtTC returns the interfaces that a predecessor has at tc.
func (d *Plane) interfacesAtTC() (at tcInterfaces, err error) {
	names, err := pinnedSides(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return at, err
	}
	for _, name := range names {
		if index, ok := d.IndexOf(kernel.InterfaceIndex(name)); ok {
			at = at.with(index, true)
		}
	}
	return at, nil
}

// setAtTC tells the programs at XDP whether the interface of this index is at tc.
func (d *Plane) setAtTC(index uint32, is bool) error {
	return d.setTCInterfaces(d.atTC.with(index, is))
}

// isThere reports whether the interface still exists, as far as netlink can tell.
func (a *attached) isThere() bool {
	_, err := netlink.LinkByIndex(a.ifindex)
	return !errors.As(err, new(netlink.LinkNotFoundError))
}

// clearAtTC does the same as setAtTC for an interface that is detached. Programs that still send to it drop
// these packets, as they would otherwise.
func (d *Plane) clearAtTC(index uint32) {
	if err := d.setAtTC(index, false); err != nil {
		d.log.Warn("programs at XDP go on sending to an interface that is detached", "error", err)
	}
}

// loadDeliveries loads the programs that deliver will attach, to shorten the moment in which the program at XDP
// marks frames and no program takes them.
func (d *Plane) loadDeliveries(a *attached) error {
	if err := a.closeDeliveries(); err != nil { // of a mode that was tried before
		return err
	}
	if !d.delivers(a) {
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
	if !d.delivers(a) {
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

func (a *attached) closeDeliveries() error { return closeAll(a.deliveries[:]) }

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

// tcPeers returns the interfaces at tc that are not pods', but are veths whose other ends are in other network namespaces, as
// bpf_redirect_peer needs.
func (d *Plane) tcPeers() (peers uint64) {
	for index := range uint32(abi.INTERFACE_MAX) {
		if d.atTC.named()>>index&1 != 0 && d.leadsToPod(index) {
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
