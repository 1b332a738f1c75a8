package memleak

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Kind is the kind of an allocation.
type Kind uint32

// The kinds, as the programs number them.
const (
	Kmalloc = Kind(memleakLeakKindLEAK_KMALLOC)
	Slab    = Kind(memleakLeakKindLEAK_SLAB)
	Pages   = Kind(memleakLeakKindLEAK_PAGES)
	Vmalloc = Kind(memleakLeakKindLEAK_VMALLOC)
	Percpu  = Kind(memleakLeakKindLEAK_PERCPU)
	Malloc  = Kind(memleakLeakKindLEAK_MALLOC)
	Mmap    = Kind(memleakLeakKindLEAK_MMAP)
)

// Kinds are all kinds of the kernel, and KindsOfProcess all kinds of a process.
var (
	Kinds          = []Kind{Kmalloc, Slab, Pages, Vmalloc, Percpu}
	KindsOfProcess = []Kind{Malloc, Mmap}
)

func (k Kind) String() string {
	if names := []string{"kmalloc", "slab", "pages", "vmalloc", "percpu", "malloc", "mmap"}; int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// MarshalText returns the same as String, for JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Allocation is a live allocation. Birth is CLOCK_MONOTONIC, ns.
type Allocation struct {
	Address, Bytes, Birth   uint64
	Cache, CallSite, Cgroup uint64
	Stack                   int32
	PID                     uint32
	Kind                    Kind
	Reclaimable             bool
}

// State is the development of a row.
type State string

// The states, in the order of rows.
const (
	// Growing: over several intervals, the allocations older than two intervals became more and more.
	Growing State = "growing"
	// Unsure: the same, but unseen frees may explain it.
	Unsure State = "unsure"
	// Reclaimable: the same, but the kernel takes this memory back when it needs memory.
	Reclaimable State = "reclaimable"
	// Early: there are too few intervals to tell.
	Early State = "early"
	// Steady: it does not grow.
	Steady State = "steady"
)

var order = []State{Growing, Unsure, Reclaimable, Early, Steady}

// Row has the live allocations of one kind and cache with one stack.
type Row struct {
	Kind      Kind     `json:"kind"`
	Cache     string   `json:"cache,omitempty"` // of the kind slab
	State     State    `json:"state"`
	Live      uint64   `json:"live"` // allocations; with sampling the sample's
	Bytes     uint64   `json:"bytes"`
	Estimate  *Scaled  `json:"estimate,omitempty"` // for all, with sampling
	Growth    float64  `json:"growth_per_second"`  // allocations that are older than two intervals; with sampling an estimate
	Rate      float64  `json:"growth_bytes_per_second"`
	Oldest    float64  `json:"oldest_seconds"` // age of the oldest
	Unfreed   uint64   `json:"unfreed"`        // frees of this stack's allocations that are known to have been missed
	Stack     []string `json:"stack"`          // the innermost function first
	Cgroups   []Share  `json:"cgroups"`        // by allocations
	Addresses []Live   `json:"addresses,omitempty"`
	Untold    int      `json:"addresses_untold,omitempty"` // number of further ones
}

// Scaled is an estimate from a sample of 1/N; each error is half of the interval that contains 95 % of these estimates.
type Scaled struct {
	Live       uint64 `json:"live"`
	LiveError  uint64 `json:"live_error"`
	Bytes      uint64 `json:"bytes"`
	BytesError uint64 `json:"bytes_error"`
}

// Share is the part of one cgroup.
type Share struct {
	Cgroup string `json:"cgroup"` // below the root of the second hierarchy; its number if it has gone
	Live   uint64 `json:"live"`
	Bytes  uint64 `json:"bytes"`
}

// Live is an allocation of a row.
type Live struct {
	Address string  `json:"address"` // of pages, the address of their struct page
	Bytes   uint64  `json:"bytes"`
	Age     float64 `json:"age_seconds"`
	PID     uint32  `json:"pid"` // of the process that was running; 0: none
}

const (
	window       = 12  // number of points in which growth is looked for
	pointsLeast  = 8   // fewer are not enough
	risesLeast   = 4   // this many rises are growth, and not a step
	grownLeast   = 16  // allocations: fewer come and go on any machine
	unfreedShare = 10  // each missed free that was found out stands for this many that were not
	addressesMax = 100 // of a row
	agedAfter    = 2   // intervals
	z95          = 1.959964
)

// point is a row at the end of an interval.
type point struct {
	at          float64 // seconds
	aged, bytes float64 // bytes of allocations that are older than two intervals
	missed      uint64  // frees of its kind that were missed, since the start
	unfreed     uint64
}

// history has a row's points at the ends of intervals: the latest ones, and some of the whole time.
type history struct {
	recent, whole []point
	every, turn   int // of the whole time, every so-many-th point is kept
	peak          float64
	fell          bool // it fell to less than half of its peak
}

// add adds a point. If the whole time has twice as many points as the window, it drops every second one.
func (h *history) add(p point) {
	h.peak = max(h.peak, p.aged)
	h.fell = h.fell || p.aged < h.peak/2
	h.recent = append(h.recent, p)
	if len(h.recent) > window {
		h.recent = h.recent[1:]
	}
	if h.turn++; h.turn < h.every {
		return
	}
	h.turn = 0
	if h.whole = append(h.whole, p); len(h.whole) == 2*window {
		h.every *= 2
		kept := h.whole[:0]
		for i := 1; i < 2*window; i += 2 {
			kept = append(kept, h.whole[i])
		}
		h.whole = kept
	}
}

// grows reports growth: more at the end, with several rises and hardly a fall, and the least of the later half is more than the most of the earlier half.
// A step up is no growth, nor are allocations that come and go.
func grows(points []point) bool {
	if len(points) < pointsLeast {
		return false
	}
	rises, falls := 0, 0
	for i, p := range points[1:] {
		switch before := points[i].aged; {
		case p.aged > before:
			rises++
		case p.aged < before:
			falls++
		}
	}
	half := len(points) / 2
	aged := func(a, b point) int { return cmp.Compare(a.aged, b.aged) }
	return points[len(points)-1].aged-points[0].aged >= grownLeast && rises >= risesLeast && rises >= 3*falls && slices.MinFunc(points[half:], aged).aged > slices.MaxFunc(points[:half], aged).aged
}

// rowKey identifies a row: by the kind, the cache's name and the stack in words.
type rowKey struct {
	kind         Kind
	cache, stack string
}

// namer returns the names for an allocation's numbers.
type namer interface {
	frames(a Allocation) []uint64
	cache(key uint64) string
	unfreed(stack int32) uint64
}

// account turns live allocations into rows, interval by interval. It does not use the kernel.
type account struct {
	interval  time.Duration
	sample    uint32
	names     namer
	function  func(address uint64) string
	addresses bool // list each allocation

	stacks    map[stackKey]stack
	caches    map[uint64]string
	histories map[rowKey]*history
	fell      map[rowKey]bool // rows that had old allocations once, and none later
	points    int
}

type stackKey struct {
	id       int32
	callSite uint64
	kind     Kind
}

func newAccount(interval time.Duration, sample uint32, names namer, function func(uint64) string, addresses bool) *account {
	a := &account{interval: interval, sample: max(1, sample), names: names, function: function, addresses: addresses,
		stacks: map[stackKey]stack{}, caches: map[uint64]string{}}
	a.restart()
	return a
}

// restart forgets the earlier allocations: growth is computed anew.
func (a *account) restart() {
	a.histories, a.fell, a.points = map[rowKey]*history{}, map[rowKey]bool{}, 0
}

// group is an unfinished row.
type group struct {
	row     Row
	ids     map[int32]bool
	aged    float64
	agedB   float64
	squares float64 // of bytes
	birth   uint64  // of the oldest one
	cgroups map[uint64]*Share
	all     []Allocation
}

// Snapshot has all rows at one time.
type Snapshot struct {
	Live    uint64
	Bytes   uint64
	Backing uint64 // bytes that slabs, vmalloc and percpu use for their memory and notes; the allocations in them have rows of their own
	Rows    []Row
}

// take makes rows of the live allocations. missed has the frees that were missed since the start, by kind.
func (a *account) take(live []Allocation, now uint64, seconds float64, missed map[Kind]uint64, cgroups map[uint64]string) Snapshot {
	groups := map[rowKey]*group{}
	var s Snapshot
	for _, one := range live {
		stack := a.stack(one)
		if stack.backing || a.cache(one) == rangesCache {
			s.Backing += one.Bytes
			continue
		}
		s.Live++
		s.Bytes += one.Bytes
		key := rowKey{one.Kind, a.cache(one), stack.text}
		g := groups[key]
		if g == nil {
			g = &group{row: Row{Kind: one.Kind, Cache: key.cache, Stack: stack.names}, ids: map[int32]bool{}, birth: one.Birth, cgroups: map[uint64]*Share{}}
			groups[key] = g
		}
		g.add(one, now, a.interval, a.addresses)
	}
	maps.DeleteFunc(a.histories, func(key rowKey, h *history) bool {
		gone := groups[key] == nil
		if gone && h.peak > 0 {
			a.fell[key] = true
		}
		return gone
	})
	a.points++
	for key, g := range groups {
		s.Rows = append(s.Rows, a.finish(key, g, now, seconds, missed[key.kind], cgroups))
	}
	slices.SortFunc(s.Rows, compareRows)
	return s
}

// compareRows sorts growing rows first, then faster ones, then older ones. Size does not count.
func compareRows(x, y Row) int {
	return cmp.Or(cmp.Compare(slices.Index(order, x.State), slices.Index(order, y.State)), cmp.Compare(y.Rate, x.Rate), cmp.Compare(y.Oldest, x.Oldest),
		cmp.Compare(y.Live, x.Live), cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Cache, y.Cache), slices.Compare(x.Stack, y.Stack))
}

