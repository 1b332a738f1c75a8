package packet_test

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

// outcome is the end of a packet.
type outcome int

const (
	passes  outcome = iota // unchanged to the byte
	drops                  // no frame leaves
	leaves                 // sent on or back, changed
	changes                // goes its original way, changed
)

func (o outcome) String() string { return [...]string{"passes", "drops", "leaves", "changes"}[o] }

func outcomeOf(verdict uint32) (outcome, error) {
	switch verdict {
	case kernel.XDPPass:
		return passes, nil
	case kernel.XDPDrop:
		return drops, nil
	case kernel.XDPTx, kernel.XDPRedirect:
		return leaves, nil
	}
	return 0, fmt.Errorf("XDP verdict %d is none of ours", verdict)
}

// trial is one row of a table: a packet and its expected outcome.
type trial struct {
	name   string
	arm    string // armA unless set
	in     packet.Packet
	raw    []byte // instead of in
	out    bool   // sent by the host, instead of received
	end    outcome
	reason string   // the reason that must be counted, once; empty: none
	notes  []string // further reasons, once each
	// want is the frame that must leave, given the frame that left if the program has a choice (a port).
	want func(got packet.Packet) packet.Packet
}

// try sends the trial's packet and judges the outcome.
func (c trial) try(t *testing.T, w *world) {
	t.Helper()
	if c.raw == nil && isLeftOut(c.in.Destination()) {
		return
	}
	arm, in := c.arm, c.raw
	if arm == "" {
		arm = armA
	}
	if in == nil {
		in = packet.Must(c.in)
	}
	must(t, w.d.Heartbeat())
	before := w.reasons()
	run := w.cpu.run
	if c.out {
		run = w.cpu.runOut
	}
	r := run(arm, bytes.Clone(in))
	must(t, r.err)
	expected := map[string]uint64{}
	for _, reason := range append([]string{c.reason}, c.notes...) {
		if reason != "" && !(reason == "checksum_completed" && c.raw == nil && isComplete(c.in)) {
			expected[reason]++
		}
	}
	if counted := w.moved(before); !maps.Equal(counted, expected) {
		t.Errorf("counted %v, want %v", counted, expected)
	}
	end, err := outcomeOf(r.verdict)
	must(t, err)
	if end == passes && c.end == changes {
		end = changes
	}
	if end != c.end {
		t.Fatalf("it %s (XDP verdict %d), but it should be one that %s", end, r.verdict, c.end)
	}
	if end == passes && !bytes.Equal(in, r.frame) {
		t.Errorf("it passes, but not as it came:\n%s", differences(in, r.frame))
	}
	if end < leaves || c.want == nil {
		return
	}
	got, err := packet.Parse(r.frame)
	if err != nil {
		t.Fatalf("what left is no packet: %v\n%x", err, r.frame)
	}
	if diff := packet.Diff(c.want(got), got); diff != "" {
		t.Errorf("it left wrong:\n%s", diff)
	}
}

// isComplete reports whether a packet has the right checksum. Of packets that leave it to hardware 1 in
// 65,536 has, and then nothing is completed; a port that the program chose decides which.
func isComplete(p packet.Packet) bool {
	return bytes.Equal(packet.Must(p), packet.Must(p.With(packet.TransportChecksum(packet.Checksum{}))))
}

func differences(in, out []byte) string {
	p, err := packet.Parse(in)
	if err != nil {
		return fmt.Sprintf("in  %x\nout %x", in, out)
	}
	return packet.DiffBytes(p, out)
}

// table runs trials in their order in one world.
func table(t *testing.T, w *world, trials []trial) {
	t.Helper()
	for _, c := range trials {
		t.Run(c.name, func(t *testing.T) { c.try(t, w) })
	}
}

// kind is a protocol and a family, as names of cases.
type kind struct {
	udp, six bool
}

var kinds = []kind{{false, false}, {true, false}, {false, true}, {true, true}}

func (k kind) String() string {
	name := "TCP over "
	if k.udp {
		name = "UDP over "
	}
	if k.six {
		return name + "IPv6"
	}
	return name + "IPv4"
}

func (k kind) pick(four, six netip.Addr) netip.Addr {
	if k.six {
		return six
	}
	return four
}

// packet makes a TCP packet with these flags, or a UDP packet.
func (k kind) packet(source, destination netip.AddrPort, flags string, edits ...packet.Edit) packet.Packet {
	if k.udp {
		return packet.NewUDP(source, destination, edits...)
	}
	return packet.NewTCP(source, destination, flags, edits...)
}

// fromClient is a packet of a client to a VIP's port, as it reaches us.
func (k kind) fromClient(clientPort, vipPort uint16, flags string, edits ...packet.Edit) packet.Packet {
	return k.packet(netip.AddrPortFrom(k.pick(client4, client6), clientPort),
		netip.AddrPortFrom(k.pick(vip4, vip6), vipPort), flags,
		append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
}

// ports reads the transport ports.
func ports(p packet.Packet) (source, destination uint16) {
	switch {
	case p.TCP != nil:
		return p.TCP.SourcePort, p.TCP.DestinationPort
	case p.UDP != nil:
		return p.UDP.SourcePort, p.UDP.DestinationPort
	}
	return 0, 0
}

func sourceOf(p packet.Packet) netip.AddrPort {
	port, _ := ports(p)
	return netip.AddrPortFrom(p.Source(), port)
}

func destinationOf(p packet.Packet) netip.AddrPort {
	_, port := ports(p)
	return netip.AddrPortFrom(p.Destination(), port)
}

// between sets addresses and ports.
func between(source, destination netip.AddrPort) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.Source, p.IPv4.Destination = source.Addr(), destination.Addr()
		} else {
			p.IPv6.Source, p.IPv6.Destination = source.Addr(), destination.Addr()
		}
		if p.TCP != nil {
			p.TCP.SourcePort, p.TCP.DestinationPort = source.Port(), destination.Port()
		}
		if p.UDP != nil {
			p.UDP.SourcePort, p.UDP.DestinationPort = source.Port(), destination.Port()
		}
	}
}

// routed takes one hop off.
func routed(p *packet.Packet) {
	if p.IPv4 != nil {
		p.IPv4.TTL--
	} else {
		p.IPv6.HopLimit--
	}
}

// inPool is the chosen port, if it is allowed; otherwise one that shows the fault.
func (w *world) inPool(port uint16) uint16 {
	if port < w.ports.First || port > w.ports.Last {
		return w.ports.First
	}
	return port
}
