package store

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// ErrNotLoaded says that the instance has no data plane.
var ErrNotLoaded = errors.New("no data plane is loaded")

// View is a data plane for reading, whether its daemon runs or not. It changes nothing.
type View struct {
	opts  Options
	maps  map[string]*ebpf.Map
	clock *ebpf.Program
	rate  uint32 // jiffies per second

	// The arrays, as the programs see them. memory holds their mappings; slots has its own.
	services []abi.Service
	backends []abi.Backend
	slots    *slotMemory
	marks    []uint64 // a bit for each slot, set by sh_recall
	runs     []abi.Addr
	settings []abi.Settings
	memory   [][]byte

	open openCounter
}

// Options identify the data plane; they are complete.
func (v *View) Options() Options { return v.opts }

// OpenView opens an instance's maps of the options' version for reading. It returns ErrNotLoaded if there are
// none.
func OpenView(opts Options) (*View, error) {
	set, err := opts.mapSetOf(nil)
	if err != nil {
		return nil, err
	}
	maps, err := set.OpenPinned()
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look at instance %q in %s: %w; start it with `shunt run`", opts.Instance, opts.MapDir(opts.Version.ABI), ErrNotLoaded)
	}
	if err != nil {
		return nil, err
	}
	v := &View{opts: opts, maps: maps}
	if err := v.mapMemory(false); err != nil {
		return nil, errors.Join(err, v.Close())
	}
	if err := v.loadClock(); err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

// jiffiesPerSecond derives the rate from the coarse clocks, whose resolution is one jiffy (posix_get_coarse_res
// in kernel/time/posix-timers.c). It does not measure: on a busy machine a measurement would now and then be
// wrong, and all timeouts with it.
func jiffiesPerSecond() (uint32, error) {
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return 0, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	length := time.Duration(resolution.Nano())
	if length < 100*time.Microsecond || length > 100*time.Millisecond { // Linux has 100 to 1000 Hz
		return 0, fmt.Errorf("read the length of a jiffy: the kernel says %s, which is not possible", length)
	}
	return uint32((time.Second + length/2) / length), nil
}

// loadClock loads sh_clock alone, and finds the unit of its time.
func (v *View) loadClock() (err error) {
	if v.rate, err = jiffiesPerSecond(); err != nil {
		return err
	}
	coll, err := v.Load(v.opts.Version.Only(abi.ObjectSweep, "sh_clock"), nil)
	if err != nil {
		return fmt.Errorf("load the program that tells the time: %w", err)
	}
	defer coll.Close()
	v.clock, err = kernel.TakeProgram(coll, "sh_clock")
	return err
}

// Close closes the maps.
func (v *View) Close() error {
	errs := []error{v.open.unload()}
	for _, m := range v.memory {
		errs = append(errs, unix.Munmap(m))
	}
	v.memory, v.services, v.backends, v.marks, v.runs, v.settings = nil, nil, nil, nil, nil, nil
	if v.slots != nil {
		errs = append(errs, v.slots.close())
	}
	if v.clock != nil {
		errs = append(errs, v.clock.Close())
		v.clock = nil
	}
	kernel.CloseMaps(v.maps)
	v.maps = nil
	return errors.Join(errs...)
}

// MapArray maps elements of an array into this process, from first on; first is at the beginning of a page.
func MapArray(m *ebpf.Map, name string, first, count uint32, protection int) ([]byte, error) {
	size := int(m.ValueSize())
	memory, err := unix.Mmap(m.FD(), int64(first)*int64(size), int(count)*size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w; the kernel must be 5.5 or later", name, err)
	}
	return memory, nil
}

// mapMemory maps the arrays into this process, except for the slots.
func (v *View) mapMemory(writable bool) error {
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	open := func(name string) ([]byte, error) {
		m := v.maps[name]
		memory, err := MapArray(m, name, 0, m.MaxEntries(), protection)
		if err != nil {
			return nil, err
		}
		v.memory = append(v.memory, memory)
		return memory, nil
	}
	services, err1 := open(abi.MapServices)
	backends, err2 := open(abi.MapBackends)
	sources, err3 := open(abi.MapSources)
	settings, err4 := open(abi.MapSettings)
	marks, err5 := open(abi.MapMarks)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return err
	}
	v.services, v.backends, v.slots = abi.Array[abi.Service](services), abi.Array[abi.Backend](backends), &slotMemory{of: v.maps[abi.MapSlots], protection: protection}
	v.runs, v.settings, v.marks = abi.Array[abi.Addr](sources), abi.Array[abi.Settings](settings), abi.Array[uint64](marks)
	return nil
}

