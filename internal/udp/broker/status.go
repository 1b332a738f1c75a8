package broker

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Status is the state of a broker.
type Status struct {
	Offers      []OfferStatus     `json:"offers"` // by name
	Connections int               `json:"connections"`
	Refused     map[string]uint64 `json:"refused,omitempty"` // connections that got no lease, by reason
}

// OfferStatus is an offer, and its leases so far.
type OfferStatus struct {
	Name      string            `json:"name"`
	Interface string            `json:"interface"`
	Program   kernel.Mode       `json:"program"`          // native or generic: how the program is attached; "": it is not attached
	Reason    string            `json:"reason,omitempty"` // reason for generic, if native was tried
	Failed    string            `json:"failed,omitempty"` // error of attaching the program
	Addresses []netip.AddrPort  `json:"addresses"`
	Given     uint64            `json:"given"`             // leases that have begun
	Resumed   uint64            `json:"resumed"`           // of them, leases of the previous broker that went on
	Awaited   *Identity         `json:"awaited,omitempty"` // holder of a lease of the previous broker that has not come back yet
	Ended     map[string]uint64 `json:"ended,omitempty"`   // leases that are over, by reason: closed, died, expired …
	LastEnd   string            `json:"last_end,omitempty"`
	// Past counts for leases that are over, and with Drop also for the time when the offer had no holder: then all datagrams were dropped.
	Past Totals `json:"past"`
	// PastQueues is the part of Past that came on queues of a lease.
	PastQueues map[int]Totals `json:"past_queues,omitempty"`
	// Claimed is the sum of the programs' claims, including the present holder's; nil: no program has claimed anything.
	Claimed  *proto.Claim  `json:"claimed,omitempty"`
	Lease    *LeaseStatus  `json:"lease,omitempty"` // the present lease; nil: none
	BusyPoll time.Duration `json:"busy_poll"`       // as the offer has it; 0: interrupts, as usual
	Drop     bool          `json:"drop"`            // as the offer has it
	Dropping bool          `json:"dropping"`        // whether it is in force
	Wait     proto.Wait    `json:"wait"`            // as the offer has it
}

// LeaseStatus is a lease that a process holds.
type LeaseStatus struct {
	Number uint64         `json:"number"`
	Holder Identity       `json:"holder"`
	Since  time.Time      `json:"since"`
	Mode   xsk.Mode       `json:"mode"`
	Reason string         `json:"reason,omitempty"` // reason for a mode other than zero-copy
	Queues []lease.Status `json:"queues"`
	// Elsewhere counts the offer's datagrams on queues that the lease does not have.
	Elsewhere hook.Count `json:"elsewhere"`
	RingSize  uint32     `json:"ring_size"`      // of each queue
	CPUs      []int      `json:"cpus,omitempty"` // as the offer has them; proto.CPUOf gives the CPU of a queue
	// Claims are the holder's claims for each queue, in the order of Queues, as of the last renewal; nil: none.
	// They are no part of any sum.
	Claims []proto.Claim `json:"claims,omitempty"`
	// Pinned is the number of the holder's threads that run only on a CPU, by CPU; nil: it could not be read, or CPUs has none.
	Pinned map[int]int `json:"pinned,omitempty"`
}

// Totals are sums over queues and leases: matched = passed_no_socket + dropped_no_socket +
// taken + waiting + dropped + ring_full, except for leases that are counted in unknown.
type Totals struct {
	hook.Count        // queues without a socket have only this
	Taken      uint64 `json:"taken"`
	Waiting    uint64 `json:"waiting"` // unread in rings when the lease was over
	Dropped    uint64 `json:"dropped"`
	RingFull   uint64 `json:"ring_full"`
	Invalid    uint64 `json:"invalid"`    // addresses in the fill ring that belong to no frame
	TxInvalid  uint64 `json:"tx_invalid"` // descriptors in the transmit ring that belong to no frame
	Unknown    uint64 `json:"unknown"`    // leases whose counters could not be read: their rings were tampered with
	Failed     uint64 `json:"failed"`     // leases that could not be taken back in order
}

// Add adds the sums of other leases.
func (t *Totals) Add(o Totals) {
	t.Count.Add(o.Count)
	t.Taken += o.Taken
	t.Waiting += o.Waiting
	t.Dropped += o.Dropped
	t.RingFull += o.RingFull
	t.Invalid += o.Invalid
	t.TxInvalid += o.TxInvalid
	t.Unknown += o.Unknown
	t.Failed += o.Failed
}

