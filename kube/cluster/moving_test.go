package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// held is a connection that began while kube-proxy balanced.
type held struct {
	again   func(context.Context) (lab.Answer, error)
	backend string
	lost    string // when it was found to be; empty: it is not
	why     error
}

// way is from where and by which address a Service is used.
type way struct {
	name string
	new  func(ctx context.Context) error // one new connection
	open func(ctx context.Context) (func(context.Context) (lab.Answer, error), error)
	held []*held
}

// hold opens a connection, and asks on it once.
func (w *way) hold(ctx context.Context) (*held, error) {
	again, err := w.open(ctx)
	if err != nil {
		return nil, err
	}
	answer, err := again(ctx)
	return &held{again: again, backend: answer.Backend}, err
}

// heldByWay is the number of connections of a way that are open throughout.
const heldByWay = 12

// TestMoving: a cluster with kube-proxy gets shunt-kube instead, in the steps of docs/guide/kubernetes.md, while
// connections are open and new ones begin. On each way a new connection succeeds after each step, and no established
// one is lost. The log has the number of new ones of a load that fail.
func TestMoving(t *testing.T) {
	c := must(Up(t.Context(), options(t)))(t)
	defer func() { ok(t, c.Down()) }()
	s := &test{Cluster: c, T: t}
	ok(t, c.StartKubeProxy())
	s.pods = must(c.Serve(within(t), "web", false))(t)
	s.hosts = must(c.Serve(within(t), "host", true))(t)
	outer := netip.MustParseAddr("203.0.113.10")
	web := must(c.Service(within(t), "web", "type: LoadBalancer, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]", outer))(t)
	local := must(c.Service(within(t), "local", "type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]", netip.MustParseAddr("203.0.113.11")))(t)
	nodePort := func(of *corev1.Service) string { return At(c.Nodes[0].Addr4().String(), of.Spec.Ports[0].NodePort) }
	clusterIP := At(web.Spec.ClusterIP, 80)
	ways := []*way{
		s.wayFrom(&s.pods[0], "pod to cluster IP", clusterIP),
		s.wayFrom(&s.hosts[0], "node to cluster IP", clusterIP),
		s.wayFrom(&s.pods[0], "pod to pod", At(s.pods[1].Status.PodIP, 8080)),
		s.wayFromOutside("outside to node port", "tcp", nodePort(web)),
		s.wayFromOutside("outside to load balancer", "tcp", At(outer.String(), 80)),
		s.wayFromOutside("outside to node port, policy Local", "tcp", nodePort(local)),
	}
	for _, w := range ways {
		ok(t, Eventually(within(t), func() error { return w.new(t.Context()) })) // kube-proxy has heard of it
		for range heldByWay {
			w.held = append(w.held, must(w.hold(within(t)))(t))
		}
	}

	load := newLoad(t.Context(), ways, 0)
	step := func(name string, do func() error) {
		load.enter(name)
		begin := time.Now()
		ok(t, do())
		took := time.Since(begin)
		for _, w := range ways { // each once, so that each way has met the new state
			if err := w.new(t.Context()); err != nil {
				t.Errorf("%s: a new connection %s: %v", name, w.name, err)
			}
		}
		s.lookAt(ways, name)
		t.Logf("%s: %s", name, took.Round(time.Millisecond))
	}
	step("1 before", func() error { return nil })
	step("2 shunt-kube comes", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), Patience)
		defer cancel()
		if err := c.Install(ctx, map[string]any{"healthPort": 10257, "moving": true}); err != nil { // kube-proxy has 10256
			return err
		}
		return c.AwaitAgents(ctx)
	})
	step("3 kube-proxy stops", c.StopKubeProxy)
	step("4 its rules go", func() error { return c.CleanKubeProxy(within(t)) })
	step("5 after", func() error { return nil })
	load.end()

	t.Log("new connections, failed of all, by step\n" + load.String())
	var lines []string
	for _, w := range ways {
		lost := map[string]int{}
		var why error
		for _, h := range w.held {
			if h.lost != "" {
				lost[h.lost]++
				why = h.why
			}
		}
		lines = append(lines, fmt.Sprintf("%-36s %v %v", w.name, lost, why))
	}
	t.Logf("established connections lost, of %d each, by step\n%s", heldByWay, strings.Join(lines, "\n"))
	if lostOf(ways) > 0 {
		t.Errorf("established connections were lost: %d", lostOf(ways))
	}
}

// lostOf counts the connections that were open throughout, and are lost.
func lostOf(ways []*way) (lost int) {
	for _, w := range ways {
		for _, h := range w.held {
			if h.lost != "" {
				lost++
			}
		}
	}
	return lost
}

