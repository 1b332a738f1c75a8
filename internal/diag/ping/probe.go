package ping

import (
	"slices"
	"time"
)

// Stage is the time between two points that a probe passed. If points between them are not known, the name joins the names
// of all stages between them by "+".
type Stage struct {
	Name string `json:"stage"`
	Ns   int64  `json:"ns"`
}

// Clock is the distance by which another host's clock is ahead of the client's, and the largest error of that.
type Clock struct {
	OffsetNs int64 `json:"offset_ns"`
	ErrorNs  int64 `json:"error_ns"`
}

// Listener has the times that the server's process needed to get a probe of ICMP. They are not part of the round trip, because the
// kernel answers.
type Listener struct {
	Protocol int64 `json:"protocol_ns"` // from the softirq to the socket
	Wakeup   int64 `json:"wakeup_ns"`   // from the socket to the run queue; 0: the process was awake
	User     int64 `json:"user_ns"`     // to the process
}

// Drop is the place where a probe or its answer was dropped.
type Drop struct {
	Host    string `json:"host"`
	Verdict string `json:"verdict,omitempty"` // of a balancer's program: drop, or answer: it answered instead of the server
	Reason  string `json:"reason"`            // enum skb_drop_reason of that host's kernel, or of a balancer's program: docs/reference/reasons.md
}

// Balancer has the verdict of a balancer's program on a probe, and on its answer if a program there saw the answer.
type Balancer struct {
	Hook    string  `json:"hook"`             // where the program is: xdp or tc
	Verdict string  `json:"verdict"`          // pass, drop, answer, send_back or send_on
	Reason  string  `json:"reason,omitempty"` // docs/reference/reasons.md
	Answer  *Answer `json:"answer,omitempty"`
	Clock   *Clock  `json:"clock,omitempty"` // not known for a lost probe
	// Others is the number of stamps of other programs that have no place in the stages.
	Others uint32 `json:"other_stamps,omitempty"`
}

// Answer is the same for a probe's answer.
type Answer struct {
	Hook    string `json:"hook"`
	Verdict string `json:"verdict"`
	Reason  string `json:"reason,omitempty"`
}

// Probe is the outcome of a probe.
type Probe struct {
	Sequence  uint64    `json:"sequence"`
	Time      time.Time `json:"time"`                    // when it was sent
	RoundTrip int64     `json:"round_trip_ns,omitempty"` // from the process to the process
	Stages    []Stage   `json:"stages"`                  // none if it is lost
	// AddsUp: the stages follow each other, so that their sum is the round trip and none is negative.
	AddsUp   bool      `json:"adds_up"`
	Reported bool      `json:"reported"` // by the server; otherwise the server's stages are part of the wire's
	Clock    *Clock    `json:"clock,omitempty"`
	Listener *Listener `json:"listener,omitempty"`
	Balancer *Balancer `json:"balancer,omitempty"` // if a balancer on the path stamps probes, and its stamps came
	Lost     bool      `json:"lost"`
	Last     string    `json:"last,omitempty"`     // of a lost probe: the last point where it was seen
	Drop     *Drop     `json:"drop,omitempty"`     // of a lost probe, if the kernel dropped it at a sensor
	NotSent  string    `json:"not_sent,omitempty"` // error with which the kernel refused it
	// Unasked: the client did not wait for the server's report.
	Unasked bool    `json:"report_not_awaited,omitempty"`
	Places  []Place `json:"places,omitempty"` // in all network namespaces, if they were asked for
	// Forgotten: newer probes took its place in the memory of this host before the answer came.
	Forgotten bool `json:"forgotten,omitempty"`

	sentNs int64 // on the client's clock, for tests
}

// state is the progress of a pending probe. The sender opens free ones, and the receiver does the rest.
type state byte

const (
	isFree  state = iota
	isOpen        // under way
	isReady       // over, and not reported yet
)

// room is memory for the account of a probe, so that it need not be allocated for each.
type room struct {
	points   [pointCount]int64
	stages   [pointCount - 1]Stage
	clock    Clock
	via      Balancer
	viaBack  Answer
	viaClock Clock
	listener Listener
	drop     Drop
}

// clone returns a copy that outlives the next settle in the same room.
func (p Probe) clone() Probe {
	p.Stages = slices.Clone(p.Stages)
	p.Clock, p.Listener, p.Drop = copied(p.Clock), copied(p.Listener), copied(p.Drop)
	if p.Balancer = copied(p.Balancer); p.Balancer != nil {
		p.Balancer.Answer, p.Balancer.Clock = copied(p.Balancer.Answer), copied(p.Balancer.Clock)
	}
	return p
}

func copied[T any](v *T) *T {
	if v == nil {
		return nil
	}
	one := *v
	return &one
}

// pending is a probe that is under way.
type pending struct {
	sequence    uint64
	time        time.Time
	sent, user  uint64 // ns of the client's clock; user 0: not answered yet
	woken       uint64
	here        row
	known       bool  // here has the probe's row
	server      *seen // the report, once it has come
	report      seen
	isUDP       bool
	stamps      [2]stamp // of a balancer: of the probe, and of its answer
	teller      *teller  // of these stamps; nil: there are none
	unshown     uint32   // stamps of other programs, which have no place
	sendFailure string
	state       state
	ourTrail    []place
	theirTrail  []place // of the server, on its own clock
	theirID     uint16  // its --userid
}

