package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// changes passes declarations to the applier one after the other: declarations of the file, of other
// sources, and of the DNS, which gives names other addresses.
type changes struct {
	turns   turns
	names   *names // of the change whose turn it is
	applier *applier
	host    *node.Host
	log     *slog.Logger
}

func newChanges(names *names, a *applier, host *node.Host) *changes {
	return &changes{turns: newTurns(), names: names, applier: a, host: host, log: host.Log}
}

// run makes changes until it is stopped.
func (c *changes) run(ctx context.Context) {
	c.turns.run(c.names.follower.Changed(), func() { c.followNames(ctx) })
}

// change makes these the declarations of their sources. Only the change whose turn it is may call it. The
// findings of health checks are applied while a change waits for names and next hops.
func (c *changes) change(ctx context.Context, named ...state.Declaration) (reconcile.Difference, error) {
	c.applier.mu.Lock()
	defer c.applier.mu.Unlock()
	defer c.names.forget()
	var declared []state.Declaration
	var keep func()
	if err := c.applier.waiting(func() { declared, keep = c.names.expanded(ctx, named) }); err != nil {
		return reconcile.Difference{}, err
	}
	return c.applier.change(ctx, declared, keep)
}

// apply puts a file's configuration into force.
func (c *changes) apply(ctx context.Context, config model.Config) (changed node.Difference, err error) {
	if stopping := c.turns.take(func() {
		settings := c.settings(config)
		var difference reconcile.Difference
		if difference, err = c.change(ctx, ofFile(config)); err == nil {
			changed = nodeDifference(settings, difference)
		}
	}); stopping != nil {
		return changed, stopping
	}
	return changed, err
}

// foresee returns the changes that apply would make, given the present results of checks.
func (c *changes) foresee(ctx context.Context, config model.Config) (foreseen node.Difference, err error) {
	if stopping := c.turns.take(func() {
		c.applier.mu.Lock()
		defer c.applier.mu.Unlock()
		defer c.names.forget()
		settings := c.settings(config)
		var declared []state.Declaration
		if err = c.applier.waiting(func() { declared, _ = c.names.expanded(ctx, []state.Declaration{ofFile(config)}) }); err != nil {
			return
		}
		var difference reconcile.Difference
		if difference, err = c.applier.foresee(declared); err == nil {
			foreseen = nodeDifference(settings, difference)
		}
	}); stopping != nil {
		return foreseen, stopping
	}
	return foreseen, err
}

// settings returns the differences between the machine's settings in force and the settings of a configuration.
func (c *changes) settings(config model.Config) []value.SettingDifference {
	return value.DifferentSettings(c.applier.writer.Snapshot().Node.Settings(), config.Node.Settings())
}

// nodeDifference converts a difference to the node's type.
func nodeDifference(settings []value.SettingDifference, d reconcile.Difference) node.Difference {
	all := node.Difference{Settings: settings, Services: status.Difference(d), Cuts: status.Cuts(d)}
	if !d.Empty() {
		all.Text = d.String()
	}
	return all
}

// declare puts a source's services into force, as apply does for the file.
func (c *changes) declare(ctx context.Context, source string, wanted Change) (err error) {
	if stopping := c.turns.take(func() {
		var difference reconcile.Difference
		difference, err = c.change(ctx, state.Declaration{Source: source, Services: wanted.Declare, Part: !wanted.Whole, Withdrawn: wanted.Withdraw, Decapsulation: wanted.Decapsulation})
		if err != nil {
			return
		}
		publish(c.host.Events, difference)
		c.host.Summarize()
		c.log.Info("services changed", "source", source, "difference", difference.String())
	}); stopping != nil {
		return stopping
	}
	return err
}

// followNames gives services the present addresses of their names.
func (c *changes) followNames(ctx context.Context) {
	for _, source := range slices.Sorted(maps.Keys(c.names.declared)) {
		before := c.applier.writer.Snapshot().Revision
		difference, err := c.change(ctx, c.names.declaration(source))
		if errors.Is(err, control.ErrStopping) || errors.Is(err, control.ErrDraining) {
			return
		}
		if err != nil {
			c.log.Error("cannot apply the present addresses of names; the earlier addresses stay in use", "source", source, "error", err)
			c.host.Conditions.Raise(condition.Condition{Code: condition.NameUnusable, Severity: condition.Error, Subject: "services of the source " + source,
				Text: fmt.Sprintf("the new addresses of their names could not be applied; the earlier addresses stay in use: %v", err)})
			continue
		}
		if difference.Empty() {
			continue
		}
		publish(c.host.Events, difference)
		if c.applier.writer.Snapshot().Revision == before { // health or a next hop has changed meanwhile
			c.log.Debug("health applied", "difference", difference.String())
			continue
		}
		c.log.Info("names have other addresses", "source", source, "difference", difference.String())
	}
}