// sums are the counters of leases that are over: of all queues, and of each queue that a lease had.
type sums struct {
	all    Totals
	queues map[int]Totals
}

func (s *sums) add(o sums) {
	s.all.Add(o.all)
	for queue, t := range o.queues {
		s.addTo(queue, t)
	}
}

// of adds queues of a lease.
func (s *sums) of(queues []lease.Status) {
	s.all.Add(TotalsOf(queues...))
	for _, q := range queues {
		s.addTo(q.Queue, TotalsOf(q))
	}
}

func (s *sums) addTo(queue int, t Totals) {
	if s.queues == nil {
		s.queues = map[int]Totals{}
	}
	before := s.queues[queue]
	before.Add(t)
	s.queues[queue] = before
}

// TotalsOf adds up the queues of a lease.
func TotalsOf(queues ...lease.Status) (t Totals) {
	for _, q := range queues {
		t.Count.Add(q.Count)
		t.Taken += q.Taken
		t.Waiting += uint64(q.Waiting)
		t.Dropped += q.Dropped
		t.RingFull += q.RingFull
		t.Invalid += q.Invalid
		t.TxInvalid += q.TxInvalid
	}
	return t
}

// Totals returns the lease's sums so far.
func (l *LeaseStatus) Totals() (t Totals) {
	t = TotalsOf(l.Queues...)
	t.Count.Add(l.Elsewhere)
	return t
}

// Lost returns the number of datagrams that are in none of the counters.
func (t Totals) Lost() int64 {
	return int64(t.Matched) - int64(t.NoSocket()+t.Taken+t.Waiting+t.Dropped+t.RingFull)
}

// Status returns the broker's state at this moment.
func (b *Broker) Status() Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	st := Status{Connections: len(b.sessions), Refused: map[string]uint64{}}
	for code, n := range b.refused {
		st.Refused[code.String()] = n
	}
	awaits := map[string]*Identity{}
	for _, a := range b.awaited {
		awaits[a.Offer.Name] = &a.Holder
	}
	for _, o := range b.offers {
		past := sums{}
		past.add(o.past) // a copy, so that the next lease does not change it
		os := OfferStatus{Name: o.Name, Interface: o.Interface, Addresses: o.Addresses, Given: o.given, Resumed: o.resumed, Ended: maps.Clone(o.ended), LastEnd: o.lastEnd, BusyPoll: o.BusyPoll, Drop: o.Drop, Dropping: o.guard != nil, Wait: o.Wait}
		os.Awaited = awaits[o.Name]
		if o.guard != nil {
			past.all.Add(o.guard.totals())
		}
		if h := b.hooks[o.Interface]; h != nil {
			at := h.Attachment()
			os.Program, os.Reason = at.Mode, at.Reason
		}
		if o.failed != nil {
			os.Failed = o.failed.Error()
		}
		if os.Claimed = o.claimed; o.holder != nil {
			var final sums
			os.Lease, final = o.holder.status()
			past.add(final)
			os.Claimed = o.holder.claimed(o.claimed) // after the lease's status: if that says that the lease is over, the claims are final
		}
		os.Past, os.PastQueues = past.all, past.queues
		st.Offers = append(st.Offers, os)
	}
	slices.SortFunc(st.Offers, func(a, b OfferStatus) int { return strings.Compare(a.Name, b.Name) })
	return st
}

// status returns the state of a lease that serves. It returns nil before the lease serves, and when it is over; then final has its
// last counters, so that no sum ever shrinks.
func (s *session) status() (st *LeaseStatus, final sums) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.serving {
		return nil, s.final
	}
	st = &LeaseStatus{Number: s.number, Holder: s.peer.Identity, Since: s.since, Mode: s.lease.Grant.Mode, Reason: s.lease.Grant.Reason}
	st.RingSize, st.Claims = s.lease.Grant.Layouts[0].ReceiveRing, s.claims
	st.Queues, _ = s.lease.Status() // rings that were tampered with have none; the audit ends their leases
	st.Elsewhere, _ = s.lease.Elsewhere()
	if st.CPUs = s.offered.CPUs; len(st.CPUs) > 0 {
		st.Pinned, _ = process.Pinned(s.peer.PID) // a process that ends meanwhile has none; its session ends too
	}
	return st, final
}
