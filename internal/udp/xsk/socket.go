package xsk

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rings are a socket's rings, mapped.
type rings struct {
	receive, transmit, fill, completion []byte
	offsets                             unix.XDPMmapOffsets
}

// Socket is an AF_XDP socket of one queue of an interface.
type Socket struct {
	Layout Layout
	fd     int
	rings  rings
	memory []byte
	taken  lengthened // of the receive ring's consumer
}

// FD returns the descriptor: for an XSKMAP, for poll(2), or to be passed to another process.
func (s *Socket) FD() int { return s.fd }

// Prepare makes a socket for a queue of an interface (by ifindex, of the calling thread's network
// namespace), with every receive frame in its fill ring. The socket is not bound: a process that is to
// use its rings adopts it now, because Linux 6.1 maps no rings of a bound socket. Prepare needs
// CAP_NET_RAW; without CAP_IPC_LOCK the memory counts against RLIMIT_MEMLOCK.
func Prepare(ifindex, queue int, plan Layout, memory *Memory) (*Socket, error) {
	plan.Interface, plan.Queue = ifindex, queue
	s := &Socket{Layout: plan, fd: -1}
	err := s.prepare(memory)
	if err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("make an AF_XDP socket for queue %d of interface %d: %w", queue, ifindex, err)
	}
	return s, nil
}

// Bind binds the socket to its queue, once: in the given mode, or with Auto in the best mode that works. Layout.Mode
// has the mode. No packet comes before the socket is in an XSKMAP.
//
// Bind waits for a queue that is taken: the kernel frees a closed socket's queue from a worker, which needs a lock that
// all network devices share (rtnl). That took 16 to 28 ms after close(2) (7 of 7 tries on Linux 6.18, veth), and more
// than a second on a machine that removed network namespaces at the same time.
func (s *Socket) Bind(mode Mode, patience time.Duration) error {
	if err := s.bind(mode, time.Now().Add(patience)); err != nil {
		return fmt.Errorf("bind an AF_XDP socket to queue %d of interface %d: %w", s.Layout.Queue, s.Layout.Interface, err)
	}
	return nil
}

func (s *Socket) prepare(memory *Memory) error {
	if err := s.Layout.check(); err != nil {
		return err
	}
	var err error
	if s.memory, err = memory.part(s.Layout); err != nil {
		return err
	}
	if s.fd, err = unix.Socket(unix.AF_XDP, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return fmt.Errorf("make the socket: %w", err)
	}
	if s.Layout.BusyPoll {
		if err := preferBusyPoll(s.fd); err != nil {
			return err
		}
	}
	if err := s.register(); err != nil {
		return err
	}
	for _, o := range []struct {
		name   string
		option int
		size   uint32
	}{
		{"fill", unix.XDP_UMEM_FILL_RING, s.Layout.FillRing},
		{"completion", unix.XDP_UMEM_COMPLETION_RING, s.Layout.CompletionRing},
		{"receive", unix.XDP_RX_RING, s.Layout.ReceiveRing},
		{"transmit", unix.XDP_TX_RING, s.Layout.TransmitRing},
	} {
		if o.size == 0 {
			continue
		}
		if err := unix.SetsockoptInt(s.fd, unix.SOL_XDP, o.option, int(o.size)); err != nil {
			return fmt.Errorf("make the %s ring of %d entries: %w", o.name, o.size, err)
		}
	}
	if err := s.mapRings(); err != nil {
		return err
	}
	return s.fill()
}

// register registers the frames as the socket's UMEM.
func (s *Socket) register() error {
	reg := unix.XDPUmemReg{
		Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.memory)))),
		Len:  uint64(len(s.memory)), Size: s.Layout.FrameSize,
	}
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(s.fd), unix.SOL_XDP, unix.XDP_UMEM_REG,
		uintptr(unsafe.Pointer(&reg)), unsafe.Sizeof(reg), 0)
	switch errno {
	case 0:
		return nil
	case unix.ENOBUFS:
		return fmt.Errorf("register %d bytes of memory: %w; they are more than RLIMIT_MEMLOCK allows: raise it (`ulimit -l`), or ask for smaller rings", len(s.memory), errno)
	}
	return fmt.Errorf("register %d bytes of memory: %w", len(s.memory), errno)
}

