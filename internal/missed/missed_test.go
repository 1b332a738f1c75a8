package missed

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestFramesNotTaken has a veth refuse a number of frames because of its MTU: the kernel counts them
// where it counts the frames that find no room in the ring, and exactly as many as are sent, which a
// full ring would leave to chance.
func TestFramesNotTaken(t *testing.T) {
	const few, many = 3, 40
	for _, test := range []struct {
		name  string
		other func(t *testing.T, a *nstest.Namespace) *nstest.Namespace
	}{
		{"the other end in the same namespace", func(_ *testing.T, a *nstest.Namespace) *nstest.Namespace { return a }},
		{"the other end in another namespace", func(t *testing.T, _ *nstest.Namespace) *nstest.Namespace { return nstest.New(t) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := nstest.New(t)
			b := test.other(t, a)
			nstest.Veth(t, a, "lan", b, "out")
			if err := a.Net.LinkSetMTU(a.Link(t, "lan"), 500); err != nil {
				t.Fatal(err)
			}
			want := uint64(0)
			for _, n := range []int{0, few, many} {
				send(t, b, "out", n, 1000)
				send(t, b, "out", many, 100) // these are taken
				want += uint64(n)
				nstest.Eventually(t, fmt.Sprintf("%d frames are missed", want), func() bool { return count(t, a) == want })
			}
		})
	}
}

// TestOtherKinds: a device that is no veth counts its missed frames itself.
func TestOtherKinds(t *testing.T) {
	n := nstest.New(t)
	if err := n.Net.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "lan"}}); err != nil {
		t.Fatal(err)
	}
	if got := count(t, n); got != 0 {
		t.Errorf("%d frames missed by a bridge without ports", got)
	}
}

func TestNoSuchInterface(t *testing.T) {
	_, err := Frames("shunt-none")
	if err == nil || !strings.Contains(err.Error(), "shunt-none") {
		t.Errorf("want an error with the interface's name, have %v", err)
	}
}

// count calls Frames in the namespace.
func count(t *testing.T, n *nstest.Namespace) (frames uint64) {
	t.Helper()
	n.Do(t, func() {
		var err error
		if frames, err = Frames("lan"); err != nil {
			t.Error(err)
		}
	})
	return frames
}

// send sends frames of a size to nobody out of an interface.
func send(t *testing.T, n *nstest.Namespace, iface string, frames, size int) {
	t.Helper()
	to := &unix.SockaddrLinklayer{Ifindex: n.Index(t, iface), Halen: 6}
	frame := make([]byte, size)
	copy(frame, append(net.HardwareAddr{2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8}, 0x88, 0xb5)) // IEEE 802, local experimental
	n.Do(t, func() {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Errorf("packet socket: %v", err)
			return
		}
		defer unix.Close(fd)
		for range frames {
			// Sendto may report a dropped frame.
			if err := unix.Sendto(fd, frame, 0, to); err != nil && err != unix.ENOBUFS {
				t.Errorf("send: %v", err)
				return
			}
		}
	})
}
