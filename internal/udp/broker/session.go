package broker

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

const (
	// handshakeFor is the time that a client may take from connecting to Ready.
	handshakeFor = 5 * time.Second
	// bindFor is the time that the broker waits for a queue that is taken although it is not leased.
	bindFor = 10 * time.Second
	// sendFor is the time that a message waits for a client that does not read.
	sendFor = time.Second
	// auditEvery is the interval at which the broker looks at a lease's rings.
	auditEvery = 100 * time.Millisecond
	// lingerFor is the time that a client has to close the connection once its lease is over.
	lingerFor = time.Second
	// lastFor is the time that the broker still listens to a connection whose process has ended.
	lastFor = 100 * time.Millisecond
	// handBackFor is the time that a client waits for a lease that another process holds: a program that is restarted
	// at once is quicker than the end of its predecessor's lease.
	handBackFor = 200 * time.Millisecond
	// burstMax is the number of messages that may come at once, and perSecond their average rate.
	burstMax, perSecond = 64, 32
)

// Reasons for a lease's end when the client, and not the broker, ends it.
const (
	endedClosed = "closed" // the client closed its connection
	endedDied   = "died"
)

// refusal is a reason for the end, with a message for the client.
type refusal struct {
	code proto.Code
	text string
}

func (r *refusal) Error() string { return r.text }

func refuse(code proto.Code, format string, args ...any) error {
	return &refusal{code, fmt.Sprintf(format, args...)}
}

var (
	errClosed = errors.New("the client has closed the connection")
	errDied   = errors.New("the client's process has ended")
	errLeft   = errors.New("the broker leaves its leases to its successor")
)

// session serves one connection, from Hello to the end of its lease.
type session struct {
	broker   *Broker
	conn     *proto.Conn
	peer     *peer
	offered  *offered   // the offer that the session holds
	hook     *hook.Hook // the hook that has the lease
	lease    *lease.Lease
	number   uint64
	since    time.Time
	incoming chan incoming
	quit     chan struct{} // closed at the end, so that the reader stops
	stop     chan string   // receives the reason for which the lease is revoked
	ending

	welcomed bool
	tokens   float64 // number of messages that may still come
	filled   time.Time

	mu      sync.Mutex // for Status
	serving bool
	final   sums          // once the lease does not serve any more
	claims  []proto.Claim // by queue; nil: the program has reported none
}

// incoming is a message from the reader.
type incoming struct {
	body  proto.Body
	files []int
	from  proto.Sender
	err   error
}

// serve handles a connection from its beginning to its end.
func (b *Broker) serve(c *net.UnixConn) {
	s := &session{
		broker: b, conn: proto.NewConn(c), incoming: make(chan incoming), quit: make(chan struct{}),
		stop: make(chan string, 1), ending: newEnding(), tokens: burstMax, filled: time.Now(),
	}
	defer s.conn.Close() //nolint:errcheck // nothing can be done about an error
	p, err := identify(c)
	if err != nil {
		s.say(refuse(proto.EndFailed, "%v", err))
		return
	}
	s.peer = p
	defer p.close()
	if !b.enter(s) {
		_, _, _, _ = s.conn.Receive(time.Now().Add(10 * time.Millisecond)) // unread messages would reset the connection
		s.say(refuse(proto.EndTooMany, "connect: user %d already has %d connections, or all users together have %d, which is the limit; close some", p.UID, connectionsOfUserMax, connectionsMax))
		return
	}
	defer b.leave(s)
	defer close(s.quit)
	go s.read()
	why := s.run()
	s.end(why)
}

// enter counts a connection, and refuses it if there are too many.
func (b *Broker) enter(s *session) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.connections[s.peer.UID] >= connectionsOfUserMax || len(b.sessions) >= connectionsMax {
		b.refused[proto.EndTooMany]++
		return false
	}
	b.sessions[s] = true
	b.connections[s.peer.UID]++
	return true
}

func (b *Broker) leave(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.sessions, s)
	if b.connections[s.peer.UID]--; b.connections[s.peer.UID] == 0 {
		delete(b.connections, s.peer.UID)
	}
}

