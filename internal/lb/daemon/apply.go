package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/value"
)

// sourceFile is what the state calls the configuration file.
const sourceFile = "file"

// ofFile is what the configuration file declares.
func ofFile(config model.Config) state.Declaration {
	return state.Declaration{Source: sourceFile, Node: &config.Node, Services: config.Services}
}

// Reload reads the file again and applies it. A file with a fault, or a change that needs
// a restart, changes nothing.
func (d *daemon) Reload(ctx context.Context) (result control.ReloadResult, err error) {
	defer func() { d.reloaded.note(result.Applied) }()
	d.reading.Lock() // what two large files are read into would have to find room at once
	defer d.reading.Unlock()
	defer returnMemory()
	parsed, err := file.Read(d.opts.ConfigPath)
	if err != nil {
		return control.ReloadResult{Refused: err.Error()}, nil
	}
	parsed.CheckHost(followedHost{out: d.ways.Out}, false)
	result.Faults = parsed.Faults
	if config.HasErrors(parsed.Faults) {
		result.Refused = "the file has errors; nothing was changed"
		d.conditions.Raise(condition.Condition{Code: condition.ConfigRefused, Severity: condition.Error,
			Subject: d.opts.ConfigPath, Text: "the configuration on disk has errors and was not applied",
			Remedy: "run `shunt check --config " + d.opts.ConfigPath + "`"})
		return result, nil
	}
	if d.opts.Socket != "" {
		parsed.Config.API.Socket = d.opts.Socket
	}
	d.applying.Lock()
	defer d.applying.Unlock()
	if err := d.refusesChange(); err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	d.supervisor.reloading()
	defer func() { d.supervisor.ready(d.summary()) }()
	settings := model.DifferentSettings(d.writer.Snapshot().Config.Node, parsed.Config.Node)
	if refused := needsRestart(settings); refused != "" {
		result.Refused = refused
		return result, nil
	}
	difference, err := d.change(ctx, ofFile(parsed.Config))
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	d.conditions.Clear(condition.ConfigRefused, d.opts.ConfigPath)
	result.Applied, result.Difference, result.Settings = true, difference, settings
	result.Text = differenceText(settings, difference)
	d.changed(difference, settings...)
	d.log.Info("reloaded", "path", d.opts.ConfigPath, "difference", result.Text)
	return result, nil
}

// refusesChange says why nothing may be changed any more, or is nil. The caller holds
// d.applying.
func (d *daemon) refusesChange() error {
	switch {
	case d.stopped:
		return control.ErrStopping
	case d.draining:
		return fmt.Errorf("%w, and waits for flows to end; start it again first", control.ErrStopping)
	}
	return nil
}

// differenceText is a line for each difference, or that there is none.
func differenceText(settings []model.SettingDifference, difference reconcile.Difference) string {
	var lines []string
	for _, s := range settings {
		lines = append(lines, s.String())
	}
	if len(lines) == 0 || !difference.Empty() {
		lines = append(lines, difference.String())
	}
	return strings.Join(lines, "\n")
}

// needsRestart names what cannot be changed under a running data plane, or is empty.
func needsRestart(settings []model.SettingDifference) string {
	for _, fixed := range []struct{ under, why string }{
		{"limits.", "limits size the maps, which are made when the data plane is first loaded; run `shunt detach` (its connections end) and start shunt with the new limits"},
		{"api.", "the control socket's path and groups cannot change while it is in use; restart shunt; its connections go on if it was started with --on-exit keep"},
	} {
		var which []string
		for _, s := range settings {
			if strings.HasPrefix(s.Key, fixed.under) {
				which = append(which, fmt.Sprintf("%s from %s to %s", s.Key, s.Before, s.After))
			}
		}
		if len(which) > 0 {
			return fmt.Sprintf("%s needs restart: %s. Nothing was changed", strings.Join(which, ", "), fixed.why)
		}
	}
	return ""
}

