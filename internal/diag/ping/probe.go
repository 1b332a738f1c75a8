package ping

import "time"

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

// pending is a probe on its way.
type pending struct {
	sequence    uint64
	time        time.Time
	sent, user  uint64 // ns of the client's clock; user 0: not answered yet
	woken       uint64
	here        row
	known       bool // here is the probe's
	server      *seen
	sendFailure string
	ourTrail    []place
	theirTrail  []place // of the server, on its own clock
	theirID     uint16  // its --userid
}

// points are on the path in order, in ns: those of each host on its own clock, 0 where it is not known.
func (p *pending) points() []int64 {
	var s seen
	if p.server != nil {
		s = *p.server
	}
	at := p.here.AtNs
	points := []int64{}
	for _, ns := range []uint64{p.sent, at[pingPingPointPING_POINT_QUEUE], at[pingPingPointPING_POINT_DRIVER], s.receive, s.softirq, s.queue, s.driver,
		at[pingPingPointPING_POINT_RECEIVE], at[pingPingPointPING_POINT_SOFTIRQ], at[pingPingPointPING_POINT_SOCKET], p.woken, p.user} {
		points = append(points, int64(ns))
	}
	return points
}

// The server's points, and those beside them.
const (
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

// settle makes the account of a probe; names of reasons are of this host, as the user's id is.
func (p *pending) settle(c *clock, userID uint16, reason func(uint32) string) Probe {
	v := Probe{Sequence: p.sequence, Time: p.time, Stages: []Stage{}, Reported: p.server != nil, NotSent: p.sendFailure, Forgotten: !p.known, sentNs: int64(p.sent)}
	points := p.points()
	if p.user == 0 {
		p.lose(&v, points, reason)
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
		v.Clock = &Clock{offset, err}
		here := bridge(offset, out, receive, answer, back)
		there = here
		for i := serverFirst; i <= serverLast; i++ {
			if points[i] != 0 {
				points[i] = here(points[i])
			}
		}
		if s := p.server; s.socket != 0 && s.user != 0 && s.softirq != 0 {
			v.Listener = &Listener{Protocol: int64(s.socket - s.softirq), User: int64(s.user - s.socket)}
			if s.woken != 0 {
				v.Listener.Wakeup, v.Listener.User = int64(s.woken-s.socket), int64(s.user-s.woken)
			}
		}
	}
	v.Places = p.places(userID, there)
	name, before := "", points[0]
	for i, at := range points[1:] {
		if name += stageNames[i]; at == 0 {
			name += "+"
			continue
		}
		v.Stages = append(v.Stages, Stage{name, at - before})
		v.AddsUp = v.AddsUp && at >= before
		name, before = "", at
	}
	return v
}

// lose finds where a probe was seen last.
func (p *pending) lose(v *Probe, points []int64, reason func(uint32) string) {
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
		v.Drop = &Drop{serverHost, p.server.reason}
	case p.here.DroppedNs != 0:
		v.Drop = &Drop{clientHost, reason(p.here.DropReason)}
	}
}
