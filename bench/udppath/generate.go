package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

const (
	// liveFrames is BPF_F_TEST_XDP_LIVE_FRAMES (linux/bpf.h): the kernel makes frames and follows the program's
	// verdicts.
	liveFrames = 1 << 1
	// setupTries is the number of measurements of the generator's setup before a turn.
	setupTries = 5
	xdpDrop    = 1 // linux/bpf.h
)

// generator makes frames on its CPU and sends them over the client's link, as fast as the other end takes them: the
// kernel's softirq of that end runs on the same CPU.
type generator struct {
	program *ebpf.Program
	counter *ebpf.Map
	frame   []byte
}

// counted are the instructions that add one to a map's only value. One CPU runs them.
func counted(counter *ebpf.Map) asm.Instructions {
	return asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, counter.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "over"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.Add.Imm(asm.R1, 1), asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
	}
}

func newCounter() (*ebpf.Map, error) {
	return ebpf.NewMap(&ebpf.MapSpec{Name: "bench_count", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
}

func count(m *ebpf.Map) (n uint64, err error) {
	err = m.Lookup(uint32(0), &n)
	return n, err
}

func newGenerator(from, to lab.Interface, ifindex int) (g *generator, err error) {
	g = &generator{}
	source := netip.AddrPortFrom(from.IPv4.Addr(), 40000)
	if g.frame, err = packet.Build(packet.NewUDP(source, server, packet.MACs(from.MAC, to.MAC), packet.Data(make([]byte, payloadSize)))); err != nil {
		return nil, err
	}
	if g.counter, err = newCounter(); err != nil {
		return nil, err
	}
	body := append(counted(g.counter),
		asm.Mov.Imm(asm.R1, int32(ifindex)).WithSymbol("over"), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return())
	g.program, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_generate", Type: ebpf.XDP, License: "GPL", Instructions: body})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("load the generator: %w", err), g.counter.Close())
	}
	return g, nil
}

func (g *generator) close() error { return errors.Join(g.program.Close(), g.counter.Close()) }

// send makes n frames, and returns the time it took with its setup, and the number of frames: the kernel may begin
// anew.
func (g *generator) send(n int) (took time.Duration, sent uint64, err error) {
	before, err := count(g.counter)
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	_, err = g.program.Run(&ebpf.RunOptions{Data: g.frame, Repeat: uint32(n), Flags: liveFrames})
	took = time.Since(begin)
	if err != nil {
		return 0, 0, fmt.Errorf("make %d frames: %w", n, err)
	}
	after, err := count(g.counter)
	return took, after - before, err
}

// run makes n frames, and returns the time without the setup of a run, which is measured first, and the number of
// frames.
func (g *generator) run(n int) (took time.Duration, sent uint64, err error) {
	var setups []time.Duration
	for range setupTries {
		setup, few, err := g.send(1)
		if err != nil {
			return 0, 0, err
		}
		setups = append(setups, setup)
		sent += few
	}
	slices.Sort(setups)
	took, many, err := g.send(n)
	return took - setups[len(setups)/2], sent + many, err
}

// neighbour tells the client the server's hardware address, because some peers answer no ARP.
func neighbour(client *lab.Host, ifindex int, to lab.Interface) error {
	return client.Run(func() error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: ifindex, State: netlink.NUD_PERMANENT, IP: to.IPv4.Addr().AsSlice(), HardwareAddr: to.MAC})
	})
}

// dropping attaches a program that drops and counts all frames: the limit of every receiver.
func dropping(host *lab.Host, ifindex int) (taken func() (uint64, error), err error) {
	counter, err := newCounter()
	if err != nil {
		return nil, err
	}
	body := append(counted(counter), asm.Mov.Imm(asm.R0, xdpDrop).WithSymbol("over"), asm.Return())
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_drop", Type: ebpf.XDP, License: "GPL", Instructions: body})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("load the limit: %w", err), counter.Close())
	}
	var l link.Link
	err = host.Run(func() (err error) {
		l, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: ifindex, Flags: link.XDPDriverMode})
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach the limit: %w", err), program.Close(), counter.Close())
	}
	return func() (uint64, error) {
		n, err := count(counter)
		return n, errors.Join(err, l.Close(), program.Close(), counter.Close())
	}, nil
}
