// Package shortcut is the pod shortcuts' program and its maps: which addresses are pods, which of them may
// take the shortcut, and counts of packets by outcome. It decides nothing: package watch judges pods.
//
// A pod is left alone until Put says otherwise, and all pods unless Watched is called again and again. Nothing
// is pinned, so the program goes with the process, or has no effect without it (below Linux 6.6).
package shortcut

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"golang.org/x/sys/unix"
)

// Mode is the part of netfilter that a connection has to go through.
type Mode string

// The modes. Checked: conntrack has seen both directions and translates nothing. Bypass: it translates
// nothing; new connections take the shortcut too.
const (
	Checked Mode = "checked"
	Bypass  Mode = "bypass"
)

// Left is the reason why a pod's packets go through the stack; Taken means that they need not.
type Left uint32

// The states of a pod and of a network.
const (
	Taken       = Left(podPodLeftPOD_TAKEN)
	Unjudged    = Left(podPodLeftPOD_UNJUDGED)
	Rule        = Left(podPodLeftPOD_RULE)
	RulesUnread = Left(podPodLeftPOD_RULES_UNREAD)
	Qdisc       = Left(podPodLeftPOD_QDISC)
	TC          = Left(podPodLeftPOD_TC)
	Bridged     = Left(podPodLeftPOD_BRIDGED)
	Down        = Left(podPodLeftPOD_DOWN)
	NotVeth     = Left(podPodLeftPOD_NOT_VETH)
	Route       = Left(podPodLeftPOD_ROUTE)    // of networks and steers
	NextHop     = Left(podPodLeftPOD_NEXT_HOP) // of steers alone
)

// FarMax is the largest number of networks.
const FarMax = int(podPodLimitFAR_MAX)

// String returns the word in output and documentation, like "fragment".
func (l Left) String() string {
	if name, ok := leftNames()[uint32(l)]; ok {
		return name
	}
	return fmt.Sprintf("left_%d", uint32(l))
}

// leftNames has the words for the outcomes of a packet.
var leftNames = sync.OnceValue(func() map[uint32]string { return kernel.Words(loadPod, "pod_left", "POD_") })

// Pod is one address of a pod, as the program has it.
type Pod struct {
	Address netip.Addr
	Ifindex int // of the host's end of its veth
	MTU     int // of that end, bytes
	Left    Left
}

// Far is a network of pods of another machine, as the programs have it.
type Far struct {
	Network netip.Prefix
	NextHop netip.Addr // of the network's family, a neighbour at the interface
	Ifindex int        // towards it; AttachFar has it as well
	MTU     int        // of the route, bytes
	Left    Left
}

// key returns the network's key, with IPv4 as ::ffff:a.b.c.d.
func (f Far) key() podPodFarKey {
	bits := f.Network.Bits()
	if f.Network.Addr().Is4() {
		bits += 96
	}
	octets := f.Network.Masked().Addr().As16()
	key := podPodFarKey{Bits: uint32(bits)}
	for i := range key.Address {
		key.Address[i] = binary.NativeEndian.Uint32(octets[4*i:])
	}
	return key
}

// Shortcut is sh_pod on the interfaces of pods. Its methods must be called on a thread in the host's
// network namespace, and no two at the same time.
type Shortcut struct {
	objects *ebpf.Collection
	ids     []uint32 // of its programs
	grace   *kernel.Grace
	at      map[int]*kernel.TC
	pods    map[int]bool // keys of at: true with sh_pod, false with sh_pod_in
	gone    Counts       // of interfaces that had a program before
}

// Counts are packets and bytes by outcome: "taken", or the reason why they were left to the stack.
type Counts map[string]kernel.Count

// Add adds other counts.
func (c Counts) Add(more Counts) {
	for name, n := range more {
		sum := c[name]
		sum.Packets += n.Packets
		sum.Bytes += n.Bytes
		c[name] = sum
	}
}

