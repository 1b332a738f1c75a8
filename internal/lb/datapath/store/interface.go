package store

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// IndexOf returns the position of an interface in sh_interfaces.
func (v *View) IndexOf(ifindex int) (uint32, bool) {
	var index uint32
	err := v.maps[abi.MapIfindexes].Lookup(uint32(ifindex), &index)
	return index, err == nil
}

// IfindexAt returns the interface at a position in sh_interfaces, the reverse of IndexOf.
func (v *View) IfindexAt(index uint32) (ifindex int, ok bool) {
	var record abi.Interface
	err := v.maps[abi.MapInterfaces].Lookup(index, &record)
	return int(record.Ifindex), err == nil && record.Ifindex != 0
}

// PutInterface writes an interface's records, at its earlier index, or else at a free one, which it returns.
// Frames leave through the interface port: a VLAN's frames through its parent.
func (w *Writer) PutInterface(dev netlink.Link, port uint32) (uint32, error) {
	attrs := dev.Attrs()
	index, err := w.findIndex(attrs.Index)
	if err != nil {
		return 0, fmt.Errorf("attach to interface %s: %w", attrs.Name, err)
	}
	record := abi.Interface{Ifindex: uint32(attrs.Index), Mtu: uint32(attrs.MTU)}
	copy(record.Mac[:], attrs.HardwareAddr)
	if err := w.sendingAddresses(attrs.Index, &record); err != nil {
		return 0, fmt.Errorf("read the addresses of interface %s: %w", attrs.Name, err)
	}
	ifindex := uint32(attrs.Index)
	if w.writtenAlready(index, record, port) {
		return index, nil
	}
	if err := w.maps[abi.MapInterfaces].Put(index, record); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapInterfaces, err)
	}
	if err := w.maps[abi.MapTxPorts].Put(index, port); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapTxPorts, err)
	}
	if err := w.maps[abi.MapIfindexes].Put(ifindex, index); err != nil {
		return 0, fmt.Errorf("write interface %s into %s: %w", attrs.Name, abi.MapIfindexes, err)
	}
	return index, nil
}

// writtenAlready reports whether all three maps describe the interface correctly. It is called every second,
// and writing to a device map makes a new entry each time.
func (w *Writer) writtenAlready(index uint32, record abi.Interface, egress uint32) bool {
	var have abi.Interface
	var port uint32
	err := errors.Join(w.maps[abi.MapInterfaces].Lookup(index, &have), w.maps[abi.MapTxPorts].Lookup(index, &port))
	at, known := w.IndexOf(int(record.Ifindex))
	return err == nil && have == record && port == egress && known && at == index
}

// findIndex returns the index of the record with this ifindex; else a free one; else the index of an interface
// that is gone.
func (w *Writer) findIndex(ifindex int) (uint32, error) {
	free, gone := -1, -1
	var goneIfindex int
	for index := range uint32(abi.INTERFACE_MAX) {
		var record abi.Interface
		if err := w.maps[abi.MapInterfaces].Lookup(index, &record); err != nil {
			return 0, fmt.Errorf("read element %d of %s: %w", index, abi.MapInterfaces, err)
		}
		switch {
		case int(record.Ifindex) == ifindex:
			return index, nil
		case record.Ifindex == 0 && free < 0:
			free = int(index)
		case record.Ifindex != 0 && gone < 0:
			var port uint32 // the kernel empties the element when the interface goes
			if err := w.maps[abi.MapTxPorts].Lookup(index, &port); errors.Is(err, ebpf.ErrKeyNotExist) {
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
	return uint32(gone), w.ClearInterface(uint32(gone), goneIfindex)
}

// ClearInterface empties an interface's records.
func (w *Writer) ClearInterface(index uint32, ifindex int) error {
	err := w.remove(abi.MapIfindexes, uint32(ifindex), "an interface")
	return errors.Join(err, w.ClearVLAN(index), w.ClearDecap(index), w.remove(abi.MapTxPorts, index, "an interface"),
		w.maps[abi.MapInterfaces].Put(index, abi.Interface{}))
}
