package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// PutDecap makes the program of the interface at an index pass packets that may belong to a tunnel to a
// program.
func (w *Writer) PutDecap(index uint32, program *ebpf.Program) error {
	return w.maps[abi.MapDecapProgs].Put(index, program)
}

// ClearDecap undoes PutDecap. It succeeds if there is nothing to undo.
func (w *Writer) ClearDecap(index uint32) error {
	if IsPods(index) {
		return nil
	}
	return w.remove(abi.MapDecapProgs, index, "the program that decapsulates for an interface")
}

// PutTunnelled makes sh_decap of the interface at an index, if it is loaded for that, pass decapsulated packets to a program.
func (w *Writer) PutTunnelled(index uint32, program *ebpf.Program) error {
	return w.maps[abi.MapTunnelProgs].Put(index, program)
}

// ClearTunnelled undoes PutTunnelled. It succeeds if there is nothing to undo.
func (w *Writer) ClearTunnelled(index uint32) error {
	if IsPods(index) {
		return nil
	}
	return w.remove(abi.MapTunnelProgs, index, "the program for packets out of tunnels of an interface")
}

// TunnelPrograms returns the map that PutTunnelled fills, for programs of other packages.
func (v *View) TunnelPrograms() *ebpf.Map { return v.maps[abi.MapTunnelProgs] }

// Reasons returns the map of the counters of reasons, for programs of other packages.
func (v *View) Reasons() *ebpf.Map { return v.maps[abi.MapReasons] }

// PinnedDecap reports whether the maps in a folder have a program that decapsulates for an interface.
func PinnedDecap(dir string, ifindex uint32) (bool, error) {
	var found [2]*ebpf.Map
	for i, name := range []string{abi.MapIfindexes, abi.MapDecapProgs} {
		path := filepath.Join(dir, name)
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, os.ErrNotExist) {
			return false, nil // of another ABI, or from before there was decapsulation
		}
		if err != nil {
			return false, fmt.Errorf("open the map pinned at %s: %w", path, err)
		}
		defer m.Close()
		found[i] = m
	}
	var index, id uint32
	err := found[0].Lookup(ifindex, &index)
	if err == nil {
		err = found[1].Lookup(index, &id)
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the interfaces that decapsulate, in %s: %w", dir, err)
	}
	return true, nil
}
