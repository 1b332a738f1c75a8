package attach

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
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

// TestPodsComeWithoutReload: while interfaces of pods are expected, one that comes or goes has no program on another interface loaded
// anew. One that is no pod's has, once, because the programs took its index for that of one.
func TestPodsComeWithoutReload(t *testing.T) {
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
		_, err := d.Attach(name, model.AttachTC)
		must(t, err)
		requireAtTC(t, name, true)
		same(name + " came")
		if ways, peers, bit := d.deliveredTo(d.attached["shunt-a"]), d.tcPeers(), uint64(1)<<index(name); ways&bit == 0 || peers&bit == 0 {
			t.Errorf("%s is at index %d, and the ways are %b, those into pods %b", name, index(name), ways, peers)
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
	_, err = d.Attach(pods[0], model.AttachTC)
	must(t, err)
	same("another pod came")

	// The next process finds a pod's interface, and keeps its index, too.
	must(t, d.Close())
	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	must(t, d.ExpectPods(true))
	before = programID(t, "shunt-a")
	_, err = d.Attach(pods[0], model.AttachTC)
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

// TestPodVanishesWhileAttached: an interface that goes while it is attached to leaves neither pins nor a place that is taken.
func TestPodVanishesWhileAttached(t *testing.T) {
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
	if _, err := d.Attach(pods[0], model.AttachTC); err == nil {
		t.Error("attached to an interface that has gone")
	}
	if _, has := d.IndexOf(gone.Attrs().Index); has {
		t.Error("the interface that has gone has an index")
	}
	if names, err := pinnedSides(opts.PinRoot, opts.Instance); err != nil || len(names) != 0 || len(d.Attached()) != 0 {
		t.Errorf("pins are left of %v, and attached is %v: %v", names, d.Attached(), err)
	}
	_, err := d.Attach(pods[1], model.AttachTC)
	must(t, err)
	if at, has := d.IndexOf(device(t, pods[1]).Attrs().Index); !has || at != 0 {
		t.Errorf("the next one has index %d, %v, want 0, which is free", at, has)
	}
}
