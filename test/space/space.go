// Package space makes the place for tests of the loaded program: a network namespace of their own,
// interfaces in it, and a data plane on these. All is removed after the test.
package space

import (
	"errors"
	"net"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/namespace"
)

// Enter makes a namespace and moves the test's goroutine into it, for good: the thread ends with it.
func Enter(t testing.TB, name string) netns.NsHandle {
	t.Helper()
	runtime.LockOSThread() // never unlocked
	handle, err := namespace.NewNamed(name)
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(handle.Close(), netns.DeleteNamed(name)); err != nil {
			t.Errorf("removing the network namespace: %v", err)
		}
	})
	return handle
}

// Stay binds a thread that the caller has locked to its present CPU, so that counters and limits per
// CPU are all on one.
func Stay(t testing.TB) {
	t.Helper()
	var set unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &set))
	for i := range 1024 {
		if set.IsSet(i) {
			set.Zero()
			set.Set(i)
			must(t, unix.SchedSetaffinity(0, &set))
			return
		}
	}
	t.Fatal("no CPU may be used")
}

// AddArm makes an interface of a balancer in the thread's namespace, up and with addresses in
// prefix notation: one end of a veth whose other end is down. mtu 0 is the kernel's own.
func AddArm(t testing.TB, name string, mac net.HardwareAddr, mtu int, addresses ...string) netlink.Link {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, mac, mtu
	veth := netlink.NewVeth(attrs)
	veth.PeerName = name + "-peer"
	must(t, netlink.LinkAdd(veth))
	link, err := netlink.LinkByName(name)
	must(t, err)
	for _, text := range addresses {
		address, err := netlink.ParseAddr(text)
		must(t, err)
		address.Flags |= unix.IFA_F_NODAD
		must(t, netlink.AddrAdd(link, address))
	}
	must(t, netlink.LinkSetUp(link))
	return link
}

// Open opens a data plane.
func Open(t testing.TB, options store.Options) *datapath.Datapath {
	t.Helper()
	d, err := datapath.Open(options)
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(d.Close(), attach.RemoveFrom(options)); err != nil {
			t.Errorf("removing the data plane: %v", err)
		}
	})
	return d
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
