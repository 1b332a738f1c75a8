package packet_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/test/space"
	"github.com/shunt-lb/shunt/test/variant"
)

// The kernel takes a tenth of a second or more to verify the program for one interface, and most worlds have the same
// two. So a world that a test leaves unchanged is kept as a site for the next: namespace, interfaces, and a data plane
// whose maps are emptied. The next test's world opens that data plane as a daemon does after another was killed;
// instead of loading a program onto the same maps, with the same constants, it uses the one that is loaded already.

var worldCount atomic.Uint32

// site is the place of a world. One world has it at a time.
type site struct {
	kind    siteKind
	number  int
	options store.Options
	space   netns.NsHandle
	ifindex map[string]int
	loaded  loaded
	guests  []*kernel.GuestHook // kept, so that programs are loaded onto the same maps again
	used    bool                // an earlier world has used the site
	pins    []string            // the pins in bpffs at a world's begin
	network string              // the namespace's state then
}

// siteKind is the common part of the worlds at one site.
type siteKind struct {
	mode   model.Attach
	limits model.Limits
}

// sites are the free sites, by kind.
var sites = struct {
	sync.Mutex
	free map[siteKind][]*site
}{free: map[siteKind][]*site{}}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, free := range sites.free {
		for _, s := range free {
			if err := s.remove(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = max(code, 1)
			}
		}
	}
	os.Exit(code)
}

// enter gives the world a site, and leaves it after the test.
func (w *world) enter(o worldOptions) {
	w.Helper()
	kind := siteKind{o.mode, o.limits}
	keep := o.vlans == nil
	if keep {
		w.site = takeSite(kind)
	}
	if w.site == nil {
		w.site = newSite(w, kind)
	}
	w.Cleanup(func() { w.leave(keep) })
	w.site.options.VLANs = func(dev netlink.Link) (store.VLAN, bool) {
		v, ok := o.vlans[dev.Attrs().Name]
		return v, ok
	}
	w.number, w.options, w.space, w.ifindex = w.site.number, w.site.options, w.site.space, w.site.ifindex
}

func takeSite(kind siteKind) *site {
	sites.Lock()
	defer sites.Unlock()
	free := sites.free[kind]
	if len(free) == 0 {
		return nil
	}
	s := free[len(free)-1]
	sites.free[kind] = free[:len(free)-1]
	return s
}

func newSite(t testing.TB, kind siteKind) *site {
	t.Helper()
	number := int(worldCount.Add(1))
	name := fmt.Sprintf("shunt-pkt-%d-%d", os.Getpid(), number)
	s := &site{kind: kind, number: number, ifindex: map[string]int{}, loaded: loaded{}}
	version := *parsed()
	version.Load = s.loaded.load
	s.options = store.Options{Instance: name, Limits: kind.limits, PinRoot: kernel.DefaultPinRoot,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Version: &version}
	var err error
	s.space, err = makeSpace(name)
	must(t, err)
	return s
}

// parsed is the version under test, which reads each object once.
var parsed = sync.OnceValue(func() *abi.Version {
	version := *abi.Built()
	if other := variant.FromEnvironment(); other != nil {
		version = *other
	}
	version.Objects = maps.Clone(version.Objects)
	for name, read := range version.Objects {
		once := sync.OnceValues(read)
		version.Objects[name] = func() (*ebpf.CollectionSpec, error) {
			spec, err := once()
			return spec.Copy(), err
		}
	}
	return &version
})

// makeSpace makes a namespace, on a thread that dies afterwards.
func makeSpace(name string) (space netns.NsHandle, err error) {
	made := make(chan struct{})
	go func() {
		defer close(made)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		space, err = namespace.NewNamed(name)
	}()
	<-made
	return space, err
}

func removeSpace(space netns.NsHandle, name string) error {
	if err := errors.Join(space.Close(), netns.DeleteNamed(name)); err != nil {
		return fmt.Errorf("removing the network namespace: %w", err)
	}
	return nil
}

// addArms makes the interfaces. It runs inside the namespace.
func (w *world) addArms() {
	for _, arm := range []struct {
		name      string
		mac       net.HardwareAddr
		addresses []string
	}{
		{armA, ownA, []string{"192.0.2.1/24", "2001:db8:1::1/64"}},
		{armC, ownC, []string{"10.0.0.1/24", "2001:db8:2::1/64"}},
	} {
		w.ifindex[arm.name] = space.AddArm(w, arm.name, arm.mac, 0, arm.addresses...).Attrs().Index
	}
}

