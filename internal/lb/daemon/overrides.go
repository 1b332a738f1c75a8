package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
)

// overrides holds the settings of operators in addition to the configuration, on the disk and in force. It
// implements control.Overrides.
type overrides struct {
	path      string // of the file
	writer    *state.Writer
	deadlines *deadlines // of the writer's overrides
	applier   *applier   // nil until the data plane is open
	host      *node.Host
}

// openOverrides opens the overrides of an earlier daemon. If they cannot be read, it continues without them:
// backends that were drained then get flows again, which is less harm than no start at all.
func openOverrides(host *node.Host) *overrides {
	path := overridesPath(host.Instance)
	clock := machineClock()
	writer, err := state.Open(path, clock.now)
	o := &overrides{path: path, writer: writer, deadlines: newDeadlines(clock, writer, host.Conditions, host.Log), host: host}
	var lost *state.LoadError
	switch {
	case errors.As(err, &lost) && lost.Aside == "":
		host.Conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: path, Text: err.Error(),
			Remedy: "fix the folder's permissions or its disk, set the overrides again, and restart the daemon at a convenient time"})
	case err != nil:
		host.Conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: state.AsideOf(path), Text: err.Error()})
	case exists(state.AsideOf(path)):
		host.Conditions.Raise(condition.Condition{Code: condition.OverridesLost, Subject: state.AsideOf(path),
			Text: "an earlier start could not use the overrides that it found, and moved them to this file; none of them is in force"})
	}
	return o
}

// follow is called every second. It reports whether the deadline of a drain has passed and has to be applied.
// The caller holds the applier's lock.
func (o *overrides) follow() (passed bool) {
	o.deadlines.follow()
	before := o.writer.Snapshot().Revision
	return o.writer.PassDeadlines() != before
}

// save writes overrides that are not on the disk yet, and keeps the conditions about their file.
func (o *overrides) save() {
	_ = o.writer.Save() // nameFaults reports a failure
	o.nameFaults()
}

// nameFaults keeps the conditions about the file of overrides.
func (o *overrides) nameFaults() {
	if !exists(state.AsideOf(o.path)) {
		o.host.Conditions.Clear(condition.OverridesLost, state.AsideOf(o.path))
	}
	if err := o.writer.Unsaved(); err != nil {
		o.host.Conditions.Raise(condition.Condition{Code: condition.OverridesUnsaved, Subject: o.path, Text: err.Error()})
	} else {
		o.host.Conditions.Clear(condition.OverridesUnsaved, o.path)
	}
}

// exists is false only if the file certainly does not exist.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

// Overrides returns the overrides in force.
func (o *overrides) Overrides() []*shuntv1.Override { return status.Overrides(o.writer.Overrides()) }

// Override sets an override, and applies it. Its times use the deadlines' clock, and are taken while no step of
// the wall clock is being followed.
func (o *overrides) Override(ctx context.Context, selector string, asked control.Override) (*shuntv1.OverrideResponse, error) {
	return o.override(ctx, "override set", asked.Author, func() ([]state.Override, error) {
		s := state.Setting{Kind: state.Kind(asked.Kind), Weight: asked.Weight, Health: state.Health(asked.Health), Author: state.Author(asked.Author),
			Since: o.deadlines.clock.now()}
		if asked.Deadline > 0 {
			s.Deadline = s.Since.Add(asked.Deadline)
		}
		backends, err := o.writer.Set(selector, s)
		var set []state.Override
		for _, b := range backends {
			set = append(set, state.Override{Backend: b, Setting: s})
		}
		return set, err
	})
}

// ClearOverrides ends overrides, and applies the change.
func (o *overrides) ClearOverrides(ctx context.Context, selector string, words []string, a control.Author) (*shuntv1.OverrideResponse, error) {
	var kinds []state.Kind
	for _, word := range words {
		kinds = append(kinds, state.Kind(word))
	}
	return o.override(ctx, "override cleared", a, func() ([]state.Override, error) {
		if selector == "" {
			return o.writer.ClearAll(kinds...), nil
		}
		return o.writer.Clear(selector, kinds...)
	})
}

// override changes overrides and applies them. An override that could not be written to the disk is in force
// all the same.
func (o *overrides) override(ctx context.Context, what string, a control.Author, change func() ([]state.Override, error)) (*shuntv1.OverrideResponse, error) {
	o.applier.mu.Lock()
	defer o.applier.mu.Unlock()
	if err := o.applier.refusesChange(); err != nil {
		return nil, err
	}
	before := o.writer.Overrides()
	concerned, err := change()
	if unknown := (*state.SelectorError)(nil); errors.As(err, &unknown) {
		return nil, control.SelectorError{Err: err, Ambiguous: len(unknown.Candidates) > 0}
	}
	if err != nil {
		return nil, err
	}
	answer := &shuntv1.OverrideResponse{}
	answer.Untracked, answer.UntrackedUdp = untracked(o.applier.checks.servedLast(), concerned)
	for _, c := range concerned {
		answer.Backends = append(answer.Backends, c.Backend.String())
	}
	answer.Backends = slices.Compact(answer.Backends) // they come in the order of backends
	if err := o.writer.Unsaved(); err != nil {
		answer.Unsaved = err.Error()
	}
	o.nameFaults()
	difference, err := o.applier.apply()
	if err != nil {
		return nil, fmt.Errorf("%s for %s: applied in part; shunt tries the rest again: %w", what, strings.Join(answer.Backends, ", "), err)
	}
	answer.Difference = status.Difference(difference)
	answer.Text = strings.Join(append([]string{difference.String()}, replaced(before, concerned)...), "\n")
	for _, c := range concerned {
		o.host.Log.Info(what, "backend", c.Backend, "kind", c.Kind, "value", valueOf(c), "by", a.By, "uid", a.UID, "client", a.Client)
	}
	o.host.Log.Info("overrides applied", "difference", difference.String())
	publish(o.host.Events, difference)
	return answer, nil
}

// untracked returns the services that lose flows at once when these backends begin to drain: services that lose
// all flows, and services that lose UDP flows alone (docs/design/13-just-enough-tracking.md). served are the
// services before the drain: a backend that gets no new flows has no flows that a drain would move.
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

// replaced lists the settings that were replaced by others: a second drain does not keep the deadline of the
// first.
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

// valueOf returns the value of an override, as a word.
func valueOf(o state.Override) string {
	switch {
	case o.Kind == state.KindWeight:
		return fmt.Sprint(o.Weight)
	case o.Kind == state.KindHealth:
		return string(o.Health)
	case !o.Deadline.IsZero():
		return "until " + o.Deadline.Local().Format(time.RFC3339) // a stored time comes back in UTC
	}
	return "without a deadline"
}
