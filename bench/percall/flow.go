package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/packet"
)

// packetSize is PACKET_WORDS of bench/bpf/front.bpf.c in bytes: Ethernet, IPv4 and TCP
// headers and 26 bytes of payload.
const packetSize = 80

// flowLimit bounds the memory of prepared packets: 80 bytes each, twice.
const flowLimit = 1 << 22

type packetBytes [packetSize]byte

// XDP verdicts, linux/bpf.h.
const (
	xdpTX       = 3
	xdpRedirect = 4
)

// verdictName is for messages.
func verdictName(v uint32) string {
	names := []string{"XDP_ABORTED", "XDP_DROP", "XDP_PASS", "XDP_TX", "XDP_REDIRECT"}
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("verdict %d", v)
}

// side is one interface of the balancer: program runs on the frames that arrive there.
type side struct {
	program *ebpf.Program
	ifindex uint32
	mac     net.HardwareAddr // of the interface, where frames are sent to
	peer    net.HardwareAddr // where frames come from
}

// xdpMD is struct xdp_md of linux/bpf.h, the context of a test run.
type xdpMD struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// options describe a test run on a frame that arrived on this side.
func (s side) options(frame []byte, repeat int) *ebpf.RunOptions {
	return &ebpf.RunOptions{
		Data: frame, Repeat: uint32(repeat),
		Context: xdpMD{DataEnd: uint32(len(frame)), IngressIfindex: s.ifindex},
	}
}

// send runs the side's program on one frame and returns the frame that it would transmit.
func (s side) send(frame []byte) ([]byte, error) {
	o := s.options(frame, 1)
	o.DataOut = make([]byte, 256)
	verdict, err := s.program.Run(o)
	if err != nil {
		return nil, fmt.Errorf("run the program: %w", err)
	}
	if verdict != xdpTX && verdict != xdpRedirect {
		return nil, fmt.Errorf("the program returned %s, not XDP_TX or XDP_REDIRECT, for %s", verdictName(verdict), describe(frame))
	}
	return o.DataOut, nil
}

// describe is a frame for a message.
func describe(frame []byte) string {
	p, err := packet.Parse(frame)
	if err != nil {
		return fmt.Sprintf("% x (%v)", frame, err)
	}
	return p.String()
}

// client is the i-th flow's client: addresses one after the other, and another port
// every time around.
func client(from netip.Prefix, i uint32) netip.AddrPort {
	size := uint32(1) << (32 - from.Bits())
	size = min(size, 1<<14) - 2 // without the network's and the broadcast address
	base := binary.BigEndian.Uint32(from.Masked().Addr().AsSlice())
	var address [4]byte
	binary.BigEndian.PutUint32(address[:], base+1+i%size)
	return netip.AddrPortFrom(netip.AddrFrom4(address), uint16(20000+i/size))
}

// shuffle puts the packets into a random order, the same in every run: entries made one
// after the other may lie side by side in memory, which packets of real flows do not follow.
// All lists are put into the same order.
func shuffle(lists ...[]packetBytes) {
	random := rand.New(rand.NewPCG(1, 2))
	random.Shuffle(len(lists[0]), func(i, j int) {
		for _, list := range lists {
			list[i], list[j] = list[j], list[i]
		}
	})
}

// makeFlows makes flows as clients and servers would, and returns one data packet per
// flow and direction.
func (s *subject) makeFlows(clients netip.Prefix, count uint32) (forward, reverse []packetBytes, err error) {
	payload := packet.Data(bytes.Repeat([]byte{'x'}, packetSize-54)) // 14 + 20 + 20 bytes of headers
	toUs := packet.MACs(s.clients.peer, s.clients.mac)
	back := packet.MACs(s.servers.peer, s.servers.mac)
	forward, reverse = make([]packetBytes, count), make([]packetBytes, count)
	for i := range count {
		from := client(clients, i)
		frame := func(flags string, edits ...packet.Edit) ([]byte, error) {
			return packet.Build(packet.NewTCP(from, s.service, flags, append(edits, toUs)...))
		}
		syn, err := frame("S", packet.Sequence(1000, 0))
		if err != nil {
			return nil, nil, err
		}
		rewritten, err := s.clients.send(syn)
		if err != nil {
			return nil, nil, fmt.Errorf("SYN of flow %d: %w", i, err)
		}
		seen, server, err := endpoints(rewritten)
		if err != nil {
			return nil, nil, err
		}
		answer, err := packet.Build(packet.NewTCP(server, seen, "SA", packet.Sequence(2000, 1001), back))
		if err != nil {
			return nil, nil, err
		}
		returned, err := s.servers.send(answer)
		if err != nil {
			return nil, nil, fmt.Errorf("answer to flow %d: %w", i, err)
		}
		if source, destination, err := endpoints(returned); err != nil || source != s.service || destination != from {
			return nil, nil, fmt.Errorf("answer to flow %d became %s, want %s to %s", i, describe(returned), s.service, from)
		}
		ack, err := frame("A", packet.Sequence(1001, 2001))
		if err != nil {
			return nil, nil, err
		}
		if _, err := s.clients.send(ack); err != nil {
			return nil, nil, fmt.Errorf("ACK of flow %d: %w", i, err)
		}
		data, err := frame("PA", packet.Sequence(1001, 2001), payload)
		if err != nil {
			return nil, nil, err
		}
		reply, err := packet.Build(packet.NewTCP(server, seen, "PA", packet.Sequence(2001, 1001), back, payload))
		if err != nil {
			return nil, nil, err
		}
		if copy(forward[i][:], data) != len(data) || copy(reverse[i][:], reply) != len(reply) || len(data) != packetSize {
			return nil, nil, fmt.Errorf("a data packet is %d bytes long, not %d", len(data), packetSize)
		}
	}
	return forward, reverse, nil
}

// endpoints reads source and destination of a TCP frame.
func endpoints(frame []byte) (source, destination netip.AddrPort, err error) {
	p, err := packet.Parse(frame)
	if err != nil {
		return source, destination, fmt.Errorf("read the program's output: %w", err)
	}
	if p.TCP == nil {
		return source, destination, fmt.Errorf("the program's output is no TCP: %s", p)
	}
	return netip.AddrPortFrom(p.Source(), p.TCP.SourcePort), netip.AddrPortFrom(p.Destination(), p.TCP.DestinationPort), nil
}
