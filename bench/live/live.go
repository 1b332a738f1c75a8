// Package live makes frames with BPF_PROG_TEST_RUN, at a fixed rate or as fast as a link takes them, and counts them at
// the other end (bench/bpf/live.bpf.c).
package live

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/lab"
	"golang.org/x/sys/unix"
)

const (
	// liveFrames is BPF_F_TEST_XDP_LIVE_FRAMES (linux/bpf.h): the kernel makes frames and follows the program's
	// verdicts.
	liveFrames = 1 << 1
	// headSize is HEAD_WORDS of the program, in bytes, and makeup the offset of head.makeup.
	headSize = 48
	makeup   = 42
	// waitLeast is less than the time that the program waits if the next frame's time has not come.
	waitLeast = 500 * time.Nanosecond
)

// Offer is a kind of frame and the interface by which frames leave.
type Offer struct {
	// Frame has Ethernet, IPv4 and UDP headers. With more than one flow its payload begins with 0xffff, which makes up for
	// the source port of each flow, so that all have the same checksum.
	Frame   []byte
	Flows   int // a power of two; each has the source port of the one before plus one
	Ifindex int // in the namespace of the thread that sends
	Paced   bool
}

// Generator sends frames. Calls of its methods must not overlap.
type Generator struct {
	Offer
	objects struct {
		Program *ebpf.Program  `ebpf:"sh_offer"`
		Begin   *ebpf.Variable `ebpf:"begin_ns"`
		Length  *ebpf.Variable `ebpf:"length_ns"`
		Spacing *ebpf.Variable `ebpf:"spacing_ps"`
		Next    *ebpf.Variable `ebpf:"next_ps"`
		Count   *ebpf.Variable `ebpf:"offer_count"`
	}
}

// NewGenerator loads the program. Close the generator.
func NewGenerator(o Offer) (*Generator, error) {
	if len(o.Frame) < headSize {
		return nil, fmt.Errorf("a frame of %d bytes: it must have at least %d", len(o.Frame), headSize)
	}
	if o.Flows < 1 || o.Flows&(o.Flows-1) != 0 || o.Flows > 1<<16 {
		return nil, fmt.Errorf("%d flows: the number must be a power of two, at most 65536", o.Flows)
	}
	if o.Flows > 1 && binary.BigEndian.Uint16(o.Frame[makeup:]) != 0xffff {
		return nil, errors.New("the payload of a frame of many flows must begin with 0xffff")
	}
	spec, err := loadLive()
	if err != nil {
		return nil, err
	}
	var words [headSize / 8]uint64
	for i := range words {
		words[i] = binary.NativeEndian.Uint64(o.Frame[8*i:])
	}
	paced := uint8(0)
	if o.Paced {
		paced = 1
	}
	g := &Generator{Offer: o}
	if err := errors.Join(spec.Variables["head_words"].Set(words), spec.Variables["flow_mask"].Set(uint32(o.Flows-1)),
		spec.Variables["offer_ifindex"].Set(uint32(o.Ifindex)), spec.Variables["offer_paced"].Set(paced)); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&g.objects, nil); err != nil {
		return nil, fmt.Errorf("load the generator: %w", err)
	}
	return g, nil
}

// Close unloads the program.
func (g *Generator) Close() error { return g.objects.Program.Close() }

// Sent is the number of frames since the generator was loaded.
func (g *Generator) Sent() (n uint64, err error) {
	err = g.objects.Count.Get(&n)
	return n, err
}

// Run has the kernel make n frames, and returns the time that it took with its setup, and the number of frames that were
// sent: the kernel may begin anew.
func (g *Generator) Run(n int) (took time.Duration, sent uint64, err error) {
	before, err := g.Sent()
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	_, err = g.objects.Program.Run(&ebpf.RunOptions{Data: g.Frame, Repeat: uint32(n), Flags: liveFrames})
	took = time.Since(begin)
	if err != nil {
		return 0, 0, fmt.Errorf("make %d frames: %w", n, err)
	}
	after, err := g.Sent()
	return took, after - before, err
}