// mapRings maps the rings. Any process that has the socket can do that.
func (s *Socket) mapRings() error {
	size := uint32(unsafe.Sizeof(s.rings.offsets))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_XDP, unix.XDP_MMAP_OFFSETS,
		uintptr(unsafe.Pointer(&s.rings.offsets)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return fmt.Errorf("read the offsets of the rings: %w", errno)
	}
	const descriptor, address = uint64(unsafe.Sizeof(Descriptor{})), 8
	for _, r := range []struct {
		name string
		to   *[]byte
		page int64
		desc uint64
		size uint64
	}{
		{"receive", &s.rings.receive, unix.XDP_PGOFF_RX_RING, s.rings.offsets.Rx.Desc, uint64(s.Layout.ReceiveRing) * descriptor},
		{"transmit", &s.rings.transmit, unix.XDP_PGOFF_TX_RING, s.rings.offsets.Tx.Desc, uint64(s.Layout.TransmitRing) * descriptor},
		{"fill", &s.rings.fill, unix.XDP_UMEM_PGOFF_FILL_RING, s.rings.offsets.Fr.Desc, uint64(s.Layout.FillRing) * address},
		{"completion", &s.rings.completion, unix.XDP_UMEM_PGOFF_COMPLETION_RING, s.rings.offsets.Cr.Desc, uint64(s.Layout.CompletionRing) * address},
	} {
		if r.size == 0 {
			continue
		}
		bytes, err := unix.Mmap(s.fd, r.page, int(r.desc+r.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w; this kernel maps the rings of a socket only before it is bound, as Linux 6.1 does", err)
		}
		if err != nil {
			return fmt.Errorf("map the %s ring: %w", r.name, err)
		}
		*r.to = bytes
	}
	return nil
}

// fill gives all receive frames to the kernel. Some drivers never recover from a fill ring that is empty at
// bind, even if the socket only sends, so fill comes first.
func (s *Socket) fill() error {
	fill, err := newRing[uint64](s.rings.fill, s.rings.offsets.Fr, s.Layout.FillRing, true)
	if err != nil {
		return err
	}
	for i := range s.Layout.ReceiveFrames {
		*fill.at(fill.own + i) = uint64(i) * uint64(s.Layout.FrameSize)
	}
	fill.push(s.Layout.ReceiveFrames)
	return nil
}

// bind binds the socket, and tries zero-copy first.
func (s *Socket) bind(mode Mode, deadline time.Time) error {
	var refused error
	if mode == ZeroCopy || mode == Auto {
		err := s.bindAs(unix.XDP_ZEROCOPY, deadline)
		if err == nil {
			s.Layout.Mode = ZeroCopy
			return nil
		}
		refused = fmt.Errorf("bind with zero-copy: %w", err)
		if mode == ZeroCopy || errors.Is(err, unix.EBUSY) {
			return refused
		}
	}
	if mode != Copy && mode != Auto {
		return fmt.Errorf("the mode %q is not supported; use auto, zero-copy or copy", mode)
	}
	if err := s.bindAs(unix.XDP_COPY, deadline); err != nil {
		return fmt.Errorf("bind with copy: %w", err)
	}
	s.Layout.Mode = Copy
	if refused != nil {
		s.Layout.Reason = refused.Error()
	}
	return nil
}

func (s *Socket) bindAs(flag uint16, deadline time.Time) error {
	address := &unix.SockaddrXDP{Flags: flag | unix.XDP_USE_NEED_WAKEUP, Ifindex: uint32(s.Layout.Interface), QueueID: uint32(s.Layout.Queue)}
	for {
		err := unix.Bind(s.fd, address)
		switch {
		case errors.Is(err, unix.EBUSY) && time.Now().Before(deadline):
			time.Sleep(2 * time.Millisecond)
			continue
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("another AF_XDP socket has the queue: %w; end the process that has the socket", err)
		case errors.Is(err, unix.EINVAL):
			return fmt.Errorf("the interface does not use this queue (`ethtool -l` shows how many it uses), or is down: %w", err)
		}
		return err
	}
}

// Adopt takes over a socket that another process has prepared and not bound yet. Unless there is an error, the
// socket closes fd. Adopt needs no capability. Linux 6.1 refuses a bound socket (EBUSY);
// later kernels accept it.
func Adopt(fd int, layout Layout, memory *Memory) (*Socket, error) {
	s := &Socket{Layout: layout, fd: fd}
	err := layout.check()
	if err == nil {
		s.memory, err = memory.part(layout)
	}
	if err == nil {
		err = s.mapRings()
	}
	if err != nil {
		s.unmap()
		return nil, fmt.Errorf("adopt an AF_XDP socket of queue %d: %w", layout.Queue, err)
	}
	return s, nil
}

// Queue returns the program's side of the socket. There may be one at a time, in any process. A
// checked queue knows the owner of each frame, and panics if a program gives a frame that it does
// not have.
func (s *Socket) Queue(checked bool) (*Queue, error) {
	q, err := newQueue(s.Layout, s.memory, s.rings, kickSocket(s.fd), checked)
	if err != nil {
		return nil, fmt.Errorf("use the rings of queue %d: %w", s.Layout.Queue, err)
	}
	if s.Layout.BusyPoll {
		q.work = pollSocket(s.fd)
	}
	return q, nil
}

// Statistics are the kernel's counters of a socket since it was opened.
type Statistics struct {
	// Taken is the number of packets that the program has read from the receive ring, Waiting the number that it has not. They
	// outlive the program.
	Taken   uint64 `json:"taken"`
	Waiting uint32 `json:"waiting"`
	// Free is the number of frames into which the kernel can still receive: those in the fill ring.
	Free    uint32 `json:"free"`
	Dropped uint64 `json:"dropped"` // the fill ring was empty, or the packet larger than a frame
	// FillEmpty is the number of times that the fill ring was empty: it equals Dropped if all packets fit.
	FillEmpty uint64 `json:"fill_empty"`
	RingFull  uint64 `json:"ring_full"`  // the receive ring was full
	Invalid   uint64 `json:"invalid"`    // addresses in the fill ring that belong to no frame
	TxInvalid uint64 `json:"tx_invalid"` // descriptors in the transmit ring that belong to no frame
}

// Received returns the number of packets that the kernel was given for the socket, including lost ones. It
// is exact if Statistics is called at least once in 2^32 packets.
func (s Statistics) Received() uint64 {
	return s.Taken + uint64(s.Waiting) + s.Dropped + s.RingFull
}

// Statistics returns the counters at this moment. Any process that has the socket may ask, at any time.
func (s *Socket) Statistics() (Statistics, error) {
	var k unix.XDPStatistics
	size := uint32(unsafe.Sizeof(k))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_XDP, unix.XDP_STATISTICS,
		uintptr(unsafe.Pointer(&k)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return Statistics{}, fmt.Errorf("read the statistics of queue %d: %w", s.Layout.Queue, errno)
	}
	r, err := newRing[Descriptor](s.rings.receive, s.rings.offsets.Rx, s.Layout.ReceiveRing, false)
	if err != nil {
		return Statistics{}, fmt.Errorf("read the receive ring of queue %d: %w", s.Layout.Queue, err)
	}
	fill, err := newRing[uint64](s.rings.fill, s.rings.offsets.Fr, s.Layout.FillRing, true)
	if err != nil {
		return Statistics{}, fmt.Errorf("read the fill ring of queue %d: %w", s.Layout.Queue, err)
	}
	return Statistics{
		Taken: s.taken.at(r.own), Waiting: r.other - r.own, Free: fill.own - fill.other,
		Dropped: k.Rx_dropped, FillEmpty: k.Rx_fill_ring_empty_descs, RingFull: k.Rx_ring_full,
		Invalid: k.Rx_invalid_descs, TxInvalid: k.Tx_invalid_descs,
	}, nil
}

// Audit reports changes of the socket's rings that no correct program makes: indices that contradict each
// other (ErrCorrupt), and addresses or descriptors outside of the frames, as the kernel has found them. It may
// be called at any time, from any process that has the socket.
func (s *Socket) Audit() error {
	k, err := s.Statistics()
	switch {
	case err != nil:
		return err
	case k.Invalid > 0:
		return fmt.Errorf("queue %d: the fill ring had %d addresses outside of the memory: %w", s.Layout.Queue, k.Invalid, ErrCorrupt)
	case k.TxInvalid > 0:
		return fmt.Errorf("queue %d: the transmit ring had %d descriptors outside of the memory: %w", s.Layout.Queue, k.TxInvalid, ErrCorrupt)
	}
	if _, err = newRing[uint64](s.rings.completion, s.rings.offsets.Cr, s.Layout.CompletionRing, false); err == nil && s.Layout.TransmitRing > 0 {
		_, err = newRing[Descriptor](s.rings.transmit, s.rings.offsets.Tx, s.Layout.TransmitRing, true)
	}
	if err != nil {
		return fmt.Errorf("queue %d: %w", s.Layout.Queue, err)
	}
	return nil
}

func (s *Socket) unmap() {
	for _, r := range []*[]byte{&s.rings.receive, &s.rings.transmit, &s.rings.fill, &s.rings.completion} {
		if *r != nil {
			_ = unix.Munmap(*r)
			*r = nil
		}
	}
}

// Close ends this process's use of the socket. The queue is free again some milliseconds after the
// last process has closed it. No Queue of it may be used after that.
func (s *Socket) Close() error {
	s.unmap()
	if s.fd < 0 {
		return nil
	}
	err := unix.Close(s.fd)
	s.fd = -1
	if err != nil {
		return fmt.Errorf("close the AF_XDP socket of queue %d: %w", s.Layout.Queue, err)
	}
	return nil
}
