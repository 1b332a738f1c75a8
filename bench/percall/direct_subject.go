package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/packet"
)

// instance is the name of the shunt that percall starts.
const instance = "bench"

// States of slots, as the report calls them.
const (
	slotsSettled    = "settled"    // no table is looked at
	slotsTransition = "transition" // and every flow is remembered
	slotsMarked     = "marked"     // and no flow is remembered
)

// slotStates are the numbers of enum slot_state, bpf/lb/types.h.
var slotStates = map[string]uint64{slotsSettled: 0, slotsTransition: 1, slotsMarked: 3}

const (
	slotStateShift = 56 // SLOT_STATE_SHIFT of bpf/lb/types.h
	slotStateMask  = 0xf
)

// Addresses of the IPv6 half; the IPv4 half is the bed's.
var (
	vip6         = netip.MustParseAddr("2001:db8::10")
	gateway6     = netip.MustParsePrefix("2001:db8:1::1/64")
	serverOne6   = netip.MustParseAddr("2001:db8:1::2")
	clients6     = netip.MustParsePrefix("2001:db8:c::/64")
	servicePort  = uint16(80)
	tunnelSizes4 = map[string]int{"dsr-l2": 0, "dsr-ipip": 20, "dsr-gue": 32} // IPv4; UDP 8; GUE 4
	tunnelSizes6 = map[string]int{"dsr-l2": 0, "dsr-ipip": 40, "dsr-gue": 52}
)

// directSubject is a running shunt with one direct-return service, on the one interface that leads
// to its backends. Clients are assumed to be behind the same interface.
type directSubject struct {
	subject
	forwarding string
	table      *ebpf.Map // sh_slots
	view       *store.View
}

// startDirect builds the namespaces and starts shunt run in them.
func startDirect(o options, forwarding string, flows uint32) (*directSubject, error) {
	s := &directSubject{forwarding: forwarding}
	if err := s.start(o, flows); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *directSubject) start(o options, flows uint32) error {
	dir, err := os.MkdirTemp("", "shunt-percall-")
	if err != nil {
		return err
	}
	s.closers = append(s.closers, func() error { return os.RemoveAll(dir) })
	binary, err := shuntBinary(o, dir)
	if err != nil {
		return err
	}
	b, err := bed.Build(lab.TwoArm)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, b.Close)
	s.in = func(f func() error) error { return b.InPinned(bed.Balancer, o.cpu, f) }
	remove, err := addCard(b, bed.ServersInterface, []netip.Prefix{netip.PrefixFrom(bed.ServerGateway, 24), gateway6},
		b.ServerMAC, []netip.Addr{bed.ServerOne, bed.ServerTwo, serverOne6})
	if err != nil {
		return err
	}
	s.closers = append(s.closers, remove)
	if err := s.writeConfig(dir, o, flows); err != nil {
		return err
	}
	args := append([]string{"run", "--instance", instance, "--config", filepath.Join(dir, "shunt.yaml")}, strings.Fields(o.shuntArgs)...)
	child, err := b.Start(bed.Balancer, binary, args...)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, child.Stop)
	if err := s.clients.attached(b, bed.ServersInterface, child); err != nil {
		return err
	}
	s.clients.peer = b.ClientMAC // a packet does not go back to the host that sent it
	s.closers = append(s.closers, s.clients.program.Close)
	if s.table, err = mapOf(s.clients.program, "sh_slots"); err != nil {
		return err
	}
	s.closers = append(s.closers, s.table.Close)
	if s.view, err = datapath.OpenReadOnly(store.Options{Instance: instance}); err != nil {
		return err
	}
	s.closers = append(s.closers, s.view.Close)
	return s.waitForwarding(child, o)
}

// rememberedDefault is limits.remembered unless set.
const rememberedDefault = 250_000

