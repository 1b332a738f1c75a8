package store

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/bed"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

var (
	must            = bed.Must
	inNamespace     = bed.Namespace
	device          = bed.Device
	fill            = bed.Fill
	requireContents = bed.RequireContents
	quiet           = bed.Quiet
)

// testOptions returns the options of an instance of the test's own, which is removed after it.
func testOptions(t *testing.T) Options {
	t.Helper()
	opts := Options{Limits: bed.Limits, Log: quiet(), Instance: bed.Instance(t, func(instance string) error {
		return os.RemoveAll(kernel.Directory(kernel.DefaultPinRoot, instance))
	})}
	must(t, opts.Complete())
	must(t, kernel.Mount(opts.PinRoot, opts.Log))
	return opts
}

func mustOpen(t *testing.T, opts Options) *Writer {
	t.Helper()
	w, err := Open(opts)
	must(t, err)
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return w
}

func TestContentsComeBackAsTheyWerePut(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	if d.Adopted() {
		t.Error("a fresh instance is said to be adopted")
	}
	requireContents(t, d, reconcile.Contents{})
	want := fill(t, d)
	requireContents(t, d, want)
	fill(t, d) // puts are idempotent
	requireContents(t, d, want)

	must(t, d.Close())
	d = mustOpen(t, opts)
	if !d.Adopted() {
		t.Error("the second process did not notice that the maps were there")
	}
	requireContents(t, d, want)
	v, err := OpenView(opts)
	must(t, err)
	defer v.Close()
	requireContents(t, v, want)

	for f := range want.Frontends {
		must(t, d.DeleteFrontend(f))
		must(t, d.DeleteFrontend(f))
	}
	for i, r := range want.Services {
		must(t, d.DeleteService(i, r.Generation+1)) // the service has another generation: nothing happens
		must(t, d.DeleteService(i, r.Generation))
		must(t, d.DeleteService(i, r.Generation))
	}
	for _, r := range want.Backends {
		must(t, d.DeleteBackend(reconcile.BackendRef{Index: r.Index, Generation: r.Generation + 1}))
		must(t, d.DeleteBackend(r.BackendRef))
		must(t, d.DeleteBackend(r.BackendRef))
	}
	for f := range want.Filters {
		must(t, d.DeleteFilter(f))
		must(t, d.DeleteFilter(f))
	}
	for a := range want.Addresses {
		must(t, d.DeleteAddress(a))
		must(t, d.DeleteAddress(a))
	}
	requireContents(t, v, reconcile.Contents{
		BackendGenerations: map[uint32]uint8{1: 1, 2: 255}, ServiceGenerations: map[uint32]uint8{0: 3},
	})
}

func TestNatDestinationIsKnownWhileAServiceNeedsIt(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	check := func(want uint32) {
		t.Helper()
		if have := d.settings[0].NatDestination; have != want {
			t.Fatalf("settings.nat_destination is %d, want %d", have, want)
		}
	}
	a := reconcile.ServiceRecord{Index: 1, Generation: 1, Name: "a", Forwarding: model.ForwardingNATDestination, Size: 1}
	b := reconcile.ServiceRecord{Index: 2, Generation: 1, Name: "b", Forwarding: model.ForwardingNATDestination, Size: 1}
	check(0)
	must(t, d.PutService(a))
	must(t, d.PutService(b))
	check(1)
	must(t, d.DeleteService(1, 1))
	check(1)
	must(t, d.Close())
	d = mustOpen(t, opts)
	check(1)
	b.Forwarding = model.ForwardingNAT
	must(t, d.PutService(b))
	check(0)
}

// TestOwnAddressesAreNoted: VIPs and NAT sources have their bits before programs can meet them, and
// backends that have left lose theirs when the next daemon comes.
func TestOwnAddressesAreNoted(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	check := func(when string, addresses ...string) {
		t.Helper()
		var want [len(d.settings[0].OwnAddresses)]uint64
		for _, a := range addresses {
			word, bit := abi.OwnBit(netip.MustParseAddr(a))
			want[word] |= bit
		}
		if have := d.settings[0].OwnAddresses; have != want {
			t.Errorf("%s: noted are %x, want %x", when, have, want)
		}
	}
	check("at first")
	must(t, d.PutAddress(reconcile.AddressRecord{Address: netip.MustParseAddr("192.0.2.10"), VIP: true}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: netip.MustParseAddr("2001:db8::10"), VIP: true}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: netip.MustParseAddr("10.0.0.1"), Source: true}))
	must(t, d.DeleteAddress(netip.MustParseAddr("192.0.2.10")))
	check("with one that has left", "192.0.2.10", "2001:db8::10", "10.0.0.1")
	must(t, d.Close())
	d = mustOpen(t, opts)
	check("after a restart", "2001:db8::10", "10.0.0.1")
}

