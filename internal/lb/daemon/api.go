package daemon

import (
	"context"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/status"
)

// views is the data plane as the API reads it, opened at the first request. It is separate from the view that
// is written, because reading may take long, and no writer may wait for it.
type views struct {
	mu    sync.Mutex
	view  *store.View
	ended bool
}

// with opens the view if necessary, and calls the function with it.
func (v *views) with(instance string, look func(*store.View) error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended {
		return control.ErrStopping
	}
	if v.view == nil {
		view, err := datapath.OpenReadOnly(store.Options{Instance: instance})
		if err != nil {
			return err
		}
		v.view = view
	}
	return look(v.view)
}

// read adds the contents of the data plane to a status.
func (v *views) read(s *shuntv1.GetStatusResponse) error {
	return v.with(s.Instance, func(view *store.View) error {
		_, err := status.Read(view, s)
		return err
	})
}

// usage reads the counters alone.
func (v *views) usage(instance string) (u store.Usage, err error) {
	err = v.with(instance, func(view *store.View) (err error) {
		u, err = view.Usage()
		return err
	})
	return u, err
}

// end closes the maps, so that they can be removed. Reading fails from then on.
func (v *views) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ended = true
	if v.view != nil {
		_ = v.view.Close() // nothing was written
		v.view = nil
	}
}

// Status implements node.Instance.
func (d *daemon) Status(_ context.Context, s *shuntv1.GetStatusResponse) error {
	if err := d.views.read(s); err != nil {
		return err
	}
	interfaces, checks := d.plane.interfaces, d.applier.checks
	showMissed(s.Attached, framesMissed(interfaces.names(), d.host.Log))
	interfaces.showPatterns(s.Attached)
	showChains(s.Attached, d.plane.datapath.Chain, d.host.Log)
	overrides := d.overrides.writer.Overrides()
	s.Daemon.Overrides = status.Overrides(overrides)
	settling := d.applier.reconciler.Settling()
	s.Daemon.SlotsInTransition, s.Daemon.SlotsMarked = int32(settling.Transition), int32(settling.Marked)
	for _, a := range interfaces.list() {
		s.Daemon.Attachments = append(s.Daemon.Attachments, &shuntv1.Attachment{Interface: a.Interface, Mode: string(a.Mode), Reason: a.Reason})
	}
	snapshot := d.snapshot()
	status.Complete(s, status.Known{Configured: snapshot.Configured, Served: checks.servedLast(), Overrides: overrides,
		Health: checks.monitor.Report(snapshot.Services)})
	return nil
}

// publish sends a difference to the clients that watch, if there is one.
func publish(events *control.Events, difference reconcile.Difference) {
	if !difference.Empty() {
		events.Publish(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "changed"})
	}
}

// eventOfHealth makes an event for watching clients from a backend's change of state.
func eventOfHealth(t health.Transition) *shuntv1.WatchResponse {
	return &shuntv1.WatchResponse{Time: timestamppb.New(t.At), Event: "health", Health: status.HealthChange(t)}
}
