package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// views is the data plane as the API reads it, opened when it is first asked for. It is apart
// from the one that is written: reading may take long, and nothing waits for it.
type views struct {
	mu    sync.Mutex
	view  *datapath.View
	ended bool
}

// with lends the view, opened.
func (v *views) with(instance string, look func(*datapath.View) error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended {
		return control.ErrStopping
	}
	if v.view == nil {
		view, err := datapath.OpenReadOnly(datapath.Options{Instance: instance})
		if err != nil {
			return err
		}
		v.view = view
	}
	return look(v.view)
}

// read adds what the data plane shows.
func (v *views) read(s *shuntv1.GetStatusResponse) error {
	return v.with(s.Instance, func(view *datapath.View) error {
		_, err := status.Read(view, s)
		return err
	})
}

// usage is read of the counters alone.
func (v *views) usage(instance string) (u datapath.Usage, err error) {
	err = v.with(instance, func(view *datapath.View) (err error) {
		u, err = view.Usage()
		return err
	})
	return u, err
}

// end lets go of the maps, so that they can be removed. Reading fails from then on.
func (v *views) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ended = true
	if v.view != nil {
		_ = v.view.Close() // nothing was written
		v.view = nil
	}
}

// Status is node.Instance's.
func (d *daemon) Status(_ context.Context, s *shuntv1.GetStatusResponse) error {
	if err := d.views.read(s); err != nil {
		return err
	}
	showMissed(s.Attached, framesMissed(d.interfaces.names(), d.log))
	d.showChains(s.Attached)
	overrides := d.Overrides()
	s.Daemon.Overrides = status.Overrides(overrides)
	settling := d.reconciler.Settling()
	s.Daemon.SlotsInTransition, s.Daemon.SlotsMarked = int32(settling.Transition), int32(settling.Marked)
	for _, a := range d.interfaces.list() {
		s.Daemon.Attachments = append(s.Daemon.Attachments, &shuntv1.Attachment{Interface: a.Interface, Mode: string(a.Mode), Reason: a.Reason})
	}
	snapshot := d.writer.Snapshot()
	status.Complete(s, status.Known{Configured: snapshot.Configured, Served: d.checks.servedLast(), Overrides: overrides,
		Health: d.checks.monitor.Report(snapshot.Services)})
	return nil
}

// Overridable is node.Overrider's.
func (d *daemon) Overridable() control.Overrides { return d }

// Overrides is what operators say beside the configuration.
func (d *daemon) Overrides() []state.Override { return d.writer.Overrides() }

// Override sets an override, and carries it out. Its times are by the deadlines' clock, and taken while no
// step of the wall clock is followed.
func (d *daemon) Override(ctx context.Context, selector string, s state.Setting, deadline time.Duration) (control.OverrideResult, error) {
	return d.override(ctx, "override set", s.Author, func() ([]state.Override, error) {
		s.Since = d.deadlines.clock.now()
		if deadline > 0 {
			s.Deadline = s.Since.Add(deadline)
		}
		backends, err := d.writer.Set(selector, s)
		var set []state.Override
		for _, b := range backends {
			set = append(set, state.Override{Backend: b, Setting: s})
		}
		return set, err
	})
}

// ClearOverrides ends overrides, and carries that out.
func (d *daemon) ClearOverrides(ctx context.Context, selector string, kinds []state.Kind, a control.Author) (control.OverrideResult, error) {
	return d.override(ctx, "override cleared", a, func() ([]state.Override, error) {
		if selector == "" {
			return d.writer.ClearAll(kinds...), nil
		}
		return d.writer.Clear(selector, kinds...)
	})
}

// override changes overrides and carries them out. One that could not be written to the disk
// is in force all the same.
func (d *daemon) override(ctx context.Context, what string, a state.Author, change func() ([]state.Override, error)) (control.OverrideResult, error) {
	d.applying.Lock()
	defer d.applying.Unlock()
	if err := d.refusesChange(); err != nil {
		return control.OverrideResult{}, err
	}
	before := d.Overrides()
	concerned, err := change()
	if err != nil {
		return control.OverrideResult{}, err
	}
	var result control.OverrideResult
	result.Untracked, result.UntrackedUDP = untracked(d.checks.servedLast(), concerned)
	for _, o := range concerned {
		result.Backends = append(result.Backends, o.Backend.String())
	}
	result.Backends = slices.Compact(result.Backends) // they come in the order of backends
	result.Unsaved = d.writer.Unsaved()
	d.nameOverrideFaults()
	result.Difference, err = d.carryOut()
	if err != nil {
		return result, fmt.Errorf("%s for %s: done in part; shunt goes on trying: %w", what, strings.Join(result.Backends, ", "), err)
	}
	result.Text = strings.Join(append([]string{result.Difference.String()}, replaced(before, concerned)...), "\n")
	for _, o := range concerned {
		d.log.Info(what, "backend", o.Backend, "kind", o.Kind, "value", valueOf(o), "by", a.By, "uid", a.UID, "client", a.Client)
	}
	d.log.Info("overrides carried out", "difference", result.Difference.String())
	d.changed(result.Difference)
	return result, nil
}

