package datapath

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const stopgapProgram = "sh_stopgap"

// stopgapTime is how long a stopgap works at the most. A change of mode takes milliseconds; an
// emulated machine under load was seen to need seconds.
const stopgapTime = time.Minute

// stopgap is sh_stopgap at the tc ingress of an interface: tcx, or clsact below Linux 6.6.
type stopgap struct {
	program *ebpf.Program
	link    link.Link // of tcx, which ends with the process; nil with clsact
	ifindex int
	created bool // the clsact qdisc is ours
}

// raiseStopgap keeps what is shunt's from the host's stack until the stopgap is lowered. The
// interface is one of the calling thread's network namespace.
func (d *Datapath) raiseStopgap(ifindex int) (*stopgap, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the monotonic clock: %w", err)
	}
	coll, err := d.loadCollection(d.version.loader(objectStopgap), map[string]any{"stopgap_end_ns": uint64(now.Nano() + stopgapTime.Nanoseconds())})
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", stopgapProgram, err)
	}
	defer coll.Close()
	g := &stopgap{ifindex: ifindex}
	if g.program, err = kernel.TakeProgram(coll, stopgapProgram); err != nil {
		return nil, err
	}
	g.link, err = link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: g.program, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
	if errors.Is(err, ebpf.ErrNotSupported) {
		g.link = nil
		err = g.attachClsact()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach %s to the tc ingress: %w", stopgapProgram, err), g.lower())
	}
	return g, nil
}

// attachClsact puts the stopgap before all other filters: of one priority, the kernel asks the
// newest of its BPF filters first (cls_bpf_change in net/sched/cls_bpf.c).
func (g *stopgap) attachClsact() error {
	err := netlink.QdiscAdd(clsactQdisc(g.ifindex))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a clsact qdisc: %w", err)
	}
	g.created = err == nil
	if err := g.removeFilters(); err != nil { // of a daemon that was killed meanwhile
		return err
	}
	f := clsactFilter(g.ifindex, netlink.HANDLE_MIN_INGRESS, stopgapProgram)
	f.Fd = g.program.FD()
	if err := netlink.FilterAdd(f); err != nil {
		return fmt.Errorf("add a filter of priority 1 to clsact: %w", err)
	}
	return nil
}

// removeFilters takes all stopgaps off clsact. That there is none is success.
func (g *stopgap) removeFilters() error {
	filters, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: g.ifindex}}, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return fmt.Errorf("list the filters of clsact: %w", err)
	}
	var errs []error
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == stopgapProgram {
			errs = append(errs, netlink.FilterDel(f))
		}
	}
	return errors.Join(errs...)
}

// lower ends the stopgap, and what it needed. Somebody else's filters on clsact stay, and with
// them the qdisc.
func (g *stopgap) lower() error {
	var errs []error
	if g.link != nil {
		errs = append(errs, g.link.Close())
	} else {
		errs = append(errs, g.removeFilters())
		if g.created {
			errs = append(errs, g.removeClsact())
		}
	}
	if err := errors.Join(append(errs, g.program.Close())...); err != nil {
		return fmt.Errorf("take %s off the tc ingress: %w", stopgapProgram, err)
	}
	return nil
}

func (g *stopgap) removeClsact() error {
	if filters, err := clsactFilters(g.ifindex); err != nil || len(filters) > 0 {
		return err
	}
	return netlink.QdiscDel(clsactQdisc(g.ifindex))
}
