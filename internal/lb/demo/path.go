package demo

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
)

// pathPort is the client's source port of the packet that is followed.
const pathPort = 19999

// path follows the first packet of a connection, and its answer, over both families.
func (d *demo) path(ctx context.Context) error {
	for i, to := range targets[:2] {
		if i > 0 {
			d.Say("\n")
		}
		if err := d.pathOf(ctx, to); err != nil {
			return fmt.Errorf("over %s: %w", to.familyName(), err)
		}
	}
	return nil
}

func (d *demo) pathOf(ctx context.Context, to target) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	captures := map[string]*lab.Capture{}
	for _, host := range append([]*lab.Host{d.top.Client}, d.top.Backends...) {
		c, err := host.Capture("eth0")
		if err != nil {
			return err
		}
		defer c.Close()
		captures[host.Name()] = c
	}
	answer, err := d.once(ctx, to, pathPort)
	if err != nil {
		return err
	}
	d.made[to.service]++
	d.facts.Counted.made(d, to, map[string]int{answer.Backend: 1})

	atClient, atBackend := captures["client"], captures[answer.Backend]
	if atBackend == nil {
		return fmt.Errorf("an unknown backend %q answered", answer.Backend)
	}
	// NAT of shunt's kind leaves sequence numbers alone, so they say which packet is which.
	sent, err := d.hop(ctx, atClient, func(f lab.Frame, t *packet.TCP) bool {
		return f.Outgoing && t.Flags == "S" && t.SourcePort == pathPort
	})
	if err != nil {
		return err
	}
	received, err := d.hop(ctx, atClient, func(f lab.Frame, t *packet.TCP) bool {
		return !f.Outgoing && t.Flags == "SA" && t.Ack == sent.tcp.Seq+1
	})
	if err != nil {
		return err
	}
	arrived, err := d.hop(ctx, atBackend, func(f lab.Frame, t *packet.TCP) bool {
		return !f.Outgoing && t.Flags == "S" && t.Seq == sent.tcp.Seq
	})
	if err != nil {
		return err
	}
	returned, err := d.hop(ctx, atBackend, func(f lab.Frame, t *packet.TCP) bool {
		return f.Outgoing && t.Flags == "SA" && t.Ack == sent.tcp.Seq+1
	})
	if err != nil {
		return err
	}
	path := Path{Family: to.family, Backend: answer.Backend}
	for i, ends := range [][2]string{{"client", "lb"}, {"lb", answer.Backend}, {answer.Backend, "lb"}, {"lb", "client"}} {
		hop := []seen{sent, arrived, returned, received}[i].hop
		hop.From, hop.To = ends[0], ends[1]
		path.Hops = append(path.Hops, hop)
	}
	d.facts.Paths = append(d.facts.Paths, path)
	d.showPath(path)
	d.judgePath(to, path)
	return nil
}

// seen is a captured TCP packet.
type seen struct {
	hop Hop
	tcp *packet.TCP
}

// hop waits for a TCP packet in a capture.
func (d *demo) hop(ctx context.Context, c *lab.Capture, match func(lab.Frame, *packet.TCP) bool) (seen, error) {
	frame, p, err := c.Await(ctx, func(f lab.Frame, p packet.Packet) bool { return p.TCP != nil && match(f, p.TCP) })
	if err != nil {
		return seen{}, err
	}
	h := Hop{SourceMAC: p.Ethernet.Source.String(), DestinationMAC: p.Ethernet.Destination.String(), Flags: p.TCP.Flags, Checksum: "wrong"}
	switch {
	case frame.ChecksumPending:
		h.Checksum = "partial"
	case p.TCP.Checksum.Mode == packet.Correct:
		h.Checksum = "correct"
	}
	var source, destination netip.Addr
	if p.IPv4 != nil {
		source, destination, h.TTL = p.IPv4.Source, p.IPv4.Destination, p.IPv4.TTL
	} else {
		source, destination, h.TTL = p.IPv6.Source, p.IPv6.Destination, p.IPv6.HopLimit
	}
	h.Source = netip.AddrPortFrom(source, p.TCP.SourcePort).String()
	h.Destination = netip.AddrPortFrom(destination, p.TCP.DestinationPort).String()
	return seen{h, p.TCP}, nil
}

func (d *demo) showPath(path Path) {
	ends, macs := 0, 0
	for _, h := range path.Hops {
		ends = max(ends, len(h.Source)+len(h.Destination))
		macs = max(macs, len(h.From)+len(h.To))
	}
	for _, h := range path.Hops {
		what := map[string]string{"S": "SYN", "SA": "SYN+ACK"}[h.Flags]
		d.Say("  %s → %s%s  %s → %s%s  ttl %d  %s → %s  %s\n", h.From, h.To, strings.Repeat(" ", macs-len(h.From)-len(h.To)),
			h.Source, h.Destination, strings.Repeat(" ", ends-len(h.Source)-len(h.Destination)), h.TTL, h.SourceMAC, h.DestinationMAC, what)
	}
	d.Say("\n")
}

// judgePath checks the rewrite, field by field.
func (d *demo) judgePath(to target, path Path) {
	sent, arrived, returned, received := path.Hops[0], path.Hops[1], path.Hops[2], path.Hops[3]
	front, back := d.top.Balancer.Interfaces()[0], d.top.Balancer.Interfaces()[1]
	client := d.top.Client.Interfaces()[0]
	var host *lab.Host
	for _, h := range d.top.Backends {
		if h.Name() == path.Backend {
			host = h
		}
	}
	server, source := host.Addr4(), back.IPv4.Addr()
	if to.family == "ipv6" {
		server, source = host.Addr6(), back.IPv6.Addr()
	}
	var wrong []string
	expect := func(ok bool, format string, args ...any) {
		if !ok {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	expect(arrived.Destination == netip.AddrPortFrom(server, serverPort).String(), "the destination became %s", arrived.Destination)
	expect(strings.HasPrefix(arrived.Source, strings.TrimSuffix(netip.AddrPortFrom(source, 0).String(), "0")), "the source became %s", arrived.Source)
	expect(arrived.TTL == sent.TTL-1, "the TTL went from %d to %d", sent.TTL, arrived.TTL)
	expect(arrived.SourceMAC == back.MAC.String() && arrived.DestinationMAC == host.Interfaces()[0].MAC.String(),
		"the frame went from %s to %s", arrived.SourceMAC, arrived.DestinationMAC)
	expect(returned.Source == arrived.Destination && returned.Destination == arrived.Source, "%s answered to %s", returned.Source, returned.Destination)
	expect(received.Source == sent.Destination && received.Destination == sent.Source,
		"the client heard from %s at %s", received.Source, received.Destination)
	expect(received.TTL == returned.TTL-1, "the answer's TTL went from %d to %d", returned.TTL, received.TTL)
	expect(received.SourceMAC == front.MAC.String() && received.DestinationMAC == client.MAC.String(),
		"the answer's frame went from %s to %s", received.SourceMAC, received.DestinationMAC)
	d.Claim(len(wrong) == 0, "over %s the VIP became %s, and became the VIP again for the client; both ways the TTL is one less and the MAC is the next hop's%s",
		to.familyName(), path.Backend, but(wrong))
	d.Claim(arrived.Checksum == "correct" && received.Checksum == "correct",
		"checksums are correct on arrival (%s; %s), though the senders left them to hardware (%s; %s)",
		arrived.Checksum, received.Checksum, sent.Checksum, returned.Checksum)
}

func but(wrong []string) string {
	if len(wrong) == 0 {
		return ""
	}
	return ", but: " + strings.Join(wrong, "; ")
}
