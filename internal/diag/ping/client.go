package ping

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/sensor"
)

// BytesMin is the smallest size of a probe, the same as PingTrace's.
const BytesMin = 144

// BytesMax is the largest message that IP can carry without fragments, if the path allows it.
const BytesMax = 65000

// CodeMax is the largest code of the echo messages. PingTrace has 1.
const CodeMax = uint8(pingPingConstantPING_CODE_MAX)

// Options are the options of a client.
type Options struct {
	BTF      sensor.BTF
	Server   netip.Addr    // with a zone if it is link-local
	Count    uint64        // probes; 0: until the context ends
	Interval time.Duration // between probes
	Bytes    int           // of the ICMP message, or of the datagram with its header
	Duration time.Duration // from the moment that the sensors are attached; 0: until the context ends
	Patience time.Duration // after which a probe is lost; 0: the default, 2 s
	Mode     Mode          // "": ModeAuto
	Code     byte          // of the echo messages; 0 or 1
	Port     uint16        // probes are datagrams of UDP to this port, which the server's process answers; 0: they are echo messages
	Places   bool          // note the places in all network namespaces
	OneHost  bool          // the server is on this host, whose places are noted here: the server's would be the same ones
	UserID   uint16        // of this host, sent with its places
	Debug    io.Writer     // receives a description of the program that the kernel has loaded; nil: none is written
}

const patienceDefault = 2 * time.Second

// Mode selects the messages that a probe waits for before it is reported.
type Mode string

// The modes, by the names that PingTrace has for them.
const (
	// ModeAuto is ModeCompact until more than missesMax probes in a row had no report, then ModePingpong until one comes.
	ModeAuto Mode = "auto"
	// ModePingpong waits only for the answer, and sends the next probe after it. A server's report that comes in time is used.
	ModePingpong Mode = "pingpong"
	// ModeCompact waits for the answer and the server's report.
	ModeCompact Mode = "compact"
)

// Modes lists all modes.
var Modes = []Mode{ModeAuto, ModePingpong, ModeCompact}

// missesMax is the same number as PingTrace's (compact_pkt_miss_threshold).
const missesMax = 3

// clientNap is the longest wait for a message: lost probes have to be noticed, and the end.
const clientNap = 20 * time.Millisecond

// client sends probes and receives their answers and reports.
type client struct {
	o          Options
	recorder   *recorder
	socket     *socket
	echo       *socket // of UDP: for echo messages with balancers' stamps; nil: socket gets them
	to         peer
	session    uint64
	id         uint16
	clock      clock
	tellers    []*teller // hosts that report stamps, in the order of their first reports
	told       uint64    // reports that could not be read
	duplicate  uint64    // answers to a probe that has one
	lateStamp  uint64    // stamps of probes that had been reported, or of too many hosts
	otherStamp uint64    // stamps that have no place in the account of their probe

	wanted    int           // number of stamps of the last probe that had some
	unstamped int           // probes since then that had fewer, and an answer
	misses    int           // answered probes without a report since the last report
	over      chan struct{} // in ModePingpong: holds an element when the sent probe is over
	ready     []uint64      // probes that are over and not reported yet
	room      room
	passed    func() error // called when probes have been reported; nil: none

	mu    sync.Mutex // guards the fields below, for the sender and the receiver
	slots []pending  // by the low bits of the number. An open one belongs to the receiver, except sendFailure
	first uint64     // the oldest probe that may not be over
	sent  uint64
	done  bool // all are sent
	// failure is the error of the first probe: nothing can be sent.
	failure error
}

// openClient attaches the sensors and opens the socket. The caller's thread must be the receiving thread, and must be
// locked.
func openClient(o Options) (*client, error) {
	random := make([]byte, 10)
	_, _ = rand.Read(random) // never fails, crypto/rand
	if o.Patience == 0 {
		o.Patience = patienceDefault
	}
	c := &client{o: o, session: binary.NativeEndian.Uint64(random) | 1, id: binary.NativeEndian.Uint16(random[8:]), first: 1,
		slots: make([]pending, o.underWay()), over: make(chan struct{}, 1)}
	zone := uint32(0)
	if o.Server.Zone() != "" {
		device, err := net.InterfaceByName(o.Server.Zone())
		if err != nil {
			return nil, fmt.Errorf("find the device of %v: %w", o.Server, err)
		}
		zone = uint32(device.Index)
	}
	c.to = newPeer(o.Server.Unmap(), zone, o.Port)
	var err error
	if c.recorder, err = open(o.BTF, c.session, uint64(len(c.slots)), o.Places, o.Port != 0); err != nil {
		return nil, err
	}
	if err = c.openSockets(); err != nil {
		return nil, errors.Join(err, c.close())
	}
	if o.Debug != nil {
		c.recorder.debug(o.Debug, c.sockets()...)
	}
	return c, nil
}

