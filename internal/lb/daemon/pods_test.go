package daemon

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// newPodBench returns an interfaceBench of a node, without pods until podsAre names their interfaces.
func newPodBench(t *testing.T, there ...string) *interfaceBench {
	b := newInterfaceBench(t, there...)
	b.podsAre()
	t.Cleanup(b.notices.stop)
	return b
}

// podsAre makes these the interfaces of pods; each keeps its index.
func (b *interfaceBench) podsAre(names ...string) {
	b.listPods = func() (all []podInterface, err error) {
		for _, name := range names {
			all = append(all, podInterface{name: name, index: b.there[name], mtu: 1500})
		}
		return all, nil
	}
}

// TestPodsComeAndGo: a pattern attaches to each interface that comes, once, removes the traces of each that goes, and
// touches no other. An interface that was made anew under its name is attached to anew.
func TestPodsComeAndGo(t *testing.T) {
	b := newPodBench(t, "eth0", "veth1", "veth2", "docker0")
	list := listed("eth0", "veth*:tc")
	follow := func(anew bool, want ...string) {
		t.Helper()
		if got := b.followPods(list, 0); got != anew {
			t.Errorf("anew is %v, want %v", got, anew)
		}
		b.did(want...)
	}
	b.podsAre("veth1", "docker0")
	if err := errors.Join(b.attachAll(nil, list), b.detachOthers(list)); err != nil {
		t.Fatal(err)
	}
	b.did("attach eth0 auto", "expect pods: true", "attach veth1 of a pod")
	follow(false)
	b.podsAre("veth1", "veth2")
	follow(true, "attach veth2 of a pod")
	b.refresh(list)
	b.did()
	if names := b.names(); !slices.Equal(names, []string{"eth0", "veth1", "veth2"}) {
		t.Errorf("attached to %q", names)
	}
	if names := b.listedNames(); !slices.Equal(names, []string{"eth0"}) {
		t.Errorf("no pod's are %q", names)
	}
	b.podsAre("veth2")
	follow(false, "detach veth1", "release veth1")
	b.there["veth2"] = 9
	follow(true, "attach veth2 of a pod")
	if b.indices()[9] == false {
		t.Errorf("clients' packets leave by the indices %v, want the new one, 9, too", b.indices())
	}
	b.holds()

	next := listed("eth0", "veth2:tc")
	if err := errors.Join(b.attachAll(list, next), b.detachOthers(next)); err != nil {
		t.Fatal(err)
	}
	b.did("attach veth2 tc", "expect pods: false")
	if err := errors.Join(b.attachAll(next, list), b.detachOthers(list)); err != nil {
		t.Fatal(err)
	}
	b.did("expect pods: true", "attach veth2 of a pod")
	if err := errors.Join(b.attachAll(list, listed("eth0")), b.detachOthers(listed("eth0"))); err != nil {
		t.Fatal(err)
	}
	b.did("detach veth2", "release veth2", "expect pods: false")
}

// TestManyPodsAtOnce: the daemon attaches to a few at a time, so that the heartbeat goes on, and to all in the end. An
// interface that refuses does not keep others waiting.
func TestManyPodsAtOnce(t *testing.T) {
	b := newPodBench(t, "veth1", "veth2", "veth3")
	b.podsAre("veth1", "veth2", "veth3")
	b.refused["veth1"] = errors.New("no place is left")
	list := listed("veth*:tc")
	const over = -time.Nanosecond // the time is up at once
	for _, want := range [][]string{nil, {"attach veth2 of a pod"}, {"attach veth3 of a pod"}} {
		b.followPods(list, over)
		b.did(want...)
		select {
		case <-b.notices.wake:
		default:
			t.Error("others wait, and nobody is woken")
		}
	}
}

// TestPodsThatRefuse: an interface of a pod that refuses is a condition, tried again, and no reason to refuse a configuration; one
// that has gone meanwhile is neither. A predecessor's programs at an interface that refuses stay.
func TestPodsThatRefuse(t *testing.T) {
	b := newPodBench(t, "eth0", "veth1")
	list := listed("eth0", "veth*:tc")
	b.podsAre("veth1", "veth2") // veth2 is gone when it is attached to
	b.refused["veth1"], b.refused["veth2"] = errors.New("no place is left"), syscall.ENODEV
	b.programs["veth1"], b.programs["veth3"] = 2, 3
	if err := errors.Join(b.attachAll(nil, list), b.detachOthers(list)); err != nil {
		t.Fatal(err)
	}
	b.did("attach eth0 auto", "expect pods: true", "detach veth3", "release veth3")
	b.holds(condition.AttachFailed + " veth1")
	delete(b.refused, "veth1")
	b.podsAre("veth1")
	if !b.followPods(list, 0) {
		t.Error("it was attached to, and is not said to be new")
	}
	b.did("attach veth1 of a pod")
	b.holds()
	b.there["veth1"] = 7
	b.refused["veth1"] = errors.New("no place is left")
	b.followPods(list, 0)
	b.holds(condition.AttachFailed + " veth1")
	b.podsAre()
	b.followPods(list, 0)
	b.did("detach veth1", "release veth1")
	b.holds()
	if names := b.names(); !slices.Equal(names, []string{"eth0"}) {
		t.Errorf("attached to %q", names)
	}

	b = newPodBench(t, "eth0")
	b.refused["pods"] = errors.New("the program was not loaded")
	if err := b.attachAll(nil, list); !errors.Is(err, b.refused["pods"]) {
		t.Errorf("pods cannot be expected, and the error is %v", err)
	}
	b.listPods = func() ([]podInterface, error) { return nil, errors.New("no memory") }
	b.refused = map[string]error{}
	if err := b.attachAll(nil, list); err != nil {
		t.Errorf("the interfaces of pods cannot be listed, which is tried again, and the error is %v", err)
	}
}

