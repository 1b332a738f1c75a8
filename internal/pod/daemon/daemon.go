// Package daemon is the pod shortcut as a node runs it: it finds the pods that the file names, has the watch judge
// them, and reports the fate of their packets.
//
//	file ──► build ──► watch.Routed ──► watch ──► sh_pod at the pods' veths
//	                   watch.Beyond       │       sh_pod_in at the uplinks
//	                                      │
//	        every second ─────────────────┴──► conditions, status, metrics
//
// Nothing outlives the process except pairs of sockets with unread data: while no process judges them, pods may not
// take the shortcut. Their connections go on through the host's stack.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// Name is the product's name, and its key in the file.
	Name = "accelerate"
	// lookInterval is the interval at which the daemon reports its state.
	lookInterval = time.Second
	// part is the node's name for the goroutine that looks.
	part = "the pod shortcut"
)

// Product returns the pod shortcut as a node's product.
func Product() node.Product {
	return node.Product{
		Name: Name,
		Part: config.NewSection(Name, "Packets from one pod to another, on this host or beyond an uplink, go past the host's stack. A pod is a network namespace behind a veth with a route to it, as made by Calico and the CNI plugin ptp. See docs/guide/pods.md.",
			"{interfaces: \"cali*\"}", build),
		CheckHost: func(s any, how node.HostCheck) { s.(*parsed).checkHost(how) },
		Describe:  func(s any) (string, []string) { return s.(*parsed).describe() },
		Needs:     func(any) []node.Need { return needs },
		Remove:    remove,
		Left: func() ([]string, error) {
			left, err := LeftPairs()
			return slices.Collect(maps.Keys(left)), err
		},
		Open: func(_ context.Context, host *node.Host, s any) (node.Instance, error) {
			return open(host, s.(*parsed).settings)
		},
	}
}

// daemon is an open product.
type daemon struct {
	host  *node.Host
	stop  context.CancelFunc
	ended chan struct{}

	mu     sync.Mutex // guards the fields that follow
	wanted settings
	watch  *watch.Watch    // nil: same_node is false
	past   shortcut.Counts // of watches that are closed
	steers bool            // the watch can have steers
	told   string          // the last summary in the log
	pairs  *pairs
}

func open(host *node.Host, s settings) (*daemon, error) {
	ctx, stop := context.WithCancel(context.Background())
	d := &daemon{host: host, stop: stop, ended: make(chan struct{}), past: shortcut.Counts{}, pairs: newPairs(host.Instance, host.Log)}
	if err := d.bring(s); err != nil {
		stop()
		return nil, err
	}
	d.pairs.bring(s.sockets)
	st, _ := d.status() // an error is a condition within a second
	d.told = d.summary(&st)
	go d.look(ctx)
	return d, nil
}

// bring brings settings into force, and changes only the parts that differ. After an error the settings before are in
// force, if that is still possible.
func (d *daemon) bring(s settings) error {
	if d.watch != nil && s.sameNode && s.mode == d.wanted.mode && (d.steers || len(s.steers) == 0) {
		if err := d.set(&s); err != nil {
			return errors.Join(err, d.set(&d.wanted))
		}
		d.wanted = s
		return nil
	}
	if err := d.shut(); err != nil {
		return err
	}
	if s.sameNode {
		var err error
		if d.watch, err = openWatch(&s); err != nil {
			if d.wanted.sameNode {
				var again error
				d.watch, again = openWatch(&d.wanted)
				err = errors.Join(err, again)
			}
			d.steers = len(d.wanted.steers) > 0
			return err
		}
	}
	d.steers = len(s.steers) > 0
	d.wanted = s
	return nil
}

// set changes the list of watched pods.
func (d *daemon) set(s *settings) error {
	return errors.Join(d.watch.Set(s.find(), watch.Beyond(s.uplinks...)), d.watch.SetSteers(s.steers))
}

func openWatch(s *settings) (*watch.Watch, error) {
	return watch.Open(watch.Options{Mode: s.mode, Find: s.find(), FindFar: watch.Beyond(s.uplinks...), Steers: s.steers, In: func(do func() error) error { return do() }})
}

// shut ends the watch, and keeps its counts.
func (d *daemon) shut() error {
	if d.watch == nil {
		return nil
	}
	st, err := d.watch.Status()
	d.past.Add(st.Counts)
	err = errors.Join(err, d.watch.Close())
	d.watch = nil
	return err
}

