package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// StampMap and StampCountMap are the names, in programs, of the ring of stamps and of the count of all stamps so far
// (bpf/core/stamp.h).
const (
	StampMap      = "sh_stamps"
	StampCountMap = "sh_stamp_count"
)

// StampPrefix begins the name of the directory, beside the pins of an instance, that has its stamps. Their layout follows.
const StampPrefix = "stamps-"

// stampBytes is the size of struct stamp.
const stampBytes = uint64(unsafe.Sizeof(coreStamp{}))

func stampDirectory(root, instance string) string {
	return filepath.Join(Directory(root, instance), StampPrefix+strconv.Itoa(int(coreStampConstantSTAMP_LAYOUT)))
}

// MakeStamps opens the maps of an instance's stamps, by their names, and makes and pins the missing ones. The caller
// closes them.
func MakeStamps(root, instance string) (map[string]*ebpf.Map, error) {
	dir := stampDirectory(root, instance)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory %s for stamps of probes: %w; shunt must run as root", dir, err)
	}
	made := map[string]*ebpf.Map{}
	for _, spec := range []*ebpf.MapSpec{
		{Name: StampMap, ValueSize: uint32(stampBytes), MaxEntries: uint32(coreStampConstantSTAMP_COUNT)},
		{Name: StampCountMap, ValueSize: 8, MaxEntries: 1},
	} {
		spec.Type, spec.KeySize, spec.Flags = ebpf.Array, 4, unix.BPF_F_MMAPABLE
		path := filepath.Join(dir, spec.Name)
		m, err := OpenMap(path)
		if errors.Is(err, os.ErrNotExist) {
			m, err = MakeMap(spec, path)
		}
		if err != nil {
			CloseMaps(made)
			return nil, err
		}
		made[spec.Name] = m
	}
	return made, nil
}

// RemoveStamps removes the pins of an instance's stamps. It succeeds if there are none.
func RemoveStamps(root, instance string) error {
	if err := os.RemoveAll(stampDirectory(root, instance)); err != nil {
		return fmt.Errorf("remove the stamps of probes of instance %q: %w", instance, err)
	}
	return nil
}

// Stamp is a record of a probe of `shunt diag ping`, made by a program of shunt that handled the probe (struct
// stamp of bpf/core/stamp.h).
type Stamp struct {
	Session, Sequence uint64
	Begin, End        uint64 // ns of CLOCK_MONOTONIC
	Source            netip.Addr
	Ifindex           uint32
	Verdict           string // "drop", "send_back"
	Reason            Reason // 0: none
	IsAnswer          bool
	AtTC              bool // otherwise at XDP
}

// StampRing reads the stamps of one instance, each once. It is for one caller at a time.
type StampRing struct {
	Missed uint64 // stamps that were overwritten before they were read, or never written to their end

	pin     fs.FileInfo // of the pin by which it was opened
	next    uint64      // number of the stamp to be read
	stamps  []byte      // mapped
	count   []byte      // likewise
	halted  uint64      // number of the unfinished stamp at which Read stopped last; 0: none
	stopped time.Time   // when it stopped there first
}

// stampPatience is the time that Read waits for the end of a stamp. A program ends within microseconds, but the CPU
// below it may be taken from a virtual machine for longer.
const stampPatience = time.Second

// StampRings reads the stamps of all instances that stamp probes, each stamp once. It is for one caller at a time. A nil one has
// no instances.
type StampRings struct {
	root   string
	rings  map[string]*StampRing // by instance
	missed uint64                // of rings that have gone
}

// OpenStampRings opens the rings of all instances, beginning with the next stamp. The caller closes it.
func OpenStampRings(root string) (*StampRings, error) {
	s := &StampRings{root: root, rings: map[string]*StampRing{}}
	if err := s.review(func(Stamp) {}, false); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Review opens the rings that instances have begun since the last time, from their first stamp on, and closes the rings
// that they have ended, after their last one. For an instance that has begun anew it does both: a reload may switch
// stamps off and on again, and a daemon may end and another begin.
func (s *StampRings) Review(take func(Stamp)) error { return s.review(take, true) }

func (s *StampRings) review(take func(Stamp), fromFirst bool) error {
	entries, err := os.ReadDir(Home(s.root))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for instances that stamp probes: %w", err)
	}
	pins := map[string]fs.FileInfo{}
	for _, e := range entries {
		if !e.IsDir() || CheckName(e.Name()) != nil {
			continue
		}
		pin, err := stampPin(s.root, e.Name())
		if err == nil {
			pins[e.Name()] = pin
		} else if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("look for stamps of instance %q: %w", e.Name(), err)
		}
	}
	for instance, r := range s.rings {
		if pin := pins[instance]; pin == nil || !os.SameFile(pin, r.pin) {
			r.drain(take) // the programs had ended when the pins went
			s.missed += r.Missed
			delete(s.rings, instance)
			if err := r.Close(); err != nil {
				return err
			}
		}
	}
	for instance := range pins {
		if s.rings[instance] != nil {
			continue
		}
		r, err := openStampRing(s.root, instance, fromFirst)
		if errors.Is(err, fs.ErrNotExist) { // it is being made, or has just gone: the next time tells
			continue
		}
		if err != nil {
			return err
		}
		s.rings[instance] = r
	}
	return nil
}

// Read hands over the stamps of all instances that have come since the last call.
func (s *StampRings) Read(take func(Stamp)) {
	for _, r := range s.Rings() {
		r.Read(take)
	}
}

// Rings are the open ones, by instance.
func (s *StampRings) Rings() map[string]*StampRing {
	if s == nil {
		return nil
	}
	return s.rings
}

