// Package udp receives and sends UDP datagrams that skip the kernel's stack: XDP puts them into memory that this
// program maps (AF_XDP). The program needs no capability. It asks shunt's broker, over a unix socket, for a lease that
// the administrator offers under a name:
//
//	lease, err := udp.Open(ctx, udp.Options{Name: "feed"})
//	…
//	defer lease.Close()
//	batch := make([]udp.Descriptor, 64)
//	for {
//		if _, err := lease.Wait(time.Second); err != nil { … }
//		for _, q := range lease.Queues {
//			n := q.Receive(batch)
//			for i := range batch[:n] {
//				packet, err := q.Packet(&batch[i])
//				…
//			}
//			q.Release(batch[:n])
//		}
//	}
//
// Where the administrator runs shunt with leases that outlive it, the lease goes on while shunt is stopped with --on-exit keep, was
// killed, or is replaced by another version: datagrams come as before, and the package finds the broker again by itself.
//
// Keep an ordinary socket open on the same port, and read it too (Options.Also): it gets fragments and other packets
// that are not plain UDP, and everything once the lease is over.
//
// Receiving and sending allocate nothing. The garbage collector of a large heap in the same process stops
// them, though: a process of its own, with GOGC off and a memory limit, has no such pauses.
//
// It is for Linux 6.1 and later. The messages on the socket are described in docs/guide/udp-protocol.md.
package udp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// DefaultSocket is the socket of shunt's broker.
const DefaultSocket = "/run/shunt/udp.sock"

// sendFor is the time that a message waits for a broker that does not read.
const sendFor = time.Second

// Options name the lease, and say how to wait.
type Options struct {
	Socket string // of the broker; "": DefaultSocket
	Name   string // of the offer
	// Spin is the time for which Wait looks at the rings before it sleeps; below 0: it sleeps at once. 0: as the
	// administrator advises (Lease.Advice), and without advice it sleeps at once.
	Spin time.Duration
	// Also are descriptors that Wait waits for as well: the ordinary socket on the same port.
	Also []int
	// MaxAge has Receive drop datagrams that reached the machine longer ago, and count them as stale; 0: none. The
	// administrator must have set timestamps.
	MaxAge time.Duration
	// Checked has the queues know the owner of each frame, and panic where a frame is given back twice.
	Checked bool
}

// Ended is the reason why the broker gives no lease, or ends it. Its text names the next step.
type Ended struct {
	Code string // refused, busy, failed, protocol, expired, revoked, tampered, too many or malformed
	Text string
}

func (e *Ended) Error() string { return e.Text }

// ErrBrokerGone is the reason of a lease's end when its broker has gone and leases do not outlive it. The kernel's
// stack has the datagrams then; Open again.
var ErrBrokerGone = errors.New("shunt's broker closed the connection")

// Lease is the datagrams to some addresses. It is over when Done is closed; until Close the memory stays.
// Queues and Wait belong to one goroutine at a time; the other methods may be called from any.
type Lease struct {
	Queues    []*Queue
	Addresses []netip.AddrPort // that it serves
	Mode      string           // zero-copy, copy or generic
	Reason    string           // why not zero-copy
	// BusyPoll: this program has the driver's work done in place of interrupts, as the administrator has set it.
	// Receive and Wait do so; call them again soon.
	BusyPoll bool
	// Advice is the administrator's setting for programs that do not decide themselves how to wait (Options.Spin is 0):
	// spin, adaptive (look for 50 µs, then sleep), sleep, or "". Wait follows it.
	Advice string

	socket  string // of the broker
	number  uint64
	reports bool // the broker takes the queues' counters
	resumes bool // the lease outlives the broker's process
	set     *xsk.Set
	waiter  *xsk.Waiter
	wake    int // an eventfd: ends Wait when the lease is over
	done    chan struct{}
	closing sync.Once
	quits   context.Context //nolint:containedctx // ends with Close, which has no other signal for waiting goroutines
	quit    func()

	sending  sync.Mutex // a Renew; it goes before mu
	mu       sync.Mutex
	conn     *proto.Conn   // another one after the broker's successor has taken the lease over
	term     time.Duration // of the broker that the connection is to
	resumed  uint64
	sequence uint64        // of the last Renew
	renewed  proto.Renewed // the last answer
	answered chan struct{} // closed at the next answer
	err      error
}

