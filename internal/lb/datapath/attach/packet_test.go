package attach

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestAFlowThroughTheLoadedProgram shows that the program reads the entries that this package writes:
// each SYN leaves towards the backend and from one of the sources.
func TestAFlowThroughTheLoadedProgram(t *testing.T) {
	// Native mode on a veth sends back by redirecting (redirect_back in lb/config.h).
	t.Run("native", func(t *testing.T) { flowThroughProgram(t, model.AttachNative, kernel.XDPRedirect) })
	t.Run("generic", func(t *testing.T) { flowThroughProgram(t, model.AttachGeneric, kernel.XDPTx) })
}

// web is a service under NAT at webVIP, TCP ports 80 and 7001 to 7777, with one backend. Its NAT
// source is the address of shunt-a.
const webIndex, webBackendIndex = 9, 3

var (
	webVIP     = netip.MustParseAddr("192.0.2.10")
	webSource  = netip.MustParseAddr("192.0.2.1")
	webBackend = model.BackendAddress{Address: netip.MustParseAddr("192.0.2.20"), Port: 8080}
	webMAC     = net.HardwareAddr{2, 0, 0, 0, 0, 20}
)

// putWeb writes that service.
func putWeb(t *testing.T, d *Plane) {
	t.Helper()
	must(t, d.Heartbeat())
	must(t, d.SetSettings(model.Timeouts{TCPEstablished: 2 * time.Hour, TCPHandshake: 30 * time.Second, TCPClosing: time.Second, UDP: time.Minute},
		value.PortRange{First: 2048, Last: 4095}))
	ref := reconcile.BackendRef{Index: webBackendIndex, Generation: 200}
	must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: webBackend}))
	must(t, d.SetHop(ref, store.Hop{Interface: device(t, "shunt-a").Attrs().Index, MAC: webMAC}))
	must(t, d.SetNATSources(ref, []netip.Addr{webSource}))
	must(t, d.WriteSlots(100, reconcile.NewTable([]reconcile.Slot{{Current: ref}, {Current: ref}, {Current: ref}})))
	must(t, d.PutService(reconcile.ServiceRecord{Index: webIndex, Generation: 1, Name: "web", Forwarding: model.ForwardingNAT, Seed: 1, Offset: 100, Size: 3}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: webVIP, VIP: true}))
	must(t, d.PutAddress(reconcile.AddressRecord{Address: webSource, Source: true}))
	for _, ports := range []value.PortRange{{First: 80, Last: 80}, {First: 7001, Last: 7777}} {
		must(t, d.PutFrontend(model.Frontend{Address: webVIP, Ports: ports, Protocol: model.TCP}, webIndex))
	}
}

// webSYN is a client's first packet to the service, as shunt-a gets it.
func webSYN(t *testing.T, client string, port uint16) []byte {
	t.Helper()
	return packet.Must(packet.NewTCP(client, netip.AddrPortFrom(webVIP, port).String(), "S",
		packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, device(t, "shunt-a").Attrs().HardwareAddr)))
}

func flowThroughProgram(t *testing.T, mode model.Attach, sent uint32) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-a", mode)
	must(t, err)
	putWeb(t, d)
	for port, want := range map[uint16]uint32{80: sent, 81: kernel.XDPPass, 7000: kernel.XDPPass, 7001: sent, 7512: sent, 7777: sent, 7778: kernel.XDPPass} {
		in := webSYN(t, "198.51.100.7:40000", port)
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
		if !bytes.Equal(out[:6], webMAC) || p.IPv4.Destination != webBackend.Address || p.IPv4.Source != webSource || p.TCP.DestinationPort != webBackend.Port ||
			p.TCP.SourcePort < 2048 || p.TCP.SourcePort > 4095 {
			t.Errorf("port %d: it left as %s", port, p)
		}
	}
	counters, err := d.Counters()
	must(t, err)
	if n := counters.Services[webIndex]; n.PacketsIn != 4 || n.FlowsCreated != 4 || counters.Backends[webBackendIndex] != n {
		t.Errorf("counted %+v for the service and %+v for the backend", n, counters.Backends[webBackendIndex])
	}
	sweep, err := d.Sweep()
	must(t, err)
	if sweep.Entries != 8 || sweep.Flows != 4 || sweep.Expired != 0 {
		t.Errorf("the flow table is said to hold %+v", sweep)
	}
}
