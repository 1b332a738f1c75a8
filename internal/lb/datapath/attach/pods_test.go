package attach

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/namespace"
)

// podVeths makes veths pod0, pod1, … whose other ends are in a namespace of their own.
func podVeths(t *testing.T, count int) (names []string) {
	t.Helper()
	here, err := netns.Get()
	must(t, err)
	name := fmt.Sprintf("shunt-pods-%d", os.Getpid())
	other, err := namespace.NewNamed(name) // which the thread is in from here on
	must(t, errors.Join(err, netns.Set(here), here.Close()))
	t.Cleanup(func() { must(t, errors.Join(other.Close(), netns.DeleteNamed(name))) })
	for i := range count {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: fmt.Sprintf("pod%d", i)})
		veth.PeerName, veth.PeerNamespace = fmt.Sprintf("in%d", i), netlink.NsFd(other)
		must(t, netlink.LinkAdd(veth))
		names = append(names, veth.Name)
	}
	return names
}

// TestPodsComeWithoutReload: while interfaces of pods are expected, one that comes or goes causes no program on another
// interface to be loaded anew. An interface that is no pod's does, once, because the programs took its index for a
// pod's.
func TestPodsComeWithoutReload(t *testing.T) { inTCModes(t, podsComeWithoutReload) }

func podsComeWithoutReload(t *testing.T, mustOpen func(*testing.T, store.Options) *Plane) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	pods := podVeths(t, 3)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	alone := programID(t, "shunt-a")
	must(t, d.ExpectPods(true))
	before := programID(t, "shunt-a")
	if at := atTC(t, "shunt-a"); before == alone || at["sh_deliver"] == 0 || at["sh_tc_out"] == 0 {
		t.Fatalf("pods are expected, and shunt-a has the program %d, as before: %v, and at tc %v", before, before == alone, at)
	}
	same := func(when string) {
		t.Helper()
		if now := programID(t, "shunt-a"); now != before {
			t.Errorf("%s, the program at shunt-a was loaded anew", when)
			before = now
		}
	}
	index := func(name string) uint32 {
		t.Helper()
		at, ok := d.IndexOf(device(t, name).Attrs().Index)
		if !ok {
			t.Fatalf("%s has no index", name)
		}
		return at
	}
	must(t, d.ExpectPods(true))
	same("expected twice")
	for _, name := range pods[:2] {
		_, err := d.AttachPod(name)
		must(t, err)
		requireAtTC(t, name, true)
		same(name + " came")
		if !store.IsPods(index(name)) {
			t.Errorf("%s is at index %d, which is no pod's", name, index(name))
		}
	}
	must(t, d.Detach(pods[0]))
	same(pods[0] + " was left")
	must(t, netlink.LinkDel(device(t, pods[1])))
	must(t, d.Detach(pods[1]))
	same(pods[1] + " has gone")
	if names, err := pinnedSides(opts.PinRoot, opts.Instance); err != nil || len(names) != 0 {
		t.Errorf("of those that have gone, pins are left: %v, %v", names, err)
	}

	// shunt-b is no pod's, because its other end is in this namespace.
	_, err = d.Attach("shunt-b", model.AttachTC)
	must(t, err)
	if now, peers := programID(t, "shunt-a"), d.tcPeers(); now == before || peers>>index("shunt-b")&1 != 0 {
		t.Errorf("shunt-b is at tc and no pod's; the program at shunt-a was loaded anew: %v, and the ways into pods are %b", now != before, peers)
	}
	before = programID(t, "shunt-a")
	_, err = d.AttachPod(pods[0])
	must(t, err)
	same("another pod came")

	// The next process finds a pod's interface, and keeps its index, too.
	must(t, d.Close())
	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	must(t, d.ExpectPods(true))
	before = programID(t, "shunt-a")
	_, err = d.AttachPod(pods[0])
	must(t, err)
	same("a predecessor's pod was adopted")
	must(t, d.Detach(pods[0]))
	same("it was left")
	must(t, d.Detach("shunt-b"))
	must(t, d.ExpectPods(false))
	if at := atTC(t, "shunt-a"); programID(t, "shunt-a") == before || len(at) != 0 {
		t.Errorf("pods are expected no more, and shunt-a has at tc %v", at)
	}
}