// Open asks the broker for a lease and begins to receive. It fails with *Ended if the broker refuses.
func Open(ctx context.Context, o Options) (*Lease, error) {
	if o.Socket == "" {
		o.Socket = DefaultSocket
	}
	if len(o.Name) > proto.NameMax {
		return nil, fmt.Errorf("lease %q: a name has up to %d bytes", o.Name, proto.NameMax)
	}
	conn, err := proto.Dial(ctx, o.Socket)
	if err != nil {
		return nil, fmt.Errorf("ask shunt's broker for the lease %q: %w; does it run, and does this program see its socket?", o.Name, err)
	}
	l := &Lease{conn: conn, socket: o.Socket, wake: -1, done: make(chan struct{}), answered: make(chan struct{})}
	l.quits, l.quit = context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	err = l.open(o)
	if !stop() && ctx.Err() != nil {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ask shunt's broker for the lease %q: %w", o.Name, err), l.release())
	}
	go l.listen()
	go l.renew()
	return l, nil
}

func (l *Lease) open(o Options) error {
	nonce, err := greet(l.conn)
	if err != nil {
		return err
	}
	request := &proto.Request{Nonce: nonce}
	proto.Put(request.Name[:], o.Name)
	if err := l.conn.Send(request, sendFor); err != nil {
		return err
	}
	grant, files, err := expect[*proto.Grant](l.conn)
	if err != nil {
		return err
	}
	l.number, l.Addresses = grant.Lease, grant.Serves()
	l.BusyPoll, l.reports, l.resumes = grant.Flags&proto.FlagBusyPoll != 0, grant.Flags&proto.FlagReport != 0, grant.Flags&proto.FlagResume != 0
	if l.set, err = xsk.AdoptSet(grant.Layouts(), files); err != nil {
		return err
	}
	queues, err := l.set.Queues(o.Checked)
	if err != nil {
		return err
	}
	for i, q := range queues {
		if o.MaxAge > 0 {
			if err := q.DropOlder(o.MaxAge); err != nil {
				return fmt.Errorf("drop datagrams older than %s: %w; timestamps: true in the administrator's entry adds them", o.MaxAge, err)
			}
		}
		l.Queues = append(l.Queues, &Queue{q, l.set.Sockets[i], int(int32(grant.Queues[i].CPU))})
	}
	if l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("make an eventfd: %w", err)
	}
	l.waiter = xsk.NewWaiter(queues, l.set.Sockets, append(slices.Clone(o.Also), l.wake)...)
	l.Advice, l.waiter.Spin = string(grant.Wait()), spin(o.Spin, grant.Wait())
	if err := l.conn.Send(&proto.Ready{Lease: l.number}, sendFor); err != nil {
		return err
	}
	serving, _, err := expect[*proto.Serving](l.conn)
	if err != nil {
		return err
	}
	l.Mode, l.Reason, l.term = serving.Mode.String(), proto.Text(serving.Reason[:]), term(serving)
	return nil
}

// greet is Hello and Welcome.
func greet(c *proto.Conn) (nonce uint64, err error) {
	if err := c.Send(&proto.Hello{Magic: proto.Magic, VersionMin: proto.Version, VersionMax: proto.Version}, sendFor); err != nil {
		return 0, err
	}
	welcome, _, err := expect[*proto.Welcome](c)
	if err != nil {
		return 0, err
	}
	return welcome.Nonce, nil
}