// writeConfig writes the README's example with direct return. The backends keep the port,
// as they must.
func (s *directSubject) writeConfig(dir string, o options, flows uint32) error {
	text := fmt.Sprintf(`interfaces:
  - name: %s
services:
  - name: web
    address: [%s, "%s"]
    port: %d
    protocol: [tcp, udp]
    forwarding: %s
    backends:
      - {address: %s}
      - {address: %s, weight: 2}
      - {address: "%s"}
`, bed.ServersInterface, bed.VIP, vip6, servicePort, s.forwarding, bed.ServerOne, bed.ServerTwo, serverOne6)
	s.config = "the README's example, tcp and udp, with forwarding: " + s.forwarding
	rest, says := restOfConfig(dir, o.features)
	text, s.config = text+rest, s.config+says
	// Half-full at most, and the budget of new entries a second grows with the table.
	if len(o.slots) > 1 && 4*flows > rememberedDefault {
		text += fmt.Sprintf("limits: {remembered: %d}\n", 4*flows)
		s.config += fmt.Sprintf(" and limits.remembered: %d", 4*flows)
	}
	return os.WriteFile(filepath.Join(dir, "shunt.yaml"), []byte(text), 0o600)
}

// waitForwarding waits until every kind of packet is forwarded: services are in the maps
// some time after the program is attached, and backends are resolved.
func (s *directSubject) waitForwarding(child *bed.Child, o options) error {
	return until(child, func() error {
		for _, kind := range o.traffics {
			frame, err := s.frame(o.clients, kind, 0)
			if err != nil {
				return err
			}
			if err := s.in(func() error { return s.checkOutput(s.clients, packetBytes(frame), kind) }); err != nil {
				return err
			}
		}
		return nil
	})
}

// packetStore keeps prepared packets: they are the same for all ways of forwarding.
type packetStore map[traffic][]packetBytes

func (p packetStore) get(s *directSubject, clients netip.Prefix, kind traffic, flows uint32, ordered bool) ([]packetBytes, error) {
	if frames, ok := p[kind]; ok {
		return frames, nil
	}
	frames := make([]packetBytes, flows)
	for i := range flows {
		frame, err := s.frame(clients, kind, i)
		if err != nil {
			return nil, err
		}
		frames[i] = packetBytes(frame)
	}
	if !ordered {
		shuffle(frames)
	}
	p[kind] = frames
	return frames, nil
}

// client6 is the i-th flow's client over IPv6: the IPv4 one's address in the host bits.
func client6(clients netip.Prefix, i uint32) netip.AddrPort {
	four := client(clients, i)
	address, low := clients6.Addr().As16(), four.Addr().As4()
	copy(address[12:], low[:])
	return netip.AddrPortFrom(netip.AddrFrom16(address), four.Port())
}

// frame is a packet in the middle of the i-th flow, packetSize long.
func (s *directSubject) frame(clients netip.Prefix, kind traffic, i uint32) ([]byte, error) {
	from, to := client(clients, i), netip.AddrPortFrom(bed.VIP, servicePort)
	if kind == tcp6 {
		from, to = client6(clients, i), netip.AddrPortFrom(vip6, servicePort)
	}
	macs := packet.MACs(s.clients.peer, s.clients.mac)
	payload := func(headers int) packet.Edit { return packet.Data(bytes.Repeat([]byte{'x'}, packetSize-headers)) }
	var p packet.Packet
	switch kind {
	case tcp4:
		p = packet.NewTCP(from, to, "PA", packet.Sequence(1001, 2001), macs, payload(14+20+20))
	case tcp6:
		p = packet.NewTCP(from, to, "PA", packet.Sequence(1001, 2001), macs, payload(14+40+20))
	case udp4:
		p = packet.NewUDP(from, to, macs, payload(14+20+8))
	default:
		return nil, fmt.Errorf("there are no packets of the kind %q", kind)
	}
	frame, err := packet.Build(p)
	if err == nil && len(frame) != packetSize {
		err = fmt.Errorf("a packet is %d bytes long, not %d: %s", len(frame), packetSize, p)
	}
	return frame, err
}

