package load

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/test/unchanged"
)

// proof is a series of actions on shunt under the load, with all problems found. It collects
// problems rather than fails, because the same code has to catch broken daemons.
type proof struct {
	*bed
	load   *Load
	random *rand.Rand
	config config // the daemon's, or the next one's
	quiet  Report // until the first event
	view   *store.View

	mu       sync.Mutex
	problems []string
	stop     func()
}

// seed is printed, and repeats the choices of a run (but not the machine's part in it).
func seed(t *testing.T) *rand.Rand {
	n := *seedFlag
	if n == 0 {
		n = rand.Uint64N(1 << 32)
	}
	t.Logf("repeat with: go test ./test/load -run '^%s$' -seed=%d", t.Name(), n)
	return rand.New(rand.NewPCG(n, 1))
}

// begin starts shunt and the load, and lets it run undisturbed for a while, for comparison.
func begin(t *testing.T, s setup) *proof {
	t.Helper()
	b := newBed(t)
	b.setup = s
	p := &proof{bed: b, random: seed(t), config: plain()}
	if s.limits != "" {
		p.config.limits = s.limits
	}
	p.config.settings = s.settings
	b.write(p.config)
	b.start()
	view, err := datapath.OpenReadOnly(store.Options{Instance: b.instance})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { view.Close() })
	p.view = view
	p.load = b.load(s.traffic())
	time.Sleep(s.quiet) // no wait for a condition: it is the measurement
	p.quiet = p.load.Report()
	p.stop = p.watch()
	t.Cleanup(p.stop)
	return p
}

func (p *proof) wrong(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// never are the reasons of packets that shunt should have delivered. Reasons that an overloaded
// machine causes are not among them.
var never = []string{"no_backend", "backend_gone", "no_source", "table_full", "egress_unlisted", "internal", "flows_full", "ports_exhausted",
	"not_remembered", "malformed_transport"}

// end stops the load and adds the load's failures. allowed are reasons that may have been counted.
func (p *proof) end(allowed ...string) []string {
	p.t.Helper()
	done := p.load.Report().Done
	for _, kind := range []Kind{KeepAlive, New, UDP} { // the last action has to show
		eventually(p.t, "more "+string(kind), func() error {
			if p.load.Report().Done[kind] == done[kind] {
				return errors.New("none was answered")
			}
			return nil
		})
	}
	transfer := time.Duration(p.traffic().TransferSize/p.traffic().TransferRate) * time.Second
	within(p.t, patience+4*transfer, "a whole transfer", func() error { // only then are its bytes compared
		if r := p.load.Report(); r.Done[Download]+r.Done[Upload] == 0 {
			return errors.New("none has arrived")
		}
		return nil
	})
	r := p.load.End()
	p.stop()
	p.t.Logf("undisturbed: %s", p.quiet)
	p.t.Logf("altogether:  %s", r)
	for _, f := range r.Failures {
		p.wrong("%s", r.Explain(f))
	}
	if r.Late > r.Length/2 { // stalls were hardly judged; all other failures were
		say := p.t.Logf
		if soak {
			say = p.wrong
		}
		say("the machine was late for %s of %s, so this proves little about stalls: run it where less else runs", r.Late, r.Length)
	}
	lost, asked := len(r.Lost)-len(p.quiet.Lost), r.Done[UDP]-p.quiet.Done[UDP]
	if lost*p.quiet.Done[UDP] > len(p.quiet.Lost)*asked {
		p.wrong("%d of %d datagrams were lost, undisturbed %d of %d", lost, asked, len(p.quiet.Lost), p.quiet.Done[UDP])
		for _, f := range r.Lost[len(p.quiet.Lost):] {
			p.wrong("%s", r.Explain(f))
		}
	}
	counters, err := p.view.Counters()
	p.must(err)
	for _, reason := range never {
		if n := counters.Reasons[reason].Packets; n > 0 && !slices.Contains(allowed, reason) {
			p.wrong("%d packets with reason %s", n, reason)
		}
	}
	return p.problems
}

// report fails the test for every problem.
func report(t *testing.T, problems []string) {
	t.Helper()
	for i, problem := range problems {
		if i == 20 {
			t.Errorf("and %d more", len(problems)-i)
			break
		}
		t.Error(problem)
	}
}

// sample is every counter, by the name of its object.
type sample map[string]uint64

func (p *proof) sample() sample {
	before, beforeErr := p.view.Contents()
	counters, err := p.view.Counters()
	after, afterErr := p.view.Contents()
	s := sample{}
	if err := errors.Join(beforeErr, err, afterErr); err != nil {
		p.wrong("the counters cannot be read: %v", err)
		return s
	}
	note := func(what string, t store.Traffic) {
		s[what+" packets in"], s[what+" bytes in"] = t.PacketsIn, t.BytesIn
		s[what+" packets out"], s[what+" bytes out"], s[what+" flows"] = t.PacketsOut, t.BytesOut, t.FlowsCreated
	}
	for i, b := range before.Backends { // a position that changed its owner meanwhile says nothing
		if after.Backends[i].BackendRef == b.BackendRef {
			note(fmt.Sprintf("backend %s at %d/%d", b.BackendAddress, i, b.Generation), counters.Backends[i])
		}
	}
	for i, r := range before.Services {
		if after.Services[i].Generation == r.Generation {
			note(fmt.Sprintf("service %s at %d/%d", r.Name, i, r.Generation), counters.Services[i])
		}
	}
	for name, c := range counters.Reasons {
		s["reason "+name] = c.Packets
	}
	return s
}

// watch reads the counters all the time: none goes back, and packets are counted all the time.
func (p *proof) watch() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		last := p.sample()
		for {
			select {
			case <-done:
				return
			case <-time.After(50 * time.Millisecond):
			}
			now := p.sample()
			for what, before := range last {
				if after, ok := now[what]; ok && after < before {
					p.wrong("the counter %q went back from %d to %d", what, before, after)
				}
			}
			last = now
		}
	}()
	return sync.OnceFunc(func() { close(done); <-ended })
}