// inTCModes runs a test in each mode of tcModes.
func inTCModes(t *testing.T, test func(*testing.T, func(*testing.T, store.Options) *Plane)) {
	for _, mode := range tcModes() {
		t.Run(mode.name, func(t *testing.T) {
			test(t, func(t *testing.T, o store.Options) *Plane {
				d := mustOpen(t, o)
				d.withoutTCX = mode.withoutTCX
				return d
			})
		})
	}
}

// TestPodVanishesWhileAttached: an interface that goes while it is attached to leaves neither pins nor a used index.
func TestPodVanishesWhileAttached(t *testing.T) { inTCModes(t, podVanishesWhileAttached) }

func podVanishesWhileAttached(t *testing.T, mustOpen func(*testing.T, store.Options) *Plane) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	pods := podVeths(t, 2)
	must(t, d.ExpectPods(true))
	gone := device(t, pods[0])
	version := *d.opts.Version
	version.Objects = maps.Clone(version.Objects)
	d.opts.Version = &version
	load := version.Objects[abi.ObjectTC]
	version.Objects[abi.ObjectTC] = func() (*ebpf.CollectionSpec, error) { // called once the interface was found
		if _, err := netlink.LinkByIndex(gone.Attrs().Index); err == nil {
			must(t, netlink.LinkDel(gone))
		}
		return load()
	}
	must(t, d.closeShared()) // so that the next one loads them
	if _, err := d.AttachPod(pods[0]); err == nil {
		t.Error("attached to an interface that has gone")
	}
	if _, has := d.IndexOf(gone.Attrs().Index); has {
		t.Error("the interface that has gone has an index")
	}
	if names, err := pinnedSides(opts.PinRoot, opts.Instance); err != nil || len(names) != 0 || len(d.Attached()) != 0 {
		t.Errorf("pins are left of %v, and attached is %v: %v", names, d.Attached(), err)
	}
	_, err := d.AttachPod(pods[1])
	must(t, err)
	if at, has := d.IndexOf(device(t, pods[1]).Attrs().Index); !has || !store.IsPods(at) {
		t.Errorf("the next one has index %d, %v", at, has)
	}
}

// TestIndexOfAPodRests: flows and backends keep an index in their hops for a while after its pod has gone, or was made anew under its name, and
// frames for it are dropped. No other pod gets that index while another one is free, not even from the next process.
func TestIndexOfAPodRests(t *testing.T) { inTCModes(t, indexOfAPodRests) }

func indexOfAPodRests(t *testing.T, mustOpen func(*testing.T, store.Options) *Plane) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	pods := podVeths(t, 5)
	must(t, d.ExpectPods(true))
	deliver, err := d.loadDelivery(&attached{Attachment: kernel.Attachment{Interface: "shunt-a", Mode: kernel.ModeNative}}, deliveries[0])
	must(t, err)
	defer deliver.Close()
	attach := func(name string) uint32 {
		t.Helper()
		_, err := d.AttachPod(name)
		must(t, err)
		index, ok := d.IndexOf(device(t, name).Attrs().Index)
		if got := verdictFor(t, deliver, index); !ok || got != tcRedirect {
			t.Fatalf("%s has index %d, %v, and a frame that is marked for it has the verdict %d", name, index, ok, got)
		}
		return index
	}
	anew, left := attach(pods[1]), attach(pods[0])
	must(t, d.Detach(pods[0]))
	must(t, netlink.LinkDel(device(t, pods[1])))
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: pods[1]})
	veth.PeerName = "again"
	must(t, netlink.LinkAdd(veth))
	rest := func(when string, indices ...uint32) {
		t.Helper()
		for _, free := range []uint32{left, anew} {
			if ifindex, taken := d.IfindexAt(free); taken || slices.Contains(indices, free) || verdictFor(t, deliver, free) != tcShot {
				t.Errorf("%s, index %d is that of interface %d, and others have %v", when, free, ifindex, indices)
			}
		}
	}
	rest("after one was left and one was made anew", attach(pods[1]), attach(pods[2]))
	if d.atTC.at[left/wordBits]>>(left%wordBits)&1 != 0 || d.atTC.at[anew/wordBits]>>(anew%wordBits)&1 != 0 {
		t.Errorf("indices %d and %d are at tc: %v", left, anew, d.atTC)
	}
	must(t, d.Close())
	d = mustOpen(t, opts)
	must(t, d.ExpectPods(true))
	rest("in the next process", attach(pods[1]), attach(pods[2]), attach(pods[3]))

	interfaces, ports := mapOf(t, d, abi.MapInterfaces), mapOf(t, d, abi.MapTxPorts)
	for index := uint32(abi.INTERFACE_MAX); index < uint32(abi.INDEX_MAX); index++ {
		if _, taken := d.IfindexAt(index); !taken && index != left {
			must(t, interfaces.Put(index, abi.Interface{Ifindex: 1<<30 + index}))
			must(t, ports.Put(index, uint32(device(t, "shunt-a").Attrs().Index)))
		}
	}
	if index := attach(pods[0]); index != left {
		t.Errorf("it has index %d, and %d alone is free", index, left)
	}
	if _, err := d.AttachPod(pods[4]); err == nil || !strings.Contains(err.Error(), "as many as it can be") {
		t.Errorf("no index is free, and the error is %v", err)
	}
}