func term(s *proto.Serving) time.Duration {
	return max(time.Duration(s.TermMS)*time.Millisecond, 30*time.Millisecond)
}

// spin is the time for which Wait looks at the rings: the program's, or else the administrator's advice.
func spin(own time.Duration, advice proto.Wait) time.Duration {
	switch {
	case own != 0:
		return max(own, 0)
	case advice == proto.WaitSpin:
		return math.MaxInt64
	case advice == proto.WaitAdaptive:
		return proto.AdaptiveFor
	}
	return 0
}

// expect is the next message, which must be of a type. The context of Open ends it.
func expect[T proto.Body](c *proto.Conn) (T, []int, error) {
	var none T
	b, files, _, err := c.Receive(time.Time{})
	if errors.Is(err, unix.ECONNRESET) { // the broker has not read everything; its last message may still be there
		b, files, _, err = c.Receive(time.Time{})
	}
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		err = ErrBrokerGone
	}
	if err != nil {
		return none, nil, err
	}
	if end, ok := b.(*proto.End); ok {
		return none, nil, &Ended{end.Code.String(), proto.Text(end.Text[:])}
	}
	got, ok := b.(T)
	if !ok {
		for _, fd := range files {
			_ = unix.Close(fd)
		}
		return none, nil, fmt.Errorf("the broker answered with a %T in place of a %T: it speaks another protocol", b, none)
	}
	return got, files, nil
}

// listen reads the messages of the broker, and of its successors, until the lease is over.
func (l *Lease) listen() {
	var err error
	for err == nil {
		err = l.hear()
		if errors.Is(err, ErrBrokerGone) && l.resumes && l.quits.Err() == nil {
			err = l.comeBack()
		}
	}
	l.mu.Lock()
	l.err = err
	l.mu.Unlock()
	_, _ = unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	close(l.done)
}

// hear reads one broker's messages, until there are no more.
func (l *Lease) hear() error {
	conn := l.connection()
	for {
		renewed, _, err := expect[*proto.Renewed](conn)
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.renewed = *renewed
		close(l.answered)
		l.answered = make(chan struct{})
		l.mu.Unlock()
	}
}

func (l *Lease) connection() *proto.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn
}

// The waits between two tries to find a broker again.
const againFirst, againMost = 10 * time.Millisecond, time.Second

// comeBack waits for the broker's successor, and has it take the lease over. The lease goes on meanwhile. An error
// means that it is over.
func (l *Lease) comeBack() error {
	for wait := againFirst; ; wait = min(2*wait, againMost) {
		conn, serving, err := l.resume()
		var end *Ended
		switch {
		case err == nil:
			l.sending.Lock()
			l.mu.Lock()
			_ = l.conn.Close()
			l.conn, l.term = conn, term(serving)
			l.resumed++
			l.mu.Unlock()
			l.sending.Unlock()
			return l.gone()
		case errors.As(err, &end) && end.Code != proto.EndBusy.String() && end.Code != proto.EndTooMany.String():
			return end
		}
		select {
		case <-l.quits.Done():
			return ErrBrokerGone
		case <-time.After(wait):
		}
	}
}

// gone is ErrBrokerGone once Close has begun, as without a successor.
func (l *Lease) gone() error {
	if l.quits.Err() != nil {
		return ErrBrokerGone
	}
	return nil
}

// resume hands copies of the lease's files to a broker, if there is one.
func (l *Lease) resume() (conn *proto.Conn, serving *proto.Serving, err error) {
	ctx, cancel := context.WithTimeout(l.quits, resumeFor)
	defer cancel()
	if conn, err = proto.Dial(ctx, l.socket); err != nil {
		return nil, nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	nonce, err := greet(conn)
	if err == nil {
		err = conn.Send(&proto.Resume{Nonce: nonce, Lease: l.number, QueueCount: uint32(len(l.Queues))}, sendFor, l.set.Files()...)
	}
	if err == nil {
		serving, _, err = expect[*proto.Serving](conn)
	}
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return conn, serving, nil
}

// resumeFor bounds the time that a broker may take to take a lease over.
const resumeFor = 5 * time.Second

// Resumed counts the times that a successor of the broker has taken the lease over.
func (l *Lease) Resumed() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.resumed
}

