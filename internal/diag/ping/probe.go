package ping

import (
	"slices"
	"strings"
	"time"
)

// Stage is the time between two points that a probe passed. If points between them are not known, the stage has the
// names of all that are in it, with "+" between.
type Stage struct {
	Name string `json:"stage"`
	Ns   int64  `json:"ns"`
}

// The stages, in the order in which a probe passes them; each is named by its host and by what happens in it.
var stageNames = []string{
	"client.send",     // the system call, up to the queueing discipline
	"client.queue",    // the queueing discipline
	"wire.out",        // the client's driver, and all that is between the hosts
	"server.receive",  // from the driver to the softirq that takes the packet
	"server.answer",   // the softirq, in which the kernel makes the answer
	"server.queue",    // the queueing discipline
	"wire.back",       // the server's driver, and all that is between the hosts
	"client.receive",  // from the driver to the softirq
	"client.protocol", // the softirq, up to the socket
	"client.wakeup",   // from the socket until the process is put on a run queue
	"client.user",     // until it has the message: the time in the run queue, and the system call
}

// pointNames are the points between the stages.
var pointNames = []string{
	"client sent", "client queue", "client driver", "server receive", "server softirq", "server queue", "server driver",
	"client receive", "client softirq", "client socket", "client wake-up", "client user",
}

// Clock is how far the server's clock is ahead of the client's, and the largest error of that.
type Clock struct {
	OffsetNs int64 `json:"offset_ns"`
	ErrorNs  int64 `json:"error_ns"`
}

// Listener is the time that the server's process needed to get the probe. It is not part of the round trip, because the
// kernel answers.
type Listener struct {
	Protocol int64 `json:"protocol_ns"` // from the softirq to the socket
	Wakeup   int64 `json:"wakeup_ns"`   // from the socket to the run queue; 0: the process was awake
	User     int64 `json:"user_ns"`     // to the process
}

// Drop is where the kernel dropped a probe or its answer.
type Drop struct {
	Host   string `json:"host"`
	Reason string `json:"reason"` // enum skb_drop_reason of that host's kernel
}

// Probe is the outcome of a probe.
type Probe struct {
	Sequence  uint64    `json:"sequence"`
	Time      time.Time `json:"time"`                    // when it was sent
	RoundTrip int64     `json:"round_trip_ns,omitempty"` // from the process to the process
	Stages    []Stage   `json:"stages"`                  // none if it is lost
	// AddsUp: the stages follow each other, so that their sum is the round trip and none is negative.
	AddsUp   bool      `json:"adds_up"`
	Reported bool      `json:"reported"` // by the server; otherwise its stages are part of the wire's
	Clock    *Clock    `json:"clock,omitempty"`
	Listener *Listener `json:"listener,omitempty"`
	Lost     bool      `json:"lost"`
	Last     string    `json:"last,omitempty"`     // of a lost one: the last point seen
	Drop     *Drop     `json:"drop,omitempty"`     // of a lost one, if the kernel dropped it in sight
	NotSent  string    `json:"not_sent,omitempty"` // why the kernel did not take it
	// Unasked: a report of the server was not waited for.
	Unasked bool    `json:"report_not_awaited,omitempty"`
	Places  []Place `json:"places,omitempty"` // in all network namespaces, if they were asked for
	// Forgotten: newer probes took its place in the memory of this host before the answer came.
	Forgotten bool `json:"forgotten,omitempty"`

	sentNs int64 // of the client's clock, for tests
}

// state says how far a pending probe has come. The sender makes free ones open, and the receiver does the rest.
type state byte

const (
	isFree  state = iota
	isOpen        // on its way
	isReady       // over, and not yet told of
)

// room is memory for the account of a probe, so that none of it is made anew for each.
type room struct {
	points   [pointCount]int64
	stages   [pointCount - 1]Stage
	clock    Clock
	listener Listener
	drop     Drop
}

// clone is a copy that outlives the next settle in the same room.
func (p Probe) clone() Probe {
	p.Stages = slices.Clone(p.Stages)
	p.Clock, p.Listener, p.Drop = copied(p.Clock), copied(p.Listener), copied(p.Drop)
	return p
}

func copied[T any](v *T) *T {
	if v == nil {
		return nil
	}
	one := *v
	return &one
}

