package packet_test

import (
	"errors"
	"flag"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// Link addresses: ours on either interface, the router's before the clients, the backends'.
var (
	ownA    = mac("02:00:00:00:0a:01")
	ownC    = mac("02:00:00:00:0c:01")
	router  = mac("02:00:00:00:00:07")
	beMAC   = mac("02:00:00:00:00:be")
	foreign = mac("02:00:00:00:00:99")
)

const (
	armA = "shunt-a"
	armC = "shunt-c"
)

var hook = flag.String("hook", "xdp", "where worlds attach that do not ask for a mode: xdp, tc or vlan")

// world is a namespace with a data plane.
type world struct {
	testing.TB
	number     int // worlds of this process have different ones
	d          *datapath.Datapath
	site       *site
	reconciler *reconcile.Reconciler
	options    store.Options
	space      netns.NsHandle
	cpu        *runner // sends packets one by one
	timeouts   model.Timeouts
	ports      value.PortRange
	flows      *ebpf.Map
	remembered *ebpf.Map
	counted    *ebpf.Map // sh_reasons, read alone because tests do so all the time
	ifindex    map[string]int
	linked     bool                  // packets go through the interfaces' programs, not through the ones that d has loaded
	trunks     map[string]store.VLAN // the interfaces at which the arms' frames come in, if not at the arms
}

// modes are the modes of this run, for tests that hold in every mode.
func modes() []model.Attach {
	if *hook == "tc" {
		return []model.Attach{model.AttachTC}
	}
	if *hook == "vlan" {
		return []model.Attach{model.AttachNative}
	}
	return []model.Attach{model.AttachNative, model.AttachGeneric}
}

// unfinishedInBytes reports whether the frame's bytes show that its checksum is left to hardware. At tc the
// sk_buff shows it, but the kernel's test runs make no such sk_buff; test/net has real ones.
func unfinishedInBytes() bool { return *hook != "tc" }

// option changes a world before it begins.
type option func(*worldOptions)

type worldOptions struct {
	mode     model.Attach
	limits   model.Limits
	timeouts model.Timeouts
	ports    value.PortRange
	silent   bool
	outer    model.Encapsulation
	services []model.Service
	vlans    map[string]store.VLAN
}

func withoutHeartbeat(o *worldOptions) { o.silent = true }
func withOuter(e model.Encapsulation) option {
	return func(o *worldOptions) { o.outer = e }
}
func withServices(list ...model.Service) option {
	return func(o *worldOptions) { o.services = list }
}
func withVLANs(vlans map[string]store.VLAN) option {
	return func(o *worldOptions) { o.vlans = vlans }
}
func withMode(m model.Attach) option     { return func(o *worldOptions) { o.mode = m } }
func withPorts(p value.PortRange) option { return func(o *worldOptions) { o.ports = p } }
func withTimeouts(change func(*model.Timeouts)) option {
	return func(o *worldOptions) { change(&o.timeouts) }
}
func withLimits(change func(*model.Limits)) option {
	return func(o *worldOptions) { change(&o.limits) }
}

// newWorld makes namespace, interfaces and data plane, and removes them after the test.
func newWorld(t testing.TB, changes ...option) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	o := worldOptions{
		mode:   modes()[0],
		limits: model.Limits{Flows: 4096, Services: 128, Backends: 64, Slots: 1 << 16, Remembered: 1 << 18, Filters: 10_000},
		timeouts: model.Timeouts{TCPEstablished: 2*time.Hour + 4*time.Minute, TCPHandshake: 30 * time.Second,
			TCPClosing: 10 * time.Second, UDP: 5 * time.Minute},
		ports:    value.PortRange{First: 1024, Last: 32767},
		outer:    model.Encapsulation{GUEPort: guePort},
		services: services(),
	}
	if *hook == "vlan" {
		o.vlans = trunks
	}
	for _, change := range changes {
		change(&o)
	}
	w := &world{TB: t, timeouts: o.timeouts, ports: o.ports}
	w.enter(o)
	w.cpu = w.newRunner(0)
	w.cpu.do(func() { w.fill(o) })
	if w.Failed() {
		w.FailNow() // fill fails on another thread
	}
	w.apply(o.services)
	return w
}

// fill opens the data plane and attaches. It runs inside the namespace.
func (w *world) fill(o worldOptions) {
	if !w.site.used {
		w.addArms()
	}
	var err error
	w.d, err = datapath.Open(w.options)
	must(w, err)
	must(w, w.d.Prepare(model.Shared(o.services)))
	if _, ok := o.vlans[armA]; ok && o.mode == model.AttachNative {
		w.addTrunks(o.vlans)
	}
	for _, arm := range []string{armA, armC} {
		_, err := w.d.Attach(arm, o.mode)
		must(w, err)
	}
	if !o.silent {
		must(w, w.d.Heartbeat())
	}
	must(w, w.d.SetSettings(w.timeouts, w.ports))
	w.d.SetEncapsulation(o.outer)
	w.reconciler = reconcile.New(w.d, reconcile.BeforeNaming(w.resolve))
	w.site.settle(w)
	w.flows, w.remembered, w.counted = w.pinned("sh_flows"), w.pinned("sh_remembered"), w.pinned("sh_reasons")
}

// pinned opens a map of the data plane, without the product.
func (w *world) pinned(name string) *ebpf.Map {
	w.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "abi-1", name), nil)
	must(w, err)
	w.Cleanup(func() { _ = m.Close() })
	return m
}

