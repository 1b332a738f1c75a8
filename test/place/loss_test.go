package place_test

import (
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// cause is the reason why a flow may be lost: the document's list, in its order, with its
// second and fifth points in halves.
type cause string

const (
	removed       cause = "1: its backend was removed"
	idledThrough  cause = "2a: idle through the settle time"
	idledOver     cause = "2b: idle for longer than its timeout"
	notRemembered cause = "3: could not be remembered"
	twoSYNs       cause = "4: SYN before and after the change"
	untracked     cause = "5a: tracking none"
	drainedUDP    cause = "5b: UDP, and its backend drains"
	otherHash     cause = "6: affinity was switched on or off"
	halfRemoved   cause = "7: the removal of a backend failed half-way"
	never         cause = ""
)

// flow is a client's connection, or its UDP packets with one tuple, as client and backends see
// them: no field is from the tables.
type flow struct {
	packet            // addresses; kind and payload are of the last packet
	service    string // of the configuration
	chattiness float64
	synsTo     []model.BackendAddress // that have the connection half open
	holder     model.BackendAddress   // the one that has the connection; the zero value: none yet
	answered   bool                   // the client has a SYN-ACK or, with UDP, has sent
	unheard    bool                   // the answer to its first SYN is lost
	state      kind
	finished   int // packets to go after a FIN
	reused     bool
	dead       bool

	sent    time.Duration // time of the last packet
	sentSeq int           // the same, counted in events
	// unremembered: the last packet should have been remembered, and was not.
	unremembered bool
	// lapsed: it was idle for longer than its timeout, and has not been remembered since. Its
	// next packet may still have come to the right backend by chance.
	lapsed bool
	always bool // the last packet was under tracking always
	noted  bool // the last packet was sent while flows are remembered

	current model.BackendAddress // the backend that its slot named last
	periods []period

	holderGone bool // the holder was removed since
	halfLeft   bool // a removal of the holder, or of a backend its SYN went to, had failed half-way
	rehashed   bool // affinity was switched on or off
	strayed    bool // without tracking, its slot named another backend
	mayStray   bool // a change that would have ended tracking failed half-way
	draining   bool // the holder has had weight 0 since the last packet
	byClient   bool // its slot is its client's
	log        []string
}

// period is a time for which the slot of a flow has been in transition, computed from changes
// of its current backend: from the first, until nothing has changed for the settle time.
type period struct {
	beginSeq int
	last     time.Duration // the last change
	over     bool          // seen to be
}

// changed notes that the flow's slot names another backend now.
func (f *flow) changed(now time.Duration, seq int, settle time.Duration) {
	if n := len(f.periods); n > 0 && !f.periods[n-1].over && now < f.periods[n-1].last+settle {
		f.periods[n-1].last = now
		return
	}
	f.periods = append(f.periods, period{beginSeq: seq, last: now})
}

// prolonged notes that the settle time begins anew, if it has not ended.
func (f *flow) prolonged(now time.Duration, settle time.Duration) {
	if n := len(f.periods); n > 0 && !f.periods[n-1].over && now < f.periods[n-1].last+settle {
		f.periods[n-1].last = now
	}
}

// isOver reports whether the flow was remembered, and has been idle for longer than its entry
// lives.
func (f *flow) isOver(now, affinity time.Duration) bool {
	timeout := f.state.timeout()
	if affinity > 0 {
		timeout = min(timeout, affinity)
	}
	return f.noted && now-f.sent > timeout
}

// lossCause returns the reason why a packet that is sent now may reach a backend that is not
// the holder, or never. f does not have the packet's own changes yet.
func (f *flow) lossCause(to model.BackendAddress, now, settle, affinity time.Duration) cause {
	switch {
	case f.holderGone:
		return removed
	case slices.Contains(f.synsTo, to):
		return twoSYNs
	case f.strayed:
		return untracked
	case f.rehashed:
		return otherHash
	case f.unremembered:
		return notRemembered
	}
	if f.state == udp && f.draining && affinity > 0 {
		return drainedUDP // its client is remembered, but not the flow
	}
	for _, p := range f.periods {
		if p.beginSeq < f.sentSeq {
			continue
		}
		if f.state == udp && f.draining && !f.always {
			return drainedUDP
		}
		if now >= p.last+settle {
			return idledThrough
		}
	}
	if f.lapsed || f.isOver(now, affinity) {
		return idledOver
	}
	return never
}
