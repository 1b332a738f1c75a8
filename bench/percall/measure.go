package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// bench is a loaded front with its prepared packets.
type bench struct {
	frontObjects
	flows int
	side  side
}

// newBench loads the front for packets that arrive on one side. Entries is the capacity of the
// table of sh_stub_find; fill puts entries in.
func newBench(s side, packets []packetBytes, entries uint32) (*bench, error) {
	spec, err := loadFront()
	if err != nil {
		return nil, err
	}
	spec.Maps["bench_packets"].MaxEntries = uint32(len(packets))
	spec.Maps["bench_entries"].MaxEntries = entries
	if err := spec.Variables["packet_mask"].Set(uint32(len(packets) - 1)); err != nil {
		return nil, err
	}
	b := &bench{flows: len(packets), side: s}
	if err := spec.LoadAndAssign(&b.frontObjects, nil); err != nil {
		return nil, fmt.Errorf("load the front: %w", err)
	}
	keys := make([]uint32, len(packets))
	for i := range keys {
		keys[i] = uint32(i)
	}
	if _, err := b.BenchPackets.BatchUpdate(keys, packets, nil); err != nil {
		b.Close()
		return nil, fmt.Errorf("write %d packets: %w", len(packets), err)
	}
	return b, nil
}

// fill makes the entries of bench_entries, in this order.
func (b *bench) fill(keys []entryKey) error {
	if _, err := b.BenchEntries.BatchUpdate(keys, make([]entry, len(keys)), nil); err != nil {
		return fmt.Errorf("make %d entries for the stub that looks one up: %w", len(keys), err)
	}
	return nil
}

// entryKeys are the keys of all packets, first of each list, then second of each and so on: the
// two entries of a flow are made one after the other, and lie side by side in memory.
func entryKeys(lists ...[]packetBytes) (keys []entryKey, err error) {
	for i := range lists[0] {
		for _, packets := range lists {
			source, destination, err := endpoints(packets[i][:])
			if err != nil {
				return nil, err
			}
			keys = append(keys, newEntryKey(source, destination))
		}
	}
	return keys, nil
}

// The sizes of struct entry_key and struct entry, bench/bpf/front.bpf.c.
type (
	entryKey [40]byte
	entry    [72]byte
)

// newEntryKey is the key that sh_stub_find makes of an IPv4 TCP packet, on a little-endian machine.
func newEntryKey(source, destination netip.AddrPort) (key entryKey) {
	copy(key[8:], source.Addr().AsSlice())
	copy(key[24:], destination.Addr().AsSlice())
	binary.BigEndian.PutUint16(key[32:], source.Port())
	binary.BigEndian.PutUint16(key[34:], destination.Port())
	key[36] = unix.IPPROTO_TCP
	return key
}

// aim puts a program behind the front.
func (b *bench) aim(program *ebpf.Program) error {
	if err := b.BenchTarget.Put(uint32(0), program); err != nil {
		return fmt.Errorf("put %s behind the front: %w (it must be an xdp.frags program, as the front is)", program, err)
	}
	return nil
}

// run has the front run count times, and returns the last verdict.
func (b *bench) run(count int) (verdict uint32, err error) {
	verdict, err = b.ShFront.Run(b.side.options(make([]byte, packetSize), count))
	if err != nil {
		return 0, fmt.Errorf("run the front: %w", err)
	}
	return verdict, nil
}

// check runs every flow's packet once and counts verdicts: a figure of packets that were
// not forwarded would be worth nothing.
func (b *bench) check(program *ebpf.Program) error {
	if err := b.aim(program); err != nil {
		return err
	}
	bad := map[uint32]int{}
	for range b.flows {
		verdict, err := b.run(1)
		if err != nil {
			return err
		}
		if verdict != xdpTX && verdict != xdpRedirect {
			bad[verdict]++
		}
	}
	if len(bad) == 0 {
		return nil
	}
	var list []string
	for verdict, count := range bad {
		list = append(list, fmt.Sprintf("%s %d times", verdictName(verdict), count))
	}
	return fmt.Errorf("of %d established flows the program did not forward all: %s", b.flows, strings.Join(list, ", "))
}

// cost is nanoseconds per packet in one measurement, as the kernel took them: the call as a
// whole waits for a grace period of some 15 ms, which is no part of any packet.
func (b *bench) cost(program *ebpf.Program, repeat int) (float64, error) {
	if err := b.aim(program); err != nil {
		return 0, err
	}
	if _, err := timedRun(b.ShFront, b.side, b.flows); err != nil { // warm up
		return 0, err
	}
	return timedRun(b.ShFront, b.side, repeat)
}

// testRun is the part of union bpf_attr that BPF_PROG_TEST_RUN uses, linux/bpf.h.
type testRun struct {
	progFD, retval          uint32
	dataSizeIn, dataSizeOut uint32
	dataIn, dataOut         uint64
	repeat, duration        uint32 // duration: whole nanoseconds per run, set by the kernel
	ctxSizeIn, ctxSizeOut   uint32
	ctxIn, ctxOut           uint64
}

