package memleak

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

const uncheckedTypes = "the kernel does not check the arguments' types"

// at returns a sensor at a tracepoint.
func at(name, watches, tracepoint, program string) sensor.Sensor {
	return sensor.Sensor{Name: name, Watches: watches, Ways: []sensor.Way{
		{Kind: sensor.TPBTF, Target: tracepoint, Program: program + "_btf"},
		{Kind: sensor.RawTP, Target: tracepoint, Program: program + "_raw", Loses: uncheckedTypes},
	}}
}

// onlyRaw removes the way that checks types.
func onlyRaw(s sensor.Sensor) sensor.Sensor {
	s.Ways = s.Ways[1:]
	return s
}

// withFunction adds the way for kernels that lack the tracepoint, and the loss if there is none.
func withFunction(s sensor.Sensor, kind sensor.Kind, function, program, without string) sensor.Sensor {
	s.Ways = append(s.Ways, sensor.Way{Kind: kind, Target: function, Program: program, Loses: "this kernel has no such tracepoint, and the function may change"})
	s.Without = without
	return s
}

const (
	withoutVmalloc = "ranges of vmalloc and vmap are not watched"
	withoutBulk    = "what is freed in bulk (kfree_rcu, heads of packets) looks live until its address is used again; the column UNFREED counts that"
)

// sensors are the tool's sensors, in the order of its first lines. Frees are watched before allocations, so that no
// allocation is seen whose free could be missed.
func sensors() []sensor.Sensor {
	return []sensor.Sensor{
		at(freesOfKmalloc, "memory that kfree() gives back", "kfree", "sh_kfree"),
		at(freesOfSlab, "objects given back to their cache", "kmem_cache_free", "sh_slab_f"),
		at(again(freesOfKmalloc), watchesAgain, "kfree", "sh_kfree2"),
		at(again(freesOfSlab), watchesAgain, "kmem_cache_free", "sh_slab_f2"),
		{Name: freesInBulk, Watches: "objects given back many at a time", Without: withoutBulk,
			Ways: []sensor.Way{{Kind: sensor.Fentry, Target: "kmem_cache_free_bulk", Program: "sh_bulk_fn"}}},
		onlyRaw(at(freesOfPages, "pages that are given back", "mm_page_free", "sh_page_f")),
		onlyRaw(at(again(freesOfPages), watchesAgain, "mm_page_free", "sh_page_f2")),
		withFunction(at(freesOfVmalloc, "ranges of addresses that are given back", "free_vmap_area_noflush", "sh_vmap_f"),
			sensor.Fentry, "free_vmap_area_noflush", "sh_vmap_f_fn", withoutVmalloc),
		at(freesOfPercpu, "memory of each CPU that is given back", "percpu_free_percpu", "sh_pcpu_f"),
		at("kmalloc", "memory from kmalloc()", "kmalloc", "sh_kmalloc"),
		at("slab", "objects from caches, by the cache's name", "kmem_cache_alloc", "sh_slab_a"),
		onlyRaw(at("pages", "pages but those of user space and of the page cache", "mm_page_alloc", "sh_page_a")),
		withFunction(at("vmalloc", "ranges of addresses from vmalloc() and vmap()", "alloc_vmap_area", "sh_vmap_a"),
			sensor.Fexit, "alloc_vmap_area", "sh_vmap_a_fn", withoutVmalloc),
		at("percpu", "memory of each CPU", "percpu_alloc_percpu", "sh_pcpu_a"),
	}
}

// Names of the sensors of frees.
const (
	freesOfKmalloc = "frees of kmalloc"
	freesOfSlab    = "frees of slab"
	freesInBulk    = "frees in bulk"
	freesOfPages   = "frees of pages"
	freesOfVmalloc = "frees of vmalloc"
	freesOfPercpu  = "frees of percpu"
)

// again returns the name of a sensor's second program, which runs where the first one was interrupted.
func again(name string) string { return name + ", again" }

const watchesAgain = "the same, where an interrupt came into the first"

