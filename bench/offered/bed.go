package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/cpus"
	"github.com/shunt-lb/shunt/bench/live"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

const (
	iface     = "eth0"
	flows     = 256
	firstPort = 20000 // source port of flow 0
	burst     = 64    // frames that a ring of the link surely takes at once
	frameSize = 64    // with the four bytes of a checksum that a wire would add: 68
	headers   = 14 + 20 + 8
	askAgain  = 200 * time.Millisecond
)

// The addresses. Client and backend are both behind the node's only interface.
var (
	node      = netip.MustParseAddr("192.0.2.1")
	client    = netip.MustParseAddr("192.0.2.2")
	backend   = netip.MustParseAddr("192.0.2.3")
	service   = netip.AddrPortFrom(node, 30080)
	endpoint  = netip.AddrPortFrom(backend, 8080)
	clusterIP = netip.MustParseAddrPort("10.96.0.10:80")
)

// bed is a node with one arm's Service, and the wire at its only interface. All beds live at the same time, and one is
// measured.
type bed struct {
	arm        arm
	folder     string
	lab        *lab.Lab
	node, wire *lab.Host
	napi       struct{ node, wire thread }
	single     *live.Generator // as fast as it can
	paced      *live.Generator
	sink       *live.Sink
	program    []string // shunt, without its arguments
	stopArm    func() error
}

func newBed(ctx context.Context, a arm, two [2]int, program []string) (b *bed, err error) {
	b = &bed{arm: a, program: program}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", a.name, errors.Join(err, b.close()))
		}
	}()
	if b.folder, err = os.MkdirTemp("", "shunt-offered-"); err != nil {
		return b, err
	}
	if b.lab, err = lab.New(""); err != nil {
		return b, err
	}
	if b.node, err = b.lab.AddHost("node"); err != nil {
		return b, err
	}
	if b.wire, err = b.lab.AddHost("wire"); err != nil {
		return b, err
	}
	if err := b.connect(ctx, two); err != nil {
		return b, err
	}
	if b.stopArm, err = a.start(ctx, b); err != nil {
		return b, err
	}
	return b, b.prove(ctx)
}

// connect joins node and wire, and loads the programs of the wire.
func (b *bed) connect(ctx context.Context, two [2]int) error {
	err := b.lab.Connect(lab.End{Host: b.node, Interface: iface, IPv4: netip.PrefixFrom(node, 24)},
		lab.End{Host: b.wire, Interface: iface, IPv4: netip.PrefixFrom(client, 24)}, lab.Cable{Queues: 1})
	if err != nil {
		return err
	}
	// A veth takes frames of XDP only with NAPI, which GRO switches on. Checksums are those of a wire: complete.
	offload := map[string]bool{"gro": true, "tx": false}
	if err := errors.Join(b.wire.AddAddress(iface, netip.PrefixFrom(backend, 24)), b.node.SetOffload(iface, offload), b.wire.SetOffload(iface, offload)); err != nil {
		return err
	}
	// Under too much load, ARP would be lost like all else.
	if err := errors.Join(neighbours(b.node, b.wire, client, backend), neighbours(b.wire, b.node, node), b.lab.Ready(ctx)); err != nil {
		return err
	}
	if b.napi.node, err = threaded(b.node, iface); err != nil {
		return err
	}
	if b.napi.wire, err = threaded(b.wire, iface); err != nil {
		return err
	}
	// Both go before all other threads of their CPUs, as a softirq does; the wire's before the generator.
	if err := errors.Join(b.napi.node.bind(two[1]), b.napi.wire.bind(two[0]), b.napi.wire.first()); err != nil {
		return err
	}
	if two[0] != cpus.Any {
		if err := b.napi.node.first(); err != nil { // on the generator's CPU, it would keep the generator from offering too much
			return err
		}
	}
	return b.load()
}

// neighbours tells a host the hardware address of another host's addresses.
func neighbours(of, to *lab.Host, addresses ...netip.Addr) error {
	index, err := of.InterfaceIndex(iface)
	if err != nil {
		return err
	}
	for _, a := range addresses {
		err = errors.Join(err, of.Netlink().NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: to.Interfaces()[0].MAC}))
	}
	return err
}

// load loads generators and sink.
func (b *bed) load() error {
	payload := make([]byte, frameSize-headers)
	binary.BigEndian.PutUint16(payload, 0xffff)
	frame, err := packet.Build(packet.NewUDP(netip.AddrPortFrom(client, firstPort), service,
		packet.MACs(b.wire.Interfaces()[0].MAC, b.node.Interfaces()[0].MAC), packet.Data(payload)))
	if err != nil {
		return err
	}
	index, err := b.wire.InterfaceIndex(iface)
	if err != nil {
		return err
	}
	offer := live.Offer{Frame: frame, Flows: flows, Ifindex: index}
	if b.single, err = live.NewGenerator(offer); err != nil {
		return err
	}
	offer.Paced = true
	if b.paced, err = live.NewGenerator(offer); err != nil {
		return err
	}
	source, destination := b.expected()
	b.sink, err = live.NewSink(b.wire, iface, source, destination)
	return err
}

