// Package lease puts the UDP path together: memory, an AF_XDP socket for each queue of an interface, and
// the entries of the interface's program that send datagrams into them.
//
//	Open ─► Bind ─► Serve ─► (Pause ─► Serve …) ─► Close   the process with the rights
//	  │ Grant, Files
//	  ▼
//	xsk.AdoptSet ─► queues                                 the process with the work: no rights needed
//
// The process with the work maps the rings before Bind: Linux 6.1 refuses it afterwards.
//
// A lease can outlive the process that has opened it (hook.Keep). The next one takes it over by its number (TakeOver), and has its
// memory and sockets again when the process with the work hands copies back (HandBack). Until then it can only end it.
//
// The parts are made so that no datagram is lost at either end: the program learns of an address when
// all sockets are there, and forgets it before they go. When the working process ends, the kernel takes
// its sockets out of the program's map only once this side has closed them too, so Unbind, Pause or Close
// belong to that end.
package lease

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Generic is the mode of sockets on an interface where XDP itself runs in generic mode: the kernel has
// made an sk_buff of each packet before.
const Generic xsk.Mode = "generic"

// Spec describes the wanted lease.
type Spec struct {
	Addresses []netip.AddrPort // datagrams to these
	Queues    []int            // of the interface; nil: all
	Mode      xsk.Mode         // auto: zero-copy, else copy; the hook decides about generic
	RingSize  uint32           // entries of each receive ring (xsk.RingSize)
	Transmit  bool             // whether the holder can send: any frame, from any address
	Stamped   bool             // whether each frame comes with the time at which it met XDP
	BusyPoll  bool             // whether the holder has the driver's work done, in place of interrupts
}

// Grant has the descriptors and sizes with which a process works with a lease.
type Grant struct {
	Mode    xsk.Mode         `json:"mode"` // that was got, once it is bound
	Reason  string           `json:"reason,omitempty"`
	Serves  []netip.AddrPort `json:"serves"`
	Layouts []xsk.Layout     `json:"layouts"`
}

// Lease is one tenant's datagrams of one interface.
type Lease struct {
	Grant  Grant
	hook   *hook.Hook
	number int
	mode   xsk.Mode // that was asked for
	set    xsk.Set
}

// Open makes memory and sockets, in the calling thread's network namespace. Bind binds them. Nothing is
// left behind when it fails.
func Open(h *hook.Hook, spec Spec) (*Lease, error) {
	number, err := h.Begin()
	if err != nil {
		return nil, err
	}
	l := &Lease{hook: h, number: number, Grant: Grant{Serves: spec.Addresses}}
	if err := l.open(spec); err != nil {
		return nil, errors.Join(fmt.Errorf("lease %v on interface %s: %w", spec.Addresses, h.Interface, err), l.Close())
	}
	return l, nil
}

func (l *Lease) open(spec Spec) error {
	queues := spec.Queues
	if queues == nil {
		inUse, err := l.hook.InUse()
		if err != nil {
			return err
		}
		if inUse > hook.MaxQueues {
			return fmt.Errorf("the interface has %d queues, and %d can have sockets: name some, or set fewer with `ethtool -L`", inUse, hook.MaxQueues)
		}
		for queue := range inUse {
			queues = append(queues, queue)
		}
	}
	frameSize, err := xsk.FrameSize(l.hook.MTU)
	if err != nil {
		return err
	}
	plan, err := xsk.Plan(spec.RingSize, frameSize, spec.Transmit)
	if err != nil {
		return err
	}
	plan.BusyPoll = spec.BusyPoll
	if plan.Stamped = spec.Stamped; plan.Stamped {
		l.hook.Stamp(l.number)
	}
	if l.set.Memory, err = xsk.NewMemory(plan.Size() * int64(len(queues))); err != nil {
		return err
	}
	if l.mode = spec.Mode; l.hook.Attachment().Mode == kernel.ModeGeneric && l.mode == xsk.Auto {
		l.mode = xsk.Copy // there is no driver to ask
	}
	for i, queue := range queues {
		plan.Offset = int64(i) * plan.Size()
		socket, err := xsk.Prepare(l.hook.Ifindex, queue, plan, l.set.Memory)
		if err != nil {
			return err
		}
		l.set.Sockets = append(l.set.Sockets, socket)
		l.Grant.Layouts = append(l.Grant.Layouts, socket.Layout)
	}
	return nil
}

// TakeOver is the lease of a number that an earlier process has opened, and that the hook has taken over (hook.Options.GoOn).
func TakeOver(h *hook.Hook, number int, grant Grant) *Lease {
	return &Lease{Grant: grant, hook: h, number: number}
}

