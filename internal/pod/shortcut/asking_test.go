package shortcut_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// TestAsking: a connection asks once, regardless of the end that sends, and not again when it has ended. To report
// ended connections to conntrack costs about as much as the connections do.
func TestAsking(t *testing.T) {
	b, _ := bedtest.New(t, 2)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var s *shortcut.Shortcut
	must(b.Node.Run(func() (err error) {
		s, err = shortcut.Open(shortcut.Checked, false)
		return err
	}))
	t.Cleanup(func() { must(b.Node.Run(s.Close)) })
	for pod := range b.Pods {
		must(b.Node.Run(func() error {
			l, err := netlink.LinkByName(b.Interface(pod))
			if err != nil {
				return err
			}
			for _, is6 := range []bool{false, true} {
				if err := s.Put(shortcut.Pod{Address: b.Address(pod, is6), Ifindex: l.Attrs().Index, MTU: l.Attrs().MTU}); err != nil {
					return err
				}
			}
			return s.Attach(l.Attrs().Index)
		}))
	}
	must(s.Watched(time.Hour))
	for _, is6 := range []bool{false, true} {
		server, err := traffic.Serve(b.Pods[1], netip.AddrPortFrom(b.Address(1, is6), 0))
		must(err)
		t.Cleanup(server.Close)
		r, err := traffic.Measure(b.Pods[0], traffic.CRR, server.Address, 50*time.Millisecond)
		must(err)
		asking, err := s.Asking()
		if err != nil || r.Transactions == 0 || len(asking) > 0 {
			t.Errorf("after %d connections %d ask, %v", r.Transactions, len(asking), err)
		}

		client, serving := bedtest.Connect(t, b, is6)
		must(bedtest.Exchange(client, serving, 100))
		end := func(c interface{ String() string }) netip.AddrPort { return netip.MustParseAddrPort(c.String()) }
		ends := []netip.AddrPort{end(client.LocalAddr()), end(client.RemoteAddr())}
		asking, err = s.Asking()
		if err != nil || len(asking) != 1 || !slices.Contains(ends, asking[0].From) || !slices.Contains(ends, asking[0].To) {
			t.Errorf("%v ask, %v; the connection is between %v", asking, err, ends)
		}
	}
}
