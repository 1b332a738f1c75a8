package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/health"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/reconcile"
	"github.com/shunt-lb/shunt/internal/state"
)

const (
	// healthBatch is how long a change of health waits for others: where a host dies, its
	// backends go down together, and the tables change once.
	healthBatch = 20 * time.Millisecond
	// latePart is one of how many checks that start late makes a condition; a single one may
	// have met a moment in which the machine did something else.
	latePart = 100
	// lateQuiet is how long none must have been late, or have failed here, for it to end.
	lateQuiet = 10 * time.Second
)

// watching is the daemon's part of the health checks.
type watching struct {
	monitor *health.Monitor
	// held is what the data plane did when this process adopted it; nil once that is used.
	held     func(service string, b model.BackendAddress) model.HealthState
	revision state.Revision // of the snapshot that the monitor checks
	panics   []string       // conditions held
	tookLast time.Duration  // to carry a change of health out
	// served are the services as last carried out; guarded by daemon.mu.
	served []model.Service
}

// startHealth begins to check. contents is what the maps hold: who has slots there serves, and
// goes on to until a check contradicts it.
func (d *daemon) startHealth(contents reconcile.Contents) {
	d.watching.held = heldStates(contents)
	d.watching.monitor = health.New(health.Options{Log: d.log, OnTransition: d.logTransition})
}

// logTransition is the one line that a change of state has in the log. Metrics and events belong
// here, too.
func (d *daemon) logTransition(t health.Transition) {
	level := slog.LevelInfo
	if t.To == model.HealthDown {
		level = slog.LevelWarn
	}
	d.log.Log(context.Background(), level, t.String(), "service", t.Service, "backend", t.Backend, "from", t.From, "to", t.To)
}

// heldStates tells the states from the maps: up is who has slots of the service's table, down
// whose record says so. Of others nothing is known.
func heldStates(contents reconcile.Contents) func(string, model.BackendAddress) model.HealthState {
	type in struct {
		service string
		backend model.BackendAddress
	}
	serves, known, down := map[in]bool{}, map[string]bool{}, map[model.BackendAddress]bool{}
	for _, b := range contents.Backends {
		if b.Down {
			down[b.BackendAddress] = true
		}
	}
	for index, record := range contents.Services {
		known[record.Name] = true
		named := map[reconcile.BackendRef]bool{}
		for _, slot := range contents.Slots[index] {
			named[slot.Current] = true
		}
		for ref := range named {
			if b, ok := contents.Backends[ref.Index]; ok && b.BackendRef == ref {
				serves[in{record.Name, b.BackendAddress}] = true
			}
		}
	}
	return func(service string, b model.BackendAddress) model.HealthState {
		switch {
		case serves[in{service, b}]:
			return model.HealthUp
		case known[service] && down[b]:
			return model.HealthDown
		}
		return ""
	}
}

// serving is the desired state with what health and next hops say. The caller holds d.applying.
func (d *daemon) serving() model.Config {
	w := &d.watching
	snapshot := d.writer.Snapshot()
	if w.revision != snapshot.Revision {
		w.monitor.Update(snapshot.Config.Services, w.held)
		w.revision, w.held = snapshot.Revision, nil
	}
	config := snapshot.Config
	config.Services = w.monitor.Serve(config.Services, d.neighbours.Unreachable)
	d.mu.Lock()
	w.served = config.Services
	d.mu.Unlock()
	d.namePanics(config.Services)
	return config
}

// namePanics keeps a condition for every service whose health is not believed.
func (d *daemon) namePanics(services []model.Service) {
	now := d.watching.monitor.Panics()
	for _, name := range d.watching.panics {
		if !slices.Contains(now, name) {
			d.conditions.Clear(condition.HealthNotBelieved, name)
		}
	}
	for _, s := range services {
		if slices.Contains(now, s.Name) {
			d.conditions.Raise(condition.Condition{Code: condition.HealthNotBelieved, Subject: s.Name,
				Text: fmt.Sprintf("fewer than %d %% of its backends are up: all of them take flows, whatever their checks say (health.panic)", s.Health.Panic)})
		}
	}
	d.watching.panics = now
}

// healthDelay is when a change of health is carried out, from now on: a flood of them must
// leave the loop half of its time for the rest.
func (d *daemon) healthDelay() time.Duration { return max(healthBatch, d.watching.tookLast) }

// healthChanged carries out what checks and next hops have shown, or says that another change is under way.
func (d *daemon) healthChanged() (done bool) {
	if !d.applying.TryLock() {
		return false
	}
	defer d.applying.Unlock()
	if d.stopped {
		return true
	}
	began := time.Now()
	difference, err := d.carryOut()
	d.watching.tookLast = time.Since(began)
	if err != nil {
		d.failing(err)
		return true
	}
	d.log.Debug("health carried out", "difference", difference.String())
	d.changed(difference)
	return true
}

// troubleWatch turns what is in the way of checks into conditions. It is for one caller at a time.
type troubleWatch struct {
	conditions       *condition.Set
	failed, wereLate time.Time // when that was last seen
}

// look takes the trouble since the look before.
func (w *troubleWatch) look(trouble health.Trouble, now time.Time) {
	switch {
	case trouble.Failed > 0:
		w.failed = now
		w.conditions.Raise(condition.Condition{Code: condition.ChecksFailHere, Subject: "host",
			Text: fmt.Sprintf("health checks cannot be made here, and what they have found stays: %v", trouble.Why)})
	case now.Sub(w.failed) >= lateQuiet:
		w.conditions.Clear(condition.ChecksFailHere, "host")
	}
	switch {
	case trouble.Late*latePart > trouble.Probes:
		w.wereLate = now
		w.conditions.Raise(condition.Condition{Code: condition.ChecksLate, Subject: "host",
			Text: "health checks start later than they should, so a backend that fails is found out late"})
	case now.Sub(w.wereLate) >= lateQuiet:
		w.conditions.Clear(condition.ChecksLate, "host")
	}
}

// healthStatus is what is known of the backends that are checked.
func (d *daemon) healthStatus() []health.Status {
	return d.watching.monitor.Report(d.writer.Snapshot().Config.Services)
}
