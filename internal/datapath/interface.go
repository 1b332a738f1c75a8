package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// slotOf is the position of an interface in sh_interfaces.
func (d *Datapath) slotOf(ifindex int) (uint32, bool) {
	var slot uint32
	err := d.maps[abiMapShIfindexes].Lookup(uint32(ifindex), &slot)
	return slot, err == nil
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
	if _, ok := d.slotOf(dev.Attrs().Index); !ok {
		return fmt.Errorf("read the addresses of interface %s: shunt is not attached to it", iface)
	}
	_, err = d.writeInterface(dev)
	return err
}

// writeInterface fills an interface's records: the place it had, or else a free one.
func (d *Datapath) writeInterface(dev netlink.Link) (uint32, error) {
	attrs := dev.Attrs()
	slot, err := d.findSlot(attrs.Index)
	if err != nil {
		return 0, fmt.Errorf("attach to interface %s: %w", attrs.Name, err)
	}
	record := abiInterface{Ifindex: uint32(attrs.Index), Mtu: uint32(attrs.MTU)}
	copy(record.Mac[:], attrs.HardwareAddr)
	if err := primaryAddresses(dev, &record); err != nil {
		return 0, fmt.Errorf("read the addresses of interface %s: %w", attrs.Name, err)
	}
	ifindex := uint32(attrs.Index)
	if d.writtenAlready(slot, record) {
		return slot, nil
	}
	if err := d.maps[abiMapShInterfaces].Put(slot, record); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abiMapShInterfaces, err)
	}
	if err := d.maps[abiMapShTxPorts].Put(slot, ifindex); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abiMapShTxPorts, err)
	}
	if err := d.maps[abiMapShIfindexes].Put(ifindex, slot); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abiMapShIfindexes, err)
	}
	return slot, nil
}

// writtenAlready says whether all three maps have the interface as it is. It is looked at every
// second, and writing to a device map makes a new entry each time.
func (d *Datapath) writtenAlready(slot uint32, record abiInterface) bool {
	var have abiInterface
	var port uint32
	err := errors.Join(d.maps[abiMapShInterfaces].Lookup(slot, &have), d.maps[abiMapShTxPorts].Lookup(slot, &port))
	at, known := d.slotOf(int(record.Ifindex))
	return err == nil && have == record && port == record.Ifindex && known && at == slot
}

// findSlot is the slot whose record has this ifindex; else a free one; else that of an
// interface that is gone.
func (d *Datapath) findSlot(ifindex int) (uint32, error) {
	free, gone := -1, -1
	var goneIfindex int
	for slot := range uint32(abiConstantINTERFACE_MAX) {
		var record abiInterface
		if err := d.maps[abiMapShInterfaces].Lookup(slot, &record); err != nil {
			return 0, fmt.Errorf("read element %d of %s: %w", slot, abiMapShInterfaces, err)
		}
		switch {
		case int(record.Ifindex) == ifindex:
			return slot, nil
		case record.Ifindex == 0 && free < 0:
			free = int(slot)
		case record.Ifindex != 0 && gone < 0:
			var port uint32 // the kernel empties the place when the interface goes
			if err := d.maps[abiMapShTxPorts].Lookup(slot, &port); errors.Is(err, ebpf.ErrKeyNotExist) {
				gone, goneIfindex = int(slot), int(record.Ifindex)
			}
		}
	}
	if free >= 0 {
		return uint32(free), nil
	}
	if gone < 0 {
		return 0, fmt.Errorf("shunt is attached to %d interfaces, which is as many as it can be", abiConstantINTERFACE_MAX)
	}
	return uint32(gone), d.clearInterface(uint32(gone), goneIfindex)
}

// clearInterface empties an interface's records.
func (d *Datapath) clearInterface(slot uint32, ifindex int) error {
	err := d.remove(abiMapShIfindexes, uint32(ifindex), "an interface")
	return errors.Join(err, d.remove(abiMapShTxPorts, slot, "an interface"),
		d.maps[abiMapShInterfaces].Put(slot, abiInterface{}))
}

// primaryAddresses finds what ICMP errors are sent from: the first address of each family
// that is neither secondary nor link-local.
func primaryAddresses(dev netlink.Link, record *abiInterface) error {
	addrs, err := netlink.AddrList(dev, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		address, ok := netip.AddrFromSlice(a.IP)
		address = address.Unmap()
		if !ok || a.Flags&unix.IFA_F_SECONDARY != 0 || address.IsLinkLocalUnicast() {
			continue
		}
		to := &record.Address6
		if address.Is4() {
			to = &record.Address4
		}
		if *to == (abiAddr{}) {
			*to = toAddr(address)
		}
	}
	return nil
}
