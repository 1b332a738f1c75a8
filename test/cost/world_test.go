package cost

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/test/space"
)

// world is a namespace with one interface, as a balancer with one arm has it, and a data plane: the
// maps that the product has filled, and the program that it has loaded onto them.
type world struct {
	testing.TB
	d        *datapath.Datapath
	options  store.Options
	link     netlink.Link
	running  *ebpf.Program        // the interface's program
	pinned   map[string]*ebpf.Map // by name
	services []model.Service
}

// newWorld makes a world, and removes it after the test. The test's goroutine stays in the namespace
// and on one CPU: the thread ends with it.
func newWorld(t testing.TB, name string, services []model.Service) *world {
	t.Helper()
	instance := fmt.Sprintf("shunt-cost-%d-%s", os.Getpid(), name)
	w := &world{TB: t, services: services, pinned: map[string]*ebpf.Map{}, options: store.Options{
		Instance: instance, PinRoot: kernel.DefaultPinRoot, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Limits: model.Limits{Flows: 1024, Services: 16, Backends: 16, Slots: 1 << 13, Remembered: 1 << 12, Filters: 64},
	}}
	space.Enter(t, instance)
	space.Stay(t)
	w.makeLink()
	w.open()
	return w
}

// makeLink makes the interface, with a router behind it that leads to the clients.
func (w *world) makeLink() {
	lo, err := netlink.LinkByName("lo")
	must(w, err)
	must(w, netlink.LinkSetUp(lo))
	w.link = space.AddArm(w, "shunt-a", own, 0, "192.0.2.1/24", "2001:db8:1::1/64")
	for _, family := range []string{"ipv4", "ipv6"} {
		must(w, os.WriteFile("/proc/sys/net/"+family+"/conf/all/forwarding", []byte("1"), 0o644))
	}
	for _, gateway := range []string{"192.0.2.254", "2001:db8:1::fe"} {
		ip := netip.MustParseAddr(gateway).AsSlice()
		must(w, netlink.NeighAdd(&netlink.Neigh{LinkIndex: w.link.Attrs().Index, State: unix.NUD_PERMANENT, IP: ip, HardwareAddr: router}))
		must(w, netlink.RouteAdd(&netlink.Route{LinkIndex: w.link.Attrs().Index, Gw: ip}))
	}
}

// open loads the program and fills the maps, as the daemon does.
func (w *world) open() {
	w.d = space.Open(w, w.options)
	must(w, w.d.Prepare(model.Shared(w.services)))
	_, err := w.d.Attach(w.link.Attrs().Name, model.AttachNative)
	must(w, err)
	must(w, w.d.Heartbeat())
	must(w, w.d.SetSettings(timeouts, onePort))
	w.d.SetEncapsulation(model.Encapsulation{GUEPort: 6080})
	reconciler := reconcile.New(w.d, reconcile.BeforeNaming(func(records []reconcile.BackendRecord) {
		for _, r := range records {
			must(w, w.d.SetNATSources(r.BackendRef, sources[r.Address.Is6()]))
			must(w, w.d.SetHop(r.BackendRef, store.Hop{Interface: w.link.Attrs().Index, MAC: station}))
		}
	}))
	_, err = reconciler.Apply(reconcile.Desired{Services: model.Shared(w.services), NATSources: slices.Concat(sources[false], sources[true]), Limits: w.options.Limits})
	must(w, err)
	for _, a := range []string{vip4, vip6} {
		must(w, w.d.SetOwned(netip.MustParseAddr(a), store.OwnedForever))
	}
	w.move()
	w.link, err = netlink.LinkByIndex(w.link.Attrs().Index)
	must(w, err)
	w.running, err = ebpf.NewProgramFromID(ebpf.ProgramID(w.link.Attrs().Xdp.ProgId))
	must(w, err)
	w.Cleanup(func() { _ = w.running.Close() })
	files, err := filepath.Glob(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "abi-*", "sh_*"))
	must(w, err)
	for _, file := range files {
		m, err := ebpf.LoadPinnedMap(file, nil)
		must(w, err)
		w.Cleanup(func() { _ = m.Close() })
		w.pinned[filepath.Base(file)] = m
	}
}

// move puts the slots of a service into transition, from their backend to the same. It bypasses the
// reconciler, which must not be used any more.
func (w *world) move() {
	contents, err := w.d.Contents()
	must(w, err)
	for f, index := range contents.Frontends {
		if f.Ports.First != portMoving || f.Protocol != model.TCP {
			continue
		}
		service := contents.Services[index]
		for _, b := range contents.Backends {
			if b.Address.Is6() == f.Address.Is6() {
				slot := reconcile.Slot{State: reconcile.Transition, Current: b.BackendRef, Previous: b.BackendRef}
				must(w, w.d.WriteSlots(service.Offset, slices.Repeat(reconcile.NewTable([]reconcile.Slot{slot}), int(service.Size))))
			}
		}
	}
}

// constants are the bytes of the running program's constants.
func (w *world) constants() []byte {
	info, err := w.running.Info()
	must(w, err)
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		must(w, err)
		defer m.Close()
		if info, err := m.Info(); err == nil && strings.HasSuffix(info.Name, ".rodata") {
			value, err := m.LookupBytes(uint32(0))
			must(w, err)
			return value
		}
	}
	w.Fatal("the program that the interface runs has no constants")
	return nil
}