// Flow is a TCP connection between two pods, as the packets of one direction have it.
type Flow struct{ From, To netip.AddrPort }

// Open loads the programs; without steers they have no instruction for steers. The times of conntrack's entries are those of the calling thread's network
// namespace; a later change of them is not noticed.
func Open(mode Mode, steers bool) (*Shortcut, error) {
	spec, err := loadPod()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	constants, err := constantsOf(mode)
	if err != nil {
		return nil, err
	}
	if steers {
		constants[podVarSteers] = uint8(1)
	}
	s := &Shortcut{at: map[int]*kernel.TC{}, pods: map[int]bool{}, gone: Counts{}}
	if s.objects, err = kernel.Load(spec, constants, nil); err != nil {
		return nil, fmt.Errorf("load the pod shortcut's program: %w; it needs conntrack's functions for BPF (Linux 6.0, nf_conntrack loaded)", err)
	}
	var errs []error
	for _, p := range s.objects.Programs {
		info, err := p.Info()
		if err == nil {
			id, _ := info.ID()
			s.ids = append(s.ids, uint32(id))
		}
		errs = append(errs, err)
	}
	s.grace, err = kernel.NewGrace()
	if err = errors.Join(append(errs, err)...); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// constantsOf returns the program's constants; see bpf/pod/conntrack.h.
func constantsOf(mode Mode) (map[string]any, error) {
	number := map[Mode]podPodMode{Checked: podPodModePOD_MODE_CHECKED, Bypass: podPodModePOD_MODE_BYPASS}
	if _, ok := number[mode]; !ok {
		return nil, fmt.Errorf("the mode %q is not supported; use checked or bypass", mode)
	}
	ms := map[string]uint32{}
	for _, name := range []string{"tcp_timeout_established", "tcp_timeout_fin_wait", "tcp_timeout_close", "udp_timeout", "udp_timeout_stream"} {
		seconds, err := host.ReadNumber("net/netfilter/nf_conntrack_" + name)
		if err != nil {
			return nil, fmt.Errorf("read conntrack's times: %w; load nf_conntrack", err)
		}
		ms[name] = uint32(min(seconds, 1<<31/1000) * 1000)
	}
	var tick unix.Timespec // the resolution of the coarse clocks is one jiffy
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &tick); err != nil {
		return nil, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	ending := min(ms["tcp_timeout_fin_wait"], ms["tcp_timeout_established"]/4)
	return map[string]any{
		podVarMode:             uint32(number[mode]),
		podVarJiffiesPerSecond: uint32((time.Second.Nanoseconds() + tick.Nano()/2) / tick.Nano()),
		podVarTcpMs:            ms["tcp_timeout_established"], podVarUdpMs: ms["udp_timeout"], podVarUdpStreamMs: ms["udp_timeout_stream"],
		podVarEndingMs: ending, podVarClosedMs: min(ms["tcp_timeout_close"], ending/4),
	}, nil
}

// Put adds a pod's address, or changes its properties. Programs that are running may see the earlier state until
// Wait has returned.
func (s *Shortcut) Put(p Pod) error {
	if p.MTU > 0xffff { // Linux has no larger MTU
		return fmt.Errorf("add pod %s: an MTU of %d bytes is not supported", p.Address, p.MTU)
	}
	high, low := kernel.AddrWords(p.Address)
	words := high ^ low
	check := uint64(uint32(words)^uint32(words>>32)) << 32
	value := podPod{Link: check | uint64(uint32(p.Ifindex)), State: check | uint64(p.Left)<<16 | uint64(p.MTU)}
	if err := s.objects.Maps[podMapShPdPods].Put(podAddr{High: high, Low: low}, value); err != nil {
		return fmt.Errorf("add pod %s: %w; there is room for %d addresses", p.Address, err, podPodLimitPODS_MAX)
	}
	return nil
}

// PutFar adds a network of another machine's pods, or changes its properties, as Put does.
func (s *Shortcut) PutFar(f Far) error {
	if !f.Network.IsValid() || f.Network.Addr().Is4() != f.NextHop.Is4() || f.MTU < 0 || f.MTU > 0xffff {
		return fmt.Errorf("add the route to %s by %s, MTU %d: network and next hop must be of one family, and the MTU 65535 at most", f.Network, f.NextHop, f.MTU)
	}
	high, low := kernel.AddrWords(f.NextHop)
	value := podPodFar{NextHop: podAddr{High: high, Low: low}, Ifindex: uint32(f.Ifindex), Left: uint16(f.Left), Mtu: uint16(f.MTU)}
	if err := s.objects.Maps[podMapShPdFar].Put(f.key(), value); err != nil {
		return fmt.Errorf("add the route to %s: %w; there is room for %d networks", f.Network, err, podPodLimitFAR_MAX)
	}
	return nil
}

// RemoveFar removes a network, as Put changes one. If it is not there, that is success.
func (s *Shortcut) RemoveFar(network netip.Prefix) error {
	if err := s.objects.Maps[podMapShPdFar].Delete(Far{Network: network}.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the route to %s: %w", network, err)
	}
	return nil
}

// Wait returns when all programs that began before the call have ended.
func (s *Shortcut) Wait() error { return s.grace.Wait() }

// Remove removes a pod's address, as Put changes one. If it is not there, that is success.
func (s *Shortcut) Remove(address netip.Addr) error {
	high, low := kernel.AddrWords(address)
	if err := s.objects.Maps[podMapShPdPods].Delete(podAddr{High: high, Low: low}); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove pod %s: %w", address, err)
	}
	return nil
}

