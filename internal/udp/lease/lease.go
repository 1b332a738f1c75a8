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
// A lease can outlive the process that has opened it (hook.Keep). The next process takes it over by its number (TakeOver). It
// has memory and sockets again when the process with the work hands copies back (HandBack); until then it can only end the lease.
//
// The order of the steps loses no datagram: the program learns of an address when all sockets are there, and
// forgets it before they go. When the process with the work ends, the kernel takes its sockets out of the
// program's map only once this process has closed them too, so Unbind, Pause or Close is needed then.
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

// Generic is the mode of sockets on an interface where XDP itself runs in generic mode: before, the kernel has
// made an sk_buff of each packet.
const Generic xsk.Mode = "generic"

// Spec describes a lease to be opened.
type Spec struct {
	Addresses []netip.AddrPort // destinations of its datagrams
	Queues    []int            // of the interface; nil: all
	Mode      xsk.Mode         // auto: zero-copy, otherwise copy; the hook decides about generic
	RingSize  uint32           // entries of each receive ring (xsk.RingSize)
	Transmit  bool             // whether the holder can send: any frame, from any address
	Stamped   bool             // whether each frame comes with the time at which XDP saw it
	BusyPoll  bool             // whether the holder makes the driver work, in place of interrupts
}

// Grant has the descriptors and sizes with which a process works with a lease.
type Grant struct {
	Mode    xsk.Mode         `json:"mode"` // the mode that the sockets got, once they are bound
	Reason  string           `json:"reason,omitempty"`
	Serves  []netip.AddrPort `json:"serves"`
	Layouts []xsk.Layout     `json:"layouts"`
}

// Lease is one holder's datagrams on one interface.
type Lease struct {
	Grant  Grant
	hook   *hook.Hook
	number int
	mode   xsk.Mode // the mode that Spec asked for
	set    xsk.Set
}

// Open makes memory and sockets, in the calling thread's network namespace. Bind binds them. If Open fails, it leaves nothing
// behind.
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
			return fmt.Errorf("the interface has %d queues, but only %d can have sockets: name some in queues, or set fewer with `ethtool -L`", inUse, hook.MaxQueues)
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

// TakeOver returns the lease that an earlier process has opened under a number, and that the hook has taken over (hook.Options.GoOn).
func TakeOver(h *hook.Hook, number int, grant Grant) *Lease {
	return &Lease{Grant: grant, hook: h, number: number}
}

// HandBack makes copies of the lease's files its own, in the order of Set.Files. The caller has compared their marks. If HandBack
// fails, it closes them.
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

// Number returns the number for TakeOver in the next process.
func (l *Lease) Number() int { return l.number }

// Leave ends this process's use of a lease that goes on (hook.Keep), in place of Close.
func (l *Lease) Leave() error { return l.set.Close() }

// Bind binds the sockets to their queues, on any thread. Grant has the mode that they got. No datagram
// comes before Serve. For a queue that is taken, Bind waits as long as patience: see xsk.Socket.Bind.
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

// Serve sends datagrams to the lease from now on.
func (l *Lease) Serve() error {
	for _, address := range l.Grant.Serves {
		if err := l.hook.Serve(l.number, address); err != nil {
			return err
		}
	}
	return nil
}

// Pause sends the datagrams to the kernel's stack, until Serve.
func (l *Lease) Pause() error { return l.hook.Withdraw(l.number, l.Grant.Serves...) }

// Unbind sends the datagrams of one queue to the kernel's stack. Datagrams that its socket has got stay in it.
func (l *Lease) Unbind(queue int) error { return l.hook.Unbind(l.number, queue) }

// Set returns the lease's memory and sockets: for use in this process, or for their files, which another process
// adopts with Grant.Layouts. The lease's Close closes the set.
func (l *Lease) Set() *xsk.Set { return &l.set }

// Audit reports changes of the rings that no correct program makes: see xsk.Socket.Audit.
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

// Lost returns the number of datagrams that are in none of the counters; it is negative if one was counted twice. It is 0
// when no packet is under way, as long as the queue's socket is open.
func (s Status) Lost() int64 {
	return int64(s.Matched) - int64(s.NoSocket()) - int64(s.Received())
}

// Status returns the status of each queue.
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

// Elsewhere counts datagrams to the lease on queues of the interface for which it has no sockets: all of them passed, or were
// dropped if there is a guard.
func (l *Lease) Elsewhere() (hook.Count, error) {
	var own []int
	for _, layout := range l.Grant.Layouts {
		own = append(own, layout.Queue)
	}
	return l.hook.Sum(l.number, own...)
}

// Counts returns the program's counters of a queue, which stay when the sockets are gone.
func (l *Lease) Counts(queue int) (hook.Count, error) { return l.hook.Counts(l.number, queue) }

// Close ends the lease: the addresses go first, then the sockets.
func (l *Lease) Close() error {
	return errors.Join(l.hook.End(l.number), l.set.Close())
}