// TestPodGoesWithoutDaemon: the next process removes the records of interfaces that went, or were made anew under their names, while no process ran; their
// indices rest. A pod that lives keeps its index, also if a process was killed between two of its records.
func TestPodGoesWithoutDaemon(t *testing.T) { inTCModes(t, podGoesWithoutDaemon) }

func podGoesWithoutDaemon(t *testing.T, mustOpen func(*testing.T, store.Options) *Plane) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	pods := podVeths(t, 5)
	must(t, d.ExpectPods(true))
	attach := func(name string) uint32 {
		t.Helper()
		_, err := d.AttachPod(name)
		must(t, err)
		index, ok := d.IndexOf(device(t, name).Attrs().Index)
		if !ok {
			t.Fatalf("%s has no index", name)
		}
		return index
	}
	lives, anew, gone := attach(pods[0]), attach(pods[1]), attach(pods[2])
	was := map[uint32]int{}
	for i, index := range []uint32{lives, anew, gone} {
		was[index] = device(t, pods[i]).Attrs().Index
	}
	must(t, d.Close())
	must(t, netlink.LinkDel(device(t, pods[2])))
	must(t, netlink.LinkDel(device(t, pods[1])))
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: pods[1]})
	veth.PeerName = "again"
	must(t, netlink.LinkAdd(veth))

	d = mustOpen(t, opts)
	for _, index := range []uint32{anew, gone} {
		if ifindex, taken := d.IfindexAt(index); taken {
			t.Errorf("index %d is still that of interface %d, which has gone", index, ifindex)
		}
		if at, has := d.IndexOf(was[index]); has {
			t.Errorf("interface %d, which has gone, still has index %d", was[index], at)
		}
	}
	keeps := func(when string) {
		t.Helper()
		if ifindex, _ := d.IfindexAt(lives); ifindex != was[lives] {
			t.Errorf("%s, index %d is that of interface %d, want %d", when, lives, ifindex, was[lives])
		}
		if at, has := d.IndexOf(was[lives]); !has || at != lives {
			t.Errorf("%s, the pod that lives has index %d, %v, want %d", when, at, has, lives)
		}
	}
	keeps("after a restart")
	must(t, d.ExpectPods(true))
	keeps("when pods are expected")
	for _, name := range []string{pods[0], pods[1], pods[3]} {
		if index := attach(name); name != pods[0] && (index == anew || index == gone) {
			t.Errorf("%s has index %d, which does not rest", name, index)
		}
	}
	keeps("after it was attached to")
	must(t, d.Detach(pods[2])) // as the daemon does with each pinned interface that it does not want
	if names, err := pinnedSides(opts.PinRoot, opts.Instance); err != nil || slices.Contains(names, pods[2]) {
		t.Errorf("of one that has gone, pins are left: %v, %v", names, err)
	}

	// A process was killed after the first of three records, and the next one has given the interface another index.
	const other = uint32(abi.INDEX_MAX) - 1
	must(t, mapOf(t, d, abi.MapInterfaces).Put(other, abi.Interface{Ifindex: uint32(was[lives])}))
	must(t, d.Close())
	d = mustOpen(t, opts)
	if ifindex, taken := d.IfindexAt(other); taken {
		t.Errorf("index %d is still that of interface %d, which has index %d", other, ifindex, lives)
	}
	keeps("with a record too many")
	must(t, d.ExpectPods(true))
	if index := attach(pods[0]); index != lives {
		t.Errorf("the pod that lives gets index %d, and had %d", index, lives)
	}
}