// read passes messages on one at a time, so that a flood waits in the client's own socket.
func (s *session) read() {
	for {
		var m incoming
		m.body, m.files, m.from, m.err = s.conn.Receive(time.Time{})
		select {
		case s.incoming <- m:
		case <-s.quit:
			closeFiles(m.files)
			return
		}
		if m.err != nil && !errors.Is(m.err, proto.ErrMalformed) {
			return
		}
	}
}

func closeFiles(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}

// revoke ends the session from outside, once.
func (s *session) revoke(why string) {
	select {
	case s.stop <- why:
	default:
	}
}

// run runs the session to its end, and returns the reason for it.
func (s *session) run() error {
	within := time.After(s.broker.options.handshake)
	asked, err := s.introduce(within)
	if err != nil {
		return err
	}
	if resume, ok := asked.body.(*proto.Resume); ok {
		if err := s.resume(resume, asked.files); err != nil {
			return err
		}
		return s.hold()
	}
	if err := s.take(proto.Text(asked.body.(*proto.Request).Name[:])); err != nil {
		return err
	}
	if err := s.grant(within); err != nil {
		return err
	}
	return s.hold()
}

// next returns the next message, or the reason why there is none.
func (s *session) next(within <-chan time.Time) (incoming, error) {
	select {
	case m := <-s.incoming:
		err := s.judge(m)
		if err != nil {
			closeFiles(m.files)
		}
		return m, err
	case <-s.peer.died:
		return incoming{}, errDied
	case why := <-s.stop:
		return incoming{}, refuse(proto.EndRevoked, "%s", why)
	case <-s.broker.left:
		return incoming{}, refuse(proto.EndRevoked, "the broker ends")
	case <-within:
		return incoming{}, refuse(proto.EndExpired, "ask for a lease: the client did not send its next message within %s of connecting", s.broker.options.handshake)
	}
}

// judge refuses messages that cannot be read, that come too often or that another process sent.
func (s *session) judge(m incoming) error {
	switch {
	case errors.Is(m.err, proto.ErrMalformed):
		return refuse(proto.EndMalformed, "read a message: %v; use a client of this broker's version, or see docs/guide/udp-protocol.md", m.err)
	case m.err != nil:
		if !errors.Is(m.err, io.EOF) && !errors.Is(m.err, unix.ECONNRESET) {
			return fmt.Errorf("receive from the client: %w", m.err)
		}
		return errClosed
	case s.welcomed && m.from.PID != s.peer.PID: // a Hello may have been sent before the broker asked the kernel for senders
		return refuse(proto.EndProtocol, "process %d connected, but process %d sent a message: the process that connects must send all messages", s.peer.PID, m.from.PID)
	}
	now := time.Now()
	s.tokens = min(burstMax, s.tokens+now.Sub(s.filled).Seconds()*perSecond) - 1
	s.filled = now
	if s.tokens < 0 {
		return refuse(proto.EndTooMany, "receive messages: the client sent more than %d per second; renew a lease every third of its term", perSecond)
	}
	return nil
}

// introduce receives Hello, sends Welcome, and returns the Request or Resume of a process that is identified.
func (s *session) introduce(within <-chan time.Time) (asked incoming, err error) {
	m, err := s.next(within)
	if err != nil {
		return m, err
	}
	closeFiles(m.files)
	hello, ok := m.body.(*proto.Hello)
	switch {
	case !ok || hello.Magic != proto.Magic:
		return m, refuse(proto.EndProtocol, "read the first message: it must be a Hello that begins with %q", proto.Magic)
	case hello.VersionMin > proto.Version || hello.VersionMax < proto.Version:
		return m, refuse(proto.EndProtocol, "the client speaks the versions %d to %d, and this broker version %d: bring both to the same release", hello.VersionMin, hello.VersionMax, proto.Version)
	}
	nonce, err := newNonce()
	if err != nil {
		return m, err
	}
	if err := s.conn.Send(&proto.Welcome{Nonce: nonce, Version: proto.Version, TermMS: s.termMS()}, sendFor); err != nil {
		return m, fmt.Errorf("welcome the client: %w", err)
	}
	s.welcomed = true
	if m, err = s.next(within); err != nil {
		return m, err
	}
	var said uint64
	switch asks := m.body.(type) {
	case *proto.Request:
		said = asks.Nonce
	case *proto.Resume:
		said = asks.Nonce
	default:
		said = ^nonce
	}
	err = s.peer.locate(m.from.PID)
	switch {
	case said != nonce:
		err = refuse(proto.EndProtocol, "after Welcome the client must send Request or Resume, with the nonce of Welcome")
	case err != nil:
		err = refuse(proto.EndFailed, "%v", err)
	}
	if err != nil {
		closeFiles(m.files)
	}
	return m, err
}

