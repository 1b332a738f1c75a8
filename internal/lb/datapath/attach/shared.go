package attach

import (
	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Interfaces of pods share one copy of each program at tc, which is loaded before the first pod comes. Each interface has an index of its
// own, and the program finds the index by the interface of the packet (bpf/lb/own.h).

// loadShared loads the programs that pods share, unless they are loaded.
func (d *Plane) loadShared() error {
	if d.shared[0] != nil {
		return nil
	}
	all := &attached{Attachment: kernel.Attachment{Mode: kernel.ModeTCX}, index: uint32(abi.INTERFACE_ANY)}
	if err := d.loadTC(all); err != nil {
		return err
	}
	d.shared = all.programs
	return nil
}

// closeShared closes them. Where they are attached, they continue.
func (d *Plane) closeShared() error { return closeAll(d.shared[:]) }

// programOf returns the program of a direction at an interface at tc.
func (d *Plane) programOf(a *attached, i int) *ebpf.Program {
	if a.isPod {
		return d.shared[i]
	}
	return a.programs[i]
}

// record writes an interface's records, and returns its index. An interface that is not at tc gives up an index that is reserved for
// pods: the programs at XDP take all interfaces with such an index for interfaces at tc.
func (d *Plane) record(dev netlink.Link, tagged *vlan, mode model.Attach, isPod bool) (uint32, error) {
	if isPod {
		return d.PutPod(dev)
	}
	ifindex := dev.Attrs().Index
	if index, has := d.IndexOf(ifindex); has && mode != model.AttachTC && store.IsPods(index) {
		d.clearAtTC(index)
		if err := d.ClearInterface(index, ifindex); err != nil {
			return 0, err
		}
	}
	return d.PutInterface(dev, tagged.port(dev))
}