// checkOutput sends one packet and checks the program's output: a program that does something else
// would be measured for nothing. The packet tests compare every byte.
func (s *directSubject) checkOutput(by side, frame packetBytes, kind traffic) error {
	out, err := by.send(frame[:])
	if err != nil {
		return err
	}
	outer, ipSize := tunnelSizes4[s.forwarding], 20
	if kind == tcp6 {
		outer, ipSize = tunnelSizes6[s.forwarding], 40
	}
	if len(out) != packetSize+outer {
		return fmt.Errorf("the program made %d bytes of %d, %d were expected", len(out), packetSize, packetSize+outer)
	}
	inner := 14 + outer
	if got, want := out[inner+ipSize:], frame[14+ipSize:]; !bytes.Equal(got, want) {
		return fmt.Errorf("the program sends the transport header and payload % x, not % x", got, want)
	}
	if outer == 0 {
		return nil
	}
	destination, backends := out[14+16:14+20], [][]byte{bed.ServerOne.AsSlice(), bed.ServerTwo.AsSlice()}
	if kind == tcp6 {
		destination, backends = out[14+24:14+40], [][]byte{serverOne6.AsSlice()}
	}
	for _, backend := range backends {
		if bytes.Equal(destination, backend) {
			return nil
		}
	}
	return fmt.Errorf("the program sends to % x, which is no backend", destination)
}

// setSlots puts every slot into a state. Their previous backend stays nobody, and the
// daemon, which has written them settled, does not touch them.
func (s *directSubject) setSlots(state string) error {
	contents, err := s.view.Contents()
	if err != nil {
		return err
	}
	for _, service := range contents.Services {
		for i := service.Offset; i < service.Offset+service.Size; i++ {
			var slot uint64
			if err := s.table.Lookup(i, &slot); err != nil {
				return fmt.Errorf("read slot %d: %w", i, err)
			}
			slot = slot&^(slotStateMask<<slotStateShift) | slotStates[state]<<slotStateShift
			if err := s.table.Put(i, slot); err != nil {
				return fmt.Errorf("write slot %d: %w", i, err)
			}
		}
	}
	return nil
}

// rememberLimit bounds the time until all flows are remembered: the budget of new entries a second
// lets a million pass in some ten seconds.
const rememberLimit = time.Minute

// rememberAll sends packets of all flows until a whole pass finds every flow remembered.
func (s *directSubject) rememberAll(b *bench) error {
	for started := time.Now(); time.Since(started) < rememberLimit; {
		before, err := s.reasons()
		if err != nil {
			return err
		}
		if err := b.check(s.clients.program); err != nil {
			return err
		}
		after, err := s.reasons()
		if err != nil {
			return err
		}
		if after[notRemembered] == before[notRemembered] {
			return nil
		}
	}
	return fmt.Errorf("after %s not all of %d flows are remembered", rememberLimit, b.flows)
}

const notRemembered = "not_remembered"

// reasons is the number of packets that each reason has counted so far.
func (s *directSubject) reasons() (map[string]uint64, error) {
	counters, err := s.view.Counters()
	if err != nil {
		return nil, err
	}
	found := map[string]uint64{}
	for name, count := range counters.Reasons {
		found[name] = count.Packets
	}
	return found, nil
}

// checkReasons fails if a reason has been counted for as many packets as there are flows:
// a packet that is simply forwarded has none.
func (s *directSubject) checkReasons(before map[string]uint64, flows int) error {
	after, err := s.reasons()
	if err != nil {
		return err
	}
	const others = 1000 // frames of the network itself
	for name, count := range after {
		if grown := count - before[name]; grown > others && grown >= uint64(flows) {
			return fmt.Errorf("the program counted %q for %d packets while it was measured", name, grown)
		}
	}
	return nil
}
