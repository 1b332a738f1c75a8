package place_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/test/space"
	"github.com/shunt-lb/shunt/test/variant"
)

// quantum is the unit of simulated time. All limits below lie about half a quantum from a
// whole number of them, so that the seconds of a test, and the program's ticks of about a
// second, decide nothing. Four minutes, after which a half-closed connection may be forgotten,
// is not ours to choose: 3.4 quanta.
const quantum = 70 * time.Second

func quanta(n float64) time.Duration { return time.Duration(n * float64(quantum)) }

var (
	timeouts = model.Timeouts{TCPEstablished: quanta(20.5), TCPHandshake: quanta(1.5), TCPClosing: quanta(0.5), UDP: quanta(5.5)}
	// halfClosed is the time of RFC 5382, REQ-5.
	halfClosed = 4 * time.Minute
	settle     = quanta(7.5)
	// Clients may idle for less and for more than the settle time.
	affinityShort, affinityLong = quanta(5.5), quanta(10.5)
)

const arm = "shunt-a"

var (
	ownMAC    = net.HardwareAddr{2, 0, 0, 0, 0x0a, 1}
	routerMAC = net.HardwareAddr{2, 0, 0, 0, 0, 7}
	ports     = value.PortRange{First: 1024, Last: 32767}
)

var worldCount atomic.Uint32

// world is a namespace with a data plane. Histories share one and leave it empty.
type world struct {
	testing.TB
	d          *datapath.Datapath
	options    store.Options
	space      netns.NsHandle
	ifindex    int
	remembered *ebpf.Map
	settings   *ebpf.Map
	rate       uint32 // jiffies a second
	aged       time.Duration
	ticked     uint64 // ticks of aged by which the entries have been aged
	tight      bool   // there is not enough room to remember every flow that should be
}

// newWorld makes namespace, interface and data plane, and removes them after the test. It
// moves the test's goroutine into the namespace for good: the thread ends with it.
func newWorld(t testing.TB, remembered uint32) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	name := fmt.Sprintf("shunt-place-%d-%d", os.Getpid(), worldCount.Add(1))
	w := &world{TB: t, options: store.Options{
		Instance: name, PinRoot: kernel.DefaultPinRoot,
		Limits: model.Limits{Flows: 64, Services: 16, Backends: 32, Slots: 1 << 15, Remembered: remembered},
		Log:    slog.New(slog.NewTextHandler(io.Discard, nil)), Version: variant.FromEnvironment(),
	}}
	w.space = space.Enter(t, name)
	w.ifindex = space.AddArm(t, arm, ownMAC, 0, "10.0.0.1/24", "2001:db8:2::1/64").Attrs().Index
	w.open()
	return w
}

func (w *world) open() {
	w.d = space.Open(w, w.options)
	_, err := w.d.Attach(arm, model.AttachNative)
	must(w, err)
	must(w, w.d.SetSettings(timeouts, ports))
	w.d.SetEncapsulation(model.Encapsulation{GUEPort: 6080})
	must(w, w.d.Heartbeat())
	dir := filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "abi-1")
	for _, m := range []struct {
		name string
		to   **ebpf.Map
	}{{"sh_remembered", &w.remembered}, {"sh_settings", &w.settings}} {
		*m.to, err = ebpf.LoadPinnedMap(filepath.Join(dir, m.name), nil)
		must(w, err)
		w.Cleanup(func() { _ = (*m.to).Close() })
	}
	w.setBudget(1 << 30)
}

// Offsets in bytes of the first timeout and the budget in struct settings of bpf/lb/types.h.
const (
	settingsEstablished = 8
	settingsBudget      = 44
)

// setBudget sets the number of flows that a CPU may remember anew in a tick, and learns the
// rate of jiffies from a timeout whose length it knows.
func (w *world) setBudget(budget uint32) {
	value, err := w.settings.LookupBytes(uint32(0))
	must(w, err)
	established := binary.NativeEndian.Uint32(value[settingsEstablished:])
	w.rate = uint32((time.Duration(established)*time.Second + timeouts.TCPEstablished - 1) / timeouts.TCPEstablished)
	if had := binary.NativeEndian.Uint32(value[settingsBudget:]); w.rate < 90 || w.rate > 1100 || had == 0 && budget != 0 && !w.tight {
		w.Fatalf("struct settings is not as this test has it: %d jiffies a second, %d new entries", w.rate, had)
	}
	binary.NativeEndian.PutUint32(value[settingsBudget:], budget)
	must(w, w.settings.Put(uint32(0), value))
}

// flowKey is struct flow_key of bpf/core/types.h.
type flowKey [40]byte

// rememberedValue is struct remembered of bpf/lb/types.h.
type rememberedValue [24]byte

const (
	valueWord = 8  // offset of the word that has seen
	seenShift = 28 // of seen in it, 16 bits
)

// entries are the entries of the program's table.
func (w *world) entries() map[flowKey]rememberedValue {
	found := map[flowKey]rememberedValue{}
	var key flowKey
	var value rememberedValue
	walk := w.remembered.Iterate()
	for walk.Next(&key, &value) {
		found[key] = value
	}
	must(w, walk.Err())
	return found
}

func (w *world) isRemembered(key flowKey) bool {
	var value rememberedValue
	err := w.remembered.Lookup(key, &value)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		must(w, err)
	}
	return err == nil
}

// age makes all entries older. No program may run meanwhile.
func (w *world) age(by time.Duration) {
	w.aged += by
	perTick := uint64(1)
	for perTick < uint64(w.rate) {
		perTick *= 2
	}
	ticks := uint64(w.aged) * uint64(w.rate) / perTick / uint64(time.Second)
	for key, value := range w.entries() {
		word := binary.NativeEndian.Uint64(value[valueWord:])
		seen := uint16(word>>seenShift) - uint16(ticks-w.ticked)
		word = word&^(0xffff<<seenShift) | uint64(seen)<<seenShift
		binary.NativeEndian.PutUint64(value[valueWord:], word)
		must(w, w.remembered.Update(key, value, ebpf.UpdateExist))
	}
	w.ticked = ticks
}

// forget empties the table.
func (w *world) forget() {
	for key := range w.entries() {
		w.forgetKey(key)
	}
}

func (w *world) forgetKey(key flowKey) {
	if err := w.remembered.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		must(w, err)
	}
}

// allowed are the CPUs of the process: read once, because threads get bound.
var allowed = func() (set unix.CPUSet) {
	_ = unix.SchedGetaffinity(0, &set)
	return set
}()

// pin moves the calling thread to a CPU, modulo the number of CPUs.
func pin(cpu int) error {
	var set unix.CPUSet
	skip := cpu % max(1, allowed.Count())
	for i := range 1024 {
		if allowed.IsSet(i) {
			if skip == 0 {
				set.Set(i)
				break
			}
			skip--
		}
	}
	return unix.SchedSetaffinity(0, &set)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// backendMAC is a backend's hardware address, which tells the backend of a packet with every
// forwarding.
func backendMAC(address netip.Addr) net.HardwareAddr {
	b := address.As16()
	family := byte(4)
	if address.Is6() {
		family = 6
	}
	return net.HardwareAddr{2, 0xbe, 0, family, 0, b[15]}
}
