package daemon

import (
	"context"
	"sync"
	"time"
)

// busyInterval is the time after which the loop tries again while another change is under way.
const busyInterval = 50 * time.Millisecond

// loop does the periodic work until ctx ends. It never waits for another change: the data plane depends on its
// heartbeat.
func (d *daemon) loop(ctx context.Context) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { d.plane.sockets.run(ctx) })
	heartbeat := time.NewTicker(heartbeatInterval)
	defer heartbeat.Stop()
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	var healthDue, podsDue <-chan time.Time
	var took time.Duration // to apply a change of health; a flood of them must leave half of the time for the rest
	healthSoon := func() {
		if healthDue == nil {
			healthDue = time.After(max(healthBatch, took))
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-heartbeat.C:
			d.beat()
			d.applier.try(d.follow) // else a change is under way; in a second again
			d.plane.loopback.keep()
			d.applier.try(d.upkeep)
			d.host.Alive(partLoop)
		case <-sweep.C:
			d.pulse.sweep(d.host.Scraped())
		case <-d.applier.retries.due:
			if !d.applier.again() {
				time.AfterFunc(busyInterval, d.applier.retries.want)
			}
		case <-d.applier.checks.monitor.Changed():
			healthSoon()
		case <-d.plane.interfaces.notices.wake:
			if podsDue == nil {
				podsDue = time.After(podBatch)
			}
		case <-podsDue:
			podsDue = nil
			if !d.applier.try(d.applier.followPods) {
				podsDue = time.After(busyInterval)
			}
		case <-d.plane.routes.Changed():
			d.applier.checks.doubt()
			healthSoon()
		case <-healthDue:
			healthDue = nil
			began := time.Now()
			if d.healthChanged() {
				took = time.Since(began)
			} else {
				healthDue = time.After(busyInterval)
			}
		}
	}
}

// beat keeps the data plane alive, and reports events since the last beat.
func (d *daemon) beat() {
	d.pulse.beat(framesMissed(d.plane.interfaces.listedNames(), d.host.Log), d.applier.checks.monitor.TakeTrouble(), time.Now())
}

// follow makes the data plane follow the machine. It is called with the applier's lock held.
func (d *daemon) follow() {
	d.applier.follow(time.Now())
	if d.beats++; d.beats%podRounds == 0 {
		d.applier.followPods()
	}
	d.uppers.follow(d.snapshot())
}

// upkeep does the work that becomes due with time: deadlines of drains, and slots that have settled. It is
// called with the applier's lock held.
func (d *daemon) upkeep() {
	d.host.Alive(partChanges)
	if d.overrides.follow() {
		d.host.Log.Info("the deadline of a drain has passed: the flows of its backend end")
		_, _ = d.applier.apply() // a failure is tried again
	}
	d.overrides.save()
	if marked, all := d.applier.settle(); all {
		d.host.Log.Info("all slots have settled", "marked", marked)
	}
}

// healthChanged applies new findings of checks and next hops. done is false while another change is under way.
func (d *daemon) healthChanged() (done bool) {
	difference, done := d.applier.applyHealth()
	if !difference.Empty() {
		d.host.Log.Debug("health applied", "difference", difference.String())
		publish(d.host.Events, difference)
	}
	return done
}