func (g *group) add(one Allocation, now uint64, interval time.Duration, keep bool) {
	g.row.Live++
	g.row.Bytes += one.Bytes
	g.squares += float64(one.Bytes) * float64(one.Bytes)
	g.birth = min(g.birth, one.Birth)
	g.ids[one.Stack] = true
	if one.Reclaimable {
		g.row.State = Reclaimable
	}
	if now > one.Birth && now-one.Birth >= uint64(agedAfter*interval) {
		g.aged++
		g.agedB += float64(one.Bytes)
	}
	share := g.cgroups[one.Cgroup]
	if share == nil {
		share = &Share{}
		g.cgroups[one.Cgroup] = share
	}
	share.Live++
	share.Bytes += one.Bytes
	if keep {
		g.all = append(g.all, one)
	}
}

// finish turns a group into a row.
func (a *account) finish(key rowKey, g *group, now uint64, seconds float64, missed uint64, cgroups map[uint64]string) Row {
	r := g.row
	r.Oldest = float64(now-min(now, g.birth)) / 1e9
	for id := range g.ids {
		r.Unfreed += a.names.unfreed(id)
	}
	h := a.histories[key]
	if h == nil {
		// Before, it had no allocations: that holds for all intervals since the start.
		h = &history{every: 1, fell: a.fell[key]}
		for i := range min(a.points-1, window) {
			h.add(point{at: seconds - float64(min(a.points-1, window)-i)*a.interval.Seconds(), missed: missed, unfreed: r.Unfreed})
		}
		a.histories[key] = h
	}
	h.add(point{seconds, g.aged, g.agedB, missed, r.Unfreed})
	a.judge(&r, h)
	if a.sample > 1 {
		n := float64(a.sample)
		r.Estimate = &Scaled{Live: r.Live * uint64(a.sample), LiveError: uint64(math.Ceil(z95 * math.Sqrt(float64(r.Live)*n*(n-1)))),
			Bytes: r.Bytes * uint64(a.sample), BytesError: uint64(math.Ceil(z95 * math.Sqrt(g.squares*n*(n-1))))}
	}
	r.Cgroups = shares(g.cgroups, cgroups)
	r.Addresses, r.Untold = addressesOf(g.all, now)
	return r
}