// Contents reads the data that the reconciler keeps in the maps.
func (v *View) Contents() (reconcile.Contents, error) {
	c := reconcile.Contents{
		Backends: map[uint32]reconcile.BackendRecord{}, Services: map[uint32]reconcile.ServiceRecord{},
		Frontends: map[model.Frontend]uint32{}, Addresses: map[netip.Addr]reconcile.AddressRecord{},
		Slots: map[uint32]reconcile.Table{}, BeforeSlots: map[uint32]reconcile.Table{},
		BackendGenerations: map[uint32]uint8{}, ServiceGenerations: map[uint32]uint8{},
	}
	v.readBackends(&c)
	if err := v.readServices(&c); err != nil {
		return c, err
	}
	if err := v.readFrontends(&c); err != nil {
		return c, err
	}
	if err := v.readFilters(&c); err != nil {
		return c, err
	}
	var key abi.Addr
	var address abi.Address
	all := v.maps[abi.MapAddresses].Iterate()
	for all.Next(&key, &address) {
		a := abi.FromAddr(key)
		c.Addresses[a] = abi.FromFlags(a, address.Flags)
	}
	if err := all.Err(); err != nil {
		return c, fmt.Errorf("read %s: %w", abi.MapAddresses, err)
	}
	return c, nil
}

func (v *View) readBackends(c *reconcile.Contents) {
	for i := range v.backends {
		b := &v.backends[i]
		switch {
		case i == 0:
		case b.Live != 0:
			c.Backends[uint32(i)] = reconcile.BackendRecord{
				BackendRef:     reconcile.BackendRef{Index: uint32(i), Generation: b.Generation},
				BackendAddress: model.BackendAddress{Address: abi.FromAddr(b.Address), Port: kernel.FromWire(b.Port)},
				Draining:       b.Draining != 0,
				Down:           abi.Draining(b.Draining) == abi.DRAINING_DOWN,
			}
		case b.Generation != 0:
			c.BackendGenerations[uint32(i)] = b.Generation
		}
	}
}

// readSlots reads a table.
func (v *View) readSlots(service string, first, count uint32) (reconcile.Table, error) {
	if uint64(first)+uint64(count) > uint64(v.slots.len()) {
		return nil, fmt.Errorf("the maps say that service %q has slots %d to %d, but there are only %d slots: the maps are damaged, run `shunt detach` and start again",
			service, first, uint64(first)+uint64(count)-1, v.slots.len())
	}
	slots := make(reconcile.Table, count)
	err := v.slots.each(first, count, func(i int, slot *uint64) { slots.Set(i, abi.FromSlot(atomic.LoadUint64(slot))) })
	return slots, err
}

// readServices reads the services; a service is present while it has a name.
func (v *View) readServices(c *reconcile.Contents) error {
	var key abi.NameKey
	var name abi.Name
	all := v.maps[abi.MapNames].Iterate()
	for all.Next(&key, &name) {
		if key.Kind != uint32(abi.NAME_SERVICE) || int(key.Index) >= len(v.services) {
			continue
		}
		s := &v.services[key.Index]
		r := reconcile.ServiceRecord{
			Index: key.Index, Generation: s.Generation, Name: abi.FromName(name),
			Forwarding: abi.FromNumber(abi.Forwardings, s.Forwarding), Seed: s.Seed,
			Tracking:        abi.FromNumber(abi.Trackings, s.Tracking),
			AffinityTimeout: time.Duration(s.AffinitySeconds) * time.Second,
			Policy:          abi.FromPolicy(s),
		}
		r.Offset, r.Size = abi.FromRun(atomic.LoadUint64(&s.Table))
		r.BeforeOffset, r.BeforeSize = abi.FromRun(atomic.LoadUint64(&s.TableBefore))
		var err error
		if c.Slots[key.Index], err = v.readSlots(r.Name, r.Offset, r.Size); err != nil {
			return err
		}
		if r.BeforeSize > 0 {
			if c.BeforeSlots[key.Index], err = v.readSlots(r.Name, r.BeforeOffset, r.BeforeSize); err != nil {
				return err
			}
		}
		c.Services[key.Index] = r
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read %s: %w", abi.MapNames, err)
	}
	for i := range v.services {
		if _, ok := c.Services[uint32(i)]; !ok && v.services[i].Generation != 0 {
			c.ServiceGenerations[uint32(i)] = v.services[i].Generation
		}
	}
	return nil
}

