// Package lease puts the UDP path together: memory, an AF_XDP socket for each queue of an interface, and
// the entries of the interface's program that send datagrams into them.
//
//	Open ─► Serve ─► (Pause ─► Serve …) ─► Close          the process with the rights
//	  │ Grant: layouts, memfd, sockets
//	  ▼
//	Adopt ─► queues                                       the process with the work: no rights needed
//
// The parts are made so that no datagram is lost at either end: the program learns of an address when
// all sockets are there, and forgets it before they go. When the working process ends, the kernel takes
// its sockets out of the program's map only once this side has closed them too, so Disown is for a lease
// that has been handed over.
package lease

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Generic is the mode of sockets on an interface where XDP itself runs in generic mode: the kernel has
// made an sk_buff of each packet before.
const Generic xsk.Mode = "generic"

// Spec is what a lease is to be.
type Spec struct {
	Addresses []netip.AddrPort // datagrams to these
	Queues    []int            // of the interface; nil: all
	Mode      xsk.Mode         // auto: zero-copy, else copy; the hook decides about generic
	RingSize  uint32           // entries of each receive ring (xsk.RingSize)
	Transmit  bool             // whether the holder can send: any frame, from any address
}

// Grant is what a process needs in order to work with a lease. The files belong to it in this order: the
// memory, then a socket for each layout.
type Grant struct {
	Mode    xsk.Mode         `json:"mode"` // that was got
	Reason  string           `json:"reason,omitempty"`
	Serves  []netip.AddrPort `json:"serves"`
	Layouts []xsk.Layout     `json:"layouts"`
}

// Lease is one tenant's datagrams of one interface.
type Lease struct {
	Grant   Grant
	hook    *hook.Hook
	number  int
	memory  *xsk.Memory
	sockets []*xsk.Socket
}

// Open makes memory and sockets. No datagram comes before Serve. Nothing is left behind when it fails.
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
		if l.hook.Queues > hook.MaxQueues {
			return fmt.Errorf("the interface has %d queues, and %d can have sockets: name some, or set fewer with `ethtool -L`", l.hook.Queues, hook.MaxQueues)
		}
		for queue := range l.hook.Queues {
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
	if l.memory, err = xsk.NewMemory(plan.Size() * int64(len(queues))); err != nil {
		return err
	}
	mode := spec.Mode
	if l.hook.Mode == kernel.ModeGeneric && mode == xsk.Auto {
		mode = xsk.Copy // there is no driver to ask
	}
	for i, queue := range queues {
		plan.Offset = int64(i) * plan.Size()
		socket, err := xsk.Open(l.hook.Ifindex, queue, plan, mode, l.memory)
		if err != nil {
			return err
		}
		l.sockets = append(l.sockets, socket)
		l.Grant.Layouts = append(l.Grant.Layouts, socket.Layout)
		if err := l.hook.Bind(l.number, queue, socket.FD()); err != nil {
			return err
		}
		l.Grant.Mode, l.Grant.Reason = socket.Layout.Mode, socket.Layout.Reason
	}
	if l.hook.Mode == kernel.ModeGeneric {
		l.Grant.Mode, l.Grant.Reason = Generic, l.hook.Reason
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

// Files are those of the grant: the memory and the sockets, for SCM_RIGHTS. They stay the lease's.
func (l *Lease) Files() []int {
	files := []int{l.memory.FD}
	for _, s := range l.sockets {
		files = append(files, s.FD())
	}
	return files
}

// Held is the lease's memory and sockets for use in this process. Close of the lease closes them.
func (l *Lease) Held() *Held { return &Held{l.memory, l.sockets} }

// Status is what became of a queue's datagrams.
type Status struct {
	Queue int `json:"queue"`
	hook.Count
	xsk.Statistics
}

// Lost is how many datagrams nobody can account for: negative, if one was counted twice. It is 0 when no
// packet is on its way, as long as a queue's socket is open.
func (s Status) Lost() int64 {
	return int64(s.Matched) - int64(s.PassedNoSocket) - int64(s.Received())
}

// Status is that of each queue.
func (l *Lease) Status() (all []Status, err error) {
	for _, socket := range l.sockets {
		s := Status{Queue: socket.Layout.Queue}
		if s.Count, err = l.hook.Counts(l.number, s.Queue); err != nil {
			return nil, err
		}
		if s.Statistics, err = socket.Statistics(); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Disown closes this process's copies of the sockets and the memory: from then on they are another
// process's, and go with it, and the kernel's stack gets the datagrams. Status has no more queues.
func (l *Lease) Disown() error {
	var errs []error
	for _, s := range l.sockets {
		errs = append(errs, s.Close())
	}
	l.sockets = nil
	if l.memory != nil {
		errs = append(errs, l.memory.Close())
		l.memory = nil
	}
	return errors.Join(errs...)
}

// Counts are the program's counters of a queue, which stay when the sockets are gone.
func (l *Lease) Counts(queue int) (hook.Count, error) { return l.hook.Counts(l.number, queue) }

// Close ends the lease: the addresses go first, then the sockets.
func (l *Lease) Close() error {
	return errors.Join(l.hook.End(l.number), l.Disown())
}

// Held is memory and sockets of a lease in the process that works with them.
type Held struct {
	memory  *xsk.Memory
	Sockets []*xsk.Socket
}

// Adopt takes over what another process has opened: its grant, and the files of it in their order, which
// it closes if it fails. It needs no capability.
func Adopt(grant Grant, files []int) (*Held, error) {
	if len(files) != 1+len(grant.Layouts) {
		closeFiles(files)
		return nil, fmt.Errorf("adopt a lease with %d queues: it comes with %d files, and needs %d", len(grant.Layouts), len(files), 1+len(grant.Layouts))
	}
	memory, err := xsk.AdoptMemory(files[0])
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	h := &Held{memory: memory}
	for i, layout := range grant.Layouts {
		socket, err := xsk.Adopt(files[1+i], layout, memory)
		if err != nil {
			closeFiles(files[1+i:])
			return nil, errors.Join(err, h.Close())
		}
		h.Sockets = append(h.Sockets, socket)
	}
	return h, nil
}

// Queues are the program's sides of all sockets: see xsk.Socket.Queue.
func (h *Held) Queues(checked bool) (all []*xsk.Queue, err error) {
	for _, s := range h.Sockets {
		q, err := s.Queue(checked)
		if err != nil {
			return nil, err
		}
		all = append(all, q)
	}
	return all, nil
}

// Close lets go of memory and sockets.
func (h *Held) Close() error {
	var errs []error
	for _, s := range h.Sockets {
		errs = append(errs, s.Close())
	}
	h.Sockets = nil
	return errors.Join(append(errs, h.memory.Close())...)
}
