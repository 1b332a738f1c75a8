package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// A hook that is kept goes on without a process: its program and its maps are pinned in a folder of bpffs,
//
//	FOLDER/link or behind    the program (kernel.Guest)
//	FOLDER/maps-LAYOUT/…     the maps
//
// and sockets stay in the map as long as the programs that hold leases have them open. The next process attaches with the folder
// and names the leases that go on.

// layout is the number of the maps' layout and meaning. A version that changes either has the next number.
var layout = 2

const mapsPrefix = "maps-"

func mapFolder(folder string) string { return filepath.Join(folder, mapsPrefix+strconv.Itoa(layout)) }

// Kept is a lease that an earlier process has begun.
type Kept struct {
	Lease     int
	Addresses []netip.AddrPort
	Stamped   bool
}

// Keep makes the program and all leases go on when the process ends, until Forget or Close. If they do already, that is success.
func (h *Hook) Keep(folder string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.kept != "" {
		return nil
	}
	err := os.MkdirAll(mapFolder(folder), 0o700)
	for name, m := range h.objects.Maps {
		if err == nil && name[0] != '.' { // other sections are the compiler's own
			err = m.Pin(filepath.Join(mapFolder(folder), name))
		}
	}
	if err == nil {
		err = h.guest.Keep(folder)
	}
	if h.kept = folder; err != nil {
		return errors.Join(fmt.Errorf("keep the UDP path's program of interface %s in %s: %w", h.Interface, folder, err), h.forget())
	}
	return nil
}

// Forget undoes Keep: the leases end with the process.
func (h *Hook) Forget() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.guest.Forget(), h.forget())
}

func (h *Hook) forget() error {
	if h.kept == "" {
		return nil
	}
	folder := h.kept
	h.kept = ""
	for name, m := range h.objects.Maps {
		if name[0] != '.' {
			_ = m.Unpin() // the folder's removal takes pins of an earlier process with it
		}
	}
	return removeMaps(folder)
}

// Leave ends the process's part of a kept hook, in place of Close.
func (h *Hook) Leave() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.guest.Leave(), h.release())
}

// Adopted reports whether the leases of Options.GoOn go on.
func (h *Hook) Adopted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.kept != ""
}

// RemoveKept removes the pins that a process has kept in a folder before its end. If there are none, that is success.
func RemoveKept(folder string) error {
	return errors.Join(kernel.RemoveKept(folder), removeMaps(folder))
}

func removeMaps(folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("remove the UDP path's maps in %s: %w", folder, err)
	}
	for range 3 { // the folders above, down from shunt's own, if this was the last one in them
		folder = filepath.Dir(folder)
		_ = os.Remove(folder)
	}
	return nil
}

// openKept opens the maps that an earlier process has kept. nil: there are none of this layout, and everything else in the folder
// has been removed.
func openKept(folder string) (map[string]*ebpf.Map, error) {
	if folder == "" {
		return nil, nil
	}
	spec, err := loadUdp()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	set, err := kernel.NewMapSet(spec, mapFolder(folder), nil, "")
	if err != nil {
		return nil, err
	}
	opened, err := set.OpenPinned()
	for name, m := range opened {
		if err == nil {
			err = set.Check(m, name, set.Path(name))
		}
	}
	if err == nil {
		return opened, nil
	}
	kernel.CloseMaps(opened)
	if _, looked := os.Lstat(folder); errors.Is(looked, fs.ErrNotExist) {
		return nil, nil
	}
	return nil, RemoveKept(folder)
}

// takeOver reads the state of this hook from an earlier process's maps: the leases that go on stay as they were, and the others
// are removed.
func (h *Hook) takeOver(goOn []Kept) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[netip.AddrPort]bool{}
	for _, k := range goOn {
		served := map[netip.AddrPort]bool{}
		for _, a := range k.Addresses {
			a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
			served[a], all[a] = true, true
		}
		h.leases[k.Lease] = served
		if k.Stamped {
			h.stamped[k.Lease] = true
		}
	}
	if err := h.readSeats(all); err != nil {
		return fmt.Errorf("take over the leases of interface %s: %w", h.Interface, err)
	}
	for address := range all {
		if err := h.seat(address); err != nil {
			return fmt.Errorf("take over %s on interface %s: %w", address, h.Interface, err)
		}
	}
	for lease := range MaxLeases {
		for queue := range MaxQueues {
			if h.leases[lease] != nil {
				break
			}
			if err := h.Unbind(lease, queue); err != nil {
				return err
			}
		}
	}
	return h.grace.Wait()
}

// readSeats adds the addresses and ports in the maps, and notes which of them are in sh_ud_direct.
func (h *Hook) readSeats(all map[netip.AddrPort]bool) error {
	var k udpLeaseKey
	var l udpLease
	entries := h.objects.Maps[udpMapShUdLeases].Iterate()
	for entries.Next(&k, &l) {
		all[addressOf(k)] = true
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read the addresses and ports of leases: %w", err)
	}
	for at := range uint32(udpLeaseLimitLEASE_BUCKETS) {
		var d udpLeaseDirect
		if err := h.objects.Maps[udpMapShUdDirect].Lookup(at, &d); err != nil {
			return fmt.Errorf("read element %d of the direct leases: %w", at, err)
		}
		if d.Key.Port != 0 {
			h.direct[at] = addressOf(d.Key)
			all[h.direct[at]] = true
		}
		var word uint64
		if err := h.objects.Maps[udpMapShUdHints].Lookup(at, &word); err != nil {
			return fmt.Errorf("read whether hashes of element %d have leases: %w", at, err)
		}
		for bit := range uint32(udpLeaseLimitLEASE_HINTS) {
			if of := at*uint32(udpLeaseLimitLEASE_HINTS) + bit; word>>bit&1 == 1 && !h.hashOwned(of) {
				if err := h.hint(of, false); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// addressOf is the inverse of key.
func addressOf(k udpLeaseKey) netip.AddrPort {
	return netip.AddrPortFrom(kernel.AddrOf(k.Address.High, k.Address.Low), kernel.FromWire(k.Port))
}