// judge decides whether a row grows, how fast, and whether unseen frees may explain it.
func (a *account) judge(r *Row, h *history) {
	reclaimable := r.State == Reclaimable
	points := h.recent
	// Memory that has fallen once is freed in lumps, as the kernel does with ranges of vmalloc and after grace periods
	// of RCU: its growth between two lumps means nothing.
	is := grows(points) && !h.fell
	if !is && grows(h.whole) {
		points, is = h.whole, true
	}
	first, last := points[0], points[len(points)-1]
	if took := last.at - first.at; took > 0 {
		r.Growth = float64(a.sample) * (last.aged - first.aged) / took
		r.Rate = float64(a.sample) * (last.bytes - first.bytes) / took
	}
	// An unseen free is found out when its address is used again, which takes some time.
	unseen := max(last.missed-min(last.missed, first.missed), unfreedShare*(last.unfreed-min(last.unfreed, first.unfreed)))
	switch {
	case !is && a.points < pointsLeast:
		r.State = Early
	case !is:
		r.State = Steady
	case last.aged-first.aged <= float64(unseen) || last.aged <= float64(unfreedShare*last.unfreed):
		r.State = Unsure
	case reclaimable:
		r.State = Reclaimable
	default:
		r.State = Growing
	}
}

func shares(by map[uint64]*Share, paths map[uint64]string) []Share {
	all := []Share{}
	for id, share := range by {
		path, known := paths[id]
		switch {
		case !known:
			share.Cgroup = fmt.Sprint(id)
		case path == "":
			share.Cgroup = "/"
		default:
			share.Cgroup = path
		}
		all = append(all, *share)
	}
	slices.SortFunc(all, func(x, y Share) int { return cmp.Or(cmp.Compare(y.Live, x.Live), cmp.Compare(x.Cgroup, y.Cgroup)) })
	return all
}