// apply replaces the services by these.
func (w *world) apply(services []model.Service) {
	w.Helper()
	_, err := w.reconciler.Apply(reconcile.Desired{
		Services: model.Shared(services), NATSources: sources, Limits: w.options.Limits,
		HostOwn: map[netip.Addr]bool{hostVIP4: true, hostVIP6: true},
	})
	must(w, err)
	for _, a := range []netip.Addr{vip4, vip6, sources[0], sources[2]} {
		must(w, w.d.SetOwned(a, store.OwnedForever))
	}
}

// resolve sets the ways to backends, before a slot names them.
func (w *world) resolve(records []reconcile.BackendRecord) {
	for _, r := range records {
		arm, from := armC, sources[0:1]
		switch {
		case netip.MustParsePrefix("192.0.2.0/24").Contains(r.Address):
			arm, from = armA, sources[1:2]
		case netip.MustParsePrefix("2001:db8:1::/64").Contains(r.Address):
			arm, from = armA, sources[3:4]
		case r.Address.Is6():
			from = sources[2:3]
		}
		if r.Address != unsourced {
			must(w, w.d.SetNATSources(r.BackendRef, from))
		}
		if r.Address != unresolved {
			mac := beMAC
			if r.Address == ownBackend4 || r.Address == ownBackend6 {
				mac = ownC
			}
			must(w, w.d.SetHop(r.BackendRef, store.Hop{Interface: w.ifindex[arm], MAC: mac}))
		}
	}
}

// runner is a thread inside the world's namespace, on one CPU.
type runner struct {
	w    *world
	work chan func()
}

// newRunner starts a thread on the CPU with this number, modulo the number of CPUs. Worlds count CPUs from
// different ones, so that tests which run beside each other share the machine.
func (w *world) newRunner(cpu int) *runner {
	r := &runner{w: w, work: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var set, allowed unix.CPUSet
		err := unix.SchedGetaffinity(0, &allowed)
		for i, skip := 0, (w.number+cpu)%max(1, allowed.Count()); i < 1024; i++ {
			if allowed.IsSet(i) {
				if skip == 0 {
					set.Set(i)
					break
				}
				skip--
			}
		}
		ready <- errors.Join(err, unix.SchedSetaffinity(0, &set), netns.Set(w.space))
		for f := range r.work {
			f()
		}
	}()
	must(w, <-ready)
	w.Cleanup(func() { close(r.work) })
	return r
}

// do runs f on the thread and waits for it. A failed must ends the goroutine, so f must not fail a test unless
// nothing else can be done.
func (r *runner) do(f func()) {
	done := make(chan struct{})
	r.work <- func() { defer close(done); f() }
	<-done
}

// result is the outcome of a frame.
type result struct {
	verdict uint32
	frame   []byte
	err     error
}

// run sends a frame in through an interface.
func (r *runner) run(arm string, frame []byte) (out result) {
	r.do(func() { out = r.w.runHere(arm, frame) })
	return out
}

// runHere is run on the calling thread, which has to be a runner's.
func (w *world) runHere(arm string, frame []byte) (out result) {
	switch {
	case w.linked:
		return w.runLinked(arm, frame)
	case w.trunks != nil:
		return w.runTagged(arm, frame)
	}
	out.verdict, out.frame, out.err = w.d.RunPacket(arm, frame)
	return out
}

// runOut makes the host send a frame out of an interface.
func (r *runner) runOut(arm string, frame []byte) (out result) {
	r.do(func() { out.verdict, out.frame, out.err = r.w.d.RunPacketOut(arm, frame) })
	return out
}

// send is run for a packet that must leave; it returns the packet that left.
func (w *world) send(arm string, p packet.Packet) packet.Packet {
	w.Helper()
	out, ok := w.try(arm, p)
	if !ok {
		w.Fatalf("%s did not leave; reasons so far: %v", p, w.reasons())
	}
	return out
}

// try is send for a packet that may be dropped.
func (w *world) try(arm string, p packet.Packet) (packet.Packet, bool) {
	w.Helper()
	r := w.cpu.run(arm, packet.Must(p))
	must(w, r.err)
	if r.verdict != kernel.XDPTx && r.verdict != kernel.XDPRedirect {
		return packet.Packet{}, false
	}
	out, err := packet.Parse(r.frame)
	must(w, err)
	return out, true
}

// reasons are the packets counted for each reason.
func (w *world) reasons() map[string]uint64 {
	w.Helper()
	counts, err := kernel.ReasonCounts(w.counted)
	must(w, err)
	out := map[string]uint64{}
	for name, c := range counts {
		out[name] = c.Packets
	}
	return out
}

// moved is the increase of the counters since before.
func (w *world) moved(before map[string]uint64) map[string]uint64 {
	w.Helper()
	now := w.reasons()
	for name, n := range before {
		if now[name] -= n; now[name] == 0 {
			delete(now, name)
		}
	}
	return now
}

// eventually waits for a condition that only time brings about.
func (w *world) eventually(what string, within time.Duration, condition func() bool) {
	w.Helper()
	limit := time.After(within)
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-limit:
			w.Fatalf("waited %s in vain: %s", within, what)
		case <-tick.C:
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mac(text string) net.HardwareAddr {
	a, err := net.ParseMAC(text)
	if err != nil {
		panic(err)
	}
	return a
}
