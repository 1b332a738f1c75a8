package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/stranger"
	"golang.org/x/sys/unix"
)

// measuredChain is shunt-a with shunt, a filter before it and a counter after it.
type measuredChain struct {
	t       *testing.T
	opts    Options
	d       *Datapath
	counted func() uint64
	after   uint64 // that the counter has seen
}

func newMeasuredChain(t *testing.T, mode model.Attach) *measuredChain {
	t.Helper()
	inNamespace(t)
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0)) // no packets but ours
	c := &measuredChain{t: t, opts: testOptions(t)}
	c.d = mustOpen(t, c.opts)
	_, err := c.d.Attach("shunt-a", mode)
	must(t, err)
	c.set(PositionBefore, stranger.Filter(t, "filter", chainOf(t, c.opts, "shunt-a")), "filter")
	count, counted := stranger.Count(t, "count")
	c.counted = counted
	c.set(PositionAfter, count, "count")
	return c
}

func (c *measuredChain) set(position Position, p *ebpf.Program, name string) {
	c.t.Helper()
	must(c.t, SetChain(c.opts, "shunt-a", position, pinned(c.t, c.opts, p, name)))
}

// send has what the interface runs take packets to the host, and as many to the port that the
// filter drops.
func (c *measuredChain) send(packets int) {
	c.t.Helper()
	p := running(c.t, "shunt-a")
	for port, want := range map[int]uint32{53: kernel.XDPPass, stranger.Discard: kernel.XDPDrop} {
		frame := packet.Must(packet.NewUDP("192.0.2.2:4000", fmt.Sprintf("192.0.2.1:%d", port),
			packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, device(c.t, "shunt-a").Attrs().HardwareAddr)))
		for range packets {
			if got, _, err := p.Test(frame); err != nil || got != want {
				c.t.Fatalf("a packet to port %d: verdict %d, %v; want %d", port, got, err, want)
			}
		}
	}
	c.after += uint64(packets)
	if got := c.counted(); got != c.after {
		c.t.Fatalf("the program after has seen %d packets, want %d", got, c.after)
	}
}

func (c *measuredChain) start() *stopwatch {
	c.t.Helper()
	s := &stopwatch{opts: c.opts, iface: "shunt-a"}
	must(c.t, s.start())
	return s
}

// requireTimes ends a measurement and expects that the programs before, shunt's and after have met so many
// packets; -1 is a place without a program.
func (c *measuredChain) requireTimes(s *stopwatch, want ...int) Chain {
	c.t.Helper()
	must(c.t, s.stop())
	requireTimes(c.t, s.chain, want...)
	return s.chain
}

func requireTimes(t *testing.T, chain Chain, want ...int) {
	t.Helper()
	var got []int
	for _, place := range chain.Places() {
		if place.Program == nil {
			got = append(got, -1)
			continue
		}
		if place.Program.Time == nil {
			t.Fatalf("%v was not measured", place.Program)
		}
		r := *place.Program.Time
		got = append(got, int(r.Packets))
		if (r.PerPacketN > 0) != (r.Packets > 0) {
			t.Errorf("measured %+v", r)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("the programs before, shunt's and after met %d packets, want %d", got, want)
	}
}

// requireNoMeasurement expects the chain as it was without one, and nothing left of any.
func (c *measuredChain) requireNoMeasurement() {
	c.t.Helper()
	requireChain(c.t, c.opts, "shunt-a", "filter", "count")
	if _, err := os.Stat(measuredPath(c.opts.PinRoot, c.opts.Instance, "shunt-a", "")); !errors.Is(err, os.ErrNotExist) {
		c.t.Errorf("after the measurement, its folder: %v", err)
	}
	c.send(2)
}

func TestStopwatch(t *testing.T) {
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		t.Run(string(mode), func(t *testing.T) {
			c := newMeasuredChain(t, mode)
			c.send(1)
			s := c.start()
			c.send(10)
			c.requireTimes(s, 20, 10, 10) // the filter kept ten
			c.requireNoMeasurement()
			c.requireTimes(c.start(), 0, 0, 0)
			c.requireNoMeasurement()
		})
	}
}

