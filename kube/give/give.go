// Package give writes the addresses of a pool into the status of Services of type LoadBalancer, on the one node that holds a Lease. It is separate from
// the pool, which needs no client of the apiserver.
package give

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/shunt-lb/shunt/kube/pool"
)

// leaseTimes are the times of an election.
type leaseTimes struct{ duration, renew, retry time.Duration }

// The times of the Lease. Each other agent asks for it after retryPeriod, or up to 2.2 times as long (leaderelection.JitterFactor): 20 small requests a second at most
// with 100 nodes. So an agent that ends is followed within 11 s, and one that dies leaseDuration later.
const (
	leaseDuration = 30 * time.Second
	renewDeadline = 20 * time.Second
	retryPeriod   = 5 * time.Second
)

// giveTimeout limits one request, and giveRetry passes after a failed one.
const (
	giveTimeout = 10 * time.Second
	giveRetry   = time.Second
)

// Options configure a Giver.
type Options struct {
	Client kubernetes.Interface
	// Lease is the NAMESPACE/NAME of the Lease of the one agent that gives.
	Lease string
	// Node is this agent's name in the Lease: no two agents may have one.
	Node string
	Pool pool.Pool
	// Ours reports whether the pool is for a Service. It may be called at any time.
	Ours func(*corev1.Service) bool
	Log  *slog.Logger
}

// Giver writes gifts into the status of Services while it holds the Lease. Run needs the rights to list Services, to update their
// status, and to create, get and update the Lease.
type Giver struct {
	options         Options
	namespace, name string
	wake            chan struct{}
	giving          sync.Mutex // held through a pass, so that the Lease is not released in the middle
	said            string     // the last error of the Lease in the log
	times           leaseTimes
}

// New returns a Giver that gives nothing yet.
func New(o Options) (*Giver, error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(o.Lease)
	if err != nil || namespace == "" || name == "" {
		return nil, fmt.Errorf("--load-balancer-lease is NAMESPACE/NAME, not %q", o.Lease)
	}
	return &Giver{options: o, namespace: namespace, name: name, wake: make(chan struct{}, 1), times: leaseTimes{leaseDuration, renewDeadline, retryPeriod}}, nil
}

// Wake tells the Giver that the pool's Plan probably has gifts. It is for any goroutine, and does not wait.
func (g *Giver) Wake() {
	select {
	case g.wake <- struct{}{}:
	default: // it is awake already
	}
}

// Run takes part in the election and gives until ctx ends. It is called once.
func (g *Giver) Run(ctx context.Context) {
	// The election goes on until a pass at work has ended.
	election, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() {
		g.giving.Lock()
		defer g.giving.Unlock()
		end()
	})()
	lease := &lock{&resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: g.namespace, Name: g.name}, Client: g.options.Client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: g.options.Node}}, g}
	for ctx.Err() == nil {
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: lease, LeaseDuration: g.times.duration, RenewDeadline: g.times.renew, RetryPeriod: g.times.retry, ReleaseOnCancel: true, Name: g.name,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(leads context.Context) { g.lead(ctx, leads) },
				OnStoppedLeading: func() {},
			},
		})
		if err != nil {
			panic(fmt.Sprintf("the times of the Lease: %v", err)) // these are constants, so every test would fail
		}
		elector.Run(election) // also returns when the Lease is lost
	}
}

// lead gives until one of the two ends.
func (g *Giver) lead(ctx, leads context.Context) {
	g.options.Log.Info("giving Services of type LoadBalancer their addresses", "pool", g.options.Pool.String())
	g.Wake() // there may have been gifts while no agent led
	for {
		var again <-chan time.Time
		select {
		case <-ctx.Done():
			return
		case <-leads.Done():
			if ctx.Err() != nil {
				return
			}
			g.options.Log.Warn("another agent gives addresses from now on: this one could not renew the Lease", "lease", g.options.Lease)
			return
		case <-g.wake:
			if err := g.pass(ctx, leads); err != nil {
				g.options.Log.Warn("could not give Services their addresses; trying again", "error", err, "after", giveRetry)
				again = time.After(giveRetry)
			}
		}
		if again != nil {
			select {
			case <-ctx.Done():
			case <-leads.Done():
			case <-again:
				g.Wake()
			}
		}
	}
}

// pass asks the apiserver for all Services in their present state, because the watched ones may be older than the gifts of the last leader, and
// gives the missing addresses. It waits for an answer even if ctx ends: a sent request may be carried out.
func (g *Giver) pass(ctx, leads context.Context) error {
	g.giving.Lock()
	defer g.giving.Unlock()
	if ctx.Err() != nil || leads.Err() != nil {
		return nil
	}
	listing, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveTimeout)
	defer cancel()
	list, err := g.options.Client.CoreV1().Services(metav1.NamespaceAll).List(listing, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list Services: %w", err)
	}
	all := make([]*corev1.Service, len(list.Items))
	for i := range list.Items {
		all[i] = &list.Items[i]
	}
	gifts, _ := g.options.Pool.Plan(all, g.options.Ours) // each agent reports the faults itself
	for _, gift := range gifts {
		if ctx.Err() != nil || leads.Err() != nil {
			return nil
		}
		switch err := g.give(ctx, gift); {
		case err == nil:
			g.options.Log.Info("gave a Service of type LoadBalancer its address", "service", gift.Name(), "addresses", fmt.Sprint(gift.Addresses))
		case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
			g.Wake() // the Service has changed since
		default:
			return fmt.Errorf("write the status of Service %s: %w", gift.Name(), err)
		}
	}
	return nil
}

// give fails with a conflict if the Service has changed since the gift was planned.
func (g *Giver) give(ctx context.Context, gift pool.Gift) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveTimeout)
	defer cancel()
	service := gift.Service.DeepCopy()
	for _, a := range gift.Addresses {
		mode := corev1.LoadBalancerIPModeVIP
		service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a.String(), IPMode: &mode})
	}
	_, err := g.options.Client.CoreV1().Services(service.Namespace).UpdateStatus(ctx, service, metav1.UpdateOptions{})
	return err
}

// lock is the Lease, and logs its errors: the election writes them only to its library's log.
type lock struct {
	*resourcelock.LeaseLock
	giver *Giver
}

// Get implements resourcelock.Interface.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.LeaseLock.Get(ctx)
	if err == nil || !apierrors.IsNotFound(err) {
		l.giver.note(err)
	}
	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l *lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Create(ctx, record)
	if !apierrors.IsAlreadyExists(err) { // another agent was faster
		l.giver.note(err)
	}
	return err
}

// Update implements resourcelock.Interface.
func (l *lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Update(ctx, record)
	if !apierrors.IsConflict(err) { // another agent was faster
		l.giver.note(err)
	}
	return err
}

// note is called by the election only.
func (g *Giver) note(err error) {
	if err == nil {
		g.said = ""
		return
	}
	if text := err.Error(); g.said != text {
		g.said = text
		g.options.Log.Warn("cannot use the Lease of the agent that gives load balancers their addresses; trying again", "lease", g.options.Lease, "error", err)
	}
}