// points fills in the points in order, in ns: those of each host on its own clock, 0 if not known.
func (p *pending) points(points *[pointCount]int64) {
	var s seen
	if p.server != nil {
		s = *p.server
	}
	if !p.isUDP { // of ICMP: the server's process only listens
		s.socket, s.woken, s.user = 0, 0, 0
	}
	at := p.here.AtNs
	for i, ns := range [pointCount]uint64{p.sent, at[pingPingPointPING_POINT_QUEUE], at[pingPingPointPING_POINT_DRIVER], p.stamps[0].begin, p.stamps[0].end,
		s.receive, s.softirq, s.socket, s.woken, s.user, s.queue, s.driver, p.stamps[1].begin, p.stamps[1].end,
		at[pingPingPointPING_POINT_RECEIVE], at[pingPingPointPING_POINT_SOFTIRQ], at[pingPingPointPING_POINT_SOCKET], p.woken, p.user} {
		points[i] = int64(ns)
	}
}

// stampCount returns the number of a balancer's stamps that have come.
func (p *pending) stampCount() (n int) {
	for _, s := range p.stamps {
		n += int(number(s.begin != 0))
	}
	return n
}

// via returns how a balancer treated the probe.
func (p *pending) via() via {
	switch {
	case p.stamps[0].verdict == verdictAnswer:
		return viaAnswered
	case p.stamps[0].begin != 0 && p.stamps[1].begin != 0:
		return viaBoth
	case p.stamps[0].begin != 0:
		return viaOut
	}
	return viaNone
}

// first returns the first known point from one to another; 0: none.
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

// settle makes the account of a probe in the room, valid until the next one is made there. The clock is the server's. The names of
// reasons and the user's id are this host's.
func (p *pending) settle(c *clock, userID uint16, reason func(uint32) string, r *room) Probe {
	v := Probe{Sequence: p.sequence, Time: p.time, Stages: r.stages[:0], Reported: p.server != nil, NotSent: p.sendFailure, Forgotten: !p.known, sentNs: int64(p.sent)}
	p.points(&r.points)
	points := r.points[:]
	if p.stamps[0].begin != 0 {
		r.via = Balancer{Hook: p.stamps[0].hook.String(), Verdict: p.stamps[0].verdict, Reason: p.stamps[0].reason, Others: p.unshown}
		v.Balancer = &r.via
		if p.stamps[1].begin != 0 {
			r.viaBack = Answer{p.stamps[1].hook.String(), p.stamps[1].verdict, p.stamps[1].reason}
			v.Balancer.Answer = &r.viaBack
		}
	}
	if p.user == 0 {
		p.lose(&v, points, reason, r)
		v.Places = p.places(userID, c.here())
		return v
	}
	v.RoundTrip = int64(p.user - p.sent)
	v.AddsUp = true
	// The first known stamp of this host after the server, and the last known one before it.
	out, back := first(points, clientDriver, clientSent), first(points, clientReceive, clientUser)
	receive, answer := first(points, serverReceive, serverDriver), first(points, serverDriver, serverReceive)
	there := c.here()
	if p.server != nil && receive != 0 {
		offset, err, ok := c.add(out, receive, answer, back)
		v.AddsUp = ok
		r.clock = Clock{offset, err}
		v.Clock = &r.clock
		// A balancer has the probe for a while between the hosts: that time lies between the server's points.
		notBefore, notAfter := out+p.stamps[0].took(), back-p.stamps[1].took()
		here := bridge(between(offset, receive, answer, notBefore, notAfter), notBefore, receive, answer, notAfter)
		there = here
		for i := serverReceive; i <= serverDriver; i++ {
			if points[i] != 0 {
				points[i] = here(points[i])
			}
		}
		if s := p.server; !p.isUDP && s.socket != 0 && s.user != 0 && s.softirq != 0 {
			r.listener = Listener{Protocol: int64(s.socket - s.softirq), User: int64(s.user - s.socket)}
			v.Listener = &r.listener
			if s.woken != 0 {
				v.Listener.Wakeup, v.Listener.User = int64(s.woken-s.socket), int64(s.user-s.woken)
			}
		}
	}
	v.Places = p.places(userID, there)
	if v.Balancer != nil {
		v.AddsUp = v.AddsUp && placeBalancer(&p.teller.clock, points, &r.viaClock)
		v.Balancer.Clock = &r.viaClock
	}
	way := &paths[number(p.isUDP)][p.via()]
	before := 0
	for i := 1; i < pointCount; i++ {
		if points[i] == 0 || way.between[before][i] == "" {
			continue
		}
		v.Stages = append(v.Stages, Stage{way.between[before][i], points[i] - points[before]})
		v.AddsUp = v.AddsUp && points[i] >= points[before]
		before = i
	}
	return v
}

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
	case p.stamps[1].ends() && last == balancerDoneAnswer:
		r.drop = Drop{balancerHost, p.stamps[1].verdict, p.stamps[1].reason}
		v.Drop = &r.drop
	case p.server != nil && p.server.dropped != 0 && last <= serverDriver:
		r.drop = Drop{Host: serverHost, Reason: p.server.reason}
		v.Drop = &r.drop
	case p.stamps[0].ends() && last == balancerDone:
		r.drop = Drop{balancerHost, p.stamps[0].verdict, p.stamps[0].reason}
		v.Drop = &r.drop
	case p.here.DroppedNs != 0:
		r.drop = Drop{Host: clientHost, Reason: reason(p.here.DropReason)}
		v.Drop = &r.drop
	}
}