// wayFrom is from a pod of Serve.
func (s *test) wayFrom(pod *corev1.Pod, name, address string) *way {
	return &way{name: name,
		new: func(ctx context.Context) error { _, err := s.From(pod).Ask(ctx, "tcp", address); return err },
		open: func(ctx context.Context) (func(context.Context) (lab.Answer, error), error) {
			return s.Hold(ctx, pod, address)
		}}
}

func (s *test) wayFromOutside(name, network, address string) *way {
	return &way{name: name,
		new: func(ctx context.Context) error { _, err := s.FromOutside().Ask(ctx, network, address); return err },
		open: func(ctx context.Context) (func(context.Context) (lab.Answer, error), error) {
			session, err := s.Outside.OpenSession(ctx, network, netip.AddrPort{}, address)
			if err != nil {
				return nil, err
			}
			s.Cleanup(func() { session.Close() })
			return func(ctx context.Context) (lab.Answer, error) {
				ctx, cancel := context.WithTimeout(ctx, answerTimeout)
				defer cancel()
				return session.Ask(ctx, "/")
			}, nil
		}}
}

// lookAt asks on all connections that are not lost.
func (s *test) lookAt(ways []*way, when string) {
	var all sync.WaitGroup
	for _, w := range ways {
		for _, h := range w.held {
			if h.lost != "" {
				continue
			}
			all.Go(func() {
				answer, err := h.again(s.Context())
				if err != nil || answer.Backend != h.backend {
					h.lost, h.why = when, err
				}
			})
		}
	}
	all.Wait()
}

// load begins connections on all ways, one after the other on each, and counts the failures.
type load struct {
	mutex  sync.Mutex
	now    string
	counts map[string]map[string]*[2]int // by step and way: failed, all
	errors map[string]error              // the first of each
	stop   context.CancelFunc
	ended  sync.WaitGroup
}

// newLoad starts a load. With a pace, a way has a turn each time it has passed, and in each turn asks on one of the connections that are kept, too: the
// way is counted again, with keptName, and a lost connection is followed by another one. Without a pace, one turn follows the other.
func newLoad(ctx context.Context, ways []*way, pace time.Duration) *load {
	l := &load{counts: map[string]map[string]*[2]int{}, errors: map[string]error{}}
	going, stop := context.WithCancel(ctx)
	l.stop = stop
	for _, w := range ways {
		l.ended.Go(func() {
			var ticks <-chan time.Time
			if pace > 0 {
				ticker := time.NewTicker(pace)
				defer ticker.Stop()
				ticks = ticker.C
			}
			for turn := 0; going.Err() == nil; turn++ {
				step := l.step()
				l.count(step, w.name, w.new(ctx)) // also the last one has its time, and counts
				if pace > 0 {
					<-ticks
					l.count(step, keptName(w), w.ask(ctx, turn%len(w.held)))
				}
			}
		})
	}
	return l
}

func keptName(w *way) string { return w.name + ", kept" }

// ask asks on an open connection, and has another one follow it if it is lost.
func (w *way) ask(ctx context.Context, which int) error {
	h := w.held[which]
	answer, lost := h.again(ctx)
	if lost == nil && answer.Backend != h.backend {
		lost = fmt.Errorf("answered by %s, and before by %s", answer.Backend, h.backend)
	}
	if lost != nil {
		if next, err := w.hold(ctx); err == nil {
			w.held[which] = next
		}
	}
	return lost
}

func (l *load) step() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.now
}

func (l *load) enter(step string) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.now = step
}

// count counts one connection; before the first step it does not.
func (l *load) count(step, way string, err error) {
	if step == "" {
		return
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.counts[step] == nil {
		l.counts[step] = map[string]*[2]int{}
	}
	if l.counts[step][way] == nil {
		l.counts[step][way] = &[2]int{}
	}
	l.counts[step][way][1]++
	if err != nil {
		l.counts[step][way][0]++
		if l.errors[step+way] == nil {
			l.errors[step+way] = err
		}
	}
}

// counted returns the numbers of a way in a step.
func (l *load) counted(step, way string) (failed, of int) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if n := l.counts[step][way]; n != nil {
		return n[0], n[1]
	}
	return 0, 0
}

// first returns the first error of a way in a step.
func (l *load) first(step, way string) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.errors[step+way]
}

func (l *load) end() {
	l.stop()
	l.ended.Wait()
}

func (l *load) String() string {
	var text strings.Builder
	for _, step := range slices.Sorted(maps.Keys(l.counts)) {
		fmt.Fprintln(&text, step)
		for _, way := range slices.Sorted(maps.Keys(l.counts[step])) {
			n := l.counts[step][way]
			fmt.Fprintf(&text, "  %-36s %d of %d", way, n[0], n[1])
			if err := l.errors[step+way]; err != nil {
				fmt.Fprintf(&text, "  %v", err)
			}
			fmt.Fprintln(&text)
		}
	}
	return text.String()
}