func TestStopwatchFindsTheSlowProgram(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	c.set(PositionBefore, stranger.Slow(t, "slow", chainOf(t, c.opts, "shunt-a")), "slow")
	s := c.start()
	p := running(t, "shunt-a")
	for range 200 {
		_, _, err := p.Test(frame(t, "shunt-a"))
		must(t, err)
	}
	chain := c.requireTimes(s, 200, 200, 200)
	slow, shunt, count := chain.Before.Time.PerPacketN, chain.Shunt.Time.PerPacketN, chain.After.Time.PerPacketN
	t.Logf("slow, shunt, count: %.0f, %.0f, %.0f ns", slow, shunt, count)
	if slow < shunt || slow < count {
		t.Error("a program that reads the clock 5,000 times for each packet is not the slowest")
	}
}

// At a high rate one packet in 16 is measured, after the first 256 of a CPU.
func TestStopwatchMeasuresFewOfMany(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	s := c.start()
	const sent, cpus = 16_000, 2 // it may move to another CPU once
	_, _, err := running(t, "shunt-a").Benchmark(frame(t, "shunt-a"), sent, nil)
	must(t, err)
	must(t, s.stop())
	if got := s.chain.Shunt.Time.Packets; got < 256+(sent-256)/16 || got > cpus*256+sent/16 {
		t.Errorf("of %d packets %d were measured", sent, got)
	}
}

// Where programs are missing, those that are there are measured.
func TestStopwatchOfAChainWithGaps(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	run := func(want ...int) {
		t.Helper()
		s := c.start()
		verdict, _, err := running(t, "shunt-a").Test(frame(t, "shunt-a"))
		if err != nil || verdict != kernel.XDPPass {
			t.Errorf("verdict %d, %v", verdict, err)
		}
		c.requireTimes(s, want...)
	}
	clear := func(position Position) {
		t.Helper()
		_, err := ClearChain(c.opts, "shunt-a", position)
		must(t, err)
	}
	clear(PositionBefore)
	run(-1, 1, 1)
	requireChain(t, c.opts, "shunt-a", "", "count")
	clear(PositionAfter)
	run(-1, 1, -1)
	requireChain(t, c.opts, "shunt-a", "", "")
	c.set(PositionBefore, stranger.Filter(t, "filter", chainOf(t, c.opts, "shunt-a")), "again")
	run(1, 1, -1)
	requireChain(t, c.opts, "shunt-a", "filter", "")
}

// A process that is killed while it measures leaves a chain that works, and what comes next puts it in order.
func TestStopwatchKilled(t *testing.T) {
	for name, next := range map[string]func(c *measuredChain){
		"attached again": func(c *measuredChain) {
			must(c.t, c.d.Close())
			c.d = mustOpen(c.t, c.opts)
			_, err := c.d.Attach("shunt-a", model.AttachAuto)
			must(c.t, err)
		},
		"attached in another mode": func(c *measuredChain) {
			_, err := c.d.Attach("shunt-a", model.AttachGeneric)
			must(c.t, err)
		},
		"program before replaced": func(c *measuredChain) {
			c.set(PositionBefore, stranger.Filter(c.t, "filter", chainOf(c.t, c.opts, "shunt-a")), "again")
		},
		"program after replaced": func(c *measuredChain) {
			count, counted := stranger.Count(c.t, "count")
			c.counted, c.after = counted, 0
			c.set(PositionAfter, count, "again")
		},
		"measured again": func(c *measuredChain) {
			s := c.start()
			c.send(3)
			c.requireTimes(s, 6, 3, 3)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newMeasuredChain(t, model.AttachNative)
			s := c.start()
			c.send(3)
			s.close() // as the kernel does for a process that is killed
			c.send(3)
			all, err := Chains(c.opts)
			must(t, err)
			if got := all[0]; got.Before.Name != "filter" || got.Shunt.Name != "sh_xdp" || got.After.Name != "count" || got.Attached != got.Before.ID {
				t.Errorf("the chain is shown as %v, %v, %v, and %d attached", got.Before, got.Shunt, got.After, got.Attached)
			}
			next(c)
			c.requireNoMeasurement()
		})
	}
	t.Run("detached", func(t *testing.T) {
		c := newMeasuredChain(t, model.AttachNative)
		c.start().close()
		must(t, c.d.Close())
		must(t, RemoveFrom(c.opts))
		if _, err := os.Stat(kernel.Directory(c.opts.PinRoot, c.opts.Instance)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after detaching, the folder of the instance: %v", err)
		}
	})
}