// timedRun is the system call itself: the library returns the duration only for runs
// without a context, and without one a packet arrives on loopback.
func timedRun(program *ebpf.Program, s side, repeat int) (float64, error) {
	var frame packetBytes
	md := xdpMD{DataEnd: packetSize, IngressIfindex: s.ifindex}
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&frame)
	pin.Pin(&md)
	attr := testRun{
		progFD: uint32(program.FD()), repeat: uint32(repeat),
		dataIn: uint64(uintptr(unsafe.Pointer(&frame))), dataSizeIn: packetSize,
		ctxIn: uint64(uintptr(unsafe.Pointer(&md))), ctxSizeIn: uint32(unsafe.Sizeof(md)),
	}
	for {
		_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_TEST_RUN, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
		if errno == unix.EINTR {
			continue // a signal of the Go runtime; the run begins again
		}
		runtime.KeepAlive(program)
		if errno != 0 {
			return 0, fmt.Errorf("run the front %d times: %w", repeat, errno)
		}
		return float64(attr.duration), nil
	}
}

// measure takes all figures, candidates interleaved. Keys are the keys of all entries of the flows,
// in the order in which they were made.
func (s *subject) measure(o options, forward, reverse []packetBytes, keys []entryKey, f *figures) error {
	table, err := mapOf(s.clients.program, "sh_flows")
	if err != nil {
		return err
	}
	defer table.Close()
	to, err := newBench(s.clients, forward, table.MaxEntries())
	if err != nil {
		return err
	}
	defer to.Close()
	from, err := newBench(s.servers, reverse, 1)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := to.fill(keys); err != nil {
		return err
	}
	if err := to.check(s.clients.program); err != nil {
		return fmt.Errorf("to the backends: %w", err)
	}
	if err := from.check(s.servers.program); err != nil {
		return fmt.Errorf("to the clients: %w", err)
	}
	if err := to.check(to.ShStubFind); err != nil {
		return fmt.Errorf("the stub that looks an entry up: %w", err)
	}
	var drop, push, find, there, back costs
	err = interleave([]candidate{
		{"drop", to, to.ShStubDrop, &drop},
		{"push", to, to.ShStubPush, &push},
		{"find", to, to.ShStubFind, &find},
		{"forward", to, s.clients.program, &there},
		{"reverse", from, s.servers.program, &back},
	}, o.rounds, max(o.repeat, len(forward)))
	if err != nil {
		return err
	}
	f.FrontDrop, f.FrontPush, f.FrontFind = drop.least(), push.least(), find.least()
	f.Forward, f.Reverse = there.least(), back.least()
	f.ForwardNet, f.ReverseNet = f.Forward-f.FrontDrop, f.Reverse-f.FrontDrop
	f.FindRatio = ratioOf(find, drop, push)
	f.ForwardRatio, f.ReverseRatio = ratioOf(there, drop, push), ratioOf(back, drop, push)
	return nil
}

// costs are one candidate's, a round each.
type costs []float64

func (c costs) least() float64 { return slices.Min(c) }

// ratio compares a net cost with another cost: the median of all rounds, and the quartiles, which
// say how far to trust it.
type ratio struct {
	Lower  float64 `json:"lower_quartile"`
	Median float64 `json:"median"`
	Upper  float64 `json:"upper_quartile"`
}

func (r ratio) String() string { return fmt.Sprintf("%.2f (%.2f–%.2f)", r.Median, r.Lower, r.Upper) }

// ratioOf divides the cost of a candidate above a stub by that of a unit, in each round separately.
// Machines change their speed within seconds (clock rates, neighbours, other work): the minimum of
// one candidate may be of a fast second and that of another of a slow one, while candidates of one
// round meet nearly the same speed.
func ratioOf(candidate, stub, unit costs) ratio {
	all := make([]float64, len(candidate))
	for i := range all {
		all[i] = (candidate[i] - stub[i]) / unit[i]
	}
	return quartiles(all)
}

// netRatio divides the costs of two candidates above the same stub, in each round separately.
func netRatio(candidate, other, stub costs) ratio {
	all := make([]float64, len(candidate))
	for i := range all {
		all[i] = (candidate[i] - stub[i]) / (other[i] - stub[i])
	}
	return quartiles(all)
}

// quartiles sorts the ratios of all rounds.
func quartiles(all []float64) ratio {
	slices.Sort(all)
	at := func(share float64) float64 {
		rank := share * float64(len(all)-1)
		below := int(rank)
		above := min(below+1, len(all)-1)
		return all[below] + (rank-float64(below))*(all[above]-all[below])
	}
	return ratio{at(0.25), at(0.5), at(0.75)}
}

// candidate is a program behind a front, and the place for its costs.
type candidate struct {
	name    string
	front   *bench
	program *ebpf.Program
	to      *costs
}

// interleave measures every candidate once in each round.
func interleave(candidates []candidate, rounds, repeat int) error {
	for round := range rounds {
		line := fmt.Sprintf("round %d:", round+1)
		for _, c := range candidates {
			cost, err := c.front.cost(c.program, repeat)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			*c.to = append(*c.to, cost)
			line += fmt.Sprintf(" %s %.0f", c.name, cost)
		}
		fmt.Fprintln(os.Stderr, line)
	}
	return nil
}