// resume makes the session the holder of a lease of the previous broker.
func (s *session) resume(r *proto.Resume, files []int) error {
	if err := s.broker.reclaim(s, r.Lease, files); err != nil {
		closeFiles(files)
		return err
	}
	err := s.lease.HandBack(files) // Status does not look at the lease before it serves
	s.broker.mu.Lock()
	s.mu.Lock()
	s.serving = true // if HandBack failed, the session ends as one that has served
	if err == nil {
		s.offered.resumed++
	}
	s.mu.Unlock()
	s.broker.mu.Unlock()
	if err != nil {
		return refuse(proto.EndFailed, "%v; ask for a new lease", err)
	}
	return s.serve()
}

// serve tells the client that datagrams come now.
func (s *session) serve() error {
	serving := &proto.Serving{Lease: s.number, Mode: proto.ModeOf(string(s.lease.Grant.Mode)), TermMS: s.termMS()}
	proto.Put(serving.Reason[:], s.lease.Grant.Reason)
	return s.conn.Send(serving, sendFor)
}

func newNonce() (uint64, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("make a nonce: %w", err)
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}

func (s *session) termMS() uint32 { return uint32(s.broker.options.Term.Milliseconds()) }

// take reserves an offer for the session, and opens its lease.
func (s *session) take(name string) error {
	for deadline := time.Now().Add(handBackFor); ; {
		other, err := s.reserve(name)
		if other == nil && err != nil {
			return err
		}
		if other == nil {
			break
		}
		select {
		case <-other.over:
		case <-other.ending:
			<-other.over
		case <-time.After(time.Until(deadline)):
			return err
		}
	}
	var l *lease.Lease
	err := s.broker.options.In(func() (err error) {
		l, err = lease.Open(s.hook, s.offered.spec())
		return err
	})
	if err != nil {
		return refuse(proto.EndFailed, "%v", err)
	}
	s.lease = l
	return nil
}

// reserve makes the session the holder of an offer. If another session holds it, reserve returns that lease's end to wait for, and
// the error for a client that has waited long enough.
func (s *session) reserve(name string) (other *ending, err error) {
	b := s.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.offers[name]
	if o == nil || !o.allows(s.peer.Identity) {
		// One message for both cases: a process that may not lease an offer does not learn whether it exists.
		return nil, refuse(proto.EndRefused, "lease %q: no offer of this name allows %s; add a rule for it to the offer", name, s.peer)
	}
	if h := b.hooks[o.Interface]; h == nil {
		return nil, refuse(proto.EndFailed, "lease %q: the program is not attached to interface %s: %v; ask again later", name, o.Interface, o.failed)
	}
	for _, other := range b.offers {
		if other.holder != nil && (other == o || other.shares(o.Offer)) {
			return &other.holder.ending, refuse(proto.EndBusy, "lease %q: %s has %q, and two leases cannot share a queue of interface %s; end that process, or give the offers different queues",
				name, other.holder.peer, other.Name, o.Interface)
		}
	}
	if a := b.inTheWay(s, o); a != nil {
		return &a.ending, refuse(proto.EndBusy, "lease %q: %s has %q since an earlier broker, and this broker waits for it for up to %s; end that process, or ask again", name, a.Holder, a.Offer.Name, b.options.Keep.Await)
	}
	b.leases++
	s.number, s.offered, o.holder, s.hook = b.leases, o, s, b.hooks[o.Interface].Hook
	return nil, nil
}