func TestWayToABackendBelongsToItsGeneration(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	r := reconcile.BackendRecord{BackendRef: reconcile.BackendRef{Index: 5, Generation: 7}, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 80}}
	sources := []netip.Addr{netip.MustParseAddr("10.0.0.8"), netip.MustParseAddr("10.0.0.9")}
	if err := d.SetNATSources(r.BackendRef, sources); !errors.Is(err, ErrGone) {
		t.Fatalf("a place without tenant took sources: %v", err)
	}
	must(t, d.PutBackend(r))
	must(t, d.SetNATSources(r.BackendRef, sources))
	d.backends[5].Hop = 42
	run := d.backends[5].Sources
	r.Port = 81
	must(t, d.PutBackend(r))
	if b := d.backends[5]; b.Hop != 42 || b.Sources != run || run == 0 {
		t.Errorf("the same tenant lost its way: %+v", b)
	}
	r.Generation++
	must(t, d.PutBackend(r))
	if b := d.backends[5]; b.Hop != 0 || b.Sources != 0 {
		t.Errorf("a new tenant has the old one's way: %+v", b)
	}
}

func TestSourceRunsAreSharedAndNeverRewrittenWhileNamed(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	ref := func(i uint32) reconcile.BackendRef { return reconcile.BackendRef{Index: i, Generation: 1} }
	for i := uint32(1); i <= 3; i++ {
		must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref(i), BackendAddress: model.BackendAddress{Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}}))
	}
	many := func(n int, first byte) (all []netip.Addr) {
		for i := range n {
			all = append(all, netip.AddrFrom4([4]byte{10, first, byte(i >> 8), byte(i)}))
		}
		return all
	}
	must(t, d.SetNATSources(ref(1), many(600, 1)))
	must(t, d.SetNATSources(ref(2), many(600, 1)))
	if d.backends[1].Sources != d.backends[2].Sources {
		t.Error("equal lists lie twice")
	}
	if err := d.SetNATSources(ref(3), many(600, 2)); err == nil {
		t.Error("1200 sources found room among 1024")
	}
	must(t, d.Close())
	d = mustOpen(t, opts)
	must(t, d.SetNATSources(ref(1), many(400, 3)))
	if err := d.SetNATSources(ref(3), many(600, 2)); err == nil {
		t.Error("a run that backend 2 names was taken")
	}
	must(t, d.SetNATSources(ref(2), nil))
	must(t, d.SetNATSources(ref(3), many(600, 2)))
	first, count := abi.FromRun(d.backends[3].Sources)
	if count != 600 || abi.FromAddr(d.runs[first]) != netip.MustParseAddr("10.2.0.0") || abi.FromAddr(d.runs[first+599]) != netip.MustParseAddr("10.2.2.87") {
		t.Errorf("the run is %d+%d, from %s", first, count, abi.FromAddr(d.runs[first]))
	}
	if first, _ := abi.FromRun(d.backends[1].Sources); abi.FromAddr(d.runs[first]) != netip.MustParseAddr("10.3.0.0") {
		t.Error("backend 1's run was overwritten")
	}
}

func TestOwnershipSurvivesARewrittenRecord(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	owned := func(a netip.Addr) uint64 {
		var record abi.Address
		must(t, d.maps[abi.MapAddresses].Lookup(abi.ToAddr(a), &record))
		return record.OwnedUntil
	}
	r := reconcile.AddressRecord{Address: netip.MustParseAddr("192.0.2.10"), VIP: true, Announce: true}
	must(t, d.SetOwned(r.Address, OwnedForever)) // no record: nothing to own
	requireContents(t, d, reconcile.Contents{})
	must(t, d.PutAddress(r))
	must(t, d.SetOwned(r.Address, OwnedForever))
	r.Source = true
	must(t, d.PutAddress(r))
	if owned(r.Address) != abi.OwnedForever {
		t.Error("PutAddress took ownership away")
	}
	r.Announce = false
	must(t, d.PutAddress(r))
	if owned(r.Address) != 0 {
		t.Error("an address that is not announced is still answered for")
	}
}

