package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/vishvananda/netlink"
)

// indexOf is the position of an interface in sh_interfaces.
func (d *Datapath) indexOf(ifindex int) (uint32, bool) {
	var index uint32
	err := d.maps[abi.MapIfindexes].Lookup(uint32(ifindex), &index)
	return index, err == nil
}

// RefreshInterface writes an interface's hardware address, addresses and MTU again, after
// they have changed.
func (d *Datapath) RefreshInterface(iface string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return fmt.Errorf("read the addresses of interface %s: %w", iface, err)
	}
	if _, ok := d.indexOf(dev.Attrs().Index); !ok {
		return fmt.Errorf("read the addresses of interface %s: shunt is not attached to it", iface)
	}
	var tagged *vlan
	if a := d.attached[iface]; a != nil {
		tagged = a.vlan
	}
	_, err = d.writeInterface(dev, tagged)
	return err
}

// writeInterface fills an interface's records: the place it had, or else a free one. A VLAN's frames
// leave by its parent.
func (d *Datapath) writeInterface(dev netlink.Link, tagged *vlan) (uint32, error) {
	attrs := dev.Attrs()
	index, err := d.findIndex(attrs.Index)
	if err != nil {
		return 0, fmt.Errorf("attach to interface %s: %w", attrs.Name, err)
	}
	record := abi.Interface{Ifindex: uint32(attrs.Index), Mtu: uint32(attrs.MTU)}
	copy(record.Mac[:], attrs.HardwareAddr)
	if err := d.sendingAddresses(attrs.Index, &record); err != nil {
		return 0, fmt.Errorf("read the addresses of interface %s: %w", attrs.Name, err)
	}
	ifindex := uint32(attrs.Index)
	port := ifindex
	if tagged != nil {
		port = tagged.key.Parent
	}
	if d.writtenAlready(index, record, port) {
		return index, nil
	}
	if err := d.maps[abi.MapInterfaces].Put(index, record); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapInterfaces, err)
	}
	if err := d.maps[abi.MapTxPorts].Put(index, port); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapTxPorts, err)
	}
	if err := d.maps[abi.MapIfindexes].Put(ifindex, index); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapIfindexes, err)
	}
	return index, nil
}

// writtenAlready says whether all three maps have the interface as it is. It is looked at every
// second, and writing to a device map makes a new entry each time.
func (d *Datapath) writtenAlready(index uint32, record abi.Interface, egress uint32) bool {
	var have abi.Interface
	var port uint32
	err := errors.Join(d.maps[abi.MapInterfaces].Lookup(index, &have), d.maps[abi.MapTxPorts].Lookup(index, &port))
	at, known := d.indexOf(int(record.Ifindex))
	return err == nil && have == record && port == egress && known && at == index
}

// findIndex is the index whose record has this ifindex; else a free one; else that of an
// interface that is gone.
func (d *Datapath) findIndex(ifindex int) (uint32, error) {
	free, gone := -1, -1
	var goneIfindex int
	for index := range uint32(abi.INTERFACE_MAX) {
		var record abi.Interface
		if err := d.maps[abi.MapInterfaces].Lookup(index, &record); err != nil {
			return 0, fmt.Errorf("read element %d of %s: %w", index, abi.MapInterfaces, err)
		}
		switch {
		case int(record.Ifindex) == ifindex:
			return index, nil
		case record.Ifindex == 0 && free < 0:
			free = int(index)
		case record.Ifindex != 0 && gone < 0:
			var port uint32 // the kernel empties the place when the interface goes
			if err := d.maps[abi.MapTxPorts].Lookup(index, &port); errors.Is(err, ebpf.ErrKeyNotExist) {
				gone, goneIfindex = int(index), int(record.Ifindex)
			}
		}
	}
	if free >= 0 {
		return uint32(free), nil
	}
	if gone < 0 {
		return 0, fmt.Errorf("the balancer is attached to %d interfaces, which is as many as it can be", abi.INTERFACE_MAX)
	}
	return uint32(gone), d.clearInterface(uint32(gone), goneIfindex)
}

// clearInterface empties an interface's records.
func (d *Datapath) clearInterface(index uint32, ifindex int) error {
	err := d.remove(abi.MapIfindexes, uint32(ifindex), "an interface")
	return errors.Join(err, d.clearVLAN(index), d.clearDecap(index), d.remove(abi.MapTxPorts, index, "an interface"),
		d.maps[abi.MapInterfaces].Put(index, abi.Interface{}))
}
