package hook

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

// A hook that is kept goes on when its process's part has ended, and the next process has the leases that it names, and
// no others.
func TestKept(t *testing.T) {
	const one, two, from = "192.0.2.10:5000", "[2001:db8::10]:5001", "198.51.100.7:40000"
	sharing := beside(one, "192.0.2.11:5000", false)
	inHost(t, func(t *testing.T) {
		must(t, kernel.Mount(kernel.DefaultPinRoot, slog.New(slog.DiscardHandler)))
		folder := filepath.Join(kernel.DefaultPinRoot, fmt.Sprintf("shunt-test-%d", os.Getpid()), "eth0")
		h, err := Attach(Options{Interface: "eth0", Mode: kernel.ModeAuto, Kept: folder})
		if err != nil || h.Adopted() {
			t.Errorf("with nothing kept: %v", err)
			return
		}
		lease := begin(t, h, one)
		other, err := h.Begin()
		must(t, err)
		must(t, h.Serve(other, netip.MustParseAddrPort(two)))
		must(t, h.Serve(other, netip.MustParseAddrPort(sharing)))
		guard, err := h.Begin()
		must(t, err)
		must(t, h.Guard(guard, netip.MustParseAddrPort("192.0.2.10:7000")))
		own := macOf(t)
		run := func(h *Hook, when, to string, want uint32) {
			t.Helper()
			source := from
			if to == two {
				source = "[2001:db8:c::7]:40000"
			}
			verdict, _, err := h.RunPacket(packet.Must(packet.NewUDP(source, to, packet.Data("hello"), packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own))))
			must(t, err)
			if verdict != want {
				t.Errorf("%s: the verdict on a datagram to %s is %d, want %d", when, to, verdict, want)
			}
		}
		must(t, h.Keep(folder))
		must(t, h.Keep(folder)) // again
		run(h, "kept", one, kernel.XDPRedirect)
		if err := h.Forget(); err != nil || h.Adopted() {
			t.Errorf("forgotten: %v", err)
		}
		if _, err := os.Lstat(filepath.Dir(folder)); !os.IsNotExist(err) {
			t.Errorf("after Forget there is %s: %v", folder, err)
		}
		must(t, h.Keep(folder))
		first, err := kernel.OccupantOf("eth0")
		must(t, err)
		must(t, h.Leave())

		next, err := Attach(Options{Interface: "eth0", Mode: kernel.ModeAuto, Kept: folder, GoOn: []Kept{{Lease: lease, Addresses: []netip.AddrPort{netip.MustParseAddrPort(one)}}}})
		if err != nil {
			t.Error(err)
			return
		}
		second, err := kernel.OccupantOf("eth0")
		must(t, err)
		if !next.Adopted() || first.Link != second.Link || first.ID == second.ID {
			t.Errorf("it is %s, and was %s", second, first)
		}
		run(next, "taken over", one, kernel.XDPRedirect)
		run(next, "taken over", two, kernel.XDPPass)
		run(next, "taken over", sharing, kernel.XDPPass)
		run(next, "taken over", "192.0.2.10:7000", kernel.XDPPass)
		if c, err := next.Counts(lease, 0); err != nil || c.Matched != 2 || c.PassedNoSocket != 0 {
			t.Errorf("counted are %+v, %v", c, err)
		}
		k, l := udpLeaseKey{}, udpLease{}
		entries, n := next.objects.Maps[udpMapShUdLeases].Iterate(), 0
		for entries.Next(&k, &l) {
			n++
		}
		if hashes := hinted(t, next); len(next.leases) != 1 || len(next.direct) != 1 || n != 1 || len(hashes) != 1 {
			t.Errorf("left are %v, %v, %d entries and the hashes %v", next.leases, next.direct, n, hashes)
		}
		if fresh, err := next.Begin(); err != nil || fresh == lease {
			t.Errorf("lease %d was begun, %v; %d goes on", fresh, err, lease)
		}
		must(t, next.Serve(1, netip.MustParseAddrPort(sharing)))
		must(t, next.End(lease))
		run(next, "over", one, kernel.XDPPass)
		must(t, next.Leave())

		// A version with another layout begins anew.
		layout++
		defer func() { layout-- }()
		third, err := Attach(Options{Interface: "eth0", Mode: kernel.ModeAuto, Kept: folder, GoOn: []Kept{{Lease: 1, Addresses: []netip.AddrPort{netip.MustParseAddrPort(sharing)}}}})
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := os.Lstat(folder); third.Adopted() || len(third.leases) > 0 || !os.IsNotExist(err) {
			t.Errorf("of another layout %v was taken over; %v", third.leases, err)
		}
		run(third, "another layout", sharing, kernel.XDPPass)
		must(t, third.Keep(folder))
		must(t, third.Leave())
		must(t, RemoveKept(folder))
		if o, err := kernel.OccupantOf("eth0"); err != nil || o != nil {
			t.Errorf("%v is left, %v", o, err)
		}
		must(t, RemoveKept(folder)) // nothing is there
	})
}
