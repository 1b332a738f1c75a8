// Package event keeps one Event in the cluster for each cause of a fault: `kubectl describe` shows it beside the Service or
// the Node.
//
//	source ──► Show(all faults) ──► Teller ──► Event, by the name OBJECT.HASH
//	                                            Warning while the fault holds, Normal once it has ended
//
// The name is made from the cause, so the agents of all nodes write one Event together, and an agent that restarts
// finds its earlier Event. A fault that comes and goes is reported in its present state, at most a few times and then once a minute.
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

// component is the reporter's name in `kubectl describe`.
const component = "shunt-kube"

// Fault is a fault with the object that its Event is about.
type Fault struct {
	translate.Fault
	About corev1.ObjectReference
}

// Pace limits how often an Event is written.
type Pace struct {
	// Again is the time after which this agent may change an Event once more, beyond the first few times.
	Again time.Duration
	// Refresh is the age at which an Event whose fault holds is written again. The apiserver forgets Events after an hour
	// unless it is configured otherwise (--event-ttl).
	Refresh time.Duration
	// Retry is the time after which a failed write is tried again.
	Retry time.Duration
}

// DefaultPace is the pace of agents.
var DefaultPace = Pace{Again: time.Minute, Refresh: 30 * time.Minute, Retry: 10 * time.Second}

// few is the number of changes of an Event that may come at once: a fault comes, is fixed, and comes back.
const few = 3

// Teller writes the faults into Events. It waits for the apiserver; callers of Show do not.
type Teller struct {
	client kubernetes.Interface
	node   string
	pace   Pace
	log    *slog.Logger
	shown  chan map[string]Fault // the last faults that were shown and that Run has not taken yet

	causes map[string]*cause // by name of the Event
	failed bool              // whether the last attempt failed; the log has its error
}

type cause struct {
	Fault
	since time.Time // the time at which the fault was found
	holds bool      // whether it holds now
	told  bool      // the state in the Event
	at    time.Time // when the Event was last looked at; zero: never
	limit *rate.Limiter
}

// New returns a Teller that has not written anything.
func New(client kubernetes.Interface, node string, pace Pace, log *slog.Logger) *Teller {
	return &Teller{client: client, node: node, pace: pace, log: log, shown: make(chan map[string]Fault, 1), causes: map[string]*cause{}}
}

// Show replaces the faults: all has every fault that holds now. It is for one goroutine, and does not wait.
func (t *Teller) Show(all []Fault) {
	named := map[string]Fault{}
	for _, f := range all {
		named[t.name(f)] = f
	}
	select {
	case <-t.shown: // not taken yet
	default:
	}
	t.shown <- named
}

// Run writes Events until ctx ends.
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

// take compares the present faults with the earlier ones.
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

// due returns the time at which the Event of a cause has to be looked at.
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

// work writes the Events that are due, and returns the time until the next one is.
func (t *Teller) work(ctx context.Context) time.Duration {
	now := time.Now()
	next := now.Add(t.pace.Refresh)
	for name, c := range t.causes {
		if !c.holds && !c.told {
			if c.limit.Tokens() >= few { // until then the fault may come back
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
				return t.pace.Retry // the apiserver may be away: then one timeout is enough
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

// tellTimeout limits the work on one Event.
const tellTimeout = 5 * time.Second

// tell makes the Event show whether the fault holds. Another agent may have done so already.
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

// event returns the contents of an Event.
func (t *Teller) event(name string, c *cause) *corev1.Event {
	now := metav1.Now()
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: name, Namespace: c.namespace()},
		InvolvedObject: c.About, Reason: reasons[c.Code], Type: corev1.EventTypeWarning, Message: t.prefix(c.Fault) + c.Text + ": " + c.Remedy,
		Source: corev1.EventSource{Component: component, Host: t.node}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: component,
	}
	if !c.holds {
		e.Type, e.Message = corev1.EventTypeNormal, "Ended: "+t.prefix(c.Fault)+c.Text
	}
	return e
}

// namespace returns the Event's namespace: the default one for the cluster's own objects, as kubelet does.
func (f *Fault) namespace() string {
	if f.About.Namespace == "" {
		return metav1.NamespaceDefault
	}
	return f.About.Namespace
}

// prefix returns the beginning of the message of a fault that may exist only on this node.
func (t *Teller) prefix(f Fault) string {
	if f.Code == translate.ServiceRefused || f.Code == translate.HealthPortUnserved {
		return "on node " + t.node + ": "
	}
	return ""
}

// name returns the Event's name: equal for all agents with the same fault, and different for another cause.
func (t *Teller) name(f Fault) string {
	const objectMax = 200 // of 253
	sum := sha256.Sum256([]byte(string(f.About.UID) + "\x00" + string(f.Code) + "\x00" + t.prefix(f) + f.Text))
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
	translate.NetworkUnreached:   "AddressNotInNetwork",
	translate.AgentAway:          "AgentNotReady",
	translate.KubeProxyFound:     "KubeProxyFound",
	translate.EndpointsMissing:   "NoEndpoints",
}