// untracked are the services that lose flows at once when these backends begin to drain: all of them,
// or those of UDP alone (docs/design/13-just-enough-tracking.md). served are the services before
// that: who gets no new flows already has none that a drain would move.
func untracked(served []*model.Service, concerned []state.Override) (all, udp []string) {
	for _, s := range served {
		begins := slices.ContainsFunc(s.Backends, func(b model.Backend) bool {
			return b.Share() > 0 && slices.ContainsFunc(concerned, func(o state.Override) bool {
				return o.Kind == state.KindDrain && o.Backend == b.BackendAddress
			})
		})
		takesUDP := slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Protocol == model.UDP })
		switch {
		case !begins || !s.Forwarding.Direct():
		case s.Tracking == model.TrackingNone:
			all = append(all, s.Name)
		case takesUDP && (s.Tracking != model.TrackingAlways || s.AffinityTimeout > 0):
			udp = append(udp, s.Name)
		}
	}
	return all, udp
}

// replaced says which settings have made place for others: a second drain has no longer the
// deadline of the first.
func replaced(before, now []state.Override) (lines []string) {
	for _, o := range now {
		for _, b := range before {
			if b.Backend == o.Backend && b.Kind == o.Kind && valueOf(b) != valueOf(o) {
				lines = append(lines, fmt.Sprintf("~ %s of %s: was %s, set by %s at %s", b.Kind, b.Backend, valueOf(b), b.By, b.Since.Local().Format(time.RFC3339)))
			}
		}
	}
	return lines
}

// valueOf is what an override says, in a word.
func valueOf(o state.Override) string {
	switch {
	case o.Kind == state.KindWeight:
		return fmt.Sprint(o.Weight)
	case o.Kind == state.KindHealth:
		return string(o.Health)
	case !o.Deadline.IsZero():
		return "until " + o.Deadline.Local().Format(time.RFC3339) // what was stored comes back in UTC
	}
	return "without a deadline"
}

// changed tells those who watch, if there is a difference.
func (d *daemon) changed(difference reconcile.Difference) {
	if !difference.Empty() {
		d.events.Publish(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "changed"})
	}
}

// eventOfHealth is another state of a backend for those who watch.
func eventOfHealth(t health.Transition) *shuntv1.WatchResponse {
	return &shuntv1.WatchResponse{Time: timestamppb.New(t.At), Event: "health", Health: status.HealthChange(t)}
}

// openState opens the overrides that an earlier daemon has left. Without them it goes on:
// backends that were drained then get flows again, which is less harm than not to start.
func (d *daemon) openState() {
	path := overridesPath(d.host.Instance)
	clock := machineClock()
	writer, err := state.Open(path, clock.now)
	d.writer, d.deadlines = writer, newDeadlines(clock, writer, d.conditions, d.log)
	var lost *state.LoadError
	switch {
	case errors.As(err, &lost) && lost.Aside == "":
		d.conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: path, Text: err.Error(),
			Remedy: "fix the folder's permissions or its disk, set the overrides again, and restart the daemon at a convenient time"})
	case err != nil:
		d.conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: state.AsideOf(path), Text: err.Error()})
	case exists(state.AsideOf(path)):
		d.conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: state.AsideOf(path),
			Text: "an earlier start could not use the overrides that it found, and moved them to this file; none of them is in force"})
	}
}

// nameOverrideFaults keeps the conditions about the file of overrides.
func (d *daemon) nameOverrideFaults() {
	path := overridesPath(d.host.Instance)
	if !exists(state.AsideOf(path)) {
		d.conditions.Clear(condition.OverridesLost, state.AsideOf(path))
	}
	if err := d.writer.Unsaved(); err != nil {
		d.conditions.Raise(condition.Condition{Code: condition.OverridesUnsaved, Subject: path, Text: err.Error()})
	} else {
		d.conditions.Clear(condition.OverridesUnsaved, path)
	}
}

// exists is false only if there is certainly nothing.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

var (
	_ node.Instance    = (*daemon)(nil)
	_ node.HostChecker = (*daemon)(nil)
	_ node.Drainer     = (*daemon)(nil)
	_ node.Sampler     = (*daemon)(nil)
	_ node.Overrider   = (*daemon)(nil)
)