// TestWayToHostBesidePods: while pods are expected, interfaces at XDP also see the answers of the host's servers, and
// remain the way to them.
func TestWayToHostBesidePods(t *testing.T) {
	b := newPodBench(t, "eth0", "a1", "br0")
	b.modes["a1"], b.modes["br0"] = kernel.ModeTCX, kernel.ModeTCX
	b.podsAre("a1")
	way := func(index int, list ...string) {
		t.Helper()
		if err := errors.Join(b.attachAll(nil, listed(list...)), b.detachOthers(listed(list...))); err != nil {
			t.Fatal(err)
		}
		if got, _, ok := b.hopToHost(); got != index || !ok {
			t.Errorf("with %q the way to the host is %d, met: %v; want %d", list, got, ok, index)
		}
	}
	way(1, "eth0", "a*:tc")
	way(3, "eth0", "a*:tc", "br0:tc")
	b.modes["eth0"] = kernel.ModeGeneric
	way(2, "eth0:generic", "a*:tc")
}

// TestPodNotices: changed addresses are noted by interface, and lost notices as all interfaces; each wakes.
func TestPodNotices(t *testing.T) {
	n := newPodNotices()
	woken := func() bool {
		select {
		case <-n.wake:
			return true
		default:
			return false
		}
	}
	message := func(kind uint16, index uint32) syscall.NetlinkMessage {
		return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: binary.NativeEndian.AppendUint32(make([]byte, 4), index)}
	}
	n.hear([]syscall.NetlinkMessage{message(unix.RTM_NEWADDR, 7), message(unix.RTM_NEWLINK, 8), {Header: syscall.NlMsghdr{Type: unix.RTM_DELADDR}}}, false)
	n.hear([]syscall.NetlinkMessage{message(unix.RTM_DELADDR, 9)}, false)
	if touched, all := n.take(); !woken() || woken() || len(touched) != 2 || !touched[7] || !touched[9] || all {
		t.Errorf("touched are %v, all: %v", touched, all)
	}
	n.hear(nil, true)
	if touched, all := n.take(); !woken() || len(touched) != 0 || !all {
		t.Errorf("after lost notices, touched are %v, all: %v", touched, all)
	}
	if touched, all := n.take(); len(touched) != 0 || all {
		t.Errorf("taken twice: %v, all: %v", touched, all)
	}
}

// TestPodsAreHeardOf: a veth into another namespace is found, and its coming, its going and its addresses cause
// notices. A port of a bridge is no pod's interface, nor is a veth whose other end is here.
func TestPodsAreHeardOf(t *testing.T) {
	node, pods := nstest.New(t), nstest.New(t)
	n := newPodNotices()
	node.Do(t, func() { n.start(slog.New(slog.DiscardHandler)) })
	if n.socket == nil {
		t.Fatal("nothing is heard")
	}
	woken := func(after string) {
		t.Helper()
		select {
		case <-n.wake:
		case <-time.After(30 * time.Second):
			t.Fatalf("nobody is woken after %s", after)
		}
	}
	find := func(want ...string) {
		t.Helper()
		var found []podInterface
		var err error
		node.Do(t, func() { found, err = findPods() })
		var names []string
		for _, p := range found {
			names = append(names, p.name)
		}
		if err != nil || !slices.Equal(names, want) {
			t.Errorf("found are %q, %v, want %q", names, err, want)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	find()
	nstest.Veth(t, node, "veth1", pods, "eth1")
	woken("an interface came")
	find("veth1")
	n.take()
	must(node.Net.AddrAdd(node.Link(t, "veth1"), &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, 0, 1), Mask: net.CIDRMask(32, 32)}}))
	for index := node.Link(t, "veth1").Attrs().Index; ; {
		woken("an address came")
		if touched, all := n.take(); touched[index] || all {
			break
		}
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	must(node.Net.LinkAdd(bridge))
	nstest.Veth(t, node, "veth2", pods, "eth2")
	must(node.Net.LinkSetMaster(node.Link(t, "veth2"), bridge))
	here := netlink.NewVeth(netlink.LinkAttrs{Name: "veth3"})
	here.PeerName = "veth4"
	must(node.Net.LinkAdd(here))
	find("veth1")
	must(node.Net.LinkDel(node.Link(t, "veth1")))
	woken("an interface went")
	find()
	n.stop()
	n.stop()
}