func TestOtherLimitsAreRefusedByName(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	want := fill(t, d)
	must(t, d.Close())
	for _, c := range []struct {
		change func(*model.Limits)
		want   string
	}{
		{func(l *model.Limits) { l.Flows *= 2 }, "limits.flows is 10000, but the loaded data plane was made for 5000"},
		{func(l *model.Limits) { l.Services = 7 }, "limits.services is 7, but the loaded data plane was made for 100"},
		{func(l *model.Limits) { l.Backends++ }, "limits.backends is 201, but the loaded data plane was made for 200"},
		{func(l *model.Limits) { l.Slots-- }, "limits.slots is 9999, but the loaded data plane was made for 10000"},
	} {
		other := opts
		c.change(&other.Limits)
		if d, err := Open(other); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
			if err == nil {
				_ = d.Close()
			}
		}
	}
	requireContents(t, mustOpen(t, opts), want)
}

func TestSettingsAndHeartbeat(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	v, err := OpenView(opts)
	must(t, err)
	defer v.Close()
	if _, known, err := v.HeartbeatAge(); err != nil || known {
		t.Fatalf("a heartbeat before the first: %v %v", known, err)
	}
	must(t, d.Heartbeat())
	age, known, err := v.HeartbeatAge()
	if err != nil || !known || age > 5*time.Second {
		t.Fatalf("age %s, known %v: %v", age, known, err)
	}
	must(t, d.SetSettings(model.Timeouts{TCPEstablished: 2 * time.Hour, TCPHandshake: 30 * time.Second, TCPClosing: time.Second, UDP: time.Minute},
		value.PortRange{First: 1024, Last: 32767}))
	s, hz := d.settings[0], d.rate
	want := [7]uint32{7200 * hz, 30 * hz, 240 * hz, hz, 60 * hz, 2 * hz, 60 * hz}
	if s.Timeouts != want || s.PortFirst != 1024 || s.PortCount != 31744 {
		t.Errorf("settings are %+v, want timeouts %v", s, want)
	}
	if err := d.SetSettings(model.Timeouts{TCPEstablished: time.Hour}, value.PortRange{First: 1, Last: 2}); err == nil {
		t.Error("a timeout of 0 was taken")
	}
	if _, err := d.Sweep(); err != nil {
		t.Error(err)
	}
}

// TestJiffiesPerSecond: the rate is the kernel's own. If the kernel does not show its configuration,
// jiffies are at least no slower than the rate.
func TestJiffiesPerSecond(t *testing.T) {
	rate, err := jiffiesPerSecond()
	must(t, err)
	if file, err := os.Open("/proc/config.gz"); err == nil {
		defer file.Close()
		unzipped, err := gzip.NewReader(file)
		must(t, err)
		config, err := io.ReadAll(unzipped)
		must(t, err)
		if want := fmt.Sprintf("\nCONFIG_HZ=%d\n", rate); !bytes.Contains(config, []byte(want)) {
			t.Errorf("the rate is %d, and the kernel's configuration has no %q", rate, want)
		}
	}
	d := mustOpen(t, testOptions(t))
	begin := time.Now()
	first, err := d.readClock(false)
	must(t, err)
	for time.Since(begin) < 100*time.Millisecond {
		runtime.Gosched()
	}
	last, err := d.readClock(false)
	must(t, err)
	// Three more, because ticks after a late one come early.
	if most := uint64(time.Since(begin)*time.Duration(rate)/time.Second) + 3; last.Jiffies-first.Jiffies > most {
		t.Errorf("%d jiffies passed, and at %d a second at most %d could", last.Jiffies-first.Jiffies, rate, most)
	}
}

// A reload sets everything again. Packets must not see the moment in which outer sources
// would not vary.
func TestTheSameEncapsulationAgainIsNotWritten(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	same := model.Encapsulation{GUEPort: 6080, Sources4: netip.MustParsePrefix("10.9.0.0/24"), Sources6: netip.MustParsePrefix("2001:db8:9::/64")}
	d.SetEncapsulation(same)
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stop.Load() {
			d.SetEncapsulation(same)
		}
	}()
	defer func() { stop.Store(true); <-done }()
	s := &d.settings[0]
	for range 20_000_000 { // a tenth of a second
		if atomic.LoadUint64(&s.TunnelVary4) == 0 || atomic.LoadUint64(&s.TunnelVary6) == 0 {
			t.Fatal("outer sources ceased to vary while the same was set again")
		}
	}
}

