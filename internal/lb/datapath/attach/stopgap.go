package attach

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

const stopgapProgram = "sh_stopgap"

// stopgapTime is the longest time that a stopgap works. A change of mode takes milliseconds; an emulated
// machine under load was seen to need seconds.
const stopgapTime = time.Minute

// stopgap is sh_stopgap at the tc ingress of an interface.
type stopgap struct {
	program *ebpf.Program
	at      *kernel.TC
}

// raiseStopgap keeps packets for shunt from the host's stack until the stopgap is lowered. The interface is in
// the calling thread's network namespace.
func (d *Plane) raiseStopgap(ifindex int) (*stopgap, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the monotonic clock: %w", err)
	}
	coll, err := d.Load(d.opts.Version.Loader(abi.ObjectStopgap), map[string]any{"stopgap_end_ns": uint64(now.Nano() + stopgapTime.Nanoseconds())})
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", stopgapProgram, err)
	}
	defer coll.Close()
	program, err := kernel.TakeProgram(coll, stopgapProgram)
	if err != nil {
		return nil, err
	}
	attach := kernel.AttachTC
	if d.withoutTCX {
		attach = kernel.AttachClsact
	}
	at, err := attach(program, stopgapProgram, ifindex)
	if err != nil {
		return nil, errors.Join(err, program.Close())
	}
	return &stopgap{program, at}, nil
}

// lower removes the stopgap, and the objects that it needed. Filters of other programs on clsact stay, and with
// them the qdisc.
func (g *stopgap) lower() error { return errors.Join(g.at.Close(), g.program.Close()) }