// grant hands the lease over, waits until the client has mapped it, and starts it.
func (s *session) grant(within <-chan time.Time) error {
	g, err := proto.NewGrant(s.number, s.lease.Grant.Layouts, s.lease.Grant.Serves, s.offered.CPUs, s.offered.Wait)
	if err != nil {
		return refuse(proto.EndFailed, "%v", err)
	}
	if s.broker.options.Keep != nil {
		g.Flags |= proto.FlagResume
	}
	if err := s.conn.Send(g, sendFor, s.lease.Set().Files()...); err != nil {
		return fmt.Errorf("hand the lease over: %w", err)
	}
	m, err := s.next(within)
	if err != nil {
		return err
	}
	closeFiles(m.files)
	if ready, ok := m.body.(*proto.Ready); !ok || ready.Lease != s.number {
		return refuse(proto.EndProtocol, "after Grant the client must send Ready, with the number of the lease")
	}
	if err := s.lease.Bind(s.broker.options.bind); err != nil {
		return s.bindRefusal(err)
	}
	s.since = time.Now()
	if err := s.broker.keep(s); err != nil {
		return refuse(proto.EndFailed, "%v", err)
	}
	if err := s.lease.Serve(); err != nil {
		return refuse(proto.EndFailed, "%v", err)
	}
	s.mu.Lock()
	s.serving = true
	s.mu.Unlock()
	s.broker.mu.Lock()
	s.offered.given++
	s.broker.mu.Unlock()
	return s.serve()
}

// bindRefusal names the processes that may still have the queue.
func (s *session) bindRefusal(err error) error {
	s.broker.mu.Lock()
	previous := s.offered.previous
	s.broker.mu.Unlock()
	if !errors.Is(err, unix.EBUSY) {
		return refuse(proto.EndFailed, "%v", err)
	}
	if _, statErr := os.Stat(fmt.Sprintf("/proc/%d", previous.PID)); previous.PID != 0 && statErr == nil {
		return refuse(proto.EndBusy, "%v: %s had the lease before, and may still have its sockets", err, previous)
	}
	return refuse(proto.EndBusy, "%v", err)
}

// hold serves the lease until its end.
func (s *session) hold() error {
	term := time.NewTimer(s.broker.options.Term)
	defer term.Stop()
	audit := time.NewTicker(auditEvery)
	defer audit.Stop()
	for {
		select {
		case m := <-s.incoming:
			closeFiles(m.files)
			if err := s.judge(m); err != nil {
				return err
			}
			if err := s.renew(m.body); err != nil {
				return err
			}
			term.Reset(s.broker.options.Term)
		case <-s.peer.died:
			return errDied
		case why := <-s.stop:
			return refuse(proto.EndRevoked, "%s", why)
		case <-s.broker.left:
			return errLeft
		case <-term.C:
			return refuse(proto.EndExpired, "keep the lease of %s: the client did not renew it within %s", s.offered.Name, s.broker.options.Term)
		case <-audit.C:
			if err := s.lease.Audit(); errors.Is(err, xsk.ErrCorrupt) {
				return refuse(proto.EndTampered, "keep the lease of %s: %v", s.offered.Name, err)
			}
		}
	}
}

// renew answers Renew and Report. A client that does not read answers any more is about to close the connection, and has
// returned its queues when it does: so an answer that cannot be sent is no end yet.
func (s *session) renew(body proto.Body) error {
	renewed := &proto.Renewed{}
	var claims []proto.Claim // nil: Renew has none
	switch m := body.(type) {
	case *proto.Renew:
		renewed.Lease, renewed.Sequence = m.Lease, m.Sequence
	case *proto.Report:
		renewed.Lease, renewed.Sequence = m.Lease, m.Sequence
		claims = m.Claims[:len(s.lease.Grant.Layouts)]
	}
	if renewed.Lease != s.number {
		return refuse(proto.EndProtocol, "during a lease the client may send only Renew and Report, with the number of the lease")
	}
	if claims != nil {
		s.claim(claims)
	}
	for i, l := range s.lease.Grant.Layouts {
		c, err := s.lease.Counts(l.Queue)
		if err != nil {
			return refuse(proto.EndFailed, "%v", err)
		}
		renewed.Counts[i] = proto.Count{Matched: c.Matched, PassedNoSocket: c.NoSocket()}
	}
	if err := s.conn.Send(renewed, sendFor); err != nil && !errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("answer Renew: %w", err)
	}
	return nil
}