// look reports changes, until ctx ends.
func (d *daemon) look(ctx context.Context) {
	defer close(d.ended)
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		d.mu.Lock()
		d.pairs.bring(d.wanted.sockets)
		st, err := d.status()
		d.tell(&st, err)
		summary := d.summary(&st)
		changed := summary != d.told
		d.told = summary
		d.mu.Unlock()
		if changed {
			d.host.Summarize()
		}
		d.host.Alive(part)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// status returns the watch's status; the zero value while the shortcut is off.
func (d *daemon) status() (watch.Status, error) {
	if d.watch == nil {
		return watch.Status{Mode: d.wanted.mode}, nil
	}
	return d.watch.Status()
}

// tell sets the conditions by a status, or by the error in its place.
func (d *daemon) tell(st *watch.Status, err error) {
	var alone, missing, unjudged, ways []condition.Condition
	for _, f := range st.Far {
		if f.State != shortcut.Taken.String() && f.Interface != "" {
			c := condition.Condition{Subject: f.Interface, Text: fmt.Sprintf("uplink %s is not used: %s: %s", f.Interface, f.State, f.Why)}
			if f.Network.IsValid() {
				c = condition.Condition{Subject: f.Network.String(), Text: fmt.Sprintf("packets to and from %s by %s go through the host's stack: %s: %s", f.Network, f.Interface, f.State, f.Why)}
			}
			ways = append(ways, c)
		}
	}
	said := map[string]bool{}
	for _, p := range st.Pods {
		if p.State != shortcut.Taken.String() && !said[p.Interface] {
			said[p.Interface] = true
			alone = append(alone, condition.Condition{Subject: p.Interface, Text: aloneText(&p)})
		}
	}
	if d.watch != nil && len(st.Pods) == 0 && err == nil {
		missing = append(missing, condition.Condition{Subject: Name, Text: fmt.Sprintf("no veth of this host that leads into another network namespace matches interfaces: %s", d.wanted.list()[0].Value)})
	}
	if err != nil {
		unjudged = append(unjudged, condition.Condition{Subject: Name, Text: fmt.Sprintf("cannot judge whether pods may take the shortcut: %v", err)})
	}
	d.host.Conditions.Only(condition.PodLeftAlone, alone)
	d.host.Conditions.Only(condition.NetworkLeftAlone, ways)
	d.host.Conditions.Only(condition.SteerLeft, steerConditions(st))
	d.host.Conditions.Only(condition.SocketsRefused, d.pairs.conditions())
	d.host.Conditions.Only(condition.PodsMissing, missing)
	d.host.Conditions.Only(condition.PodsUnjudged, unjudged)
}

func aloneText(p *watch.PodStatus) string {
	who := "the pod behind " + p.Interface
	if p.Address.IsValid() {
		who += " (" + p.Address.String() + ")"
	}
	if p.Why == "" {
		return fmt.Sprintf("%s is left to the host's stack: %s", who, p.State)
	}
	return fmt.Sprintf("%s is left to the host's stack: %s: %s", who, p.State, p.Why)
}

// Refuses implements node.Instance.
func (d *daemon) Refuses(any) error { return nil }

// Apply implements node.Instance.
func (d *daemon) Apply(_ context.Context, s any) (node.Difference, error) {
	after := s.(*parsed).settings
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.wanted.list()
	if err := d.bring(after); err != nil {
		return node.Difference{}, fmt.Errorf("accelerate pods as the file says: %w", err)
	}
	d.pairs.bring(after.sockets)
	st, err := d.status()
	d.tell(&st, err)
	return node.Difference{Settings: value.DifferentSettings(before, after.list())}, nil
}

// Summary implements node.Instance.
func (d *daemon) Summary() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	st, _ := d.status() // an error is a condition
	return d.summary(&st)
}

func (d *daemon) summary(st *watch.Status) string {
	if d.watch == nil {
		return "accelerating no pods, because same_node is false"
	}
	pods := podsOf(st)
	took := 0
	for _, p := range pods {
		if takes(p) {
			took++
		}
	}
	text := fmt.Sprintf("accelerating %d of %s, %s", took, value.Counted(len(pods), "pod"), st.Mode)
	if len(d.wanted.uplinks) > 0 {
		ways, of := waysOf(st)
		text += fmt.Sprintf(", and the ways to %d of %s", ways, value.Counted(of, "network"))
	}
	if len(st.Steers) > 0 {
		text += fmt.Sprintf(", and %d of %s", len(st.Steers)-len(steerConditions(st)), value.Counted(len(st.Steers), "steer"))
	}
	return text
}

// Close implements node.Instance. Nothing outlives the process, for any value of keep, except pairs of sockets with
// unread data.
func (d *daemon) Close(keep bool) error {
	d.stop()
	<-d.ended
	d.mu.Lock()
	defer d.mu.Unlock()
	err := errors.Join(d.shut(), d.pairs.close(keep))
	for _, code := range []string{condition.PodLeftAlone, condition.NetworkLeftAlone, condition.SteerLeft, condition.SocketsRefused, condition.PodsMissing, condition.PodsUnjudged} {
		d.host.Conditions.Only(code, nil)
	}
	return err
}
