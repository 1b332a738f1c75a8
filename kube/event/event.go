// Package event keeps one Event in the cluster for each cause of a fault: `kubectl describe` shows it beside the Service or
// the Node.
//
//	source ──► Show(all faults) ──► Teller ──► Event, by the name OBJECT.HASH
//	                                            Warning while the fault holds, Normal once it has ended
//
// The name is made of the cause, so the agents of all nodes write one Event and not one each, and an agent that starts
// again finds what it said before. A fault that comes and goes is told as it is then, at most a few times and then once a minute.
package event

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/shunt-lb/shunt/kube/translate"
)

// component is who tells, as `kubectl describe` shows it.
const component = "shunt-kube"

// Fault is a fault with the object that its Event is about.
type Fault struct {
	translate.Fault
	About corev1.ObjectReference
}

// Pace is how often is told.
type Pace struct {
	// Again is the time after which this agent may change an Event once more, beyond the first few times.
	Again time.Duration
	// Refresh is the age at which an Event whose fault holds is written anew. The apiserver forgets Events after an hour
	// unless told otherwise (--event-ttl).
	Refresh time.Duration
	// Retry is the time after which what has failed is tried again.
	Retry time.Duration
}

// DefaultPace is for agents.
var DefaultPace = Pace{Again: time.Minute, Refresh: 30 * time.Minute, Retry: 10 * time.Second}

// few is how often an Event may be changed at once: a fault comes, is fixed, and is back.
const few = 3

// Teller keeps the Events as the faults are. It waits for the apiserver; those who call Show do not.
type Teller struct {
	client kubernetes.Interface
	node   string
	pace   Pace
	log    *slog.Logger
	shown  chan map[string]Fault // the last that was shown and has not been seen

	causes map[string]*cause // by name of the Event
	failed bool              // the last attempt; its failure is in the log
}

type cause struct {
	Fault
	since time.Time // it is known
	holds bool      // now
	told  bool      // as the Event says
	at    time.Time // when the Event was looked at last; zero: never
	limit *rate.Limiter
}

// New is a Teller that has told nothing.
func New(client kubernetes.Interface, node string, pace Pace, log *slog.Logger) *Teller {
	return &Teller{client: client, node: node, pace: pace, log: log, shown: make(chan map[string]Fault, 1), causes: map[string]*cause{}}
}

// Show says which faults there are: all that hold now. It is for one goroutine, and does not wait.
func (t *Teller) Show(all []Fault) {
	named := map[string]Fault{}
	for _, f := range all {
		named[t.name(f)] = f
	}
	select {
	case <-t.shown: // nobody has seen it
	default:
	}
	t.shown <- named
}

// Run tells until ctx ends.
func (t *Teller) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.shown:
			t.take(now)
		case <-timer.C:
		}
		timer.Reset(t.work(ctx))
	}
}

// take compares what holds with what held.
func (t *Teller) take(now map[string]Fault) {
	for name, f := range now {
		c := t.causes[name]
		if c == nil {
			c = &cause{since: time.Now(), limit: rate.NewLimiter(rate.Every(t.pace.Again), few)}
			t.causes[name] = c
		}
		c.Fault, c.holds = f, true
	}
	for name, c := range t.causes {
		if _, holds := now[name]; !holds {
			c.holds = false
		}
	}
}

// due is when the Event of a cause is to be looked at.
func (t *Teller) due(c *cause) time.Time {
	switch {
	case c.at.IsZero():
		return c.since
	case c.told != c.holds && c.limit.Tokens() >= 1:
		return c.at
	case c.told != c.holds:
		return c.at.Add(t.pace.Again)
	}
	return c.at.Add(t.pace.Refresh)
}