// expected is the source address and the destination of the frames that come back: translated, unless the arm is the floor.
func (b *bed) expected() (netip.Addr, netip.AddrPort) {
	if b.arm.floor {
		return client, service
	}
	return node, endpoint
}

func (b *bed) close() error {
	var errs []error
	if b.stopArm != nil {
		errs = append(errs, b.stopArm())
	}
	if b.sink != nil {
		errs = append(errs, b.sink.Close())
	}
	for _, g := range []*live.Generator{b.single, b.paced} {
		if g != nil {
			errs = append(errs, g.Close())
		}
	}
	if b.lab != nil {
		errs = append(errs, b.lab.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}

// prove shows that the arm is a working Service: a socket of each flow asks the backend through it and is answered, which
// also makes all flows known in both directions; and frames of the generator come back with the right addresses.
func (b *bed) prove(ctx context.Context) error {
	if !b.arm.floor {
		if err := b.askAll(ctx); err != nil {
			return err
		}
	}
	if err := b.sink.SetOpen(true); err != nil {
		return err
	}
	for range flows / burst {
		if err := b.sendBurst(ctx); err != nil {
			return err
		}
	}
	return b.checkSample()
}

// askAll has a socket with each flow's port ask the backend through the node.
func (b *bed) askAll(ctx context.Context) error {
	server, err := b.wire.ListenPacket("udp4", endpoint.String())
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- serve(server) }()
	for flow := range flows {
		if err = b.ask(ctx, netip.AddrPortFrom(client, uint16(firstPort+flow))); err != nil {
			break
		}
	}
	return errors.Join(err, server.Close(), <-served)
}

// serve answers each question with the address from which it came, until the socket is closed.
func serve(server net.PacketConn) error {
	question := make([]byte, 64)
	for {
		_, from, err := server.ReadFrom(question)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err == nil {
			_, err = server.WriteTo([]byte(from.String()), from)
		}
		if err != nil {
			return fmt.Errorf("the backend: %w", err)
		}
	}
}

// ask asks once through the Service. The backend must have been asked by the node.
func (b *bed) ask(ctx context.Context, from netip.AddrPort) error {
	conn, err := b.wire.DialFrom(ctx, "udp4", from, service.String())
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // of a client that has its answer
	answer := make([]byte, 64)
	return benchbed.Until(ctx, func() error {
		if _, err := conn.Write([]byte("who asks?")); err != nil {
			return fmt.Errorf("ask %s from %s: %w", service, from, err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(askAgain)); err != nil {
			return err
		}
		n, err := conn.Read(answer)
		if err != nil {
			return fmt.Errorf("the backend does not answer %s: %w", from, err)
		}
		if seen, err := netip.ParseAddrPort(string(answer[:n])); err != nil || seen.Addr() != node {
			return fmt.Errorf("the backend was asked from %q and not by the node, %s", answer[:n], node)
		}
		return nil
	})
}

// sendBurst sends few frames, and waits until the sink has all of them.
func (b *bed) sendBurst(ctx context.Context) error {
	before, _, err := b.sink.Counts()
	if err != nil {
		return err
	}
	var sent uint64
	if err := b.wire.Run(func() (err error) { _, sent, err = b.single.Run(burst); return err }); err != nil {
		return err
	}
	return benchbed.Until(ctx, func() error {
		taken, other, err := b.sink.Counts()
		if err == nil && taken-before != sent {
			err = fmt.Errorf("%d of %d frames came back as they should, and %d others in all", taken-before, sent, other)
		}
		return err
	})
}

// checkSample compares a frame that came back with the one that should.
func (b *bed) checkSample() error {
	sample, err := b.sink.Sample()
	if err != nil {
		return err
	}
	if sample == nil {
		return fmt.Errorf("no frame of %d bytes came back", frameSize)
	}
	p, err := packet.Parse(sample)
	if err != nil {
		return fmt.Errorf("a frame that came back: %w", err)
	}
	source, destination := b.expected()
	correct := packet.Checksum{Mode: packet.Correct}
	if p.IPv4 == nil || p.UDP == nil || p.IPv4.Source != source || p.IPv4.Destination != destination.Addr() || p.UDP.DestinationPort != destination.Port() ||
		p.IPv4.Checksum.Mode != correct.Mode || p.UDP.Checksum.Mode != correct.Mode {
		return fmt.Errorf("a frame came back wrong, %v; it should be from %s to %s, with correct checksums", p, source, destination)
	}
	return nil
}
