package demo

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/story"
)

const (
	// calmRequests is the number of answers that each flow must have got before the demo continues.
	calmRequests = 5
	// deadFor is the least time for which the balancer is without its daemon.
	deadFor = 2200 * time.Millisecond
	// slotsMovedMax is the largest share of the other backends' slots that may move.
	slotsMovedMax = 0.05
)

// removeBackend removes the last backend from the file and reloads.
func (d *demo) removeBackend(ctx context.Context) error {
	if err := d.startFlows(ctx); err != nil {
		return err
	}
	if err := d.allAnswered(ctx, d.flows.look()); err != nil {
		return err
	}
	gone := d.top.Backends[len(d.top.Backends)-1].Name()
	r := &d.facts.Reload
	r.Removed, r.Flows = gone, len(d.flows.flows)
	slots, err := d.status(ctx)
	if err != nil {
		return err
	}
	before := d.flows.look()
	if err := d.writeConfig(configText(d.top, d.socket(), len(weights)-1)); err != nil {
		return err
	}
	begin := time.Now()
	result, err := d.control().Reload(ctx)
	if err != nil {
		return err
	}
	r.Milliseconds = float64(time.Since(begin).Microseconds()) / 1000
	r.Difference = result.Text
	d.Say("  %d connections and UDP sockets ask every %s; %s is removed from the file; then\n\n  # shunt reload\n%s\n\n",
		r.Flows, millis(requestInterval), gone, story.Indent(result.Text))
	d.Claim(result.Applied, "the reload was applied, in %.0f ms%s", r.Milliseconds, result.Refused)
	if !result.Applied {
		return nil
	}
	for _, s := range result.Difference.Services {
		for _, t := range s.Tables {
			r.SlotsMoved += int(t.SlotsMoved)
			r.SlotsOfOthers += int(t.Slots)
		}
	}
	for _, to := range targets {
		own := slots.service(to.service).backend(to.backendKey(d.top.Backends[len(weights)-1])).Slots
		r.SlotsOfOthers -= own
		r.OthersSlots -= own
	}
	r.OthersSlots += r.SlotsMoved
	if err := d.allAnswered(ctx, d.flows.look()); err != nil {
		return err
	}
	d.judgeReload(before, gone)
	return d.openAfterReload(ctx, gone)
}