// readFrontends joins prefixes to ranges again. Two adjacent ranges of one service become one, which is
// equivalent, because the prefixes decide.
func (v *View) readFrontends(c *reconcile.Contents) error {
	var key abi.FrontendKey
	var entry abi.Frontend
	exact := v.maps[abi.MapFrontends].Iterate()
	for exact.Next(&key, &entry) {
		c.Frontends[abi.FromFrontendKey(key)] = entry.ServiceIndex
	}
	if err := exact.Err(); err != nil {
		return fmt.Errorf("read %s: %w", abi.MapFrontends, err)
	}
	type piece struct {
		model.Frontend
		service uint32
	}
	var pieces []piece
	var prefix abi.RangeKey
	ranges := v.maps[abi.MapRanges].Iterate()
	for ranges.Next(&prefix, &entry) {
		f := abi.FromRangeKey(prefix)
		if f.Ports == value.AnyPort {
			c.Frontends[f] = entry.ServiceIndex
			continue
		}
		pieces = append(pieces, piece{f, entry.ServiceIndex})
	}
	if err := ranges.Err(); err != nil {
		return fmt.Errorf("read %s: %w", abi.MapRanges, err)
	}
	slices.SortFunc(pieces, func(a, b piece) int {
		if n := a.Address.Compare(b.Address); n != 0 {
			return n
		}
		if n := int(a.Protocol) - int(b.Protocol); n != 0 {
			return n
		}
		return int(a.Ports.First) - int(b.Ports.First)
	})
	for i := 0; i < len(pieces); {
		whole, j := pieces[i], i+1
		for ; j < len(pieces) && pieces[j].service == whole.service && pieces[j].Address == whole.Address &&
			pieces[j].Protocol == whole.Protocol && pieces[j].Ports.First == whole.Ports.Last+1; j++ {
			whole.Ports.Last = pieces[j].Ports.Last
		}
		c.Frontends[whole.Frontend] = whole.service
		i = j
	}
	return nil
}

// Traffic is the number of packets and bytes of a service or a backend since the data plane was loaded.
type Traffic struct {
	PacketsIn    uint64 `json:"packets_in"` // from clients
	BytesIn      uint64 `json:"bytes_in"`   // whole frames
	PacketsOut   uint64 `json:"packets_out"`
	BytesOut     uint64 `json:"bytes_out"`
	FlowsCreated uint64 `json:"flows_created"`
}

// add adds traffic that was counted elsewhere.
func (t *Traffic) add(o Traffic) {
	t.PacketsIn += o.PacketsIn
	t.BytesIn += o.BytesIn
	t.PacketsOut += o.PacketsOut
	t.BytesOut += o.BytesOut
	t.FlowsCreated += o.FlowsCreated
}

// Counters are all counters, summed over the CPUs.
type Counters struct {
	Services map[uint32]Traffic      // by service index; of the services in the maps
	Backends map[uint32]Traffic      // by backend index; of the backends in the maps
	Reasons  map[string]kernel.Count // by the reason's name, without zeros

	names map[uint32]string // of Services
}

// Counters reads the counters. They grow while they are read.
func (v *View) Counters() (Counters, error) {
	c := Counters{Services: map[uint32]Traffic{}}
	var err error
	if c.names, err = v.serviceNames(); err != nil {
		return c, err
	}
	services := uint32(0) // the first so many have all that are there
	for index := range c.names {
		services = max(services, index+1)
	}
	traffic, err := v.readTraffic(abi.MapSvcTraffic, services)
	if err != nil {
		return c, err
	}
	for index := range c.names {
		c.Services[index] = traffic[index]
	}
	backends := uint32(0)
	for i := range v.backends {
		if v.backends[i].Live != 0 {
			backends = uint32(i) + 1
		}
	}
	if traffic, err = v.readTraffic(abi.MapBeTraffic, backends); err != nil {
		return c, err
	}
	c.Backends = make(map[uint32]Traffic, backends)
	for i := uint32(1); i < backends; i++ {
		if v.backends[i].Live != 0 {
			c.Backends[i] = traffic[i]
		}
	}
	c.Reasons, err = v.ReasonCounts()
	return c, err
}

// ReasonCounts returns the counters of reasons that are not zero, by name.
func (v *View) ReasonCounts() (map[string]kernel.Count, error) {
	return kernel.ReasonCounts(v.maps[abi.MapReasons])
}

// readClock reads the kernel's jiffies; with beat it also writes the heartbeat.
func (v *View) readClock(beat bool) (abi.Clock, error) {
	var in, out abi.Clock
	if beat {
		in.Beat = 1
	}
	if _, err := v.clock.Run(&ebpf.RunOptions{Context: in, ContextOut: &out}); err != nil {
		return out, fmt.Errorf("run sh_clock to read the kernel's time: %w", err)
	}
	return out, nil
}

// Jiffies returns the kernel's time, in the unit of flows.
func (v *View) Jiffies() (uint64, error) {
	now, err := v.readClock(false)
	return now.Jiffies, err
}

// HeartbeatAge returns the time since the daemon's last heartbeat; known is false if there was none.
func (v *View) HeartbeatAge() (age time.Duration, known bool, err error) {
	beat := atomic.LoadUint64(&v.settings[0].Heartbeat)
	if beat == 0 {
		return 0, false, nil
	}
	now, err := v.readClock(false)
	if err != nil {
		return 0, false, err
	}
	return time.Duration(now.Jiffies-beat) * time.Second / time.Duration(v.rate), true, nil
}
