package hook

import (
	"fmt"
	"slices"
)

// Count counts a lease's datagrams on one queue: Matched is the sum of PassedNoSocket, DroppedNoSocket and
// the datagrams that the queue's socket was given.
type Count struct {
	Matched         uint64 `json:"matched"`
	PassedNoSocket  uint64 `json:"passed_no_socket"`
	DroppedNoSocket uint64 `json:"dropped_no_socket"`
}

// Add adds another count.
func (c *Count) Add(o Count) {
	c.Matched += o.Matched
	c.PassedNoSocket += o.PassedNoSocket
	c.DroppedNoSocket += o.DroppedNoSocket
}

// NoSocket returns the number of datagrams that no socket took: they passed, or were dropped.
func (c Count) NoSocket() uint64 { return c.PassedNoSocket + c.DroppedNoSocket }

// Counts returns the count of a lease on a queue, since Begin.
func (h *Hook) Counts(lease, queue int) (sum Count, err error) {
	if err := check(lease, queue); err != nil {
		return sum, fmt.Errorf("read counters: %w", err)
	}
	var each []udpLeaseCount
	if err := h.objects.Maps[udpMapShUdCounts].Lookup(slot(lease, queue), &each); err != nil {
		return sum, fmt.Errorf("read the counters of lease %d, queue %d: %w", lease, queue, err)
	}
	for _, one := range each {
		sum.Add(Count{one.Matched, one.PassedNoSocket, one.DroppedNoSocket})
	}
	return sum, nil
}

// Sum returns the sum of Counts over all queues of the interface except some.
func (h *Hook) Sum(lease int, but ...int) (sum Count, err error) {
	for queue := range min(h.Queues, MaxQueues) {
		if slices.Contains(but, queue) {
			continue
		}
		c, err := h.Counts(lease, queue)
		if err != nil {
			return sum, err
		}
		sum.Add(c)
	}
	return sum, nil
}

// passedNames names the values of enum lease_pass.
var passedNames = map[udpLeasePass]string{
	udpLeasePassPASSED_FRAGMENT:  "fragment",
	udpLeasePassPASSED_OPTIONS:   "options",
	udpLeasePassPASSED_MALFORMED: "malformed",
	udpLeasePassPASSED_LARGE:     "large",
	udpLeasePassPASSED_QUEUE:     "queue",
	udpLeasePassPASSED_UNSTAMPED: "unstamped",
}

// Passed counts packets that the program left to the stack, by reason: fragments of any protocol, UDP behind
// options, malformed packets, and datagrams to a lease that are too large, come on a queue beyond MaxQueues, or cannot carry
// the time that the lease wants.
func (h *Hook) Passed() (map[string]uint64, error) {
	sums := map[string]uint64{}
	for why, name := range passedNames {
		var each []uint64
		if err := h.objects.Maps[udpMapShUdPassed].Lookup(uint32(why), &each); err != nil {
			return nil, fmt.Errorf("read the counter of passed packets (%s): %w", name, err)
		}
		for _, one := range each {
			sums[name] += one
		}
	}
	return sums, nil
}