// underWay returns the number of probes for which there must be room: if all are lost, those of the patience, and half
// as many again. Further probes wait for room. The number is a power of two.
func (o Options) underWay() uint64 {
	most := rowsMax
	if o.Interval > 0 {
		most = uint64(o.Patience+o.Patience/2) / uint64(o.Interval)
	}
	room := rowsMin
	for room < min(most, rowsMax) {
		room *= 2
	}
	return room
}

func (c *client) openSockets() (err error) {
	is6, filter := !c.o.Server.Unmap().Is4(), c.recorder.filter.Programs[pingProgShPingFilter].FD()
	if c.o.Port == 0 {
		c.socket, err = openSocket(is6, filter)
		return err
	}
	if c.socket, err = openUDP(is6, 0, filter); err == nil {
		c.echo, err = openSocket(is6, filter)
	}
	return err
}

// sockets returns the client's sockets.
func (c *client) sockets() (all []*socket) {
	for _, s := range []*socket{c.socket, c.echo} {
		if s != nil {
			all = append(all, s)
		}
	}
	return all
}

func (c *client) close() error {
	var errs []error
	for _, s := range c.sockets() {
		errs = append(errs, s.close())
	}
	return errors.Join(append(errs, c.recorder.close())...)
}

// slot returns the slot of a probe, which a newer one may have taken.
func (c *client) slot(n uint64) *pending { return &c.slots[n&uint64(len(c.slots)-1)] }

// run sends probes and passes each to settled when its outcome is known; the probe is valid until the
// next call. It ends when all are settled, or some time after the context has ended.
func (c *client) run(ctx context.Context, settled func(Probe) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { c.sendAll(ctx) })
	defer group.Wait()
	defer cancel()
	sockets := c.sockets()
	for more := false; ; {
		if c.o.together() {
			if !more {
				sleep(togetherWait)
			}
		} else if err := wait(clientNap, sockets...); err != nil {
			return err
		}
		asOf := c.recorder.now()
		more = false
		for _, s := range sockets {
			again, err := s.receiveAll(c.recorder.now, c.take)
			if err != nil {
				return err
			}
			more = more || again
		}
		if more {
			asOf = 0
		}
		over, err := c.settleAll(settled, asOf)
		if c.passed != nil {
			err = errors.Join(err, c.passed())
		}
		if over || err != nil {
			return err
		}
	}
}

// sendAll sends until all probes are sent or the context ends.
func (c *client) sendAll(ctx context.Context) {
	box := newOutbox(c.to, c.o.Bytes, c.o.Port != 0)
	due := time.Now() // time of the next probe
	timer := time.NewTimer(0)
	defer timer.Stop()
	var err error
	for n := uint64(1); err == nil && (c.o.Count == 0 || n <= c.o.Count); {
		count := c.due(n, due)
		if wait := time.Until(due); wait > 0 || count == 0 {
			if c.o.together() {
				sleep(togetherWait)
			} else {
				timer.Reset(max(wait, roomWait))
				select {
				case <-ctx.Done():
				case <-timer.C:
				}
			}
			count = c.due(n, due)
		}
		if ctx.Err() != nil {
			break
		}
		if count == 0 {
			continue
		}
		err = c.send(box, n, count)
		n, due = n+uint64(count), due.Add(time.Duration(count)*c.o.Interval)
		if c.o.Mode == ModePingpong {
			select {
			case <-ctx.Done():
			case <-c.over:
			}
			if now := time.Now(); due.Before(now) {
				due = now // a late probe does not make later ones hurry
			}
		}
	}
	c.mu.Lock()
	c.done, c.failure = true, err
	c.mu.Unlock()
}

