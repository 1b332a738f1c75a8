package daemon

import (
	"context"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// Foresee is node.Foreseer's: what Apply would change, with what checks know of backends by now.
func (d *daemon) Foresee(ctx context.Context, settings any) (node.Difference, error) {
	config := settings.(*file.Parsed).Config
	d.changing.Lock()
	defer d.changing.Unlock()
	d.applying.Lock()
	defer d.applying.Unlock()
	defer d.names.forget()
	changes := value.DifferentSettings(d.writer.Snapshot().Node.Settings(), config.Node.Settings())
	var declared []state.Declaration
	if err := d.waiting(func() { declared, _ = d.names.expanded(ctx, []state.Declaration{ofFile(config)}) }); err != nil {
		return node.Difference{}, err
	}
	next, err := d.writer.Try(declared...)
	if err != nil {
		return node.Difference{}, err
	}
	if err := requireInterfaces(d.unknown(next.Node.Interfaces)); err != nil {
		return node.Difference{}, err
	}
	if _, err := portPool(next.Node); err != nil {
		return node.Difference{}, err
	}
	services := d.checks.monitor.Serve(next.Services, false, d.unreachable)
	desired := reconcile.Desired{Services: services, HostOwn: d.own, Limits: next.Node.Limits}
	if sources := d.sources.Load(); sources != nil {
		desired.Sources = *sources
	}
	difference, err := d.reconciler.Plan(desired)
	if err != nil {
		return node.Difference{}, err
	}
	difference.Cuts = append(d.countCuts(difference, services), d.foreseenClosings(services)...)
	foreseen := node.Difference{Settings: changes, Services: status.Difference(difference), Cuts: status.Cuts(difference)}
	if !difference.Empty() {
		foreseen.Text = difference.String()
	}
	return foreseen, nil
}

// foreseenClosings are the flows of backends that are down, where a service begins to close them.
func (d *daemon) foreseenClosings(services []*model.Service) (all []reconcile.Cut) {
	ends := newlyClosed(d.checks.servedLast(), services)
	if len(ends) == 0 {
		return nil
	}
	open, err := d.datapath.CountOpen()
	if err != nil {
		d.log.Warn("cannot count the flows of backends that are down", "error", err)
		return nil
	}
	for _, c := range closings(ends, services, open) {
		all = append(all, reconcile.Cut{Service: c.Subject, Text: "service " + c.Subject + ": " + c.Text})
	}
	return all
}
