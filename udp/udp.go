// Package udp receives and sends UDP datagrams that skip the kernel's stack: XDP puts them into memory that
// this program maps (AF_XDP). The program needs no capability. It asks shunt's broker, over a unix socket,
// for a lease of what the administrator offers under a name:
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
// Keep an ordinary socket open on the same port, and read it too (Options.Also): it gets fragments and what
// else is not plain UDP, and everything once the lease is over.
//
// Receiving and sending allocate nothing. The garbage collector of a large heap in the same process stops
// them, though: a process of its own, with GOGC off and a memory limit, has no such pauses.
//
// It is for Linux 6.1 and later. What goes over the socket is described in docs/guide/udp-protocol.md.
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

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"golang.org/x/sys/unix"
)

// DefaultSocket is where shunt's broker listens.
const DefaultSocket = "/run/shunt/udp.sock"

// sendFor is how long a message waits for a broker that does not read.
const sendFor = time.Second

// Options say which lease, and how to wait.
type Options struct {
	Socket string // of the broker; "": DefaultSocket
	Name   string // of the offer
	// Spin is how long Wait looks at the rings before it sleeps; below 0: it sleeps at once. 0: as the administrator advises
	// (Lease.Advice), and without advice it sleeps at once.
	Spin time.Duration
	// Also are descriptors that Wait waits for as well: the ordinary socket on the same port.
	Also []int
	// MaxAge has Receive drop datagrams that reached the machine longer ago, and count them as stale; 0: none. The
	// administrator must have set timestamps.
	MaxAge time.Duration
	// Checked has the queues know the owner of each frame, and panic where a frame is given back twice.
	Checked bool
}

// Ended is why the broker gives no lease, or gives it no more. Its text says what to do.
type Ended struct {
	Code string // refused, busy, failed, protocol, expired, revoked, tampered, too many or malformed
	Text string
}

func (e *Ended) Error() string { return e.Text }

// ErrBrokerGone is why a lease is over whose broker has gone. The kernel's stack has the datagrams then; Open
// again.
var ErrBrokerGone = errors.New("shunt's broker has closed the connection")

// Lease is the datagrams to some addresses. It is over when Done is closed; until Close the memory stays.
// Queues and Wait belong to one goroutine at a time; the other methods may be called from any.
type Lease struct {
	Queues    []*Queue
	Addresses []netip.AddrPort // that it serves
	Mode      string           // zero-copy, copy or generic
	Reason    string           // why not zero-copy
	// BusyPoll is whether this program has the driver's work done in place of interrupts, as the administrator has it.
	// Receive and Wait do so; what matters is to come back to them soon.
	BusyPoll bool
	// Advice is how the administrator has programs wait that do not decide themselves (Options.Spin is 0): spin, adaptive (look
	// for 50 µs, then sleep), sleep, or "". Wait does so.
	Advice string

	conn    *proto.Conn
	number  uint64
	reports bool // the broker takes the queues' counters
	term    time.Duration
	set     *xsk.Set
	waiter  *xsk.Waiter
	wake    int // an eventfd: ends Wait when the lease is over
	done    chan struct{}
	closing sync.Once

	sending  sync.Mutex // a Renew
	mu       sync.Mutex
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
		return nil, fmt.Errorf("ask shunt's broker for the lease %q: %w; is it running, and is its socket to be seen here?", o.Name, err)
	}
	l := &Lease{conn: conn, wake: -1, done: make(chan struct{}), answered: make(chan struct{})}
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
	if err := l.conn.Send(&proto.Hello{Magic: proto.Magic, VersionMin: proto.Version, VersionMax: proto.Version}, sendFor); err != nil {
		return err
	}
	welcome, _, err := expect[*proto.Welcome](l.conn)
	if err != nil {
		return err
	}
	request := &proto.Request{Nonce: welcome.Nonce}
	proto.Put(request.Name[:], o.Name)
	if err := l.conn.Send(request, sendFor); err != nil {
		return err
	}
	grant, files, err := expect[*proto.Grant](l.conn)
	if err != nil {
		return err
	}
	l.number, l.Addresses = grant.Lease, grant.Serves()
	l.BusyPoll, l.reports = grant.Flags&proto.FlagBusyPoll != 0, grant.Flags&proto.FlagReport != 0
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
	l.Mode, l.Reason = serving.Mode.String(), proto.Text(serving.Reason[:])
	l.term = max(time.Duration(serving.TermMS)*time.Millisecond, 30*time.Millisecond)
	return nil
}

// spin is how long Wait looks at the rings: as the program says, and else as the administrator advises.
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
	if errors.Is(err, io.EOF) {
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

// listen reads what the broker says, until the lease is over.
func (l *Lease) listen() {
	var err error
	for err == nil {
		var renewed *proto.Renewed
		if renewed, _, err = expect[*proto.Renewed](l.conn); err != nil {
			break
		}
		l.mu.Lock()
		l.renewed = *renewed
		close(l.answered)
		l.answered = make(chan struct{})
		l.mu.Unlock()
	}
	l.mu.Lock()
	l.err = err
	l.mu.Unlock()
	_, _ = unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	close(l.done)
}

// renew keeps the lease.
func (l *Lease) renew() {
	tick := time.NewTicker(l.term / 3)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_, _ = l.ask() // listen sees what is wrong
		case <-l.done:
			return
		}
	}
}

// ask renews the lease and returns the number of the message. It may run beside the queues' use.
func (l *Lease) ask() (uint64, error) {
	l.sending.Lock()
	defer l.sending.Unlock()
	l.sequence++
	if !l.reports {
		return l.sequence, l.conn.Send(&proto.Renew{Lease: l.number, Sequence: l.sequence}, sendFor)
	}
	report := &proto.Report{Lease: l.number, Sequence: l.sequence}
	for i, q := range l.Queues {
		report.Claims[i] = proto.Claim(q.queue.Shared())
	}
	return l.sequence, l.conn.Send(report, sendFor)
}

// Wait returns true when a queue has packets, a descriptor of Options.Also can be read, or the lease is over,
// and false after the timeout. A signal may end it early. It allocates nothing.
func (l *Lease) Wait(timeout time.Duration) (bool, error) { return l.waiter.Wait(timeout) }

// Wakeups counts the sleeps that Wait has ended with true.
func (l *Lease) Wakeups() uint64 { return l.waiter.Wakeups }

// Done is closed when the lease is over. What is in the rings then can still be received.
func (l *Lease) Done() <-chan struct{} { return l.done }

// Err is why the lease is over: *Ended, or ErrBrokerGone. It is nil while it is not.
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

// Count has the counters of shunt's program for a queue: matched = passed_no_socket + what the queue's socket was given.
type Count struct {
	Matched uint64 // datagrams to the lease's addresses, since it began
	// PassedNoSocket are those of them that the queue had no socket for: left to the kernel's stack, or dropped where the
	// administrator wants that (on_no_socket: drop).
	PassedNoSocket uint64
}

// Counts asks the broker for those of each queue. It renews the lease, too. Ask a few times a second at most:
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
			_, _ = l.ask() // the last of the counters; a broker that does not hear them lacks nothing else
		}
		_ = l.conn.Unix().CloseRead() // ends listen; the connection goes last
		<-l.done
		err = l.release()
	})
	return err
}

// release lets go of everything that open has got. The broker, which sees the connection's end last, can
// lend the queues at once.
func (l *Lease) release() error {
	var errs []error
	if l.set != nil {
		errs = append(errs, l.set.Close())
	}
	if l.wake >= 0 {
		errs = append(errs, unix.Close(l.wake))
	}
	return errors.Join(append(errs, l.conn.Close())...)
}
