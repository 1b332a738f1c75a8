package node

import (
	"cmp"
	"context"
	"os"
	"runtime"
	"sync"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/metrics"
	"google.golang.org/protobuf/types/known/timestamppb"
)

var _ control.Handler = (*node)(nil)

// Status returns the whole state of the instance.
func (n *node) Status(ctx context.Context) (*shuntv1.GetStatusResponse, error) {
	if n.phase.Load() == stopping {
		return nil, control.ErrStopping
	}
	s := &shuntv1.GetStatusResponse{Instance: n.opts.Instance, Daemon: &shuntv1.Daemon{
		Pid: int32(os.Getpid()), Since: timestamppb.New(n.since), ConfigPath: n.opts.ConfigPath, Instance: n.opts.Instance,
		Conditions: message.Conditions(n.Conditions())}}
	for _, p := range n.products.states() {
		m := &shuntv1.Product{Name: p.name, Does: p.summary}
		if p.failed != nil {
			m.Failed = p.failed.Error()
		}
		s.Daemon.Products = append(s.Daemon.Products, m)
	}
	err := n.products.each(func(i Instance) error { return i.Status(ctx, s) })
	if err != nil {
		return nil, err
	}
	if n.opts.Status != nil {
		n.opts.Status(s)
	}
	return s, nil
}

// Conditions lists the faults that hold now.
func (n *node) Conditions() []condition.Condition { return n.conditions.List() }

// Overrides returns the balancer's overrides.
func (n *node) Overrides() (found control.Overrides, err error) {
	_ = n.products.each(func(i Instance) error {
		if o, has := i.(Overrider); has {
			found = o.Overridable()
		}
		return nil
	})
	if found != nil {
		return found, nil
	}
	return nil, cmp.Or(n.refuses(), control.ErrNoBalancer)
}

// reloaded counts reloads of the configuration file, by result. The zero value is ready.
type reloaded struct {
	mu sync.Mutex
	metrics.Reloads
}

// note is called after each reading.
func (r *reloaded) note(applied bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Refused = !applied; applied {
		r.Applied = time.Now()
	}
}

func (r *reloaded) get() metrics.Reloads {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Reloads
}

// sample returns the present state of the instance. It may be called at any time, and does not wait for a
// change.
func (n *node) sample() (*metrics.Sample, error) {
	s := &metrics.Sample{Version: n.opts.Version, GoVersion: runtime.Version(), Reloads: n.reloaded.get(),
		SeriesMax: uint64(n.settings.Load().Metrics.SeriesMax)}
	for _, c := range n.conditions.Counts() {
		s.Conditions = append(s.Conditions, metrics.Condition{Code: c.Code, Severity: string(c.Severity), Count: uint64(c.Count)})
	}
	err := n.products.each(func(i Instance) error {
		if sampler, has := i.(Sampler); has {
			return sampler.Sample(s)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}
