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

// PutInterface writes an interface's records, at its earlier index, or else at a free one that is for no pod, and returns the index.
// Frames leave through the interface port: a VLAN's frames through its parent.
func (w *Writer) PutInterface(dev netlink.Link, port uint32) (uint32, error) {
	return w.putInterface(dev, port, indexRange{first: 0, from: 0, end: uint32(abi.INTERFACE_MAX)})
}

// PutPod does the same for a pod's interface. An index that becomes free rests until all others that are free have been given: flows and backends still have it in
// their hops for as long as packets of a pod that has gone are on their way, and these must not get into another pod.
func (w *Writer) PutPod(dev netlink.Link) (uint32, error) {
	among := podRange
	among.from = w.nextPod
	if among.from == 0 { // a predecessor may have given some, and freed others
		among.from = w.afterLast(among)
	}
	_, had := w.IndexOf(dev.Attrs().Index)
	index, err := w.putInterface(dev, uint32(dev.Attrs().Index), among)
	if err == nil && !had {
		w.nextPod = index + 1
	}
	return index, err
}

// podRange are the positions for interfaces of pods.
var podRange = indexRange{first: uint32(abi.INTERFACE_MAX), end: uint32(abi.INDEX_MAX)}

// ForgetPods empties the records of interfaces of pods that went while no daemon heard of it, and returns how many there were. Such an interface has
// left at most a name, in its pins, and the name does not show the index. But the kernel has emptied its element of sh_tx_ports. The indices rest, as in PutPod.
func (w *Writer) ForgetPods() (forgotten int, err error) {
	if w.nextPod == 0 {
		w.nextPod = w.afterLast(podRange)
	}
	var errs []error
	for index := range podRange.all {
		ifindex, taken := w.IfindexAt(index)
		if !taken || !w.isGone(index) {
			continue
		}
		forgotten++
		errs = append(errs, w.ClearInterface(index, ifindex))
	}
	return forgotten, errors.Join(errs...)
}

// isGone reports whether the kernel has emptied an interface's element of sh_tx_ports, which it does when the interface goes.
func (w *Writer) isGone(index uint32) bool {
	var port uint32
	return errors.Is(w.maps[abi.MapTxPorts].Lookup(index, &port), ebpf.ErrKeyNotExist)
}

// indexRange are the positions in sh_interfaces that an interface may take. They are looked at from one on, and then from the first one to that.
type indexRange struct{ first, from, end uint32 }

func (r indexRange) all(yield func(index uint32) bool) {
	start := r.from
	if start < r.first || start >= r.end {
		start = r.first
	}
	for n := range r.end - r.first {
		index := start + n
		if index >= r.end {
			index -= r.end - r.first
		}
		if !yield(index) {
			return
		}
	}
}

// afterLast is the position after the last one that an interface has.
func (w *Writer) afterLast(among indexRange) uint32 {
	for index := among.end - 1; index >= among.first; index-- {
		if _, taken := w.IfindexAt(index); taken {
			return index + 1
		}
	}
	return among.first
}

// IsPods reports whether the index is reserved for interfaces of pods.
func IsPods(index uint32) bool { return index >= uint32(abi.INTERFACE_MAX) }

func (w *Writer) putInterface(dev netlink.Link, port uint32, among indexRange) (uint32, error) {
	attrs := dev.Attrs()
	index, err := w.findIndex(attrs.Index, among)
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
	_, known := w.IndexOf(attrs.Index)
	for _, m := range []struct {
		name       string
		key, value any
	}{{abi.MapInterfaces, index, record}, {abi.MapTxPorts, index, port}, {abi.MapIfindexes, ifindex, index}} {
		if err := w.maps[m.name].Put(m.key, m.value); err != nil {
			err = fmt.Errorf("write interface %s into %s: %w", attrs.Name, m.name, err)
			if !known { // it has gone, for example
				err = errors.Join(err, w.ClearInterface(index, attrs.Index))
			}
			return 0, err
		}
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

// findIndex returns the index that the interface has; else a free one; else the index of an interface that is gone.
func (w *Writer) findIndex(ifindex int, among indexRange) (uint32, error) {
	if index, ok := w.IndexOf(ifindex); ok {
		return index, nil
	}
	gone := -1
	var goneIfindex int
	for index := range among.all {
		var record abi.Interface
		if err := w.maps[abi.MapInterfaces].Lookup(index, &record); err != nil {
			return 0, fmt.Errorf("read element %d of %s: %w", index, abi.MapInterfaces, err)
		}
		switch {
		case record.Ifindex == 0 || int(record.Ifindex) == ifindex:
			return index, nil
		case gone < 0 && w.isGone(index):
			gone, goneIfindex = int(index), int(record.Ifindex)
		}
	}
	if gone < 0 {
		return 0, fmt.Errorf("the balancer is attached to %d interfaces of this kind, which is as many as it can be", among.end-among.first)
	}
	return uint32(gone), w.ClearInterface(uint32(gone), goneIfindex)
}

// ClearInterface empties an interface's records at an index. If the interface has another index, because a daemon was killed while it wrote, the
// interface keeps that index.
func (w *Writer) ClearInterface(index uint32, ifindex int) (err error) {
	if at, has := w.IndexOf(ifindex); has && at == index {
		err = w.remove(abi.MapIfindexes, uint32(ifindex), "an interface")
	}
	return errors.Join(err, w.ClearVLAN(index), w.ClearDecap(index), w.ClearTunnelled(index), w.remove(abi.MapTxPorts, index, "an interface"),
		w.maps[abi.MapInterfaces].Put(index, abi.Interface{}))
}
