package datapath

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/reconcile"
)

// TestAFlowThroughTheLoadedProgram shows that the program reads what this package writes:
// each SYN leaves as it must, towards the backend and from one of the sources.
func TestAFlowThroughTheLoadedProgram(t *testing.T) {
	// Native mode on a veth sends back by redirecting (redirect_back in lb/config.h).
	t.Run("native", func(t *testing.T) { flowThroughProgram(t, model.AttachNative, kernel.XDPRedirect) })
	t.Run("generic", func(t *testing.T) { flowThroughProgram(t, model.AttachGeneric, kernel.XDPTx) })
}

func flowThroughProgram(t *testing.T, mode model.Attach, sent uint32) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-a", mode)
	must(t, err)
	must(t, d.Heartbeat())
	must(t, d.SetSettings(model.Timeouts{TCPEstablished: 2 * time.Hour, TCPHandshake: 30 * time.Second, TCPClosing: time.Second, UDP: time.Minute},
		model.PortRange{First: 2048, Last: 4095}))
	vip, source := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("192.0.2.1")
	ref := reconcile.BackendRef{Index: 3, Generation: 200}
	backend := model.BackendAddress{Address: netip.MustParseAddr("192.0.2.20"), Port: 8080}
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 20}
	must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: backend}))
	must(t, d.SetHop(ref, Hop{device(t, "shunt-a").Attrs().Index, mac}))
	must(t, d.SetSources(ref, []netip.Addr{source}))
	must(t, d.WriteSlots(100, reconcile.NewTable([]reconcile.Slot{{Current: ref}, {Current: ref}, {Current: ref}})))
	must(t, d.PutService(reconcile.ServiceRecord{Index: 9, Generation: 1, Name: "web", Forwarding: model.ForwardingNAT, Seed: 1, Offset: 100, Size: 3}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: vip, VIP: true}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: source, Source: true}))
	must(t, d.PutFrontend(model.Frontend{Address: vip, Ports: model.PortRange{First: 80, Last: 80}, Protocol: model.TCP}, 9))
	must(t, d.PutFrontend(model.Frontend{Address: vip, Ports: model.PortRange{First: 7001, Last: 7777}, Protocol: model.TCP}, 9))

	us := device(t, "shunt-a").Attrs().HardwareAddr
	for port, want := range map[uint16]uint32{80: sent, 81: kernel.XDPPass, 7000: kernel.XDPPass, 7001: sent, 7512: sent, 7777: sent, 7778: kernel.XDPPass} {
		in := packet.Must(packet.NewTCP("198.51.100.7:40000", netip.AddrPortFrom(vip, port).String(), "S",
			packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, us)))
		verdict, out, err := d.RunPacket("shunt-a", in)
		must(t, err)
		if verdict != want {
			counters, _ := d.Counters()
			t.Errorf("port %d: verdict %d, want %d; reasons %v", port, verdict, want, counters.Reasons)
			continue
		}
		if want == kernel.XDPPass {
			if !bytes.Equal(in, out) {
				t.Errorf("port %d: a frame that passes was changed", port)
			}
			continue
		}
		p, err := packet.Parse(out)
		must(t, err)
		if !bytes.Equal(out[:6], mac) || p.IPv4.Destination != backend.Address || p.IPv4.Source != source || p.TCP.DestinationPort != 8080 ||
			p.TCP.SourcePort < 2048 || p.TCP.SourcePort > 4095 {
			t.Errorf("port %d: it left as %s", port, p)
		}
	}
	counters, err := d.Counters()
	must(t, err)
	if n := counters.Services[9]; n.PacketsIn != 4 || n.FlowsCreated != 4 || counters.Backends[3] != n {
		t.Errorf("counted %+v for the service and %+v for the backend", n, counters.Backends[3])
	}
	sweep, err := d.Sweep()
	must(t, err)
	if sweep.Entries != 8 || sweep.Flows != 4 || sweep.Expired != 0 {
		t.Errorf("the flow table is said to hold %+v", sweep)
	}
}