// seenInKernel has the sensors by the events that they see.
var seenInKernel = seen{
	Kmalloc: {[]string{"kmalloc"}, []string{freesOfKmalloc, freesOfSlab, freesInBulk}}, Slab: {[]string{"slab"}, nil}, Pages: {[]string{"pages"}, []string{freesOfPages}},
	Vmalloc: {[]string{"vmalloc"}, []string{freesOfVmalloc}}, Percpu: {[]string{"percpu"}, []string{freesOfPercpu}},
}

// Options select the memory that is watched.
type Options struct {
	BTF      sensor.BTF
	PID      int           // watch the memory of this process, from its C library; 0: the kernel's
	Cgroup   string        // only allocations of tasks in this folder of the second cgroup hierarchy; "": all
	Duration time.Duration // from the moment that the sensors are attached; 0: until the context ends
	Interval time.Duration
	Sample   uint32  // watch one address in this number, a power of 2; 0 stands for 1: all
	Table    uint32  // largest number of live allocations; 0 stands for TableSize
	MaxCPU   float64 // percent of one CPU; if the sensors take more, fewer addresses are watched; 0: no limit
}

// TableSize is the default limit of live allocations in the table.
const TableSize = uint32(memleakLeakConstantLEAK_TABLE_SIZE)

// SampleMax is the largest N of sampling 1/N.
const SampleMax = 1 << 16

// collector watches this machine's kernel, or a process. It is for one goroutine.
type collector struct {
	set     *sensor.Set
	process *watchedProcess // nil: the kernel
	by      seen
	sample  uint32
	blind   map[Kind]bool // none of its allocations, or none of its frees, are seen
}

func open(o Options) (*collector, error) {
	spec, err := loadMemleak()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag: %w", err)
	}
	group := uint64(0)
	if o.Cgroup != "" {
		if group, err = cgroup.ID(o.Cgroup); err != nil {
			return nil, err
		}
	}
	c := &collector{sample: max(1, o.Sample), by: seenInKernel}
	if o.Table > 0 {
		spec.Maps[memleakMapShLeaks].MaxEntries = o.Table
	}
	all, of := sensors(), sensor.Process{}
	if o.PID != 0 {
		if c.process, err = openProcess(o.PID); err != nil {
			return nil, err
		}
		all, c.by = c.process.sensors()
		of.PID = o.PID
	} else {
		spec.Maps[memleakMapShLeakCalls].MaxEntries = 1
	}
	c.set, err = sensor.Open(spec, all, sensor.Options{BTF: o.BTF, Process: of,
		Constants: map[string]any{"except_tgid": uint32(os.Getpid()), "only_cgroup": group, "sample_mask": c.sample - 1}})
	if err != nil {
		return nil, errors.Join(err, c.release())
	}
	c.blind = blind(c.set.Results)
	return c, nil
}

// blind returns the kinds that cannot be shown, because one of their sensors is not attached.
func blind(results []sensor.Result) map[Kind]bool {
	blind := map[Kind]bool{}
	for _, r := range results {
		if r.Got == nil && r.Sensor.Without == withoutVmalloc {
			blind[Vmalloc] = true
		}
	}
	return blind
}

// live returns the allocations in the table, some of which may come and go meanwhile.
func (c *collector) live() ([]Allocation, error) {
	table := c.set.Maps[memleakMapShLeaks]
	const chunk = 4096
	keys, values := make([]uint64, chunk), make([]memleakLeakAlloc, chunk)
	var all []Allocation
	var cursor ebpf.MapBatchCursor
	for done := false; !done; {
		n, err := table.BatchLookup(&cursor, keys, values, nil)
		done = errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !done {
			return nil, fmt.Errorf("read the live allocations: %w", err)
		}
		for i, v := range values[:n] {
			if kind := Kind(v.Kind); !c.blind[kind] && isSampled(keys[i], c.sample) {
				all = append(all, Allocation{Address: keys[i], Bytes: v.Bytes, Birth: v.BirthNs, Cache: v.Cache, CallSite: v.CallSite,
					Cgroup: v.CgroupId, Stack: v.Stack, PID: v.Tgid, Kind: kind, Reclaimable: v.IsReclaimable != 0})
			}
		}
	}
	return all, nil
}

// isSampled does the same as is_sampled of the programs.
func isSampled(address uint64, one uint32) bool {
	return address>>3*uint64(memleakLeakConstantLEAK_MULTIPLIER)>>20&uint64(one-1) == 0
}

