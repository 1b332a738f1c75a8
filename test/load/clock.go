package load

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	// clockEvery is the interval of the clock's questions.
	clockEvery = 20 * time.Millisecond
	// clockLate is the delay from which an answer counts as late: two busy CPUs delay an
	// answer this long that otherwise takes well below a millisecond.
	clockLate = 60 * time.Millisecond
)

// clock tells when the machine, and not shunt, was late: it asks a backend's server from the
// process that makes the load, through the same kernel, on a way without shunt.
type clock struct {
	session *lab.Session

	mu   sync.Mutex
	due  time.Time // of the question without an answer yet
	late []span
	err  error // the error that ended it
}

// span is a time when the clock was late.
type span struct{ from, to time.Time }

func startClock(ctx context.Context, client *lab.Host, address netip.AddrPort) (*clock, error) {
	session, err := client.OpenSession(ctx, "tcp", netip.AddrPort{}, address.String())
	if err != nil {
		return nil, fmt.Errorf("start the clock: %w", err)
	}
	c := &clock{session: session, due: time.Now()}
	if _, err := session.Ask(ctx, "/clock"); err != nil {
		_ = session.Close()
		return nil, fmt.Errorf("start the clock: %w", err)
	}
	go c.run(ctx)
	return c, nil
}

func (c *clock) run(ctx context.Context) {
	defer c.session.Close()
	for due := time.Now(); pause(ctx, due); {
		if _, err := c.session.Ask(ctx, "/clock"); err != nil {
			if ctx.Err() == nil { // from here on it is always late, and no stall is judged
				c.mu.Lock()
				c.err = err
				c.mu.Unlock()
			}
			return
		}
		now := time.Now()
		c.mu.Lock()
		if now.Sub(due) > clockLate {
			c.late = append(c.late, span{due, now})
		}
		if due = due.Add(clockEvery); due.Before(now) {
			due = now
		}
		c.due = due
		c.mu.Unlock()
	}
}

// broken returns the error that ended the clock before the load.
func (c *clock) broken() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// lateness is the time for which the clock was late between two moments.
func (c *clock) lateness(from, to time.Time) (sum time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	spans := c.late
	if time.Since(c.due) > clockLate {
		spans = append(spans[:len(spans):len(spans)], span{c.due, time.Now()})
	}
	for _, s := range spans {
		if begin, end := latest(s.from, from), earliest(s.to, to); end.After(begin) {
			sum += end.Sub(begin)
		}
	}
	return sum
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