// settle notes the first world's state at its begin. It runs inside the namespace.
func (s *site) settle(t testing.TB) {
	if s.used {
		return
	}
	if s.kind.mode != model.AttachTC {
		for _, index := range s.ifindex {
			hook, err := kernel.HostGuests(index)
			must(t, err)
			s.guests = append(s.guests, hook)
		}
	}
	var err error
	s.pins, err = s.pinned()
	must(t, err)
	s.network, err = s.describeNetwork()
	must(t, err)
}

// leave ends a world: its site is kept for others if only the contents of maps have changed.
func (w *world) leave(keep bool) {
	if w.d == nil { // a test could not open it again, or not at all
		keep = false
	} else if err := w.d.Close(); err != nil {
		w.Errorf("closing the data plane: %v", err)
	}
	if keep && !w.Failed() && w.site.unchanged() {
		if err := w.site.blank(); err != nil {
			w.Errorf("emptying the maps for the next world: %v", err)
		} else {
			w.site.used = true
			sites.Lock()
			defer sites.Unlock()
			sites.free[w.site.kind] = append(sites.free[w.site.kind], w.site)
			return
		}
	}
	if err := w.site.remove(); err != nil {
		w.Error(err)
	}
}

// unchanged reports whether the pins and the namespace are the same as at the first world's begin.
func (s *site) unchanged() bool {
	pins, err := s.pinned()
	if err != nil || !slices.Equal(pins, s.pins) {
		return false
	}
	network, err := s.describeNetwork()
	return err == nil && network == s.network
}

func (s *site) directory() string {
	return filepath.Join(s.options.PinRoot, "shunt", s.options.Instance)
}

// pinned lists the pins, by path.
func (s *site) pinned() (paths []string, err error) {
	err = filepath.WalkDir(s.directory(), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			paths = append(paths, path)
		}
		return err
	})
	return paths, err
}

// describeNetwork describes all state of the namespace that tests change.
func (s *site) describeNetwork() (string, error) {
	handle, err := netlink.NewHandleAt(s.space)
	if err != nil {
		return "", err
	}
	defer handle.Close()
	var text []string
	links, err := handle.LinkList()
	for _, l := range links {
		a := l.Attrs()
		text = append(text, fmt.Sprint("link ", a.Index, a.Name, a.MTU, a.HardwareAddr, a.RawFlags, a.MasterIndex, l.Type(), a.Xdp != nil && a.Xdp.Attached))
	}
	addresses, err2 := handle.AddrList(nil, unix.AF_UNSPEC)
	for _, a := range addresses {
		text = append(text, fmt.Sprint("address ", a.LinkIndex, a.IPNet, a.Flags))
	}
	routes, err3 := handle.RouteListFiltered(unix.AF_UNSPEC, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	for _, r := range routes {
		text = append(text, "route "+r.String())
	}
	neighbours, err4 := handle.NeighList(0, unix.AF_UNSPEC)
	for _, n := range neighbours {
		if !n.IP.IsMulticast() { // the kernel makes those at any time
			text = append(text, fmt.Sprint("neighbour ", n.LinkIndex, n.IP, n.HardwareAddr))
		}
	}
	slices.Sort(text)
	return strings.Join(text, "\n"), errors.Join(err, err2, err3, err4)
}

// blank gives all maps the contents that the kernel made them with.
func (s *site) blank() error { return s.eachMap(func(_ string, m *ebpf.Map) error { return blank(m) }) }

func blank(m *ebpf.Map) error {
	if m.Flags()&unix.BPF_F_MMAPABLE != 0 {
		return inMemory(m, unix.PROT_READ|unix.PROT_WRITE, func(all []byte) { clear(all) })
	}
	all, err := contents(m)
	if err != nil || len(all) == 0 {
		return err
	}
	keys := octets(len(all), m.KeySize())
	i := 0
	for key := range all {
		reflect.Copy(keys.Index(i), reflect.ValueOf([]byte(key)))
		i++
	}
	switch m.Type() {
	case ebpf.Array:
		_, err = m.BatchUpdate(keys.Interface(), octets(len(all), m.ValueSize()).Interface(), nil)
	case ebpf.PerCPUArray:
		_, err = m.BatchUpdate(keys.Interface(), octets(len(all)*ebpf.MustPossibleCPU(), m.ValueSize()).Interface(), nil)
	case ebpf.Hash, ebpf.LRUHash:
		_, err = m.BatchDelete(keys.Interface(), nil)
	default:
		for key := range all {
			err = errors.Join(err, m.Delete([]byte(key)))
		}
	}
	if err != nil {
		return fmt.Errorf("empty %d elements: %w", len(all), err)
	}
	return nil
}

// octets is a slice of so many values of this size.
func octets(count int, size uint32) reflect.Value {
	return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), count, count)
}