// sampleLess watches one address in one from now on, which is fewer than before. The remaining addresses were all watched
// before, so their live allocations stay exact.
func (c *collector) sampleLess(one uint32) error {
	if err := c.set.SetSample("sample_mask", one); err != nil {
		return err
	}
	c.sample = one
	return c.forget()
}

// forget removes allocations outside of the sample from the table, because their frees will not.
func (c *collector) forget() error {
	table := c.set.Maps[memleakMapShLeaks]
	var address uint64
	var value memleakLeakAlloc
	var gone []uint64
	for entries := table.Iterate(); entries.Next(&address, &value); {
		if !isSampled(address, c.sample) {
			gone = append(gone, address)
		}
	}
	for _, address := range gone {
		if err := table.Delete(address); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget allocations outside of the sample: %w", err)
		}
	}
	return nil
}

// frames returns a stack, the innermost frame first; without a stack, the caller of the allocator.
func (c *collector) frames(a Allocation) []uint64 {
	var stack memleakLeakStack
	if a.Stack >= 0 && c.set.Maps[memleakMapShLeakStacks].Lookup(uint32(a.Stack), &stack) == nil {
		frames := stack.Frames[:]
		if end := slices.Index(frames, 0); end >= 0 {
			frames = frames[:end]
		}
		return fromCaller(frames, a.CallSite)
	}
	if a.CallSite != 0 {
		return []uint64{a.CallSite}
	}
	return nil
}

// fromCaller leaves out the frames of the allocator, as far as the call site shows them.
func fromCaller(frames []uint64, callSite uint64) []uint64 {
	if at := slices.Index(frames, callSite); at > 0 {
		return frames[at:]
	}
	return frames
}

// cache returns the name of a slab cache; "": it is not known.
func (c *collector) cache(key uint64) string {
	var cache memleakLeakCache
	if c.set.Maps[memleakMapShLeakCaches].Lookup(key, &cache) != nil {
		return ""
	}
	return event.Text(cache.Name[:])
}

// unfreed returns the number of times that the free of a stack's allocation was not seen.
func (c *collector) unfreed(stack int32) uint64 {
	var n uint64
	if c.set.Maps[memleakMapShLeakUnfreed].Lookup(stack, &n) != nil {
		return 0
	}
	return n
}

// counts returns the numbers of allocations and frees that the programs saw and missed.
func (c *collector) counts() (Counts, error) {
	counts := Counts{}
	for kind := range c.by {
		counts[kind] = &Count{}
		for what, n := range counts[kind].parts() {
			var all []uint64
			key := uint32(kind)*uint32(memleakLeakCountLEAK_COUNTS_COUNT) + uint32(what)
			if err := c.set.Maps[memleakMapShLeakCounts].Lookup(key, &all); err != nil {
				return nil, fmt.Errorf("read the counters: %w", err)
			}
			for _, one := range all {
				*n += one
			}
		}
	}
	notRun, err := c.set.Missed()
	if err != nil {
		return nil, err
	}
	for kind, names := range c.by {
		counts[kind].AllocsNotRun = counts[kind].endless
		for _, name := range names.allocs {
			counts[kind].AllocsNotRun += notRun[name]
		}
		for _, name := range names.frees {
			counts[kind].FreesNotRun += notRun[name]
		}
		counts[kind].FreesNotRun -= min(counts[kind].FreesNotRun, counts[kind].caught)
	}
	return counts, nil
}

// now returns CLOCK_MONOTONIC, as the programs read it.
func now() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail with this clock
	return uint64(t.Nano())
}

func (c *collector) release() error {
	err := c.set.Close()
	c.process.close()
	return err
}

// Examine attaches the sensors of `shunt diag memleak` and detaches them again. If the tool could not run, the error is
// sensor.ErrNoWay, and the results are complete.
func Examine(b sensor.BTF) ([]sensor.Result, error) {
	spec, err := loadMemleak()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag: %w", err)
	}
	spec.Maps[memleakMapShLeaks].MaxEntries = 1
	set, err := sensor.Open(spec, sensors(), sensor.Options{BTF: b})
	if set == nil {
		return nil, err
	}
	return set.Results, errors.Join(err, set.Close())
}