// allAnswered waits until every flow got a few more answers than it had.
func (d *demo) allAnswered(ctx context.Context, since []flowState) error {
	var lagging string
	err := until(ctx, 2*patience, "every open flow has been answered again", func() (bool, error) {
		for i, now := range d.flows.lookAgain() {
			if now.requests < since[i].requests+calmRequests {
				lagging = fmt.Sprintf("one of %s, last answered by %s, got %d answers, with %d failures%s",
					d.flows.flows[i].session.target, now.backend, now.requests-since[i].requests, now.failures-since[i].failures, because(now.fault))
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, lagging)
	}
	return nil
}

// judgeReload compares the state of every flow with its state before the backend was removed.
func (d *demo) judgeReload(before []flowState, gone string) {
	r := &d.facts.Reload
	stuck := 0
	var fault error
	for i, now := range d.flows.look() {
		r.Requests += now.requests - before[i].requests
		moved := now.moves != before[i].moves || now.reopened != before[i].reopened
		if moved {
			d.facts.Counted.moved(d.flows.flows[i].session.target.service)
			d.made[d.flows.flows[i].session.target.service] += now.reopened - before[i].reopened
		}
		if before[i].backend == gone {
			r.FlowsOnIt++
			if moved {
				r.FlowsMoved++
			}
			if now.backend == gone {
				stuck++
			}
			continue
		}
		if moved {
			r.OthersMoved++
		}
		if failed := now.failures - before[i].failures; failed > 0 {
			r.OthersFailed += failed
			fault = now.fault
		}
	}
	others := r.Flows - r.FlowsOnIt
	d.Claim(r.FlowsOnIt > 0 && r.FlowsMoved == r.FlowsOnIt && stuck == 0, "%d of %d flows moved: the flows on %s, which had %d", r.FlowsMoved+r.OthersMoved, r.Flows, r.Removed, r.FlowsOnIt)
	d.Claim(r.OthersMoved == 0 && r.OthersFailed == 0, "the other %d stayed on their backend and connection, and none of their requests failed%s", others, because(fault))
	share := float64(r.OthersSlots) / float64(max(r.SlotsOfOthers, 1))
	d.Claim(r.OthersSlots >= 0 && share <= slotsMovedMax, "slots place new flows: of the slots of the backends that stay, %.1f %% moved", 100*share)
}

// openAfterReload checks that new flows go to the remaining backends.
func (d *demo) openAfterReload(ctx context.Context, gone string) error {
	r := &d.facts.Reload
	t, err := d.openWeb(ctx)
	if err != nil {
		return err
	}
	r.NewFlows, r.NewFailed, r.NewOnIt = t.flows, t.failed, t.on[gone]
	d.Claim(r.NewFailed == 0 && r.NewOnIt == 0, "%d new connections: %d failed, %d reached %s", r.NewFlows+r.NewFailed, r.NewFailed, r.NewOnIt, gone)
	return nil
}

// kill kills the daemon, lets the flows go on without it, and starts it again.
func (d *demo) kill(ctx context.Context) error {
	k := &d.facts.Kill
	k.Flows = len(d.flows.flows)
	before := d.flows.look()
	stop, ended := make(chan struct{}), make(chan *tally, 1)
	go func() { ended <- d.keepConnecting(ctx, stop) }()

	k.PIDBefore = d.daemon.cmd.Process.Pid
	d.Say("  # kill -9 %d\n  # shunt status\n", k.PIDBefore)
	died := time.Now()
	d.daemon.kill()
	alive := time.NewTimer(deadFor)
	defer alive.Stop()
	text, err := d.statusOutput(ctx, "text")
	var dead status
	if err == nil {
		dead, err = d.status(ctx)
	}
	if err == nil {
		err = d.allAnswered(ctx, d.flows.lookAgain())
	}
	select {
	case <-alive.C:
	case <-ctx.Done():
	}
	k.SecondsDead = time.Since(died).Seconds()
	var takeover time.Duration
	if err == nil {
		begin := time.Now()
		_, err = d.startDaemon(ctx)
		takeover = time.Since(begin)
	}
	if err == nil {
		err = d.allAnswered(ctx, d.flows.lookAgain())
	}
	close(stop)
	t := <-ended
	d.made["web"] += t.flows
	if err != nil {
		return err
	}
	k.TakeoverMillis, k.PIDAfter = float64(takeover.Milliseconds()), d.daemon.cmd.Process.Pid
	k.NewFlows, k.NewFailed = t.flows, t.failed
	k.Status, _, _ = strings.Cut(string(text), "\n\n")
	d.Say("%s\n\n", story.Indent(k.Status))
	d.Claim(dead.Forwarding && dead.Daemon == nil && strings.Contains(k.Status, "without health checks since"), "while the daemon was dead, `shunt status` said so and still showed the counters")
	d.judgeKill(before, t)
	return d.takenOver(ctx, dead)
}

// judgeKill checks that nothing failed at all.
func (d *demo) judgeKill(before []flowState, t *tally) {
	k := &d.facts.Kill
	var fault error
	for i, now := range d.flows.look() {
		k.Requests += now.requests - before[i].requests
		k.Failed += now.failures - before[i].failures
		if now.failures > before[i].failures {
			fault = now.fault
		}
		if now.moves != before[i].moves || now.reopened != before[i].reopened || now.backend != before[i].backend {
			k.FlowsMoved++
			d.made[d.flows.flows[i].session.target.service] += now.reopened - before[i].reopened
		}
		k.SlowestMillis = max(k.SlowestMillis, float64(now.slowest.Microseconds())/1000)
	}
	d.Claim(k.Failed == 0, "in %.1f s without a daemon and in the takeover after it, %d of %d requests failed, the slowest took %.0f ms%s",
		k.SecondsDead, k.Failed, k.Requests+k.Failed, k.SlowestMillis, because(fault))
	d.Claim(k.NewFailed == 0 && k.NewFlows > 0, "%d connections were opened meanwhile, %d failed%s", k.NewFlows+k.NewFailed, k.NewFailed, t.why())
	d.Claim(k.FlowsMoved == 0, "all %d open flows are on the same connection and backend as before", k.Flows-k.FlowsMoved)
}

// takenOver checks that the new daemon continues with the old one's data plane.
func (d *demo) takenOver(ctx context.Context, dead status) error {
	k := &d.facts.Kill
	now, err := d.status(ctx)
	if err != nil {
		return err
	}
	kept := now.Daemon != nil && now.Daemon.PID == k.PIDAfter && k.PIDAfter != k.PIDBefore
	for _, service := range dead.Services {
		kept = kept && now.service(service.Name).FlowsCreated >= service.FlowsCreated && service.FlowsCreated > 0
	}
	d.Claim(kept, "a new `shunt run` (process %d) took over in %.0f ms, with all counters", k.PIDAfter, k.TakeoverMillis)
	return nil
}

func because(fault error) string {
	if fault == nil {
		return ""
	}
	return fmt.Sprintf(" (the last fault: %v)", fault)
}