// work tells what is due, and returns how long nothing will be.
func (t *Teller) work(ctx context.Context) time.Duration {
	now := time.Now()
	next := now.Add(t.pace.Refresh)
	for name, c := range t.causes {
		if !c.holds && !c.told {
			if c.limit.Tokens() >= few { // until then it may come back
				delete(t.causes, name)
			}
			continue
		}
		if !t.due(c).After(now) {
			if err := t.tell(ctx, name, c); err != nil {
				if ctx.Err() == nil && !t.failed {
					t.log.Warn("could not make an Event of a fault; trying again", "object", c.Object, "fault", c.Code, "error", err)
				}
				t.failed = true
				return t.pace.Retry // the apiserver may be away: not one timeout for each
			}
			if c.told != c.holds {
				c.limit.AllowN(now, 1)
			}
			t.failed, c.told, c.at = false, c.holds, now
		}
		if due := t.due(c); due.Before(next) {
			next = due
		}
	}
	return max(0, time.Until(next))
}

// tellTimeout is for one Event.
const tellTimeout = 5 * time.Second

// tell has the Event say whether the fault holds. Another agent may have done so already.
func (t *Teller) tell(ctx context.Context, name string, c *cause) error {
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	events := t.client.CoreV1().Events(c.namespace())
	wanted := t.event(name, c)
	if c.holds {
		_, err := events.Create(ctx, wanted, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		there, err := events.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) && !c.holds {
			return nil // the apiserver has forgotten it, or the namespace is gone
		}
		if err != nil {
			return err
		}
		if there.Type == wanted.Type && (!c.holds || time.Since(there.LastTimestamp.Time) < t.pace.Refresh) {
			return nil
		}
		there.Type, there.Message, there.LastTimestamp, there.Source = wanted.Type, wanted.Message, wanted.LastTimestamp, wanted.Source
		if c.holds {
			there.Count++
		}
		_, err = events.Update(ctx, there, metav1.UpdateOptions{})
		return err
	})
}

// event is the contents of an Event.
func (t *Teller) event(name string, c *cause) *corev1.Event {
	now := metav1.Now()
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: name, Namespace: c.namespace()},
		InvolvedObject: c.About, Reason: reasons[c.Code], Type: corev1.EventTypeWarning, Message: t.place(c.Fault) + c.Text + ": " + c.Remedy,
		Source: corev1.EventSource{Component: component, Host: t.node}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: component,
	}
	if !c.holds {
		e.Type, e.Message = corev1.EventTypeNormal, "Ended: "+t.place(c.Fault)+c.Text
	}
	return e
}

// namespace is the Event's: that of a cluster's own objects is the default one, as kubelet has it.
func (f *Fault) namespace() string {
	if f.About.Namespace == "" {
		return metav1.NamespaceDefault
	}
	return f.About.Namespace
}

// place begins the message of a fault that this node may have alone.
func (t *Teller) place(f Fault) string {
	if f.Code == translate.ServiceRefused || f.Code == translate.HealthPortUnserved {
		return "on node " + t.node + ": "
	}
	return ""
}

// name is the Event's: the same at all agents that have the same fault, and another for another cause.
func (t *Teller) name(f Fault) string {
	const objectMax = 200 // of 253
	sum := sha256.Sum256([]byte(string(f.About.UID) + "\x00" + string(f.Code) + "\x00" + t.place(f) + f.Text))
	return f.About.Name[:min(len(f.About.Name), objectMax)] + "." + hex.EncodeToString(sum[:8])
}

// reasons are the faults' names in Kubernetes' style.
var reasons = map[translate.Code]string{
	translate.SCTPRefused:        "SCTPNotServed",
	translate.ObjectInvalid:      "ObjectInvalid",
	translate.FamilyUnserved:     "FamilyNotServed",
	translate.NodeAddressMissing: "NodeAddressMissing",
	translate.AffinityShortened:  "AffinityShortened",
	translate.PodRangeMissing:    "PodRangeMissing",
	translate.HealthPortUnserved: "HealthCheckNodePortNotServed",
	translate.FrontendTaken:      "AddressTaken",
	translate.ServiceRefused:     "ServiceRefused",
	translate.PoolExhausted:      "NoAddressFree",
	translate.AddressOutsidePool: "AddressNotInPool",
	translate.AddressRefused:     "AddressRefused",
	translate.KubeProxyFound:     "KubeProxyFound",
	translate.EndpointsMissing:   "NoEndpoints",
}
