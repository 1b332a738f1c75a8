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

// BytesMin is the least size of a probe, as the tool from which the options are has it.
const BytesMin = 144

// BytesMax is the largest message that IP can carry without a fragment, if the path can.
const BytesMax = 65000

// CodeMax is the largest code of the echo messages. PingTrace has 1.
const CodeMax = uint8(pingPingConstantPING_CODE_MAX)

// Options are a client's.
type Options struct {
	BTF      sensor.BTF
	Server   netip.Addr    // with a zone if it is link-local
	Count    uint64        // probes; 0: until the context ends
	Interval time.Duration // between probes
	Bytes    int           // of the ICMP message
	Duration time.Duration // from the moment that the sensors are attached; 0: until the context ends
	Patience time.Duration // after which a probe is lost; 0: the default, 2 s
	Mode     Mode          // "": ModeAuto
	Code     byte          // of the echo messages; 0 or 1
	Places   bool          // note the places in all network namespaces
	OneHost  bool          // the server is on this host, whose places are noted here: the server's would be the same ones
	UserID   uint16        // of this host, told with its places
	Debug    io.Writer     // what the kernel has loaded is told there; nil: it is not
}

const patienceDefault = 2 * time.Second

// Mode is what a probe waits for before it is told of.
type Mode string

// The modes, by the names that PingTrace has for them.
const (
	// ModeAuto is ModeCompact until more than missesMax probes in a row had no report, then ModePingpong until one comes.
	ModeAuto Mode = "auto"
	// ModePingpong waits for the answer alone, and sends the next probe not before. What a report says in time is told.
	ModePingpong Mode = "pingpong"
	// ModeCompact waits for the answer and the server's report.
	ModeCompact Mode = "compact"
)

// Modes are all of them.
var Modes = []Mode{ModeAuto, ModePingpong, ModeCompact}

// missesMax is as many as PingTrace has (compact_pkt_miss_threshold).
const missesMax = 3

// clientNap is how long to wait for a message at most: lost probes have to be noticed, and the end.
const clientNap = 20 * time.Millisecond

// client sends probes and hears of them.
type client struct {
	o         Options
	recorder  *recorder
	socket    *socket
	to        unix.Sockaddr
	session   uint64
	id        uint16
	clock     clock
	told      uint64 // reports that could not be read
	duplicate uint64 // answers to a probe that has one

	misses int           // answered probes without a report since the last report
	over   chan struct{} // in ModePingpong: has an element when the probe that was sent is over

	mu      sync.Mutex // guards what follows, for the sender and the receiver
	pending map[uint64]*pending
	order   []uint64 // of pending, by number; settled ones may be in it
	sent    uint64
	done    bool // all are sent
	failure error
}

// openClient attaches the sensors and opens the socket. The caller's thread is the one that has to receive, and has to
// be locked.
func openClient(o Options) (*client, error) {
	random := make([]byte, 10)
	_, _ = rand.Read(random) // never fails, crypto/rand
	c := &client{o: o, session: binary.NativeEndian.Uint64(random) | 1, id: binary.NativeEndian.Uint16(random[8:]), pending: map[uint64]*pending{}, over: make(chan struct{}, 1)}
	if c.o.Patience == 0 {
		c.o.Patience = patienceDefault
	}
	zone := uint32(0)
	if o.Server.Zone() != "" {
		device, err := net.InterfaceByName(o.Server.Zone())
		if err != nil {
			return nil, fmt.Errorf("find the device of %v: %w", o.Server, err)
		}
		zone = uint32(device.Index)
	}
	c.to = sockaddr(o.Server.Unmap(), zone)
	var err error
	if c.recorder, err = open(o.BTF, c.session, o.Places); err != nil {
		return nil, err
	}
	if c.socket, err = openSocket(!o.Server.Unmap().Is4(), c.recorder.filter.Programs[pingProgShPingFilter].FD()); err != nil {
		return nil, errors.Join(err, c.recorder.close())
	}
	if o.Debug != nil {
		c.recorder.debug(o.Debug, c.socket)
	}
	return c, nil
}

func (c *client) close() error { return errors.Join(c.socket.close(), c.recorder.close()) }

// run sends probes and hands each to settled when it is known what became of it. It ends when all are settled, or
// some time after the context has ended.
func (c *client) run(ctx context.Context, settled func(Probe) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { c.sendAll(ctx) })
	defer group.Wait()
	defer cancel()
	for {
		if err := wait(clientNap, c.socket); err != nil {
			return err
		}
		if err := c.socket.receiveAll(c.recorder.now, c.take); err != nil {
			return err
		}
		probes, over, err := c.settleAll()
		for _, p := range probes {
			if err := settled(p); err != nil {
				return err
			}
		}
		if over || err != nil {
			return err
		}
	}
}