// identity is the state that a start has to adopt: the ids of maps and links, and the contents of
// the maps. Slots change with time, so only their backends count.
type identity struct {
	Pins     map[string]uint32 // ids of maps and links
	Contents reconcile.Contents
}

func (p *proof) identity() identity {
	p.t.Helper()
	contents, err := p.view.Contents()
	p.must(err)
	contents.BeforeSlots = nil
	for i, slots := range contents.Slots {
		for n := range slots {
			slots.Set(n, reconcile.Slot{Current: slots.At(n).Current})
		}
		r := contents.Services[i]
		r.BeforeOffset, r.BeforeSize = 0, 0
		contents.Services[i] = r
	}
	return identity{p.pins(), contents}
}

func (p *proof) difference(before, now identity) string {
	return cmp.Diff(before, now, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
}

// pins are the kernel's ids of all pinned objects that a start has to take over.
func (p *proof) pins() map[string]uint32 {
	p.t.Helper()
	ids := map[string]uint32{}
	root := filepath.Join(kernel.DefaultPinRoot, "shunt", p.instance)
	entries, err := os.ReadDir(root)
	p.must(err)
	for _, e := range entries {
		path := filepath.Join(root, e.Name())
		switch {
		case e.IsDir():
			maps, err := os.ReadDir(path)
			p.must(err)
			for _, m := range maps {
				ids[e.Name()+"/"+m.Name()] = p.mapID(filepath.Join(path, m.Name()))
			}
		case strings.HasPrefix(e.Name(), "chain-"):
			ids[e.Name()] = p.mapID(path)
		case strings.HasPrefix(e.Name(), "link-eth"):
			l, err := link.LoadPinnedLink(path, nil)
			p.must(err)
			info, err := l.Info()
			p.must(err, l.Close())
			ids[e.Name()] = uint32(info.ID)
		}
	}
	return ids
}

func (p *proof) mapID(path string) uint32 {
	p.t.Helper()
	m, err := ebpf.LoadPinnedMap(path, nil)
	p.must(err)
	info, err := m.Info()
	p.must(err, m.Close())
	id, ok := info.ID()
	if !ok {
		p.t.Fatalf("the kernel gives no id for the map at %s", path)
	}
	return uint32(id)
}

// upTo is a random time.
func (p *proof) upTo(most time.Duration) time.Duration {
	return time.Duration(p.random.Int64N(int64(most)))
}

// outage is one way to end the daemon.
type outage struct {
	name   string
	signal syscall.Signal
	reload bool // in the middle of a reload
}

// outages are so many of each, in random order, some of them in the middle of a reload.
func (p *proof) outages(each, reloading int) []outage {
	var all []outage
	for i := range each {
		all = append(all, outage{"kill -9", syscall.SIGKILL, i < (reloading+1)/2}, outage{"restart", syscall.SIGTERM, i < reloading/2})
	}
	p.random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// suffer carries one outage out, and checks the state after the next start.
func (p *proof) suffer(o outage) {
	p.t.Helper()
	time.Sleep(p.upTo(500 * time.Millisecond)) // a random moment
	name, after := o.name, p.config
	if o.reload {
		name += " during a reload"
		after = p.change()
	}
	end := p.load.Event(name, p.config.mayBreak(after)...)
	defer end()
	reloaded := make(chan struct{})
	close(reloaded)
	if o.reload {
		p.write(after)
		p.config = after
		reloaded = make(chan struct{})
		go func() {
			defer close(reloaded)
			_, _ = p.reload() // any answer is right: the daemon may have ended
		}()
		time.Sleep(p.upTo(30 * time.Millisecond)) // longer than most reloads take
	}
	p.bed.end(o.signal)
	<-reloaded
	before := p.identity()
	time.Sleep(p.upTo(200 * time.Millisecond))
	if p.random.IntN(4) == 0 { // the next daemon does not live long
		p.launch()
		time.Sleep(p.upTo(400 * time.Millisecond))
		p.bed.end(syscall.SIGKILL)
	}
	p.start()
	now := p.identity()
	if o.reload { // the rest of the reload is done now
		before.Contents, now.Contents = reconcile.Contents{}, reconcile.Contents{}
	}
	if difference := p.difference(before, now); difference != "" {
		p.wrong("%s: the next start did not adopt what was there (-before +now):\n%s", name, difference)
	}
}

// change removes a backend from a service, or puts it back, or gives it another weight.
func (p *proof) change() config {
	after := p.config.clone()
	s := []string{translated.name, direct.name}[p.random.IntN(2)]
	n := 1 + p.random.IntN(backendCount)
	_, there := after.members[s][n]
	switch {
	case !there:
		after.members[s][n] = member{weight: 1}
	case p.random.IntN(2) == 0 && len(after.members[s]) > 2:
		delete(after.members[s], n)
	default:
		after.members[s][n] = member{weight: 1 + p.random.IntN(3)}
	}
	return after
}

// unsettle leaves positions and generations that no fresh start would choose.
func (p *proof) unsettle() {
	p.t.Helper()
	without := p.config.clone()
	delete(without.members[translated.name], 2)
	delete(without.members[direct.name], 2)
	p.apply(p.load, "b2 removed", p.config, without)
	p.apply(p.load, "b2 added", without, p.config)
}

// killed proves that a daemon may end at any moment.
func killed(t *testing.T, how string, each, reloading int, quiet time.Duration) []string {
	t.Helper()
	p := begin(t, setup{how: "shunt", quiet: quiet, args: []string{"--on-exit", "keep"}})
	p.unsettle()
	p.how = how // from the next start on
	p.suffer(outage{"kill -9", syscall.SIGKILL, false})
	p.unsettle()
	for _, o := range p.outages(each, reloading) {
		p.suffer(o)
	}
	return p.end()
}

// TestDaemonKilledAndRestarted: no flow suffers when the daemon is killed or restarted, at any
// moment, also in the middle of a reload. The next daemon finds the same maps, links, positions,
// generations and counters.
func TestDaemonKilledAndRestarted(t *testing.T) {
	quiet := 5 * time.Second
	if soak {
		quiet = 2 * time.Minute
	}
	report(t, killed(t, "shunt", times(50, 5), times(10, 4), quiet))
}

// TestBrokenDaemonsAreNoticed: the proof above fails for each broken daemon.
func TestBrokenDaemonsAreNoticed(t *testing.T) {
	if os.Geteuid() == 0 && unchanged.Rests(t, "*.go", "../../internal/lb/daemon/*.go", "../../internal/lb/reconcile/*.go", "../../internal/lb/datapath/*.go") {
		return
	}
	for how := range between {
		t.Run(strings.ReplaceAll(how, " ", "_"), func(t *testing.T) {
			problems := killed(t, how, 3, 6, 3*time.Second)
			if len(problems) == 0 {
				t.Fatalf("a daemon with %q passes", how)
			}
			first, _, _ := strings.Cut(problems[0], "\n")
			t.Logf("%d problems, the first: %s", len(problems), first)
		})
	}
}