// TestDeletedBackendIsNotLive: a program that still finds a backend during its deletion finds its next hop, too.
// Otherwise new flows of slots that name it as the previous one are lost while the daemon waits for a CPU.
func TestDeletedBackendIsNotLive(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	const index, rounds = 5, 20000
	b := &d.backends[index]
	var round atomic.Int32 // of now, while the backend has a way or is being deleted; else 0, and -1 after the last
	begun := make(chan struct{})
	var watching sync.WaitGroup
	wrong := 0
	watching.Go(func() {
		close(begun)
		for now := round.Load(); now >= 0; now = round.Load() {
			hop, tail := atomic.LoadUint64(&b.Hop), abi.Backend{}
			*abi.BackendTail(&tail) = atomic.LoadUint64(abi.BackendTail(b))
			if now > 0 && hop == 0 && tail.Live != 0 && round.Load() == now {
				wrong++
			}
		}
	})
	<-begun
	for n := range int32(rounds) {
		r := reconcile.BackendRecord{BackendRef: reconcile.BackendRef{Index: index, Generation: uint8(1 + n%200)},
			BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1")}}
		must(t, d.PutBackend(r))
		atomic.StoreUint64(&b.Hop, 42)
		round.Store(n + 1)
		must(t, d.DeleteBackend(r.BackendRef))
		round.Store(0)
	}
	round.Store(-1)
	watching.Wait()
	if wrong > 0 {
		t.Errorf("a deleted backend was seen live and without a way %d times", wrong)
	}
}

// TestBackendHalfWritten: a process that was killed while it put or deleted a backend leaves an address that is not live.
// The next process takes the position for empty, and the next backend there has a new generation.
func TestBackendHalfWritten(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	r := reconcile.BackendRecord{BackendRef: reconcile.BackendRef{Index: 5, Generation: 7}, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 80}}
	must(t, d.PutBackend(r))
	d.backends[5].Hop = 42
	dead := abi.Backend{Generation: r.Generation}
	*abi.BackendTail(&d.backends[5]) = *abi.BackendTail(&dead)
	contents, err := d.Contents()
	must(t, err)
	if _, there := contents.Backends[5]; there || contents.BackendGenerations[5] != r.Generation {
		t.Errorf("the contents are %v, with generations %v", contents.Backends, contents.BackendGenerations)
	}
	if err := d.SetHop(r.BackendRef, Hop{}); !errors.Is(err, ErrGone) {
		t.Errorf("a place that is half empty took a way: %v", err)
	}
	must(t, d.PutBackend(r))
	if hop := d.backends[5].Hop; hop != 0 {
		t.Errorf("the way %d was left to the next tenant", hop)
	}
}

func TestInterfaceRecordsAndHops(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	put := func(name string) {
		t.Helper()
		_, err := d.PutInterface(device(t, name), uint32(device(t, name).Attrs().Index))
		must(t, err)
	}
	put("shunt-b")
	put("shunt-a")
	dev := device(t, "shunt-a")
	slot, ok := d.IndexOf(dev.Attrs().Index)
	if !ok || slot != 1 {
		t.Fatalf("shunt-a has slot %d, %v", slot, ok)
	}
	var record abi.Interface
	must(t, d.maps[abi.MapInterfaces].Lookup(slot, &record))
	if net.HardwareAddr(record.Mac[:]).String() != dev.Attrs().HardwareAddr.String() || abi.FromAddr(record.Address4) != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("the record is %+v", record)
	}
	mac := net.HardwareAddr{2, 3, 4, 5, 6, 7}
	must(t, netlink.LinkSetHardwareAddr(dev, mac))
	put("shunt-a")
	must(t, d.maps[abi.MapInterfaces].Lookup(slot, &record))
	if net.HardwareAddr(record.Mac[:]).String() != mac.String() {
		t.Errorf("after a refresh the record is %+v", record)
	}
	ref := reconcile.BackendRef{Index: 1, Generation: 1}
	must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("192.0.2.2")}}))
	must(t, d.SetHop(ref, Hop{dev.Attrs().Index, mac}))
	if d.backends[1].Hop != 1<<48|0x070605040302 {
		t.Errorf("the hop is %#x", d.backends[1].Hop)
	}
	if err := d.SetHop(ref, Hop{1, mac}); err == nil || !strings.Contains(err.Error(), "not attached") {
		t.Errorf("a hop through lo: %v", err)
	}
	ref.Generation++
	if err := d.SetHop(ref, Hop{dev.Attrs().Index, mac}); !errors.Is(err, ErrGone) {
		t.Errorf("another tenant's hop: %v", err)
	}
}