// Missed returns the number of stamps that were overwritten before they were read, or never ended, in all rings so far.
func (s *StampRings) Missed() (sum uint64) {
	if s == nil {
		return 0
	}
	sum = s.missed
	for _, r := range s.rings {
		sum += r.Missed
	}
	return sum
}

// Close closes all rings.
func (s *StampRings) Close() error {
	var errs []error
	for _, r := range s.Rings() {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// stampPin tells the ring of an instance from another one that it has later.
func stampPin(root, instance string) (fs.FileInfo, error) {
	return os.Stat(filepath.Join(stampDirectory(root, instance), StampMap))
}

func openStampRing(root, instance string, fromFirst bool) (r *StampRing, err error) {
	pin, err := stampPin(root, instance)
	if err != nil {
		return nil, err
	}
	r = &StampRing{pin: pin, next: 1}
	for _, one := range []struct {
		name   string
		bytes  uint64
		memory *[]byte
	}{{StampMap, stampBytes * uint64(coreStampConstantSTAMP_COUNT), &r.stamps}, {StampCountMap, 8, &r.count}} {
		m, err := OpenMap(filepath.Join(stampDirectory(root, instance), one.name))
		if err == nil {
			if got := uint64(m.ValueSize()) * uint64(m.MaxEntries()); got != one.bytes {
				err = fmt.Errorf("the map has %d bytes, and this version's %d", got, one.bytes)
			} else {
				*one.memory, err = unix.Mmap(m.FD(), 0, int(one.bytes), unix.PROT_READ, unix.MAP_SHARED)
			}
			err = errors.Join(err, m.Close())
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open map %s with the stamps of instance %q: %w", one.name, instance, err), r.Close())
		}
	}
	if !fromFirst {
		r.next = r.total() + 1
	}
	if now, err := stampPin(root, instance); err != nil || !os.SameFile(now, pin) {
		return nil, errors.Join(fs.ErrNotExist, r.Close()) // the opened maps may belong to the old or to the new pins
	}
	return r, nil
}

// Close closes the ring.
func (r *StampRing) Close() error {
	var errs []error
	for _, memory := range []*[]byte{&r.stamps, &r.count} {
		if *memory != nil {
			errs = append(errs, unix.Munmap(*memory))
			*memory = nil
		}
	}
	return errors.Join(errs...)
}

// total returns the number of stamps that were ever begun.
func (r *StampRing) total() uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&r.count[0]))) }

// Read passes on the stamps that have been made since the last call, in the order in which they were begun. It
// stops at a stamp that is still being written, for a second at most: after that it counts the stamp as missed.
func (r *StampRing) Read(take func(Stamp)) {
	for !r.readUntilHalf(take) {
		if r.halted != r.next {
			r.halted, r.stopped = r.next, time.Now()
		}
		if time.Since(r.stopped) < stampPatience {
			return
		}
		r.skip()
	}
}

// drain does the same as Read after the last writer has ended: a stamp that was begun and not ended never will be.
func (r *StampRing) drain(take func(Stamp)) {
	for !r.readUntilHalf(take) {
		r.skip()
	}
}

// skip counts the next stamp as missed.
func (r *StampRing) skip() {
	r.Missed++
	r.next++
}

// readUntilHalf passes on stamps; false: the next one was begun and has not ended.
func (r *StampRing) readUntilHalf(take func(Stamp)) bool {
	for total := r.total(); r.next <= total; {
		if oldest := total - min(total, uint64(coreStampConstantSTAMP_COUNT)) + 1; r.next < oldest {
			r.Missed += oldest - r.next
			r.next = oldest
		}
		s, number := r.at(r.next)
		switch {
		case number == r.next:
			take(s)
			r.next++
		case number > r.next: // of a later round, which came since
			r.skip()
		default: // 0, or of the round before: its program has not ended
			total = r.total()
			if total < r.next+uint64(coreStampConstantSTAMP_COUNT) {
				return false
			} // otherwise it has been overtaken, and is counted
		}
	}
	return true
}

// at returns the stamp in the element of a number, and its number; 0: it is being changed.
func (r *StampRing) at(number uint64) (Stamp, uint64) {
	p := (*coreStamp)(unsafe.Pointer(&r.stamps[(number-1)%uint64(coreStampConstantSTAMP_COUNT)*stampBytes]))
	before := atomic.LoadUint64(&p.Number)
	if before == 0 {
		return Stamp{}, 0
	}
	var source [16]byte
	binary.NativeEndian.PutUint64(source[:], atomic.LoadUint64(&p.Source.High))
	binary.NativeEndian.PutUint64(source[8:], atomic.LoadUint64(&p.Source.Low))
	last := atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.Ifindex))) // with the octets behind it
	s := Stamp{
		Session: atomic.LoadUint64(&p.Session), Sequence: atomic.LoadUint64(&p.Sequence),
		Begin: atomic.LoadUint64(&p.BeginNs), End: atomic.LoadUint64(&p.EndNs), Source: netip.AddrFrom16(source).Unmap(),
	}
	var octets [8]byte
	binary.NativeEndian.PutUint64(octets[:], last)
	s.Ifindex = binary.NativeEndian.Uint32(octets[:])
	s.Verdict, s.Reason, s.IsAnswer = verdictNames()[uint32(octets[4])], Reason(octets[5]), octets[6] != 0
	s.AtTC = octets[7] != 0
	if atomic.LoadUint64(&p.Number) != before {
		return Stamp{}, 0
	}
	return s, before
}

// verdictNames are the words of all verdicts.
var verdictNames = sync.OnceValue(func() map[uint32]string { return Words(loadCore, "verdict", "VERDICT_") })