// change makes this what a source declares. The order is: what may be refused first, new
// interfaces, contents, old interfaces. Whatever is done here is of the snapshot that comes of
// it, which has what other sources declare, too. The caller holds d.applying.
func (d *daemon) change(ctx context.Context, named state.Declaration) (reconcile.Difference, error) {
	declared, keep := d.names.expanded(ctx, named)
	defer d.names.forget()
	next, err := d.writer.Try(declared)
	if err != nil {
		return reconcile.Difference{}, err
	}
	node := next.Config.Node
	if err := requireInterfaces(d.unknown(node.Interfaces)); err != nil {
		return reconcile.Difference{}, err
	}
	ports, err := portPool(node)
	if err != nil {
		return reconcile.Difference{}, err
	}
	listening, err := d.metrics.Prepare(ctx, node.Metrics.Listen)
	if err != nil {
		return reconcile.Difference{}, err
	}
	defer listening.Drop()
	// Without overrides: a backend that is drained for good needs its room again without.
	if _, err := d.reconciler.Plan(reconcile.Desired{Services: next.Configured, Limits: node.Limits}); err != nil {
		return reconcile.Difference{}, err
	}
	if err := d.datapath.Prepare(next.Configured); err != nil {
		return reconcile.Difference{}, err
	}
	// Interfaces before contents: a backend's way out must be known when it is named.
	if err := d.interfaces.attachAll(d.writer.Snapshot().Config.Interfaces, node.Interfaces); err != nil {
		return reconcile.Difference{}, err
	}
	if err := d.datapath.SetSettings(node.Timeouts, ports); err != nil {
		return reconcile.Difference{}, err
	}
	d.datapath.SetEncapsulation(node.Encapsulation)
	if _, err := d.writer.Replace(declared); err != nil {
		return reconcile.Difference{}, err
	}
	// From here on it is carried out, now or by trying again.
	keep()
	listening.Commit()
	d.checks.reread() // the files may be new, too
	difference, err := d.reconcileNow(ctx)
	if err != nil {
		return difference, fmt.Errorf("the change is carried out in part, and is tried again: %w", err)
	}
	return difference, d.interfaces.detachOthers(node.Interfaces)
}

// unknown are interfaces that the configuration in force does not have. One that it has and that
// has gone is a condition already, and no reason to refuse other changes.
func (d *daemon) unknown(interfaces []model.Interface) []model.Interface {
	known := d.writer.Snapshot().Config.Interfaces
	return slices.DeleteFunc(slices.Clone(interfaces), func(i model.Interface) bool { return slices.Contains(known, i) })
}

// reconcileNow makes the maps agree with the desired state, and waits before that for the ways to
// backends that are new. It is for changes that somebody asks for, and not for d.loop, which must
// go on.
func (d *daemon) reconcileNow(ctx context.Context) (reconcile.Difference, error) {
	config := d.desired()
	if d.ways.Await(ctx, config.Services) {
		config = d.desired() // without those that are known by now to be out of reach
	}
	return d.carry(config)
}

// desired is what the data plane is to have: the desired state, with what health and next hops
// say, and closed to new flows while this node drains. The caller holds d.applying.
func (d *daemon) desired() model.Config {
	snapshot := d.writer.Snapshot()
	config := snapshot.Config
	config.Services = d.checks.serve(snapshot, d.ways.Unreachable)
	if d.draining {
		config.Services = closedToNew(config.Services)
	}
	return config
}

// carryOut makes the maps agree with what is desired, and waits for nothing.
func (d *daemon) carryOut() (reconcile.Difference, error) { return d.carry(d.desired()) }

// carry is carryOut of what was desired a moment ago. What fails is a condition, and tried again.
func (d *daemon) carry(config model.Config) (difference reconcile.Difference, err error) {
	defer func() {
		if err != nil {
			d.retries.failing(err)
		} else {
			d.retries.succeeded()
		}
	}()
	d.ways.Follow(config.Services)
	own, err := hostAddresses()
	if err != nil {
		return reconcile.Difference{}, err
	}
	desired := reconcile.Desired{
		Services: config.Services,
		Sources:  d.ways.Sources(),
		HostOwn:  own,
		Limits:   config.Limits,
		Settle:   config.Timeouts.Settle,
	}
	d.sources.Store(&desired.Sources)
	difference, err = d.reconciler.Apply(desired)
	d.ways.Change(d.reconciler.BackendChanges())
	if err != nil {
		d.ways.Doubt() // a backend may be put anew, at the place that it had
		return difference, fmt.Errorf("apply the configuration: %w", err)
	}
	if !d.draining { // then all are, and it is meant
		d.conditions.Only(condition.NoBackend, deserted(config.Services))
	}
	if err := d.datapath.Heartbeat(); err != nil { // from here on the hops are fresh
		return difference, err
	}
	return difference, d.announcer.want(config, desired.Sources, own)
}

// portPool is where source ports of full NAT come from.
func portPool(node model.Node) (value.PortRange, error) {
	if node.SNAT.Ports != (value.PortRange{}) {
		return node.SNAT.Ports, nil
	}
	return freePorts()
}