// verdictFor runs sh_deliver on a frame with the mark of an index. The mark's last three octets have the index and an offset (bpf/lb/mark.h).
func verdictFor(t *testing.T, deliver *ebpf.Program, index uint32) uint32 {
	t.Helper()
	frame := slices.Concat(make([]byte, 6), []byte{0x06, 0x73, 0x68, 0x70 | byte(index>>8), byte(index), 0}, []byte{0x88, 0xb5}, make([]byte, 46))
	verdict, _, err := deliver.Test(frame)
	must(t, err)
	return verdict
}

// TestManyPods: as many interfaces of pods as a large node has run one copy of each program, with an index each. They get other programs
// together, even if one of them has gone, and leave nothing behind. The test prints the times to attach to 60 and to all of them.
func TestManyPods(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	pods := podVeths(t, 250)
	for _, name := range pods { // as the plugin ptp has it
		must(t, netlink.LinkSetUp(device(t, name)))
		must(t, netlink.AddrAdd(device(t, name), &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 244, 7, 1), Mask: net.CIDRMask(32, 32)}}))
	}
	must(t, d.ExpectPods(true))
	begun, since := cpuTime(t), time.Now()
	for i, name := range pods {
		_, err := d.AttachPod(name)
		must(t, err)
		if n := time.Duration(i + 1); n == 60 || int(n) == len(pods) {
			t.Logf("%v to attach to the interfaces of %d pods, so %v for each, of which %v of CPU", time.Since(since).Round(time.Millisecond), n, time.Since(since)/n, (cpuTime(t)-begun)/n)
		}
	}
	indices := map[uint32]string{}
	same := func(names []string) (program ebpf.ProgramID) {
		t.Helper()
		for i, name := range names {
			if i%10 == 0 {
				at := requireAtTC(t, name, true)
				if program == 0 {
					program = at["sh_tc_in"]
				}
				if at["sh_tc_in"] != program {
					t.Fatalf("%s has the program %d, and %s has %d", name, at["sh_tc_in"], names[0], program)
				}
			}
			index, ok := d.IndexOf(device(t, name).Attrs().Index)
			if other := indices[index]; !ok || !store.IsPods(index) || other != "" && other != name {
				t.Fatalf("%s has index %d, %v, which is that of %q", name, index, ok, other)
			}
			indices[index] = name
		}
		return program
	}
	before := same(pods)

	// sh_deliver finds each by its mark.
	nic := &attached{Attachment: kernel.Attachment{Interface: "shunt-a", Mode: kernel.ModeNative}}
	deliver, err := d.loadDelivery(nic, deliveries[0])
	must(t, err)
	defer deliver.Close()
	for index := range uint32(abi.INDEX_MAX) {
		want := uint32(tcShot)
		if indices[index] != "" {
			want = tcRedirect
		}
		if got := verdictFor(t, deliver, index); got != want {
			t.Fatalf("a frame that is marked for index %d, of %q: verdict %d, want %d", index, indices[index], got, want)
		}
	}

	must(t, netlink.LinkDel(device(t, pods[7]))) // the daemon has had no notice yet
	left := slices.Delete(slices.Clone(pods), 7, 8)
	must(t, d.require(abi.FEATURE_MSS))
	if now := same(left); now == before {
		t.Errorf("they have the program %d, as before another one was needed", now)
	}
	begun, since = cpuTime(t), time.Now()
	for _, name := range pods {
		must(t, d.Detach(name))
	}
	t.Logf("%v to leave them, and %v of CPU for each", time.Since(since).Round(time.Millisecond), (cpuTime(t)-begun)/time.Duration(len(pods)))
	for index, name := range indices {
		if ifindex, taken := d.IfindexAt(index); taken {
			t.Errorf("index %d of %s is still that of interface %d", index, name, ifindex)
		}
	}
	if names, err := pinnedSides(opts.PinRoot, opts.Instance); err != nil || len(names) != 0 || d.atTC.at[1]&1 != 0 {
		t.Errorf("left are the pins of %v, %v, and %v", names, err, d.atTC)
	}
}

// cpuTime returns the CPU time that this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
