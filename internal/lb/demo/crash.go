package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/story"
)

// The checks of the demo's services.
const (
	checkInterval = 200 * time.Millisecond
	checkTimeout  = 200 * time.Millisecond
	checkFall     = 2
	checkRise     = 2
	// checkSlack is for a busy machine.
	checkSlack = 4 * time.Second
)

// checkBound is the longest time that a backend may be dead before its checks have found out: it may have died
// just after a check that passed. Intervals vary by 5 %.
func checkBound() time.Duration {
	return checkFall*(checkInterval+checkInterval/20) + checkTimeout
}

// crash kills the servers of a backend, lets its checks find out, and starts them again.
func (d *demo) crash(ctx context.Context) error {
	c := &d.facts.Crash
	const dead = 1
	host := d.top.Backends[dead]
	c.Backend = host.Name()
	if err := d.startFlows(ctx); err != nil {
		return err
	}
	if err := d.allAnswered(ctx, d.flows.look()); err != nil {
		return err
	}
	stop, ended := make(chan struct{}), make(chan *tally, 1)
	go func() { ended <- d.keepConnecting(ctx, stop) }()
	before := d.flows.look()
	kid := d.kids[dead]
	c.Flows = len(before)
	d.Say("  %d connections and UDP sockets ask every %s, and each service checks its backends every %s; then\n\n  # kill -9 %d        # the servers of %s\n\n",
		c.Flows, millis(requestInterval), millis(checkInterval), kid.cmd.Process.Pid, c.Backend)
	died := time.Now()
	kid.kill()
	downAfter, err := d.awaitState(ctx, dead, "down")
	if err == nil {
		err = d.allAnswered(ctx, d.flows.lookAgain())
	}
	close(stop)
	t := <-ended
	if err != nil {
		return err
	}
	c.DetectedMillis, c.BoundMillis = float64(downAfter.Milliseconds()), float64(checkBound().Milliseconds())
	d.Claim(downAfter <= checkBound()+checkSlack, "%s was down in both services after %s; its checks, %d failures in a row, allow %s",
		c.Backend, millis(downAfter), checkFall, millis(checkBound()))
	d.judgeCrash(before, t, died, downAfter)
	d.endFlows()
	return d.comesBack(ctx, dead)
}

// awaitState waits until a backend has a state in all its services, and returns the time that took. It shows
// the results of the checks.
func (d *demo) awaitState(ctx context.Context, which int, state string) (time.Duration, error) {
	begin := time.Now()
	host := d.top.Backends[which]
	var keys []string
	for _, to := range targets {
		keys = append(keys, to.backendKey(host))
	}
	var took time.Duration
	var said []string
	err := until(ctx, 2*patience, host.Name()+" is "+state, func() (bool, error) {
		now, err := d.control().Status(ctx)
		if err != nil {
			return false, err
		}
		took, said = time.Since(begin), nil
		left := len(keys)
		for _, b := range now.Backends {
			if b.State == state && slices.Contains(keys, b.Address) {
				left--
				said = append(said, saidOf(b)...)
			}
		}
		return left == 0, nil
	})
	if len(said) > 0 {
		d.Say("%s\n\n", story.Indent(strings.Join(said, "\n")))
	}
	return took, err
}

// saidOf returns the reasons why a backend is down, in each of its services.
func saidOf(b *shuntv1.Backend) (lines []string) {
	for _, h := range b.Health {
		if h.State == "down" {
			lines = append(lines, fmt.Sprintf("%s: backend %s is down: %s", h.Service, b.Address, h.LastError))
		}
	}
	return lines
}

// judgeCrash checks that flows of the dead backend are with others, and that nothing failed once the backend
// was known to be dead.
func (d *demo) judgeCrash(before []flowState, t *tally, died time.Time, known time.Duration) {
	c := &d.facts.Crash
	c.TakenOver = map[string]int{}
	last := time.Duration(0)
	if t.failed > 0 {
		last = t.failedBegan.Sub(died)
	}
	stuck, othersFailed := 0, 0
	for i, now := range d.flows.look() {
		service := d.flows.flows[i].session.target.service
		d.made[service] += now.reopened - before[i].reopened
		c.Requests += now.requests - before[i].requests
		failed := now.failures - before[i].failures
		c.Failed += failed
		for range failed + now.moves - before[i].moves { // the data plane may have counted another flow for each
			d.facts.Counted.moved(service)
		}
		if failed > 0 {
			last = max(last, now.failedBegan.Sub(died))
		}
		switch {
		case before[i].backend != c.Backend:
			othersFailed += failed
		case now.backend == c.Backend:
			stuck++
		default:
			c.FlowsOnIt++
			c.TakenOver[now.backend]++
		}
	}
	for range t.failed {
		d.facts.Counted.moved("web")
	}
	d.made["web"] += t.flows + t.failed
	c.NewFlows, c.NewFailed, c.LastFailedMillis = t.flows, t.failed, float64(last.Milliseconds())
	var by []string
	for _, host := range d.top.Backends {
		if n := c.TakenOver[host.Name()]; n > 0 {
			by = append(by, fmt.Sprintf("%d by %s", n, host.Name()))
		}
	}
	d.Claim(stuck == 0 && c.FlowsOnIt > 0, "its %d flows were taken over, %s", c.FlowsOnIt+stuck, strings.Join(by, " and "))
	d.Claim(othersFailed == 0, "the %d flows of the others went on, and none of their requests failed", c.Flows-c.FlowsOnIt-stuck)
	d.Claim(last <= known, "%d of %d requests failed, and %d of %d new connections; the last of them began %s after the kill",
		c.Failed, c.Requests+c.Failed, c.NewFailed, c.NewFlows+c.NewFailed, millis(last))
}

// comesBack starts the servers again.
func (d *demo) comesBack(ctx context.Context, which int) error {
	c := &d.facts.Crash
	host := d.top.Backends[which]
	kid, err := d.startBackend(host)
	if err != nil {
		return err
	}
	d.kids[which] = kid
	back, err := d.awaitState(ctx, which, "active")
	if err != nil {
		return err
	}
	c.BackMillis = float64(back.Milliseconds())
	t, err := d.openWeb(ctx)
	if err != nil {
		return err
	}
	c.BackFlows, c.BackFailed, c.BackOnIt = t.flows, t.failed, t.on[c.Backend]
	d.Claim(c.BackFailed == 0 && c.BackOnIt > 0, "its servers were started again, and %s later it was up: of %d new connections it answered %d, and %d failed",
		millis(back), c.BackFlows+c.BackFailed, c.BackOnIt, c.BackFailed)
	return nil
}