// Watched lets packets take the shortcut for a time from now on. Then they go through the stack, unless it is
// called again.
func (s *Shortcut) Watched(so time.Duration) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the time: %w", err)
	}
	if err := s.objects.Maps[podMapShPdWatched].Put(uint32(0), uint64(now.Nano())+uint64(so)); err != nil {
		return fmt.Errorf("tell the pod shortcut's program that shunt judges the pods: %w", err)
	}
	return nil
}

// Asking removes and returns the connections, each once, that may take the shortcut once conntrack is liberal with them. It may be
// called at the same time as the other methods.
func (s *Shortcut) Asking() (all []Flow, err error) {
	m := s.objects.Maps[podMapShPdAsking]
	var key podPodFlow
	for range podPodLimitASKING_MAX { // more can come meanwhile
		if err := m.NextKey(nil, &key); errors.Is(err, ebpf.ErrKeyNotExist) {
			return all, nil
		} else if err != nil {
			return all, fmt.Errorf("list the connections that wait for the pod shortcut: %w", err)
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return all, fmt.Errorf("remove a connection that waits for the pod shortcut: %w", err)
		}
		all = append(all, Flow{end(key.Source, key.SourcePort), end(key.Destination, key.DestinationPort)})
	}
	return all, nil
}

func end(a podAddr, port uint16) netip.AddrPort {
	var octets [16]byte
	binary.NativeEndian.PutUint64(octets[:8], a.High)
	binary.NativeEndian.PutUint64(octets[8:], a.Low)
	return netip.AddrPortFrom(netip.AddrFrom16(octets).Unmap(), kernel.FromWire(port))
}

// Attach attaches the program to an interface, for packets from the pod behind it. If it is attached already, that is success.
func (s *Shortcut) Attach(ifindex int) error {
	if s.at[ifindex] != nil && !s.pods[ifindex] { // a steer leads there, and now a pod is there
		if err := s.Detach(ifindex); err != nil {
			return err
		}
	}
	err := s.attach(ifindex, podProgShPod)
	s.pods[ifindex] = err == nil
	return err
}

// AttachFar attaches the other program, for packets that come in by an interface from the pods of other machines, and for answers
// to steered packets. The program of pods handles answers too, so it stays where it is attached.
func (s *Shortcut) AttachFar(ifindex int) error { return s.attach(ifindex, podProgShPodIn) }

