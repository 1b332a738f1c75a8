package ping

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/sensor"
)

// trailWait bounds the server's wait for places that an answer passes after it has left the namespace, in other queues
// and devices of the host.
const trailWait = 10 * time.Millisecond

// answerPatience bounds the server's wait until the kernel's answer to a probe has left: less than a client waits.
const answerPatience = time.Second

// busyProbes is the number of probes in one reportWait from which on the process takes them together. Waking it for each would cost a
// CPU more than all the rest; the kernel answers meanwhile.
const busyProbes = 8

// reportWait bounds the wait of a report for more probes.
const reportWait = time.Millisecond

// heard is a probe that the server's process has received.
type heard struct {
	seen
	session uint64
	id      uint16
	socket  *socket
	from    peer
	local   local
	trail   []place
}

// clientsMax is the number of clients that a server remembers.
const clientsMax = 4096

// Served counts the work of a server.
type Served struct {
	Clients   int    `json:"clients"`
	Probes    uint64 `json:"probes"`
	Reported  uint64 `json:"reported"`
	Forgotten uint64 `json:"forgotten"`     // newer probes took their place before they were reported
	NotSent   uint64 `json:"not_sent"`      // reports, stamps and answers of UDP that the kernel did not take
	Crowded   uint64 `json:"not_waited"`    // probes beyond the number that a server remembers
	Stamps    uint64 `json:"stamps"`        // of balancers on this host, told to clients
	Missed    uint64 `json:"stamps_missed"` // stamps that were overwritten before they were read, or never ended
}

// ServerOptions are the options of a server.
type ServerOptions struct {
	BTF      sensor.BTF
	Duration time.Duration // from the moment that the sensors are attached; 0: until the context ends
	JSON     bool
	Places   bool      // note the places in all network namespaces, and send them to clients
	OneHost  bool      // the client is on this host and notes them itself: they are not sent
	UserID   uint16    // of this host, sent with its places
	Port     uint16    // of UDP, at which probes are answered too; 0: none
	Debug    io.Writer // receives a description of the program that the kernel has loaded; nil: none is written
}

// server reports the probes that it sees. The kernel answers probes of ICMP, and the server those of UDP.
type server struct {
	o        ServerOptions
	recorder *recorder
	sockets  []*socket // the first two are for echo messages, IPv4 and IPv6
	relay    relay
	waiting  []heard
	ready    []heard
	message  []byte    // the unfinished report
	since    time.Time // of the first one that is ready
	clients  map[uint64]bool
	served   Served
	busy     uint64                 // probes of the last passes; older ones count less
	skew     func(ns uint64) uint64 // set by a test: simulates another clock; nil: none
	told     func(client netip.Addr, session uint64) error
}

func openServer(o ServerOptions) (*server, error) {
	r, err := open(o.BTF, 0, rowsServer, o.Places && !o.OneHost, o.Port != 0)
	if err != nil {
		return nil, err
	}
	s := &server{o: o, recorder: r, clients: map[uint64]bool{}}
	filter := r.filter.Programs[pingProgShPingFilter].FD()
	ways := []func(is6 bool) (*socket, error){func(is6 bool) (*socket, error) { return openSocket(is6, filter) }}
	if o.Port != 0 {
		ways = append(ways, func(is6 bool) (*socket, error) { return openUDP(is6, o.Port, filter) })
	}
	for _, open := range ways {
		for _, is6 := range []bool{false, true} {
			one, err := open(is6)
			if is6 && errors.Is(err, unix.EAFNOSUPPORT) { // a kernel with ipv6.disable=1
				continue
			}
			if err != nil {
				return nil, errors.Join(err, s.close())
			}
			s.sockets = append(s.sockets, one)
		}
	}
	_, _ = kernel.SharePins() // without bpffs there are no stamps
	if s.relay, err = openRelay(kernel.DefaultPinRoot); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if o.Debug != nil {
		r.debug(o.Debug, s.sockets...)
	}
	return s, nil
}