// sendAll sends until all are sent or the context ends.
func (c *client) sendAll(ctx context.Context) {
	message := make([]byte, c.o.Bytes)
	due := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var err error
	for n := uint64(1); err == nil && (c.o.Count == 0 || n <= c.o.Count); n++ {
		if wait := time.Until(due); wait > 0 {
			timer.Reset(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
		}
		if ctx.Err() != nil {
			break
		}
		err = c.send(message, n)
		due = due.Add(c.o.Interval)
		if c.o.Mode == ModePingpong {
			select {
			case <-ctx.Done():
			case <-c.over:
			}
			if now := time.Now(); due.Before(now) {
				due = now // a probe that was late makes no later ones hurry
			}
		}
	}
	c.mu.Lock()
	c.done, c.failure = true, err
	c.mu.Unlock()
}

// send sends one probe. Its error is of the first probe only: later ones are lost, because a network may come back.
func (c *client) send(message []byte, n uint64) error {
	p := &pending{sequence: n, time: time.Now()}
	head{byte(pingPingConstantPING_KIND_PROBE), c.session, n}.put(message[icmpBytes:])
	c.recorder.begin(c.session, n)
	p.sent = c.recorder.now()
	c.mu.Lock()
	c.pending[n] = p
	c.order = append(c.order, n)
	c.sent++
	c.mu.Unlock()
	err := c.socket.send(message, true, c.o.Code, c.id, uint16(n), c.to)
	if err == nil {
		return nil
	}
	if n == 1 {
		if errors.Is(err, unix.EMSGSIZE) {
			err = fmt.Errorf("%w: give fewer than %d bytes with -b, because probes are not fragmented", err, c.o.Bytes)
		}
		return fmt.Errorf("send a probe to %v: %w", c.o.Server, err)
	}
	c.mu.Lock()
	p.sendFailure = err.Error()
	c.mu.Unlock()
	return nil
}

// take takes what socket.receiveAll hands over.
func (c *client) take(m arrival, user uint64) error {
	if m.session != c.session {
		return nil
	}
	c.mu.Lock() // the sender adds to pending
	defer c.mu.Unlock()
	switch m.kind {
	case byte(pingPingConstantPING_KIND_REPORT):
		c.takeReport(m)
		return nil
	case byte(pingPingConstantPING_KIND_TRAIL):
		c.takeTrail(m)
		return nil
	}
	p := c.pending[m.sequence]
	if p == nil || p.user != 0 {
		c.duplicate++
		return nil
	}
	p.user = user
	if p.here, p.known = c.recorder.look(c.session, m.sequence); !p.known {
		p.here = row{} // another probe's
	}
	p.woken = c.recorder.wokenBetween(p.here.AtNs[pingPingPointPING_POINT_SOCKET], user)
	return nil
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
		if p := c.pending[s.sequence]; p != nil {
			p.server = &s
		}
	}
}

// takeTrail takes the places of one probe, which the server sends before the probe's report.
func (c *client) takeTrail(m arrival) {
	userID, places, err := parseTrail(m.payload)
	if err != nil {
		c.told++
		return
	}
	if p := c.pending[m.sequence]; p != nil && !c.o.OneHost {
		p.theirTrail, p.theirID = places, userID
	}
}

// waits is whether a probe with an answer waits for a report.
func (c *client) waits() bool {
	switch c.o.Mode {
	case ModePingpong:
		return false
	case ModeCompact:
		return true
	}
	return c.misses <= missesMax
}

// settle settles a probe that is over.
func (c *client) settle(p *pending, waited bool) Probe {
	if p.user == 0 {
		if p.here, p.known = c.recorder.look(c.session, p.sequence); !p.known {
			p.here = row{} // another probe's
		}
	}
	if p.user != 0 && p.server == nil {
		c.misses++
	}
	p.ourTrail = c.recorder.trail(c.session, p.sequence)
	v := p.settle(&c.clock, c.o.UserID, c.recorder.reason)
	v.Unasked = p.server == nil && !waited
	if c.o.Mode == ModePingpong {
		select {
		case c.over <- struct{}{}:
		default:
		}
	}
	return v
}

// settleAll settles probes with an answer and, if they wait for it, a report, and probes that are too old to wait for.
// over: none is left, and none will come.
func (c *client) settleAll() (probes []Probe, over bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.recorder.now()
	for _, n := range c.order {
		p := c.pending[n]
		if p == nil {
			continue
		}
		old := now > p.sent && now-p.sent > uint64(c.o.Patience)
		waits := c.waits()
		if !(p.user != 0 && (p.server != nil || !waits)) && !old {
			continue
		}
		delete(c.pending, n)
		probes = append(probes, c.settle(p, waits))
	}
	c.order = slices.DeleteFunc(c.order, func(n uint64) bool { return c.pending[n] == nil })
	return probes, c.done && (len(c.pending) == 0 || c.failure != nil), c.failure
}

// Run sends probes until the context ends or all are sent, and tells of them.
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