func (s *Shortcut) attach(ifindex int, program string) error {
	if s.at[ifindex] != nil {
		return nil
	}
	if err := s.makeCounts(uint32(ifindex)); err != nil {
		return fmt.Errorf("interface %d: %w", ifindex, err)
	}
	t, err := kernel.AttachTC(s.objects.Programs[program], program, ifindex)
	if err != nil {
		return errors.Join(err, s.objects.Maps[podMapShPdCounts].Delete(uint32(ifindex)))
	}
	s.at[ifindex] = t
	return nil
}

// makeCounts makes the counters of an interface or a steer.
func (s *Shortcut) makeCounts(of uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count the CPUs: %w", err)
	}
	if err := s.objects.Maps[podMapShPdCounts].Put(of, make([]podPodCounts, cpus)); err != nil {
		return fmt.Errorf("make counters: %w; there is room for %d", err, podPodLimitPODS_MAX)
	}
	return nil
}

// Mode returns the mode of the program on an interface; empty if it is not attached.
func (s *Shortcut) Mode(ifindex int) kernel.Mode {
	if t := s.at[ifindex]; t != nil {
		return t.Mode
	}
	return ""
}

// Attached returns the interfaces that have the program.
func (s *Shortcut) Attached() []int { return slices.Collect(maps.Keys(s.at)) }

// Detach detaches the program from interfaces. If it is not attached, that is success.
func (s *Shortcut) Detach(interfaces ...int) error {
	var errs []error
	var off []int
	for _, ifindex := range interfaces {
		if t := s.at[ifindex]; t != nil {
			delete(s.at, ifindex)
			delete(s.pods, ifindex)
			errs = append(errs, t.Close())
			off = append(off, ifindex)
		}
	}
	if len(off) == 0 {
		return nil
	}
	errs = append(errs, s.Wait()) // for the last packets to be counted
	for _, ifindex := range off {
		counts, err := s.countsOf(uint32(ifindex))
		s.gone.Add(counts)
		errs = append(errs, err, s.objects.Maps[podMapShPdCounts].Delete(uint32(ifindex)))
	}
	return errors.Join(errs...)
}

// ForeignTC lists programs of others at tc of an interface.
func (s *Shortcut) ForeignTC(ifindex int) ([]string, error) {
	return kernel.ForeignTC(ifindex, s.ids...)
}

// Counts returns the counts of all packets since Open, and by interface the counts of packets that came from it since it was
// attached. Outcomes that did not happen are left out.
func (s *Shortcut) Counts() (all Counts, from map[int]Counts, err error) {
	all, from = Counts{}, map[int]Counts{}
	all.Add(s.gone)
	for ifindex := range s.at {
		if from[ifindex], err = s.countsOf(uint32(ifindex)); err != nil {
			return all, from, err
		}
		all.Add(from[ifindex])
	}
	return all, from, nil
}

func (s *Shortcut) countsOf(of uint32) (Counts, error) {
	var each []podPodCounts
	if err := s.objects.Maps[podMapShPdCounts].Lookup(of, &each); err != nil {
		return nil, fmt.Errorf("read the counters %d: %w", of, err)
	}
	counts := Counts{}
	for left, name := range leftNames() {
		for _, one := range each {
			if n := one.Of[left]; n.Packets > 0 {
				counts.Add(Counts{name: {Packets: n.Packets, Bytes: n.Bytes}})
			}
		}
	}
	return counts, nil
}

// Close detaches the program everywhere.
func (s *Shortcut) Close() error {
	var errs []error
	errs = append(errs, s.Detach(s.Attached()...))
	if s.grace != nil {
		errs = append(errs, s.grace.Close())
	}
	s.objects.Close()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach the pod shortcut's program: %w", err)
	}
	return nil
}