func (s *server) close() error {
	var errs []error
	for _, one := range s.sockets {
		errs = append(errs, one.close())
	}
	return errors.Join(append(errs, s.relay.close(), s.recorder.close())...)
}

// tellStamps sends clients the stamps of the balancers on this host for their probes, in echo messages.
func (s *server) tellStamps() error {
	err := s.relay.read(s.skew)
	told, notSent := s.relay.tell(func(message []byte, to netip.Addr) error {
		for _, one := range s.sockets {
			if !one.isUDP && one.is6 == to.Is6() {
				return one.send(message, 0, 0, local{}, newPeer(to, 0, 0))
			}
		}
		return unix.EAFNOSUPPORT
	})
	s.served.Stamps, s.served.NotSent, s.served.Missed = s.served.Stamps+told, s.served.NotSent+notSent, s.relay.rings.Missed()
	return err
}

func (s *server) run(ctx context.Context) error {
	for ctx.Err() == nil {
		nap := 50 * time.Millisecond
		if s.relay.has() {
			nap = stampWait
		}
		if len(s.waiting)+len(s.ready) > 0 {
			nap = reportWait
		}
		if err := wait(nap, s.sockets...); err != nil {
			return err
		}
		before := s.served.Probes
		for _, one := range s.sockets {
			_, err := one.receiveAll(s.recorder.now, func(m arrival, user uint64) error { return s.take(one, m, user) })
			if err != nil {
				return err
			}
		}
		if s.busy = s.busy/2 + s.served.Probes - before; s.busy >= busyProbes {
			sleep(reportWait)
		}
		s.look()
		if err := s.tellStamps(); err != nil {
			return err
		}
		if perReport := reportBytes / entryBytes; len(s.ready) >= perReport || len(s.ready) > 0 && (len(s.waiting) == 0 || time.Since(s.since) >= reportWait) {
			s.report()
		}
	}
	return nil
}

// take takes a message from socket.receiveAll.
func (s *server) take(one *socket, m arrival, user uint64) error {
	s.served.Probes++
	if one.isUDP && one.answer(m) != nil {
		s.served.NotSent++
	}
	if uint64(len(s.waiting)) >= s.recorder.rows {
		s.served.Crowded++
		return nil
	}
	h := heard{seen: seen{sequence: m.sequence, user: user}, session: m.session, id: m.id, socket: one, from: m.from, local: m.local}
	h.seen.socket = s.recorder.reached(m.session, m.sequence)
	h.woken = s.recorder.wokenBetween(h.seen.socket, user)
	s.waiting = append(s.waiting, h)
	return s.meet(&s.waiting[len(s.waiting)-1])
}

// meet reports a client when it is new. It remembers a limited number, and reports the others again.
func (s *server) meet(h *heard) error {
	if s.clients[h.session] {
		return nil
	}
	s.served.Clients++
	if len(s.clients) >= clientsMax {
		clear(s.clients)
	}
	s.clients[h.session] = true
	if s.told == nil {
		return nil
	}
	return s.told(h.from.address(), h.session)
}

// look makes probes ready whose answer has left, or will not leave any more.
func (s *server) look() {
	now := s.recorder.now()
	kept := s.waiting[:0]
	for i := range s.waiting {
		if h := &s.waiting[i]; !s.lookAt(h, now) {
			kept = append(kept, *h)
		}
	}
	s.waiting = kept
}

