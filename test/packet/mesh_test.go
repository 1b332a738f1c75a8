package packet_test

import (
	"bytes"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/stranger"
	"github.com/vishvananda/netlink"
)

// newMeshWorld is a balancer that is a backend as well: its programs hand tunnels' packets to sh_decap.
func newMeshWorld(t *testing.T, mode model.Attach) (*world, *decap.Beside, decap.Wanted) {
	t.Helper()
	w := newWorld(t, withMode(mode))
	w.apply(append(services(), ownServices()...))
	wanted := decap.Wanted{VIPs: []netip.Addr{decapVIP4, decapVIP6}, Senders: decapFroms, GUEPort: decapPort}
	beside := decap.NewBeside(w.d, slog.New(slog.NewTextHandler(io.Discard, nil)))
	w.cpu.do(func() {
		dev, err := netlink.LinkByName(armC)
		must(w, err)
		for _, own := range []string{decapOwn4.String() + "/24", decapOwn6.String() + "/64"} {
			address, err := netlink.ParseAddr(own)
			must(w, err)
			must(w, netlink.AddrAdd(dev, address))
		}
		must(w, beside.Follow([]string{armC}, wanted, false))
	})
	w.Cleanup(beside.Close)
	return w, beside, wanted
}

// decidedByDecap reports whether sh_decap decides a case: sh_xdp has already judged a packet that is damaged on
// the outside, or that is no tunnel's.
func decidedByDecap(reason string) bool {
	return strings.HasPrefix(reason, "decap_") && reason != "decap_no_tunnel"
}

// TestMeshDecapsulates: behind a balancer's program tunnels' packets get the same result as without one, also if
// the balancer would balance their inner packet; and a program after sees them.
func TestMeshDecapsulates(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" {
		return // decapsulation is at XDP, on interfaces whose frames come in by themselves
	}
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			w, beside, wanted := newMeshWorld(t, mode)
			count, packets := stranger.Count(t, "count")
			must(t, w.chain(armC).Put(uint32(2), count)) // CHAIN_AFTER
			tried := 0
			for name, c := range decapCases() {
				if !decidedByDecap(c.reason) {
					continue
				}
				tried++
				expected := decapModel(c.frame)
				verdict, seen := uint32(kernel.XDPPass), uint64(1)
				if expected.drop {
					verdict, seen = kernel.XDPDrop, 0
				}
				before, was := w.reasons(), packets()
				r := w.cpu.run(armC, bytes.Clone(c.frame))
				moved := w.moved(before)
				switch {
				case r.err != nil || r.verdict != verdict || moved[c.reason] != 1:
					t.Errorf("%s: verdict %d, counted %v, %v; want %d, %s", name, r.verdict, moved, r.err, verdict, c.reason)
				case !expected.drop && !bytes.Equal(r.frame, expected.out):
					t.Errorf("%s: it went on as\n%x, want\n%x", name, r.frame, expected.out)
				case packets()-was != seen:
					t.Errorf("%s: the program after saw %d packets, want %d", name, packets()-was, seen)
				}
			}
			if tried < 50 {
				t.Errorf("%d cases were tried", tried)
			}
			inTunnel := packet.Must(shells()[0].carry(toVIP(false)))
			passesAsItCame := func(what string) {
				t.Helper()
				if r := w.cpu.run(armC, bytes.Clone(inTunnel)); r.err != nil || r.verdict != kernel.XDPPass || !bytes.Equal(r.frame, inTunnel) {
					t.Errorf("%s: verdict %d, %v\n%x, want\n%x", what, r.verdict, r.err, r.frame, inTunnel)
				}
			}
			w.cpu.do(func() { must(w, beside.Follow([]string{armC}, decap.Wanted{}, false)) })
			passesAsItCame("no backend any more")
			w.cpu.do(func() { must(w, beside.Follow([]string{armC}, wanted, false)) })
			if r := w.cpu.run(armC, bytes.Clone(inTunnel)); r.verdict != kernel.XDPPass || bytes.Equal(r.frame, inTunnel) {
				t.Errorf("a backend again: verdict %d and the frame as it came", r.verdict)
			}
			w.cpu.do(func() { must(w, w.d.Detach(armC)); _, err := w.d.Attach(armC, mode); must(w, err) })
			passesAsItCame("attached anew, so that another interface may have the place")
		})
	}
}

// TestMeshBalances: packets without a tunnel get the same result as without sh_decap, and packets for this
// machine's own server pass unchanged.
func TestMeshBalances(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" {
		return
	}
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			w, _, _ := newMeshWorld(t, mode)
			for _, k := range kinds {
				own := k.toDirect(40000, portOwnDirect, "S", packet.Data("hello"))
				v := wayOf(model.ForwardingDSRIPIP, false)
				other := k.toDirect(40000, v.port, "S")
				table(t, w, []trial{
					{name: k.String() + "/own", in: own, end: changes, want: func(packet.Packet) packet.Packet { return own }},
					{name: k.String() + "/other", in: other, end: leaves, want: v.expected(other, single(v.source()))},
				})
			}
		})
	}
}