// Two measurements at once: the second ends the first, which then leaves the second alone.
func TestStopwatchTwice(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	first := c.start()
	c.send(1)
	second := c.start()
	c.send(2)
	c.requireTimes(first, 2, 1, 1)
	c.send(4)
	c.requireTimes(second, 12, 6, 6)
	c.requireNoMeasurement()

	// What measures for status leaves one that an operator has asked for alone.
	first = c.start()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if all, err := c.d.MeasureOthers(ctx, time.Hour); !errors.Is(err, ErrMeasured) {
		t.Errorf("measured beside another: %v, %v", all, err)
	}
	c.send(5)
	c.requireTimes(first, 10, 5, 5)

	first = c.start()
	must(t, c.d.Detach("shunt-a"))
	c.requireTimes(first, 0, 0, 0)
	_, err := c.d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	requireChain(t, c.opts, "shunt-a", "", "")
}

func TestMeasureChains(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	_, err := c.d.Attach("shunt-b", model.AttachNative)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	all, err := MeasureChains(ctx, c.opts, time.Hour)
	must(t, err)
	if len(all) != 2 {
		t.Fatalf("measured %+v", all)
	}
	requireTimes(t, all[0], 0, 0, 0)
	requireTimes(t, all[1], -1, 0, -1)
	if all, err = MeasureChains(ctx, c.opts, time.Hour, "shunt-b"); err != nil || len(all) != 1 || all[0].Interface != "shunt-b" {
		t.Errorf("measured %+v, %v", all, err)
	}
	if all, err = c.d.MeasureOthers(ctx, time.Hour); err != nil || len(all) != 1 || all[0].Interface != "shunt-a" {
		t.Errorf("measured %+v, %v", all, err)
	}
	if _, err = MeasureChains(ctx, c.opts, time.Hour, "shunt-a", "shunt-c"); err == nil || !strings.Contains(err.Error(), "not attached to it, but to shunt-a, shunt-b") {
		t.Errorf("of an interface without shunt: %v", err)
	}
	c.requireNoMeasurement()
}

// withoutSysAdmin takes CAP_SYS_ADMIN from the calling thread until the returned function gives it back.
func withoutSysAdmin(t *testing.T) (giveBack func()) {
	t.Helper()
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var had [2]unix.CapUserData
	must(t, unix.Capget(header, &had[0]))
	has := had
	has[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	must(t, unix.Capset(header, &has[0]))
	return func() { must(t, unix.Capset(header, &had[0])) }
}

// A daemon under systemd has no CAP_SYS_ADMIN, without which a number of a chain is no program.
func TestMeasureOthersWithoutSysAdmin(t *testing.T) {
	c := newMeasuredChain(t, model.AttachNative)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	measured := func() {
		t.Helper()
		giveBack := withoutSysAdmin(t)
		_, err := ebpf.NewProgramFromID(ebpf.ProgramID(programID(t, "shunt-a")))
		all, failed := c.d.MeasureOthers(ctx, time.Hour)
		giveBack()
		if !errors.Is(err, unix.EPERM) {
			t.Fatalf("opening a program by its number: %v, want EPERM", err)
		}
		must(t, failed)
		if len(all) != 1 || all[0].Before.Name != "filter" || all[0].Shunt.Name != "sh_xdp" || all[0].After.Name != "count" {
			t.Errorf("measured %+v", all)
		}
		c.requireNoMeasurement()
	}
	measured()
	c.start().close() // killed
	measured()
}
