package attach

import (
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

// TestReservedPortsAreNobodys: new flows take only the ports of a pool that are not reserved, and all ports once they
// are given back. Ports that a killed process reserved are given back, too. Packets to a reserved port pass.
func TestReservedPortsAreNobodys(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	putWeb(t, d) // its pool is 2048 to 4095
	backend := netip.AddrPortFrom(webBackend.Address, webBackend.Port)
	port := func(n uint16) store.SourcePort {
		return store.SourcePort{Protocol: model.TCP, Source: netip.AddrPortFrom(webSource, n), Backend: backend}
	}
	client := uint16(10000)
	// given returns the source port of a flow that begins, or 0 for none.
	given := func() uint16 {
		t.Helper()
		client++
		verdict, out, err := d.RunPacket("shunt-a", webSYN(t, netip.AddrPortFrom(netip.MustParseAddr("198.51.100.7"), client).String(), 80))
		must(t, err)
		if verdict != kernel.XDPTx {
			return 0
		}
		p, err := packet.Parse(out)
		must(t, err)
		return p.TCP.SourcePort
	}
	var all []store.SourcePort // every second one: a search has an odd stride, so it meets a free one next
	for n := uint16(2049); n <= 4095; n += 2 {
		all = append(all, port(n))
	}
	must(t, d.Reserve(all))
	must(t, d.Reserve(all))
	for range 200 {
		if n := given(); n == 0 || n%2 == 1 {
			t.Fatalf("a flow has port %d, which is reserved or no port", n)
		}
	}
	answer := packet.Must(packet.NewTCP(backend.String(), all[0].Source.String(), "SA", packet.MACs(webMAC, device(t, "shunt-a").Attrs().HardwareAddr)))
	if verdict, _, err := d.RunPacket("shunt-a", answer); err != nil || verdict != kernel.XDPPass {
		t.Errorf("a packet to a reserved port: verdict %d, %v; want that it passes", verdict, err)
	}
	sweep, err := d.Sweep()
	must(t, err)
	if want := uint64(2*200 + len(all) + 1); sweep.Flows != 200 || uint64(sweep.Entries) != want {
		t.Errorf("a sweep finds %+v, want 200 flows and %d entries", sweep, want)
	}
	counters, err := d.Counters()
	must(t, err)
	if n := counters.Reasons["flow_recycled"].Packets; n != 0 {
		t.Errorf("%d reservations were taken for entries that were written at the same time", n)
	}
	must(t, d.Close()) // as if it were killed
	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	must(t, d.Reserve(all[:10]))
	sweep, err = d.Sweep()
	must(t, err)
	if sweep.Entries != 2*200+10+1 {
		t.Errorf("a sweep finds %+v, want the entries of 200 flows and of 10 reserved ports", sweep)
	}
	must(t, d.Reserve(nil))
	sweep, err = d.Sweep()
	must(t, err)
	if sweep.Entries != 2*200 {
		t.Errorf("a sweep finds %+v, want the entries of 200 flows", sweep)
	}
	odd := 0
	for range 200 {
		odd += int(given() % 2)
	}
	if odd == 0 {
		t.Error("no flow has a port that was given back")
	}
}

// TestAFlowKeepsItsPort: a flow's port is not reserved while the flow has it.
func TestAFlowKeepsItsPort(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	putWeb(t, d)
	syn := webSYN(t, "198.51.100.7:40000", 80)
	_, out, err := d.RunPacket("shunt-a", syn)
	must(t, err)
	first, err := packet.Parse(out)
	must(t, err)
	must(t, d.Reserve([]store.SourcePort{{Protocol: model.TCP, Source: netip.AddrPortFrom(webSource, first.TCP.SourcePort), Backend: netip.AddrPortFrom(webBackend.Address, webBackend.Port)}}))
	_, out, err = d.RunPacket("shunt-a", syn)
	must(t, err)
	again, err := packet.Parse(out)
	must(t, err)
	sweep, err := d.Sweep()
	must(t, err)
	if again.TCP.SourcePort != first.TCP.SourcePort || sweep.Entries != 2+1 {
		t.Errorf("the flow had port %d and has %d; a sweep finds %+v, want the flow's entries alone beside the first of all", first.TCP.SourcePort, again.TCP.SourcePort, sweep)
	}
}