// spec is the program as the product has loaded it, to be loaded once more: with its maps and its
// constants. Only redirect_back differs, which is for veth: it is as on a network card.
func (w *world) spec(features uint32, program string) (*ebpf.CollectionSpec, map[string]*ebpf.Map) {
	spec, err := ebpf.LoadCollectionSpec("../../internal/lb/datapath/abi/xdp_bpfel.o")
	must(w, err)
	if program == programStamps {
		spec.Programs[program].Name = programXDP
		spec.Programs[programXDP] = spec.Programs[program]
	} else { // as the daemon does
		maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return strings.HasPrefix(name, "sh_stamp") })
	}
	delete(spec.Programs, programStamps)
	constants := w.constants()
	for _, v := range spec.Variables {
		if v.SectionName == ".rodata" {
			copy(v.Value, constants[v.Offset:])
		}
	}
	must(w, spec.Variables["redirect_back"].Set(uint8(0)))
	if features != 0 {
		must(w, spec.Variables["features"].Set(features))
	}
	replacements := map[string]*ebpf.Map{}
	for name, m := range spec.Maps {
		if have, ok := w.pinned[name]; ok {
			m.MaxEntries = have.MaxEntries()
			replacements[name] = have
		}
	}
	return spec, replacements
}

// copies are the program twice: as it is, and counting.
type copies struct {
	*world
	*counted
	plain  *ebpf.Program
	state  []*ebpf.Map // all maps that packets change
	second uint32      // in jiffies
}

// The program, and the one that takes its place to stamp probes.
const (
	programXDP    = "sh_xdp"
	programStamps = "sh_xdp_stamps"
)

func (w *world) load(features uint32, program string) *copies {
	c := &copies{world: w}
	for _, name := range []string{"sh_flows", "sh_fragments", "sh_remembered", "sh_source_rates", "sh_hands", "sh_handshakes", "sh_tracked"} {
		c.state = append(c.state, w.pinned[name])
	}
	for _, counting := range []bool{false, true} {
		spec, replacements := w.spec(features, program)
		must(w, spec.Variables["jiffies_per_second"].Get(&c.second))
		if counting {
			var err error
			c.counted, err = count(spec, programXDP)
			must(w, err)
		}
		coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replacements})
		if err != nil {
			w.Fatalf("loading sh_xdp once more (counting: %t): %+v", counting, err)
		}
		w.Cleanup(coll.Close)
		if counting {
			c.take(coll, programXDP)
		} else {
			c.plain = coll.Programs[programXDP]
		}
		for name, m := range coll.Maps {
			if replacements[name] == nil && strings.HasPrefix(name, "sh_") {
				c.state = append(c.state, m)
			}
		}
	}
	return c
}

// forget empties the maps that packets change.
func (c *copies) forget() {
	for _, m := range c.state {
		switch m.Type() {
		case ebpf.Array, ebpf.PerCPUArray:
			var zero any = make([]byte, m.ValueSize())
			if m.Type() == ebpf.PerCPUArray {
				cpus, err := ebpf.PossibleCPU()
				must(c, err)
				zero = slices.Repeat([][]byte{make([]byte, m.ValueSize())}, cpus)
			}
			for i := range m.MaxEntries() {
				must(c, m.Put(i, zero))
			}
		case ebpf.Hash, ebpf.LRUHash:
			key := make([]byte, m.KeySize())
			for m.NextKey(nil, &key) == nil {
				must(c, m.Delete(key))
			}
		}
	}
}

// run sends a frame through one of the copies.
func (c *copies) run(program *ebpf.Program, frame []byte) (verdict uint32, out []byte) {
	c.Helper()
	const grow = 256 // XDP's headroom
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+grow), Context: xdpContext{
		DataEnd: uint32(len(frame)), IngressIfindex: uint32(c.link.Attrs().Index)}}
	verdict, err := program.Run(&opts)
	must(c, err)
	return verdict, opts.DataOut
}

// xdpContext is struct xdp_md of linux/bpf.h.
type xdpContext struct {
	Data, DataEnd, DataMeta                     uint32
	IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// jiffies asks the kernel for its time.
func jiffies(t testing.TB) (now uint64) {
	t.Helper()
	coll, err := ebpf.NewCollection(&ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{"now": {Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}},
		Programs: map[string]*ebpf.ProgramSpec{"ask": {Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{
			asm.FnJiffies64.Call(),
			asm.LoadMapValue(asm.R1, 0, 0).WithReference("now"),
			asm.StoreMem(asm.R1, 0, asm.R0, asm.DWord),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(),
		}}},
	})
	must(t, err)
	defer coll.Close()
	_, err = coll.Programs["ask"].Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	must(t, err)
	must(t, coll.Maps["now"].Lookup(uint32(0), &now))
	return now
}

var timeouts = model.Timeouts{TCPEstablished: 2*time.Hour + 4*time.Minute, TCPHandshake: 10 * time.Second,
	TCPClosing: 10 * time.Second, UDP: 5 * time.Minute}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
