package differential_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/test/space"
)

var worldCount atomic.Uint32

// world is a namespace with a data plane that has the services.
type world struct {
	testing.TB
	d       *datapath.Datapath
	options store.Options
	ifindex [armsN]int
	cpus    int
	// backends are the reconciler's records, by index.
	backends map[uint32]reconcile.BackendRecord
	reasons  *ebpf.Map
	flows    map[string]*ebpf.Map // the state left by an episode, by name
	bounds   *ebpf.Map            // sh_svc_flows
	tokens   []*ebpf.Map          // of ICMP errors and resets, one map a program
	counted  []count              // the counters up to the last packet, by reason and CPU
	now      []count
	keys     []uint32
}

// tokens is struct icmp_tokens of bpf/lb/icmp.h.
type tokens struct{ Refilled, Level uint64 }

// count is struct count of bpf/core/types.h.
type count struct{ Packets, Bytes uint64 }

// newWorld makes namespace, interfaces and data plane, and removes them after the test. It moves
// the test's goroutine into the namespace for good: the thread ends with it.
func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	name := fmt.Sprintf("shunt-differ-%d-%d", os.Getpid(), worldCount.Add(1))
	w := &world{TB: t, flows: map[string]*ebpf.Map{}, options: store.Options{
		Instance: name, PinRoot: kernel.DefaultPinRoot,
		// Room for more flows than an episode has packets: displacement in rings is not tested.
		Limits: model.Limits{Flows: 4096, Services: 128, Backends: 128, Slots: 1 << 16, Remembered: 1 << 17, Filters: 64},
		Log:    slog.New(slog.NewTextHandler(io.Discard, nil)),
	}}
	space.Enter(t, name)
	space.Stay(t)
	for i, a := range arms {
		w.ifindex[i] = space.AddArm(t, a.name, a.mac, a.mtu, a.addresses...).Attrs().Index
	}
	w.open()
	w.apply()
	w.findTokens()
	return w
}

func (w *world) open() {
	var err error
	w.d = space.Open(w, w.options)
	for _, a := range arms {
		mode := model.AttachNative
		if a.generic {
			mode = model.AttachGeneric
		}
		_, err = w.d.Attach(a.name, mode)
		must(w, err)
	}
	must(w, w.d.SetSettings(timeouts, pools[0]))
	w.d.SetEncapsulation(outer)
	w.reasons, w.bounds = w.pinned("sh_reasons"), w.pinned("sh_svc_flows")
	for _, name := range []string{"sh_flows", "sh_fragments", "sh_remembered", "sh_source_rates"} {
		w.flows[name] = w.pinned(name)
	}
	w.cpus, err = ebpf.PossibleCPU()
	must(w, err)
	size := int(w.reasons.MaxEntries())
	w.counted, w.now, w.keys = make([]count, size*w.cpus), make([]count, size*w.cpus), make([]uint32, size)
}

// pinned opens a map of the data plane, without the product.
func (w *world) pinned(name string) *ebpf.Map {
	w.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "abi-1", name), nil)
	must(w, err)
	w.Cleanup(func() { _ = m.Close() })
	return m
}

func (w *world) apply() {
	reconciler := reconcile.New(w.d, reconcile.BeforeNaming(w.resolve))
	_, err := reconciler.Apply(reconcile.Desired{
		Services: model.Shared(services()), NATSources: natSources, Limits: w.options.Limits,
		HostOwn: map[netip.Addr]bool{hostVIPs[0]: true, hostVIPs[1]: true},
	})
	must(w, err)
	for _, a := range ownedAddresses {
		must(w, w.d.SetOwned(a, store.OwnedForever))
	}
	contents, err := w.d.Contents()
	must(w, err)
	w.backends = contents.Backends
	w.remove(gone)
}

// remove deletes a backend, though slots and flows name it.
func (w *world) remove(address netip.Addr) {
	for _, b := range w.backends {
		if b.Address == address {
			must(w, w.d.DeleteBackend(b.BackendRef))
		}
	}
}

// bringBack undoes remove.
func (w *world) bringBack(address netip.Addr) {
	for _, b := range w.backends {
		if b.Address == address {
			must(w, w.d.PutBackend(b))
			w.resolve([]reconcile.BackendRecord{b})
		}
	}
}

// resolve sets the ways to backends, before a slot names them.
func (w *world) resolve(records []reconcile.BackendRecord) {
	for _, r := range records {
		if r.Address != unsourced {
			must(w, w.d.SetNATSources(r.BackendRef, []netip.Addr{natSourceFor(r.Address)}))
		}
		if r.Address != unresolved {
			must(w, w.d.SetHop(r.BackendRef, store.Hop{Interface: w.ifindex[behind(r.Address)], MAC: stationOf(r.Address)}))
		}
	}
}