// togetherInterval is the interval below which probes are sent and received together, every togetherWait. Waking the receiver for
// each probe cost about as much as all the rest: 39 to 47 µs of both ends' CPU time a probe, and 22 to 23 without (three and two runs of
// 100,000, two virtual CPUs of an AMD EPYC, Linux 6.18, beside a load of 20 to 25).
const (
	togetherInterval = 100 * time.Microsecond
	togetherWait     = 500 * time.Microsecond
)

// together reports whether probes are sent and received together.
func (o Options) together() bool { return o.Interval < togetherInterval && o.Mode != ModePingpong }

// roomWait is the shortest wait of the sender: timers are no better, and many probes get room at once.
const roomWait = 50 * time.Microsecond

// due returns the number of probes, from number n on, that can be sent now if n was due at a time; 0: there is no room.
func (c *client) due(n uint64, at time.Time) int {
	c.mu.Lock()
	count := uint64(len(c.slots)) - (n - c.first)
	c.mu.Unlock()
	count = min(count, batchMax)
	if c.o.Count > 0 {
		count = min(count, c.o.Count-n+1)
	}
	if !c.o.together() { // then probes are sent one by one
		count = min(count, 1)
	}
	if c.o.Interval > 0 {
		count = min(count, 1+uint64(max(0, time.Since(at))/c.o.Interval))
	}
	return int(count)
}

// send sends count probes from number n on. Only the first probe of all can be an error: later ones are lost, because a
// network may come back.
func (c *client) send(box *outbox, n uint64, count int) error {
	begin := time.Now()
	sent := c.recorder.now()
	c.mu.Lock()
	for i := range count {
		p := c.slot(n + uint64(i))
		*p = pending{sequence: n + uint64(i), time: begin, sent: sent, state: isOpen, isUDP: c.o.Port != 0}
	}
	c.sent += uint64(count)
	c.mu.Unlock()
	for i := range count {
		c.recorder.begin(c.session, n+uint64(i))
		box.put(i, c.socket.is6, c.o.Code, c.id, head{kind: byte(pingProbeConstantPROBE_KIND_PROBE), session: c.session, sequence: n + uint64(i)})
	}
	for from := 0; from < count; from++ {
		taken, err := c.socket.sendBatch(box, from, count)
		if from += taken; err == nil {
			break
		}
		if n == 1 && from == 0 {
			if errors.Is(err, unix.EMSGSIZE) {
				err = fmt.Errorf("%w: give fewer than %d bytes with -b, because probes are not fragmented", err, c.o.Bytes)
			}
			return fmt.Errorf("send a probe to %v: %w", c.o.Server, err)
		}
		c.mu.Lock()
		c.slot(n + uint64(from)).sendFailure = err.Error()
		c.mu.Unlock()
	}
	return nil
}

// take takes a message from socket.receiveAll.
func (c *client) take(m arrival, user uint64) error {
	if m.session != c.session {
		return nil
	}
	c.mu.Lock() // the sender makes probes
	defer c.mu.Unlock()
	switch m.kind {
	case byte(pingPingConstantPING_KIND_REPORT):
		c.takeReport(m)
		return nil
	case byte(pingPingConstantPING_KIND_TRAIL):
		c.takeTrail(m)
		return nil
	case byte(pingPingConstantPING_KIND_STAMPS):
		c.takeStamps(m)
		return nil
	}
	p := c.slot(m.sequence)
	if p.sequence != m.sequence || p.state == isFree || p.user != 0 {
		c.duplicate++
		return nil
	}
	p.user = user
	p.woken = c.recorder.wokenBetween(c.recorder.reached(c.session, m.sequence), user)
	c.check(p)
	return nil
}

// check marks a probe as over if it is, without regard to its age.
func (c *client) check(p *pending) {
	if p.state == isOpen && p.user != 0 && (p.server != nil || !c.waits() || p.via() == viaAnswered) && p.stampCount() >= c.wanted {
		p.state = isReady
		c.ready = append(c.ready, p.sequence)
	}
}

func (c *client) takeReport(m arrival) {
	all, err := parseReport(m.payload, m.sequence)
	if err != nil {
		c.told++
		return
	}
	if len(all) > 0 {
		c.misses = 0
	}
	for _, s := range all {
		if p := c.slot(s.sequence); p.sequence == s.sequence && p.state == isOpen {
			p.report, p.server = s, &p.report
			c.check(p)
		}
	}
}