// inMemory calls do with the memory of an array whose values' size is a multiple of 8.
func inMemory(m *ebpf.Map, protection int, do func(all []byte)) error {
	all, err := unix.Mmap(m.FD(), 0, int(m.MaxEntries())*int(m.ValueSize()), protection, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	do(all)
	return unix.Munmap(all)
}

// eachMap calls do for each pinned map, and for the programs' own maps.
func (s *site) eachMap(do func(name string, m *ebpf.Map) error) error {
	for _, path := range s.pins {
		if filepath.Dir(path) == s.directory() && !strings.HasPrefix(filepath.Base(path), "chain-") {
			continue // a link
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err == nil {
			err = errors.Join(do(path, m), m.Close())
		}
		if err != nil {
			return fmt.Errorf("map %s: %w", path, err)
		}
	}
	for key, all := range s.loaded {
		for name, m := range all.Maps {
			if strings.HasPrefix(name, ".") {
				continue // a map of constants
			}
			if err := do(fmt.Sprintf("%s of %.4x", name, sha256.Sum256([]byte(key))), m); err != nil {
				return fmt.Errorf("map %s: %w", name, err)
			}
		}
	}
	return nil
}

// zero is the value of an array's element that was never written.
func zero(m *ebpf.Map) any {
	if m.Type() != ebpf.PerCPUArray {
		return make([]byte, m.ValueSize())
	}
	each := make([][]byte, ebpf.MustPossibleCPU())
	for i := range each {
		each[i] = make([]byte, m.ValueSize())
	}
	return each
}

// contents are a map's elements, by key; of arrays the elements that are not zero.
func contents(m *ebpf.Map) (map[string]string, error) {
	found := map[string]string{}
	switch m.Type() {
	case ebpf.Array, ebpf.PerCPUArray:
		return found, eachWritten(m, func(index uint32, value []byte) { found[string(keyOf(index))] = string(value) })
	case ebpf.Hash, ebpf.LRUHash:
		return found, eachElement(m, func(key, value []byte) { found[string(key)] = string(value) })
	case ebpf.LPMTrie, ebpf.DevMap, ebpf.ProgramArray:
		key, end := m.NextKeyBytes(nil)
		for ; key != nil; key, end = m.NextKeyBytes(key) {
			value, err := m.LookupBytes(key)
			if err != nil {
				return nil, err
			}
			if value != nil { // prog arrays and devmaps list empty places
				found[string(key)] = string(value)
			}
		}
		return found, end
	}
	return nil, fmt.Errorf("its type %s is not known here", m.Type())
}

func keyOf(index uint32) []byte {
	return []byte{byte(index), byte(index >> 8), byte(index >> 16), byte(index >> 24)} // the order of amd64 and arm64
}

var noughts [4096]byte

func isZero(b []byte) bool {
	for ; len(b) > len(noughts); b = b[len(noughts):] {
		if !bytes.Equal(b[:len(noughts)], noughts[:]) {
			return false
		}
	}
	return bytes.Equal(b, noughts[:len(b)])
}

// eachWritten calls do for each element of an array that is not zero, with the values of all CPUs in turn.
func eachWritten(m *ebpf.Map, do func(index uint32, value []byte)) error {
	size := int(m.ValueSize())
	if m.Type() == ebpf.PerCPUArray {
		size *= ebpf.MustPossibleCPU()
	}
	look := func(all []byte) {
		for index := range m.MaxEntries() {
			if value := all[int(index)*size:][:size]; !isZero(value) {
				do(index, value)
			}
		}
	}
	if m.Flags()&unix.BPF_F_MMAPABLE != 0 {
		return inMemory(m, unix.PROT_READ, look)
	}
	values := octets(int(m.MaxEntries())*size/int(m.ValueSize()), m.ValueSize())
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, make([]uint32, m.MaxEntries()), values.Interface(), nil)
	if n != int(m.MaxEntries()) { // if the batch reaches the end the kernel returns "the key does not exist"
		return fmt.Errorf("read %d elements, got %d: %w", m.MaxEntries(), n, err)
	}
	look(unsafe.Slice((*byte)(values.UnsafePointer()), values.Len()*int(m.ValueSize())))
	return nil
}

// eachElement calls do for each element of a hash. Nothing may change it meanwhile.
func eachElement(m *ebpf.Map, do func(key, value []byte)) error {
	most := int(min(m.MaxEntries(), 4096)) // at least as many as a bucket has: otherwise the kernel returns none of them
	keys, values := octets(most, m.KeySize()), octets(most, m.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		for i := range n {
			do(keys.Index(i).Bytes(), values.Index(i).Bytes())
		}
		if err != nil { // that was the last element
			return nil
		}
	}
}

// remove deletes a site for good.
func (s *site) remove() error {
	for _, g := range s.guests {
		g.Release()
	}
	s.loaded.close()
	err := attach.RemoveFrom(s.options)
	if err != nil {
		err = fmt.Errorf("removing the data plane: %w", err)
	}
	return errors.Join(err, removeSpace(s.space, s.options.Instance))
}

// loaded are collections whose programs the kernel has verified, by all inputs of the programs.
type loaded map[string]*ebpf.Collection

// kept are objects, by one of their programs, from which the data plane only takes programs. Of other objects it reads
// maps afterwards, which have to be new.
var kept = []string{"sh_xdp", "sh_tc", "sh_clock", "sh_sweep", "sh_bulk_tx", "sh_tunnelled"}

// load is kernel.Load, except for programs that are loaded already, with the same instructions, constants and maps.
func (l loaded) load(spec *ebpf.CollectionSpec, constants map[string]any, replacements map[string]*ebpf.Map) (*ebpf.Collection, error) {
	if !slices.ContainsFunc(kept, func(name string) bool { return spec.Programs[name] != nil }) {
		return kernel.Load(spec, constants, replacements)
	}
	key, err := loadKey(spec, constants, replacements)
	if err != nil {
		return nil, err
	}
	all := l[key]
	if all == nil {
		if all, err = kernel.Load(spec, constants, replacements); err != nil {
			return nil, err
		}
		l[key] = all
	}
	coll := &ebpf.Collection{Programs: map[string]*ebpf.Program{}}
	for name, p := range all.Programs {
		if coll.Programs[name], err = p.Clone(); err != nil {
			return nil, err
		}
	}
	return coll, nil
}

// loadKey is equal for loads that give the same programs.
func loadKey(spec *ebpf.CollectionSpec, constants map[string]any, replacements map[string]*ebpf.Map) (string, error) {
	var key strings.Builder
	fmt.Fprintln(&key, constants)
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		fmt.Fprintln(&key, name, spec.Maps[name].MaxEntries)
		if m := replacements[name]; m != nil {
			info, err := m.Info()
			if err != nil {
				return "", err
			}
			id, _ := info.ID()
			fmt.Fprintln(&key, id)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		fmt.Fprintf(&key, "%s %x\n", name, digest(spec.Programs[name].Instructions))
	}
	return key.String(), nil
}

// digest is a hash of instructions before they refer to maps.
func digest(instructions asm.Instructions) [sha256.Size]byte {
	var all []byte
	for _, i := range instructions {
		all = append(all, byte(i.OpCode>>8), byte(i.OpCode), byte(i.Dst), byte(i.Src))
		all = binary.LittleEndian.AppendUint16(all, uint16(i.Offset))
		all = binary.LittleEndian.AppendUint64(all, uint64(i.Constant))
		all = append(append(append(all, i.Reference()...), 0), i.Symbol()...)
	}
	return sha256.Sum256(all)
}

func (l loaded) close() {
	for _, all := range l {
		all.Close()
	}
}