// renew keeps the lease.
func (l *Lease) renew() {
	for {
		l.mu.Lock()
		next := time.NewTimer(l.term / 3)
		l.mu.Unlock()
		select {
		case <-next.C:
			_, _ = l.ask() // listen gets the error
		case <-l.done:
			next.Stop()
			return
		}
	}
}

// ask renews the lease and returns the number of the message. It may run beside the queues' use.
func (l *Lease) ask() (uint64, error) {
	l.sending.Lock()
	defer l.sending.Unlock()
	l.sequence++
	conn := l.connection()
	if !l.reports {
		return l.sequence, conn.Send(&proto.Renew{Lease: l.number, Sequence: l.sequence}, sendFor)
	}
	report := &proto.Report{Lease: l.number, Sequence: l.sequence}
	for i, q := range l.Queues {
		report.Claims[i] = proto.Claim(q.queue.Shared())
	}
	return l.sequence, conn.Send(report, sendFor)
}

// Wait returns true when a queue has packets, a descriptor of Options.Also can be read, or the lease is over,
// and false after the timeout. A signal may end it early. It allocates nothing.
func (l *Lease) Wait(timeout time.Duration) (bool, error) { return l.waiter.Wait(timeout) }

// Wakeups counts the sleeps that Wait has ended with true.
func (l *Lease) Wakeups() uint64 { return l.waiter.Wakeups }

// Done is closed when the lease is over. The packets in the rings can still be received.
func (l *Lease) Done() <-chan struct{} { return l.done }

// Err is the reason why the lease is over: *Ended, or ErrBrokerGone. It is nil while it is not.
func (l *Lease) Err() error {
	select {
	case <-l.done:
	default:
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Count has the counters of shunt's program for a queue: matched = passed_no_socket + the number given to the queue's
// socket.
type Count struct {
	Matched uint64 // datagrams to the lease's addresses, since it began
	// PassedNoSocket counts those for which the queue had no socket: left to the kernel's stack, or dropped where the
	// administrator wants that (on_no_socket: drop).
	PassedNoSocket uint64
}

// Counts asks the broker for the counters of each queue. It renews the lease, too. Ask a few times a second at most:
// the broker ends a lease whose holder floods it (32 messages a second).
func (l *Lease) Counts(ctx context.Context) ([]Count, error) {
	want, err := l.ask()
	for err == nil {
		l.mu.Lock()
		got, next := l.renewed, l.answered
		l.mu.Unlock()
		if got.Sequence >= want {
			all := make([]Count, len(l.Queues))
			for i := range all {
				all[i] = Count(got.Counts[i])
			}
			return all, nil
		}
		select {
		case <-next:
		case <-l.done:
			err = l.Err()
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return nil, fmt.Errorf("ask shunt's broker for the counters: %w", err)
}

// Close gives the lease back. The queues must not be used any more.
func (l *Lease) Close() (err error) {
	l.closing.Do(func() {
		if l.reports && l.Err() == nil {
			_, _ = l.ask() // the last of the counters; a broker that does not get them lacks nothing else
		}
		l.quit()
		_ = l.connection().Unix().CloseRead() // ends listen; the connection goes last
		<-l.done
		err = l.release()
	})
	return err
}

// release frees all resources of Open. The broker, which sees the connection's end last, can lend the queues at once.
func (l *Lease) release() error {
	var errs []error
	if l.set != nil {
		errs = append(errs, l.set.Close())
	}
	if l.wake >= 0 {
		errs = append(errs, unix.Close(l.wake))
	}
	l.quit()
	return errors.Join(append(errs, l.conn.Close())...)
}