// addressesOf returns the oldest allocations, and the number of the others.
func addressesOf(all []Allocation, now uint64) (told []Live, untold int) {
	slices.SortFunc(all, func(x, y Allocation) int {
		return cmp.Or(cmp.Compare(x.Birth, y.Birth), cmp.Compare(x.Address, y.Address))
	})
	for _, one := range all[:min(len(all), addressesMax)] {
		told = append(told, Live{fmt.Sprintf("%#x", one.Address), one.Bytes, float64(now-min(now, one.Birth)) / 1e9, one.PID})
	}
	return told, len(all) - len(told)
}

func (a *account) cache(one Allocation) string {
	if one.Cache == 0 {
		return ""
	}
	name, known := a.caches[one.Cache]
	if !known {
		name = a.names.cache(one.Cache)
		a.caches[one.Cache] = name
	}
	return name
}

// stack is a stack in words.
type stack struct {
	names   []string
	text    string
	backing bool // it holds other allocations, or notes on them
}

func (a *account) stack(one Allocation) stack {
	key := stackKey{one.Stack, one.CallSite, one.Kind}
	s, known := a.stacks[key]
	if known {
		return s
	}
	s.names = []string{}
	for _, address := range a.names.frames(one) {
		s.names = append(s.names, a.function(address))
	}
	if slices.Contains(Kinds, one.Kind) {
		s.backing = slices.ContainsFunc(s.names, func(f string) bool {
			return isFunction(f, ofSlabs) || one.Kind == Pages && isFunction(f, backing)
		})
		s.names = cut(s.names)
	}
	s.text = strings.Join(s.names, "\n")
	a.stacks[key] = s
	return s
}

// rangesCache is the cache in which vmalloc notes its ranges. Notes of freed ranges stay until there are many.
const rangesCache = "vmap_area"

// ofSlabs are the beginnings of the names of functions that take memory for new slabs, and for notes on them.
var ofSlabs = []string{"allocate_slab", "new_slab", "alloc_slab_obj_exts"}

// backing are the beginnings of the names of functions that take pages to put other allocations into.
var backing = []string{"__kmalloc_large", "___kmalloc_large", "kmalloc_large", "__vmalloc_area", "__vmalloc_node_range",
	"vm_area_alloc_pages", "pcpu_populate_chunk", "pcpu_alloc_pages", "pcpu_create_chunk"}

// allocators are the beginnings of the names of functions that only pass the request on, and of functions that run the programs.
var allocators = []string{"bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_", "bpf_get_stackid", "bpf_trampoline_", "__alloc_pages", "__alloc_frozen_pages",
	"alloc_pages", "alloc_frozen_pages", "__folio_alloc", "folio_alloc", "__get_free_pages", "get_free_pages", "get_zeroed_page", "__get_vm_area_node",
	"alloc_vmap_area", "__vmalloc", "vmalloc", "vzalloc", "kvmalloc", "kmem_cache_alloc", "kmalloc_trace", "__kmalloc", "__kvmalloc", "pcpu_alloc", "__alloc_percpu"}

// isFunction reports whether a frame is in a function whose name has one of these beginnings.
func isFunction(frame string, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(frame, name) })
}

// cut leaves out the allocator at the top, and at the bottom the code that an interrupt has interrupted: that code did not
// ask for memory, and it differs each time.
func cut(names []string) []string {
	for len(names) > 1 && isFunction(names[0], allocators) {
		names = names[1:]
	}
	for i, name := range names {
		if i > 0 && strings.HasPrefix(name, "asm_") {
			return names[:i]
		}
	}
	return names
}