// lookAt makes a probe ready for a report; false: it has to wait.
func (s *server) lookAt(h *heard, now uint64) bool {
	left := s.recorder.left(h.session, h.sequence)
	if left == 0 && now-h.user < uint64(answerPatience) || s.recorder.everywhere && now < left+uint64(trailWait) {
		return false
	}
	v, known := s.recorder.look(h.session, h.sequence)
	if !known {
		s.served.Forgotten++
		return true
	}
	at := v.AtNs
	h.receive, h.softirq = at[pingPingPointPING_POINT_RECEIVE], at[pingPingPointPING_POINT_SOFTIRQ]
	h.queue, h.driver = at[pingPingPointPING_POINT_QUEUE], at[pingPingPointPING_POINT_DRIVER]
	if v.DroppedNs != 0 && h.driver == 0 {
		h.dropped, h.reason = v.DroppedNs, s.recorder.reason(v.DropReason)
	}
	h.trail = s.recorder.trail(h.session, h.sequence)
	if s.skew != nil {
		for i := range h.trail {
			h.trail[i].at = s.skew(h.trail[i].at)
		}
		for _, ns := range []*uint64{&h.receive, &h.softirq, &h.queue, &h.driver, &h.seen.socket, &h.woken, &h.user, &h.dropped} {
			if *ns != 0 {
				*ns = s.skew(*ns)
			}
		}
	}
	if len(s.ready) == 0 {
		s.since = time.Now()
	}
	s.ready = append(s.ready, *h)
	return true
}

// report sends the clients all reports that are ready, in as few messages as possible.
func (s *server) report() {
	slices.SortStableFunc(s.ready, func(a, b heard) int { return cmp.Compare(a.session, b.session) })
	for ready := s.ready; len(ready) > 0; {
		firstOne := &ready[0]
		message := append(s.message[:0], make([]byte, icmpBytes+headBytes)...)
		count := 0
		for i := range ready {
			h := &ready[i]
			if h.session != firstOne.session || len(message)+entryBytes+len(h.reason) > reportBytes {
				break
			}
			s.sendTrail(h)
			message = h.append(message)
			count++
		}
		head{kind: byte(pingPingConstantPING_KIND_REPORT), isAnswer: firstOne.socket.isUDP, session: firstOne.session, sequence: uint64(count)}.put(message[icmpBytes:])
		if err := firstOne.socket.send(message, firstOne.id, uint16(firstOne.sequence), firstOne.local, firstOne.from); err != nil {
			s.served.NotSent++
		} else {
			s.served.Reported += uint64(count)
		}
		ready, s.message = ready[count:], message
	}
	s.ready = s.ready[:0]
}

// sendTrail sends the client the places that its probe passed, before the report.
func (s *server) sendTrail(h *heard) {
	if len(h.trail) == 0 {
		return
	}
	message := appendTrail(make([]byte, icmpBytes+headBytes, reportBytes), s.o.UserID, h.trail)
	head{kind: byte(pingPingConstantPING_KIND_TRAIL), isAnswer: h.socket.isUDP, session: h.session, sequence: h.sequence}.put(message[icmpBytes:])
	if h.socket.send(message, h.id, uint16(h.sequence), h.local, h.from) != nil {
		s.served.NotSent++
	}
}

// Serve reports to clients until the context ends.
func Serve(ctx context.Context, o ServerOptions, out io.Writer) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := openServer(o)
	if err != nil {
		return err
	}
	lines := json.NewEncoder(out)
	s.told = func(client netip.Addr, session uint64) error {
		if o.JSON {
			return lines.Encode(clientLine{"client", client, fmt.Sprintf("%016x", session)})
		}
		_, err := fmt.Fprintf(out, "client %v, session %016x\n", client, session)
		return err
	}
	if o.JSON {
		err = lines.Encode(newStart(s.recorder.set.Results, o.BTF, nil))
	} else {
		err = startText(out, s.recorder.set.Results, o.BTF)
	}
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	if err == nil {
		err = s.run(ctx)
	}
	if err == nil && o.JSON {
		err = lines.Encode(servedLine{"summary", s.served})
	} else if err == nil {
		v := s.served
		_, err = fmt.Fprintf(out, "%d clients, %d probes: %d reported, %d forgotten, %d not waited for, %d reports not sent\n", v.Clients, v.Probes, v.Reported, v.Forgotten, v.Crowded, v.NotSent)
		if err == nil && (v.Stamps > 0 || v.Missed > 0 || s.relay.has()) {
			_, err = fmt.Fprintf(out, "%d stamps of balancers on this host reported, %d missed\n", v.Stamps, v.Missed)
		}
	}
	return errors.Join(err, s.close())
}