// end takes the lease back, counts the reason, and tells the client.
func (s *session) end(why error) {
	var totals sums
	close(s.ending.ending)
	if errors.Is(why, errLeft) {
		_ = s.lease.Leave()
		close(s.over)
		return
	}
	served := s.serving
	if s.lease != nil {
		totals = s.takeBack(served && errors.Is(why, errDied))
	}
	b, word := s.broker, endedClosed
	var r *refusal
	switch {
	case errors.As(why, &r):
		word = r.code.String()
	case errors.Is(why, errDied) || s.peer.exiting():
		word = endedDied
	}
	kill := false
	b.mu.Lock()
	if r != nil && !served {
		b.refused[r.code]++
	}
	if s.offered != nil {
		kill = served && s.offered.Kill
		s.offered.holder = nil
		s.offered.past.add(totals)
		s.offered.claimed = s.claimed(s.offered.claimed)
		s.offered.previous = s.peer.Identity
		if served {
			s.offered.ended[word]++
			s.offered.lastEnd = word
		}
	}
	b.mu.Unlock()
	close(s.over)
	if r != nil {
		s.say(r)
		s.linger(kill)
	}
}

// hearLast notes the reports that a process has sent right before its end, because the broker may learn of the end first. The
// connection is closed by then, unless another process has it too; hearLast does not wait for that one.
func (s *session) hearLast() {
	timer := time.NewTimer(lastFor)
	defer timer.Stop()
	for {
		select {
		case m := <-s.incoming:
			closeFiles(m.files)
			if m.err != nil {
				return
			}
			if report, ok := m.body.(*proto.Report); ok && report.Lease == s.number && m.from.PID == s.peer.PID {
				s.claim(report.Claims[:len(s.lease.Grant.Layouts)])
			}
		case <-timer.C:
			return
		}
	}
}

// takeBack ends the lease in the order that gives the datagrams to the kernel's stack soonest. If the process died, it reads the
// last reports before Status shows that the lease is over: so the numbers in that Status are final.
func (s *session) takeBack(died bool) (totals sums) {
	var errs []error
	for _, l := range s.lease.Grant.Layouts {
		errs = append(errs, s.lease.Unbind(l.Queue))
	}
	errs = append(errs, s.lease.Pause())
	if elsewhere, err := s.lease.Elsewhere(); err == nil {
		totals.all.Count.Add(elsewhere)
	}
	if all, err := s.lease.Status(); err == nil && len(all) > 0 {
		totals.of(all)
	} else {
		totals.all.Unknown++ // the rings were tampered with, or were not handed back
	}
	if died {
		s.hearLast()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serving, s.final = false, totals
	if err := errors.Join(append(errs, s.lease.Close(), s.broker.forget(s.number, s.hook))...); err != nil {
		totals.all.Failed++
	}
	return totals
}

// say sends the last message. A client that does not read it never gets it.
func (s *session) say(err error) {
	var r *refusal
	if !errors.As(err, &r) {
		return
	}
	end := &proto.End{Code: r.code}
	proto.Put(end.Text[:], r.text)
	_ = s.conn.Send(end, sendFor)
}

// linger gives the client time to read the last message, and to close its connection: a connection that is closed here with
// unread data is reset, and the message lost. With kill, linger ends a process that does not close it.
func (s *session) linger(kill bool) {
	_ = s.conn.Unix().CloseWrite()
	timer := time.NewTimer(lingerFor)
	defer timer.Stop()
	for {
		select {
		case m := <-s.incoming:
			closeFiles(m.files)
			if m.err != nil && !errors.Is(m.err, proto.ErrMalformed) {
				return
			}
		case <-s.peer.died:
			return
		case <-timer.C:
			if kill {
				_ = s.peer.signal(unix.SIGKILL)
			}
			return
		}
	}
}