// pending is a probe on its way.
type pending struct {
	sequence    uint64
	time        time.Time
	sent, user  uint64 // ns of the client's clock; user 0: not answered yet
	woken       uint64
	here        row
	known       bool  // here is the probe's
	server      *seen // report, once it has come
	report      seen
	sendFailure string
	state       state
	ourTrail    []place
	theirTrail  []place // of the server, on its own clock
	theirID     uint16  // its --userid
}

// points are on the path in order, in ns: those of each host on its own clock, 0 where it is not known.
func (p *pending) points(points *[pointCount]int64) {
	var s seen
	if p.server != nil {
		s = *p.server
	}
	at := p.here.AtNs
	for i, ns := range [pointCount]uint64{p.sent, at[pingPingPointPING_POINT_QUEUE], at[pingPingPointPING_POINT_DRIVER], s.receive, s.softirq, s.queue, s.driver,
		at[pingPingPointPING_POINT_RECEIVE], at[pingPingPointPING_POINT_SOFTIRQ], at[pingPingPointPING_POINT_SOCKET], p.woken, p.user} {
		points[i] = int64(ns)
	}
}

// The server's points, those beside them, and how many there are of all.
const (
	pointCount  = 12
	clientOut   = 2
	serverFirst = 3
	serverLast  = 6
	clientBack  = 7
)

// first is the first known point from one to another; 0: none.
func first(points []int64, from, to int) int64 {
	step := 1
	if from > to {
		step = -1
	}
	for i := from; i != to+step; i += step {
		if points[i] != 0 {
			return points[i]
		}
	}
	return 0
}

// settle makes the account of a probe, in the room: it is valid until the next one is made there. Names of reasons are of
// this host, as the user's id is.
func (p *pending) settle(c *clock, userID uint16, reason func(uint32) string, r *room) Probe {
	v := Probe{Sequence: p.sequence, Time: p.time, Stages: r.stages[:0], Reported: p.server != nil, NotSent: p.sendFailure, Forgotten: !p.known, sentNs: int64(p.sent)}
	p.points(&r.points)
	points := r.points[:]
	if p.user == 0 {
		p.lose(&v, points, reason, r)
		v.Places = p.places(userID, c.here())
		return v
	}
	v.RoundTrip = int64(p.user - p.sent)
	v.AddsUp = true
	// The first stamp of this host after the server, and the last one before, whichever are known.
	out, back := first(points, clientOut, 0), first(points, clientBack, len(points)-1)
	receive, answer := first(points, serverFirst, serverLast), first(points, serverLast, serverFirst)
	there := c.here()
	if p.server != nil && receive != 0 {
		offset, err, ok := c.add(out, receive, answer, back)
		v.AddsUp = ok
		r.clock = Clock{offset, err}
		v.Clock = &r.clock
		here := bridge(offset, out, receive, answer, back)
		there = here
		for i := serverFirst; i <= serverLast; i++ {
			if points[i] != 0 {
				points[i] = here(points[i])
			}
		}
		if s := p.server; s.socket != 0 && s.user != 0 && s.softirq != 0 {
			r.listener = Listener{Protocol: int64(s.socket - s.softirq), User: int64(s.user - s.socket)}
			v.Listener = &r.listener
			if s.woken != 0 {
				v.Listener.Wakeup, v.Listener.User = int64(s.woken-s.socket), int64(s.user-s.woken)
			}
		}
	}
	v.Places = p.places(userID, there)
	before := 0
	for i := 1; i < pointCount; i++ {
		if points[i] == 0 {
			continue
		}
		v.Stages = append(v.Stages, Stage{stagesBetween[before][i], points[i] - points[before]})
		v.AddsUp = v.AddsUp && points[i] >= points[before]
		before = i
	}
	return v
}

// stagesBetween are the names of what is between two points: of all stages there.
var stagesBetween = func() (names [pointCount][pointCount]string) {
	for from := range pointCount {
		for to := from + 1; to < pointCount; to++ {
			names[from][to] = strings.Join(stageNames[from:to], "+")
		}
	}
	return names
}()

// lose finds where a probe was seen last.
func (p *pending) lose(v *Probe, points []int64, reason func(uint32) string, r *room) {
	v.Lost = true
	last := 0
	for i, at := range points {
		if at != 0 {
			last = i
		}
	}
	v.Last = pointNames[last]
	switch {
	case p.server != nil && p.server.dropped != 0 && last <= serverLast:
		r.drop = Drop{serverHost, p.server.reason}
		v.Drop = &r.drop
	case p.here.DroppedNs != 0:
		r.drop = Drop{clientHost, reason(p.here.DropReason)}
		v.Drop = &r.drop
	}
}
