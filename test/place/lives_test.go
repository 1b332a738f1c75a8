package place_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// hall is shared by the senders and the test that changes the tables under them.
type hall struct {
	// Senders hold it for reading during a round, so that time stands still for them.
	sync.RWMutex
	now time.Duration
	// Changes of the configuration that have begun, and that have ended.
	begun, ended atomic.Int64
	gone         [256]atomic.Bool // backends that were ever removed
}

// pass lets time pass, for the flows and for their entries.
func (h *hall) pass(w *world, by time.Duration) {
	h.Lock()
	defer h.Unlock()
	h.now += by
	w.age(by)
}

// life is a client's connection from its first SYN to its last packet, or its UDP packets, with
// pauses: a flow that may be lost, but only because of an action of its client or the configuration.
type life struct {
	packet
	synsTo   []byte // backends that have it half open
	holder   byte   // the backend that has the connection; 0: none yet
	state    kind
	finished int           // packets to go after its FIN
	wakes    time.Duration // it is silent until then
	sent     time.Duration
	changes  int64 // that had ended at its last packet
}

// livesTally counts the events in the lives of one sender.
type livesTally struct {
	begun, retransmitted, halfClosed, paused, again int
	losses                                          map[cause]int
}

func (t *livesTally) String() string {
	return fmt.Sprintf("%d flows begun (%d on tuples of closed ones), %d SYNs sent again, %d half-closed, %d pauses, lost: %v",
		t.begun, t.again, t.retransmitted, t.halfClosed, t.paused, sorted(t.losses))
}

// begin is a new life with this tuple.
func (s *sender) begin(p packet) *life {
	s.tally.begun++
	l := &life{packet: p, state: syn, sent: s.hall.now}
	if p.frontend.Protocol == model.UDP {
		l.state = udp
	}
	return l
}

// turn is a life's turn in a round. It returns the life that goes on: another one if this one has
// ended and its client uses the port again, nil if none does.
func (s *sender) turn(l *life) (*life, error) {
	if l.wakes > s.hall.now {
		return l, nil
	}
	l.kind, l.payload = data, s.rng.IntN(2) == 0
	switch {
	case l.state == udp:
		l.kind, l.payload = udp, true
	case l.holder == 0:
		l.kind, l.payload = syn, false
		if len(l.synsTo) > 0 {
			s.tally.retransmitted++
		}
	case l.finished > 0:
		l.payload = false // it acknowledges data of the other half
		if l.finished--; l.finished == 0 {
			if s.rng.IntN(2) > 0 {
				return nil, nil
			}
			s.tally.again++
			return s.begin(l.packet), nil
		}
	case s.rng.IntN(60) == 0:
		l.kind, l.payload, l.finished = fin, false, 2+s.rng.IntN(30)
		s.tally.halfClosed++
	}
	alive, err := s.speak(l)
	if err != nil || !alive {
		return nil, err
	}
	if l.kind == syn && s.rng.IntN(3) > 0 { // one of the answers arrives
		l.holder = l.synsTo[s.rng.IntN(len(l.synsTo))]
	}
	if s.rng.IntN(40) == 0 {
		s.tally.paused++
		l.wakes = s.hall.now + time.Duration(s.rng.Int64N(int64(quanta(24))))
	}
	return l, nil
}

// speak sends the life's packet and judges its destination. A life that is lost, or may be lost from
// now on because it was silent for too long, is not alive.
func (s *sender) speak(l *life) (alive bool, err error) {
	idle := s.hall.now - l.sent
	over := idle > l.state.timeout()
	ended := s.hall.ended.Load()
	to, err := s.number(l.frame())
	if err != nil {
		return false, err
	}
	s.sent++
	switch {
	case l.kind == syn:
		if !slices.Contains(l.synsTo, to) {
			l.synsTo = append(l.synsTo, to)
		}
	case l.holder == 0:
		l.holder = to // of UDP
	case to != l.holder:
		why := never
		switch {
		case s.hall.gone[l.holder].Load():
			why = removed
		case slices.Contains(l.synsTo, to):
			why = twoSYNs
		case idle >= settle && s.hall.begun.Load() > l.changes:
			why = idledThrough
		case over:
			why = idledOver
		default:
			s.lost = append(s.lost, fmt.Sprintf("round %d, CPU %d: %s is on %d, its packet went to %d after %.1f quanta",
				s.rounds.Load(), s.cpu, l.packet, l.holder, to, float64(idle)/float64(quantum)))
		}
		s.tally.losses[why]++
		return false, nil
	}
	if l.state != udp {
		l.state = l.state.then(l.packet)
	}
	l.sent, l.changes = s.hall.now, ended
	return !over, nil
}