// takeStamps takes a balancer's stamps of probes. From then on, a probe waits for as many stamps as the last one that had
// some, until more than missesMax in a row had fewer.
func (c *client) takeStamps(m arrival) {
	all, err := parseStamps(m.payload, m.sequence)
	if err != nil {
		c.told++
		return
	}
	from := c.teller(m.from.address())
	for _, s := range all {
		p := c.slot(s.sequence)
		if from == nil || p.sequence != s.sequence || p.state != isOpen || s.begin == 0 {
			c.lateStamp++
			continue
		}
		from.stamps++
		if p.takeStamp(from, s) {
			c.wanted, c.unstamped = max(c.wanted, p.stampCount()), 0
			c.check(p)
		}
	}
}

// takeTrail takes the places of one probe, which the server sends before its report.
func (c *client) takeTrail(m arrival) {
	userID, places, err := parseTrail(m.payload)
	if err != nil {
		c.told++
		return
	}
	if p := c.slot(m.sequence); p.sequence == m.sequence && p.state == isOpen && !c.o.OneHost {
		p.theirTrail, p.theirID = places, userID
	}
}

// waits reports whether a probe with an answer waits for a report.
func (c *client) waits() bool {
	switch c.o.Mode {
	case ModePingpong:
		return false
	case ModeCompact:
		return true
	}
	return c.misses <= missesMax
}

// settle makes the account of a probe that is over.
func (c *client) settle(p *pending) Probe {
	waited := c.waits()
	if p.here, p.known = c.recorder.look(c.session, p.sequence); !p.known {
		p.here = row{} // the row belongs to another probe
	}
	if p.user != 0 && p.server == nil && p.via() != viaAnswered {
		c.misses++
	}
	if p.user != 0 && p.stampCount() < c.wanted {
		if c.unstamped++; c.unstamped > missesMax {
			c.wanted = 0
		}
	}
	p.ourTrail = c.recorder.trail(c.session, p.sequence)
	c.mu.Lock() // the sender may set that it was not sent
	v := p.settle(&c.clock, c.o.UserID, c.recorder.reason, &c.room)
	c.mu.Unlock()
	c.otherStamp += uint64(p.unshown)
	v.Unasked = p.user != 0 && v.unreported() && !waited
	if c.o.Mode == ModePingpong {
		select {
		case c.over <- struct{}{}:
		default:
		}
	}
	return v
}

// settleAll reports probes that are over or too old to wait for, in the order in which they were
// sent. All answers that had come at asOf have been taken. over: no probe is left, and none will come.
func (c *client) settleAll(settled func(Probe) error, asOf uint64) (over bool, err error) {
	c.findOver(asOf)
	slices.Sort(c.ready)
	for _, n := range c.ready {
		if err := settled(c.settle(c.slot(n))); err != nil {
			return false, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.ready {
		c.slot(n).state = isFree
	}
	c.ready = c.ready[:0]
	for c.first <= c.sent && c.slot(c.first).state == isFree {
		c.first++
	}
	return c.done && (c.first > c.sent || c.failure != nil), c.failure
}

// findOver looks at the oldest probes, up to the first that is still open: probes become too old in the order in which they
// were sent. Their age is computed at asOf, a time in ns, and all answers that had come by then have been taken since: this
// process may have had no CPU for a while, with answers in its socket.
func (c *client) findOver(asOf uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := c.first; n <= c.sent; n++ {
		p := c.slot(n)
		c.check(p)
		if p.state == isOpen && asOf > p.sent && asOf-p.sent > uint64(c.o.Patience) {
			p.state = isReady
			c.ready = append(c.ready, n)
		}
		if p.state == isOpen {
			return
		}
	}
}

// Run sends probes until the context ends or all are sent, and reports them.
func Run(ctx context.Context, o Options, p *Printer) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := openClient(o)
	if err != nil {
		return err
	}
	err = p.start(c.recorder.set.Results, o)
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	sum := newSum()
	c.passed = p.flush
	if err == nil {
		err = c.run(ctx, func(probe Probe) error {
			sum.add(probe)
			return p.probe(probe)
		})
	}
	if err == nil {
		var missed map[string]uint64
		missed, err = c.recorder.set.Missed()
		err = errors.Join(err, p.summary(sum.summary(c, missed)))
	}
	return errors.Join(err, c.close())
}
