package store

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// VLAN describes an interface's frames on the wire: their parent interface and tags.
type VLAN struct {
	Parent string // the interface that has them with their tags
	Tags   []Tag  // one or two, the outer first
}

// Tag tells a VLAN from others (IEEE 802.1Q).
type Tag struct {
	Protocol uint16 // unix.ETH_P_8021Q or ETH_P_8021AD
	ID       uint16 // 1 to 4094
}

// PutVLAN makes the program of a parent pass frames with a key to the interface at an index. An earlier key of
// the index, of a VLAN that has gone, is removed.
func (w *Writer) PutVLAN(index uint32, key abi.VlanKey) error {
	return errors.Join(w.forgetKey(index, key), w.maps[abi.MapVlanTags].Put(index, key.Tags), w.maps[abi.MapVlans].Put(key, index))
}

// PutVLANProgram sets the program that frames of the interface at an index meet after their tags are removed.
func (w *Writer) PutVLANProgram(index uint32, program *ebpf.Program) error {
	return w.maps[abi.MapVlanProgs].Put(index, program)
}

// PutTagProgram sets the program that tagged frames of the interface at an index meet.
func (w *Writer) PutTagProgram(index uint32, program *ebpf.Program) error {
	return w.maps[abi.MapVlanProgs].Put(uint32(abi.INTERFACE_MAX)+index, program)
}

// ClearTags removes the entries about tags of the interface at an index, beginning with the key that assigns
// its parent's frames to it.
func (w *Writer) ClearTags(index uint32) error {
	return errors.Join(w.forgetKey(index, abi.VlanKey{}), w.maps[abi.MapVlanTags].Put(index, abi.VlanTags{}))
}

// forgetKey removes the key of the interface at an index, unless it equals the key to keep.
func (w *Writer) forgetKey(index uint32, stays abi.VlanKey) error {
	var key abi.VlanKey
	var at uint32
	all := w.maps[abi.MapVlans].Iterate()
	for all.Next(&key, &at) {
		if at == index && key != stays {
			return w.remove(abi.MapVlans, key, "a VLAN") // there is no other, and the iteration ends with its key
		}
	}
	return all.Err()
}

// ClearVLAN does the same as ClearTags, and removes the interface's programs.
func (w *Writer) ClearVLAN(index uint32) error {
	if IsPods(index) {
		return nil
	}
	return errors.Join(w.ClearTags(index),
		w.remove(abi.MapVlanProgs, index, "the program of an interface"),
		w.remove(abi.MapVlanProgs, uint32(abi.INTERFACE_MAX)+index, "the program of an interface"))
}

// TakenVLAN is a VLAN whose frames are taken at its parent, as the maps describe it. Both fields are an
// ifindex.
type TakenVLAN struct {
	Index           uint32
	Ifindex, parent int
}

// TakenVLANs lists the VLANs whose frames are taken at their parents, by ifindex.
func (v *View) TakenVLANs() ([]TakenVLAN, error) {
	return takenIn(v.maps[abi.MapVlans], v.maps[abi.MapInterfaces])
}

// PinnedVLANs does the same as View.TakenVLANs for an instance with maps of any ABI, also one before VLANs.
func PinnedVLANs(opts Options, number uint32) ([]TakenVLAN, error) {
	var maps [2]*ebpf.Map
	for i, name := range []string{abi.MapVlans, abi.MapInterfaces} {
		path := filepath.Join(kernel.MapDirectory(opts.PinRoot, opts.Instance, number), name)
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("open the map pinned at %s: %w", path, err)
		}
		defer m.Close()
		maps[i] = m
	}
	return takenIn(maps[0], maps[1])
}

// ParentOf returns the interface at which the frames of an interface are taken; empty if it has no parent, or
// another one.
func ParentOf(opts Options, iface string) (string, error) {
	all, err := PinnedVLANs(opts, opts.Version.ABI)
	if err != nil {
		return "", err
	}
	ifindex := kernel.InterfaceIndex(iface)
	for _, t := range all {
		if t.Ifindex == ifindex {
			return kernel.InterfaceName(t.parent), nil
		}
	}
	return "", nil
}

func takenIn(vlans, interfaces *ebpf.Map) (all []TakenVLAN, err error) {
	var key abi.VlanKey
	var index uint32
	entries := vlans.Iterate()
	for entries.Next(&key, &index) {
		var record abi.Interface
		if err := interfaces.Lookup(index, &record); err != nil {
			return nil, fmt.Errorf("read element %d of %s: %w", index, abi.MapInterfaces, err)
		}
		all = append(all, TakenVLAN{index, int(record.Ifindex), int(key.Parent)})
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", abi.MapVlans, err)
	}
	slices.SortFunc(all, func(a, b TakenVLAN) int { return cmp.Compare(a.Ifindex, b.Ifindex) })
	return all, nil
}