// Pace sends so many frames a second for a time, which begins when the kernel is ready, and returns the number of frames. It
// keeps the CPU busy. The thread must be in the namespace of the interface, as for Run.
func (g *Generator) Pace(perSecond float64, each time.Duration) (sent uint64, err error) {
	if !g.Paced {
		return 0, errors.New("the generator was loaded without a pace")
	}
	if err := errors.Join(g.objects.Begin.Set(uint64(0)), g.objects.Length.Set(uint64(each)),
		g.objects.Spacing.Set(uint64(1e12/perSecond)), g.objects.Next.Set(uint64(0))); err != nil {
		return 0, err
	}
	runs := float64(each)/float64(waitLeast) + perSecond*each.Seconds() // runs that are left at the end are over at once
	for {
		_, n, err := g.Run(int(runs))
		if err != nil {
			return sent, err
		}
		sent += n
		var begin uint64
		if err := g.objects.Begin.Get(&begin); err != nil {
			return sent, err
		}
		if monotonic() >= time.Duration(begin)+each {
			return sent, nil
		}
	}
}

// monotonic is the clock of bpf_ktime_get_ns.
func monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // fails for an unknown clock alone
	return time.Duration(now.Nano())
}

// Sink is the program at the end of a link. It takes the frames that it is told to take while it is open.
type Sink struct {
	link    link.Link
	objects struct {
		Program     *ebpf.Program  `ebpf:"sh_sink"`
		Open        *ebpf.Variable `ebpf:"sink_open"`
		Source      *ebpf.Variable `ebpf:"sink_source"`
		Destination *ebpf.Variable `ebpf:"sink_destination"`
		Port        *ebpf.Variable `ebpf:"sink_port"`
		Count       *ebpf.Variable `ebpf:"sink_count"`
		Other       *ebpf.Variable `ebpf:"other_count"`
		Sample      *ebpf.Variable `ebpf:"sample"`
		SampleSize  *ebpf.Variable `ebpf:"sample_size"`
	}
}

// NewSink attaches a closed sink to a host's interface. Close the sink.
func NewSink(host *lab.Host, iface string, source netip.Addr, destination netip.AddrPort) (*Sink, error) {
	spec, err := loadLive()
	if err != nil {
		return nil, err
	}
	s := &Sink{}
	if err := spec.LoadAndAssign(&s.objects, nil); err != nil {
		return nil, fmt.Errorf("load the sink: %w", err)
	}
	port := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, destination.Port()))
	err = errors.Join(s.objects.Source.Set(source.As4()), s.objects.Destination.Set(destination.Addr().As4()), s.objects.Port.Set(port))
	if err == nil {
		s.link, err = attach(host, iface, s.objects.Program)
	}
	if err != nil {
		return nil, errors.Join(err, s.objects.Program.Close())
	}
	return s, nil
}

// attach attaches a program natively.
func attach(host *lab.Host, iface string, program *ebpf.Program) (l link.Link, err error) {
	index, err := host.InterfaceIndex(iface)
	if err != nil {
		return nil, err
	}
	err = host.Run(func() (err error) {
		l, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: index, Flags: link.XDPDriverMode})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("attach a program to %s of %s: %w", iface, host.Name(), err)
	}
	return l, nil
}

// Close detaches the sink.
func (s *Sink) Close() error { return errors.Join(s.link.Close(), s.objects.Program.Close()) }

// SetOpen opens or closes the sink. A closed one passes all frames to the kernel.
func (s *Sink) SetOpen(open bool) error {
	value := uint8(0)
	if open {
		value = 1
	}
	return s.objects.Open.Set(value)
}

// Counts are the frames that the sink has taken, and the other IPv4 frames that came while it was open.
func (s *Sink) Counts() (taken, other uint64, err error) {
	err = errors.Join(s.objects.Count.Get(&taken), s.objects.Other.Get(&other))
	return taken, other, err
}

// Sample is the first 64 bytes of the first frame that the sink took, nil if it took none of that length.
func (s *Sink) Sample() ([]byte, error) {
	var size uint32
	sample := make([]byte, 64)
	if err := errors.Join(s.objects.SampleSize.Get(&size), s.objects.Sample.Get(&sample)); err != nil {
		return nil, err
	}
	if size == 0 {
		return nil, nil
	}
	return sample, nil
}

// Drop attaches a program that drops and counts all frames: the limit of every receiver. taken detaches it, and returns
// its count.
func Drop(host *lab.Host, iface string) (taken func() (uint64, error), err error) {
	spec, err := loadLive()
	if err != nil {
		return nil, err
	}
	var objects struct {
		Program *ebpf.Program  `ebpf:"sh_drop"`
		Count   *ebpf.Variable `ebpf:"drop_count"`
	}
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		return nil, fmt.Errorf("load the limit: %w", err)
	}
	l, err := attach(host, iface, objects.Program)
	if err != nil {
		return nil, errors.Join(err, objects.Program.Close())
	}
	return func() (n uint64, err error) {
		err = errors.Join(l.Close(), objects.Count.Get(&n), objects.Program.Close())
		return n, err
	}, nil
}
