package attach

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// The stopgap drops the packets that the program at XDP would take, and passes the host's own. It ends by itself if
// it is not lowered.
func TestStopgapKnowsWhatIsOurs(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	must(t, d.Heartbeat())
	must(t, d.SetSettings(model.Timeouts{TCPEstablished: 2 * time.Hour, TCPHandshake: 30 * time.Second, TCPClosing: time.Second, UDP: time.Minute},
		value.PortRange{First: 2048, Last: 4095}))
	ref := reconcile.BackendRef{Index: 3, Generation: 1}
	must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("192.0.2.20"), Port: 8080}}))
	must(t, d.SetHop(ref, store.Hop{Interface: device(t, "shunt-a").Attrs().Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 20}}))
	must(t, d.SetNATSources(ref, []netip.Addr{netip.MustParseAddr("192.0.2.1")}))
	must(t, d.WriteSlots(0, reconcile.NewTable([]reconcile.Slot{{Current: ref}})))
	must(t, d.PutService(reconcile.ServiceRecord{Index: 9, Generation: 1, Name: "web", Forwarding: model.ForwardingNAT, Size: 1}))
	for _, a := range []reconcile.AddressRecord{
		{Address: netip.MustParseAddr("192.0.2.10"), VIP: true}, {Address: netip.MustParseAddr("2001:db8::10"), VIP: true},
		{Address: netip.MustParseAddr("192.0.2.1"), VIP: true, Source: true, HostOwn: true}} {
		must(t, d.PutAddress(a))
	}
	for vip, ports := range map[string]value.PortRange{"192.0.2.10": {First: 80, Last: 80}, "192.0.2.1": {First: 90, Last: 99}} {
		must(t, d.PutFrontend(model.Frontend{Address: netip.MustParseAddr(vip), Ports: ports, Protocol: model.TCP}, 9))
	}
	macs := packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, device(t, "shunt-a").Attrs().HardwareAddr)
	_, out, err := d.RunPacket("shunt-a", packet.Must(packet.NewTCP("198.51.100.7:40000", "192.0.2.10:80", "S", macs)))
	must(t, err)
	syn, err := packet.Parse(out)
	must(t, err)
	ours := netip.AddrPortFrom(syn.IPv4.Source, syn.TCP.SourcePort).String()

	g, err := d.raiseStopgap(device(t, "shunt-a").Attrs().Index)
	must(t, err)
	defer func() { must(t, g.lower()) }()
	judge := func(program *ebpf.Program, frame []byte) uint32 {
		verdict, err := program.Run(&ebpf.RunOptions{Data: frame, Context: skbContext{Ifindex: uint32(device(t, "shunt-a").Attrs().Index)}})
		must(t, err)
		return verdict
	}
	later := packet.NewTCP("198.51.100.7:1", "192.0.2.1:95", "A", macs)
	later.IPv4.FragmentOffset = 1480
	dropped := uint64(0)
	for _, c := range []struct {
		what  string
		frame packet.Packet
		want  uint32
	}{
		{"to a service", packet.NewTCP("198.51.100.7:40000", "192.0.2.10:80", "A", macs), tcShot},
		{"to a VIP's other port", packet.NewTCP("198.51.100.7:40000", "192.0.2.10:81", "A", macs), tcShot},
		{"to a VIP over IPv6", packet.NewUDP("[2001:db8::7]:5", "[2001:db8::10]:6", macs), tcShot},
		{"an answer of a flow", packet.NewTCP("192.0.2.20:8080", ours, "SA", macs), tcShot},
		{"an answer to the host", packet.NewTCP("192.0.2.20:8080", "192.0.2.1:50000", "SA", macs), tcUnspecified},
		{"to a service of the host's address", packet.NewTCP("198.51.100.7:40000", "192.0.2.1:95", "A", macs), tcShot},
		{"to the host itself", packet.NewTCP("198.51.100.7:40000", "192.0.2.1:22", "A", macs), tcUnspecified},
		{"a later fragment to the host's address", later, tcUnspecified},
		{"to somebody else", packet.NewUDP("198.51.100.7:40000", "203.0.113.9:80", macs), tcUnspecified},
		{"to another station", packet.NewTCP("198.51.100.7:40000", "192.0.2.10:80", "A",
			packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, net.HardwareAddr{2, 0, 0, 0, 0, 99})), tcUnspecified},
	} {
		if verdict := judge(g.program, packet.Must(c.frame)); verdict != c.want {
			t.Errorf("%s: verdict %#x, want %#x", c.what, verdict, c.want)
		}
		if c.want == tcShot {
			dropped++
		}
	}
	counters, err := d.Counters()
	must(t, err)
	if n := counters.Reasons["mode_change"].Packets; n != dropped {
		t.Errorf("mode_change counts %d packets, want %d", n, dropped)
	}
	over, err := d.Load(abi.Built().Loader(abi.ObjectStopgap), map[string]any{"stopgap_end_ns": uint64(1)})
	must(t, err)
	defer over.Close()
	if verdict := judge(over.Programs[stopgapProgram], packet.Must(packet.NewTCP("198.51.100.7:40000", "192.0.2.10:80", "A", macs))); verdict != tcUnspecified {
		t.Errorf("a stopgap whose time is over: verdict %#x, want %#x", verdict, uint32(tcUnspecified))
	}
}

// clsact holds the stopgap on kernels without tcx: a stopgap that a killed daemon left goes, other
// filters stay behind ours, and the qdisc and filter that the test's stopgap made are removed.
func TestStopgapWithClsact(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	d.withoutTCX = true
	dev := device(t, "shunt-a")
	raise := func() *stopgap {
		g, err := d.raiseStopgap(dev.Attrs().Index)
		must(t, err)
		return g
	}
	filters := func() (names []string) {
		all, err := netlink.FilterList(dev, netlink.HANDLE_MIN_INGRESS)
		must(t, err)
		for _, f := range all {
			names = append(names, f.(*netlink.BpfFilter).Name)
		}
		return names
	}
	hasClsact := func() bool {
		all, err := netlink.QdiscList(dev)
		must(t, err)
		for _, q := range all {
			if q.Type() == "clsact" {
				return true
			}
		}
		return false
	}
	g := raise()
	if got := filters(); len(got) != 1 || got[0] != stopgapProgram {
		t.Errorf("filters %v, want the stopgap alone", got)
	}
	must(t, g.lower())
	if hasClsact() {
		t.Error("clsact is still there after the stopgap that needed it")
	}
	left := raise() // and it is never lowered
	must(t, netlink.FilterAdd(&netlink.BpfFilter{Fd: left.program.FD(), Name: "other", DirectAction: true,
		FilterAttrs: netlink.FilterAttrs{LinkIndex: dev.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Protocol: unix.ETH_P_ALL, Priority: 1}}))
	g = raise()
	if got := filters(); len(got) != 2 || got[0] != stopgapProgram || got[1] != "other" {
		t.Errorf("filters %v, want the stopgap and then the other", got)
	}
	must(t, g.lower())
	if got := filters(); len(got) != 1 || got[0] != "other" || !hasClsact() {
		t.Errorf("filters %v, want the other alone", got)
	}
}