// findTokens opens the maps that limit the programs' own packets. Each program has one for itself,
// which is not pinned.
func (w *world) findTokens() {
	for _, a := range arms {
		link, err := netlink.LinkByName(a.name)
		must(w, err)
		program, err := ebpf.NewProgramFromID(ebpf.ProgramID(link.Attrs().Xdp.ProgId))
		must(w, err)
		info, err := program.Info()
		must(w, errors.Join(err, program.Close()))
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			must(w, err)
			if about, err := m.Info(); err != nil || about.Name != "sh_icmp_tokens" {
				must(w, errors.Join(err, m.Close()))
				continue
			}
			w.tokens = append(w.tokens, m)
			w.Cleanup(func() { _ = m.Close() })
		}
	}
	if len(w.tokens) != len(arms) {
		w.Fatalf("%d programs have %d maps sh_icmp_tokens; this test empties that of each", len(arms), len(w.tokens))
	}
	w.unlimit()
}

// unlimit fills these maps up: no packet of our own is held back because of earlier ones.
func (w *world) unlimit() {
	longAgo := make([]tokens, w.cpus)
	for _, m := range w.tokens {
		for kind := range m.MaxEntries() {
			must(w, m.Put(kind, longAgo))
		}
	}
}

// renew makes the data plane forget all packets, and sets the pool of source ports.
func (w *world) renew(pool value.PortRange) {
	for _, m := range w.flows {
		w.clear(m)
	}
	must(w, w.d.SetSettings(timeouts, pool))
	must(w, w.d.Heartbeat())
	var bound struct {
		Count      int32
		Generation uint32
	} // struct service_flows
	for i := range w.bounds.MaxEntries() {
		must(w, w.bounds.Lookup(i, &bound))
		if bound.Count != 0 {
			bound.Count = 0
			must(w, w.bounds.Put(i, bound))
		}
	}
	w.unlimit()
}

func (w *world) clear(m *ebpf.Map) {
	key, err := m.NextKeyBytes(nil)
	for must(w, err); key != nil; must(w, err) {
		var next []byte // read before this one is deleted, or the search would begin anew
		next, err = m.NextKeyBytes(key)
		must(w, m.Delete(key))
		key = next
	}
}

// run sends a frame in through an arm.
func (w *world) run(arm int, frame []byte) (verdict uint32, out []byte, err error) {
	return w.d.RunPacket(arms[arm].name, frame)
}

// more is how often a reason has been counted since the last call for it. It takes a sixtieth of
// the time of readCounters.
func (w *world) more(r reason) uint64 {
	const lookup = 1 // BPF_MAP_LOOKUP_ELEM
	number, at := uint32(r), int(r)*w.cpus
	attr := element{fd: uint32(w.reasons.FD()), key: unsafe.Pointer(&number), value: unsafe.Pointer(&w.now[at])}
	if _, _, code := unix.Syscall(unix.SYS_BPF, lookup, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr)); code != 0 {
		w.Fatalf("reading sh_reasons: %v", code)
	}
	return w.difference(at)
}

// difference is the increase of one reason's counters since the last call.
func (w *world) difference(at int) (more uint64) {
	for i := at; i < at+w.cpus; i++ {
		more += w.now[i].Packets - w.counted[i].Packets
		w.counted[i] = w.now[i]
	}
	return more
}

// whatElse lists the reasons whose counters have increased since they were last read.
func (w *world) whatElse() map[reason]uint64 {
	w.readCounters()
	out := map[reason]uint64{}
	for _, number := range w.keys {
		if n := w.difference(int(number) * w.cpus); n > 0 {
			out[reason(number)] = n
		}
	}
	return out
}

// element is the part of union bpf_attr (linux/bpf.h) for BPF_MAP_LOOKUP_ELEM.
type element struct {
	fd         uint32
	key, value unsafe.Pointer
	flags      uint64
}

// batch is the part of union bpf_attr (linux/bpf.h) for BPF_MAP_LOOKUP_BATCH.
type batch struct {
	in, out, keys, values unsafe.Pointer
	count, fd             uint32
	elementFlags, flags   uint64
}

// readCounters reads sh_reasons with one call and no copies in between: the library's own way
// takes 15 times as long as a packet (72 against 5 us).
func (w *world) readCounters() {
	const lookupBatch = 24 // BPF_MAP_LOOKUP_BATCH
	var next uint32
	attr := batch{out: unsafe.Pointer(&next), keys: unsafe.Pointer(unsafe.SliceData(w.keys)), values: unsafe.Pointer(unsafe.SliceData(w.now)),
		count: uint32(len(w.keys)), fd: uint32(w.reasons.FD())}
	_, _, code := unix.Syscall(unix.SYS_BPF, lookupBatch, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if code != 0 && code != unix.ENOENT || int(attr.count) != len(w.keys) {
		w.Fatalf("reading sh_reasons: %d of %d counters, %v", attr.count, len(w.keys), code)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