// HandBack makes copies of the lease's files its own, in the order of Set.Files. The caller has compared their marks. It closes
// them if it fails.
func (l *Lease) HandBack(files []int) error {
	set, err := xsk.AdoptSet(l.Grant.Layouts, files)
	if err != nil {
		return fmt.Errorf("take the lease %v on interface %s over: %w", l.Grant.Serves, l.hook.Interface, err)
	}
	l.set = *set
	for _, socket := range l.set.Sockets {
		count, err := l.hook.Counts(l.number, socket.Layout.Queue)
		if err != nil {
			return err
		}
		got, err := socket.Statistics()
		if err != nil {
			return err
		}
		about := count.Matched - count.NoSocket() - got.Dropped - got.RingFull - uint64(got.Waiting)
		if err := socket.Continue(about); err != nil {
			return err
		}
	}
	return nil
}

// Number is the lease's for TakeOver, in the process after this one.
func (l *Lease) Number() int { return l.number }

// Leave ends this process's use of a lease that goes on (hook.Keep), in place of Close.
func (l *Lease) Leave() error { return l.set.Close() }

// Bind binds the sockets to their queues, on any thread. The mode that was got is in Grant. No datagram
// comes before Serve. It waits so long for a queue that is taken: see xsk.Socket.Bind.
func (l *Lease) Bind(patience time.Duration) error {
	for i, socket := range l.set.Sockets {
		err := socket.Bind(l.mode, patience)
		if err == nil {
			err = l.hook.Bind(l.number, socket.Layout.Queue, socket.FD())
		}
		if err != nil {
			return fmt.Errorf("lease %v on interface %s: %w", l.Grant.Serves, l.hook.Interface, err)
		}
		l.Grant.Layouts[i] = socket.Layout
		l.Grant.Mode, l.Grant.Reason = socket.Layout.Mode, socket.Layout.Reason
	}
	if at := l.hook.Attachment(); at.Mode == kernel.ModeGeneric {
		l.Grant.Mode, l.Grant.Reason = Generic, at.Reason
	}
	return nil
}

// Serve has the lease's datagrams come from now on.
func (l *Lease) Serve() error {
	for _, address := range l.Grant.Serves {
		if err := l.hook.Serve(l.number, address); err != nil {
			return err
		}
	}
	return nil
}

// Pause has them go to the kernel's stack, until Serve.
func (l *Lease) Pause() error { return l.hook.Withdraw(l.number, l.Grant.Serves...) }

// Unbind has the datagrams of one queue go to the kernel's stack. Those that its socket has got stay in it.
func (l *Lease) Unbind(queue int) error { return l.hook.Unbind(l.number, queue) }

// Set is the lease's memory and sockets: for use in this process, or for their files, which another one
// adopts with Grant.Layouts. Close of the lease closes it.
func (l *Lease) Set() *xsk.Set { return &l.set }

// Audit says what a holder has done to the rings that no correct program does: see xsk.Socket.Audit.
func (l *Lease) Audit() error {
	for _, socket := range l.set.Sockets {
		if err := socket.Audit(); err != nil {
			return err
		}
	}
	return nil
}

// Status counts a queue's datagrams by outcome.
type Status struct {
	Queue int `json:"queue"`
	hook.Count
	xsk.Statistics
	Oldest time.Duration `json:"oldest"` // see xsk.Socket.Oldest
}

// Lost is how many datagrams nobody can account for: negative, if one was counted twice. It is 0 when no
// packet is on its way, as long as a queue's socket is open.
func (s Status) Lost() int64 {
	return int64(s.Matched) - int64(s.NoSocket()) - int64(s.Received())
}

// Status is that of each queue.
func (l *Lease) Status() (all []Status, err error) {
	for _, socket := range l.set.Sockets {
		s := Status{Queue: socket.Layout.Queue}
		if s.Count, err = l.hook.Counts(l.number, s.Queue); err != nil {
			return nil, err
		}
		if s.Statistics, err = socket.Statistics(); err != nil {
			return nil, err
		}
		s.Oldest = socket.Oldest()
		all = append(all, s)
	}
	return all, nil
}

// Elsewhere counts datagrams for the lease on queues of the interface that it has no sockets for: all of it passed, or was dropped
// where there is a guard.
func (l *Lease) Elsewhere() (hook.Count, error) {
	var own []int
	for _, layout := range l.Grant.Layouts {
		own = append(own, layout.Queue)
	}
	return l.hook.Sum(l.number, own...)
}

// Counts are the program's counters of a queue, which stay when the sockets are gone.
func (l *Lease) Counts(queue int) (hook.Count, error) { return l.hook.Counts(l.number, queue) }

// Close ends the lease: the addresses go first, then the sockets.
func (l *Lease) Close() error {
	return errors.Join(l.hook.End(l.number), l.set.Close())
}
