package broker

import (
	"math"

	"github.com/shunt-lb/shunt/internal/udp/proto"
)

// Only a program knows the numbers that it claims. They decide nothing and enter no sum of datagrams. They are kept so
// that none of them ever shrinks, even if a program claims less.

// each combines two claims number by number.
func each(a, b proto.Claim, f func(a, b uint64) uint64) proto.Claim {
	return proto.Claim{Stale: f(a.Stale, b.Stale), TxShort: f(a.TxShort, b.TxShort), Kicks: f(a.Kicks, b.Kicks), Wakeups: f(a.Wakeups, b.Wakeups)}
}

// larger keeps a number that a program tries to lower.
func larger(a, b uint64) uint64 { return max(a, b) }

// sum stops at the largest number instead of wrapping to 0.
func sum(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}

// claim notes the holder's claims for each queue. Results that Status has returned do not change.
func (s *session) claim(claims []proto.Claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := make([]proto.Claim, len(claims))
	for i, c := range claims {
		if now[i] = c; s.claims != nil {
			now[i] = each(s.claims[i], c, larger)
		}
	}
	s.claims = now
}

// claimed returns before plus the claims of the session's holder, over all queues; nil if there are neither.
func (s *session) claimed(before *proto.Claim) *proto.Claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claims == nil {
		return before
	}
	var all proto.Claim
	if before != nil {
		all = *before
	}
	for _, c := range s.claims {
		all = each(all, c, sum)
	}
	return &all
}
