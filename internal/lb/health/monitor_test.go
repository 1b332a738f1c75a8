package health

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// fleet has backends that answer as a test says, and notes the times of their checks.
type fleet struct {
	mu     sync.Mutex
	causes map[string]error // by backend; a backend without one is well
	asked  map[string][]time.Time
	takes  time.Duration // to answer
	log    []Transition
}

// nobodyLost is for tests in which every backend is reachable.
func nobodyLost(bool, netip.Addr) bool { return false }

func newFleet(t *testing.T) (*fleet, *Monitor) {
	f := &fleet{causes: map[string]error{}, asked: map[string][]time.Time{}}
	m := New(Options{
		OnTransition: func(tr Transition) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.log = append(f.log, tr)
		},
		newProber: func(t target) prober { return fakeProber{f, t} },
	})
	t.Cleanup(m.Close)
	return f, m
}

type fakeProber struct {
	*fleet
	target target
}

func (p fakeProber) probe(ctx context.Context) error {
	p.mu.Lock()
	who := p.target.backend.String()
	p.asked[who] = append(p.asked[who], time.Now())
	err, takes := p.causes[who], p.takes
	p.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(takes):
		return err
	}
}

func (f *fleet) set(who string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.causes[who] = err
}

// when returns the times of each backend's checks.
func (f *fleet) when() map[string][]time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.asked)
}

// transitions returns the transitions so far.
func (f *fleet) transitions() []Transition {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

var checked = model.Health{Check: model.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}

func service(name string, h model.Health, backends ...model.Backend) model.Service {
	return model.Service{Name: name, Health: h, Backends: backends}
}

var (
	listing sync.Mutex
	listed  = map[*Monitor]map[string]*model.Service{}
)

// list returns services as the desired state has them: an unchanged service is the same pointer as before.
func list(m *Monitor, services ...model.Service) []*model.Service {
	listing.Lock()
	defer listing.Unlock()
	if listed[m] == nil {
		listed[m] = map[string]*model.Service{}
	}
	all := model.Shared(services)
	for i, s := range all {
		if known := listed[m][s.Name]; known != nil && known.Equal(s) {
			all[i] = known
		} else {
			listed[m][s.Name] = s
		}
	}
	return all
}

// states returns the answer of Serve, a sign for each backend: S serves, D is down, - is idle, and the percentage of a
// ramp.
func states(m *Monitor, services ...model.Service) string {
	kept, all := m.Serve(list(m, services...), false, nobodyLost), m.Serve(list(m, services...), true, nobodyLost)
	for i, s := range all { // in a bubble no result comes between the two calls
		if !s.Equal(kept[i]) {
			panic(fmt.Sprintf("what Serve keeps is %+v, and worked out anew it is %+v", kept[i], s))
		}
	}
	return words(all)
}

// words describes the services as they are served, in the signs of states.
func words(served []*model.Service) string {
	text := ""
	for _, s := range served {
		for _, b := range s.Backends {
			switch {
			case b.Observed.Down:
				text += "D"
			case b.Observed.Idle:
				text += "-"
			case b.Observed.Ramp > 0:
				text += fmt.Sprint(b.Observed.Ramp)
			default:
				text += "S"
			}
		}
	}
	return text
}

func TestMonitor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		a, b := backend("10.0.0.1", 80), backend("10.0.0.2", 80)
		web := service("web", checked, a, b)
		f.set("10.0.0.2:80", errors.New("refused"))
		m.Update(list(m, web), nil)
		if got := states(m, web); got != "--" {
			t.Fatalf("before the first result: %s", got)
		}
		<-m.Changed()
		if got := states(m, web); got != "S-" {
			t.Fatalf("after the first result: %s", got)
		}
		time.Sleep(6 * time.Second)
		if got := states(m, web); got != "SD" {
			t.Errorf("after three failures: %s", got)
		}
		f.set("10.0.0.2:80", nil)
		time.Sleep(2 * time.Second)
		if got := states(m, web); got != "SD" {
			t.Errorf("after one success: %s", got)
		}
		time.Sleep(2 * time.Second)
		if got := states(m, web); got != "SS" {
			t.Errorf("after two: %s", got)
		}
		f.set("10.0.0.1:80", errors.New("no answer"))
		failing := time.Now()
		for states(m, web) != "DS" {
			<-m.Changed()
		}
		if took := time.Since(failing); took > 6*time.Second {
			t.Errorf("going down took %s, want at most fall intervals", took)
		}
		if log := f.transitions(); len(log) != 4 {
			t.Errorf("%d transitions, want 4: %v", len(log), log)
		}
		report := m.Report(list(m, web))
		if len(report) != 2 || report[0].State != down || report[0].LastError != "no answer" || report[0].Adopted || report[1].State != up {
			t.Errorf("the report is %+v", report)
		}
	})
}

// TestAwait: a wait ends when each backend with an unknown state has a result, good or bad.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		f.takes = 500 * time.Millisecond
		web := service("web", checked, backend("10.0.0.1", 80), backend("10.0.0.2", 80), backend("10.0.0.3", 80))
		f.set("10.0.0.2:80", errors.New("refused"))
		takes := func(what string, ctx context.Context, want time.Duration, state string) {
			t.Helper()
			began := time.Now()
			m.Await(ctx)
			if took := time.Since(began); took < want || took > want+10*time.Millisecond {
				t.Errorf("%s: it took %s, want %s", what, took, want)
			}
			if got := states(m, web); got != state {
				t.Errorf("%s: the states are %s, want %s", what, got, state)
			}
		}
		takes("nothing is checked", t.Context(), 0, "---")
		m.Update(list(m, web), nil)
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		takes("not for so long", short, 100*time.Millisecond, "---")
		takes("all", t.Context(), 400*time.Millisecond, "S-S")
		takes("again", t.Context(), 0, "S-S")
		m.Update(list(m, web, service("dns", checked, backend("10.0.0.4", 53))), func(string, model.BackendAddress) model.HealthState { return up })
		takes("what is known from elsewhere", t.Context(), 0, "S-S")
	})
}

// TestMonitorKeepsItsPace has probes of 900 ms every 2 s, and expects neither drift nor
// overlap, with jitter and without.
func TestMonitorKeepsItsPace(t *testing.T) {
	for _, jitter := range []uint32{0, 20} {
		synctest.Test(t, func(t *testing.T) {
			f, m := newFleet(t)
			f.takes = 900 * time.Millisecond
			h := checked
			h.Jitter = jitter
			m.Update(list(m, service("web", h, backend("10.0.0.1", 80))), nil)
			time.Sleep(200 * time.Second)
			times := f.when()["10.0.0.1:80"]
			if len(times) < 95 || len(times) > 106 {
				t.Errorf("jitter %d: %d probes in 200 s, want about 100", jitter, len(times))
			}
			differ := false
			for i := 1; i < len(times); i++ {
				gap := times[i].Sub(times[i-1])
				differ = differ || gap != 2*time.Second
				if spread := 2 * time.Second * time.Duration(jitter) / 100; gap < 2*time.Second-spread || gap > 2*time.Second+spread {
					t.Errorf("jitter %d: %s between two probes", jitter, gap)
				}
			}
			if differ != (jitter > 0) {
				t.Errorf("jitter %d: intervals differ: %t", jitter, differ)
			}
		})
	}
}

// TestUpdateKeepsWhatIsKnown goes through the changes of a configuration that must not make a
// living backend wait, or a dead one serve.
func TestUpdateKeepsWhatIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		a, b := backend("10.0.0.1", 80), backend("10.0.0.2", 80)
		f.set("10.0.0.2:80", errors.New("refused"))
		update := func(s ...model.Service) { m.Update(list(m, s...), nil) }
		expect := func(what, want string, s ...model.Service) {
			t.Helper()
			if got := states(m, s...); got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
		plain := service("web", model.Health{}, a, b)
		update(plain)
		expect("without checks", "SS", plain)
		web := service("web", checked, a, b)
		update(web)
		expect("checks added", "SS", web)
		time.Sleep(7 * time.Second)
		expect("and they have found out", "SD", web)
		renamed := service("www", checked, a, b)
		update(renamed)
		expect("renamed", "SD", renamed)
		faster := checked
		faster.Interval, faster.Timeout = time.Second, time.Second
		changed := service("www", faster, b, a)
		update(changed)
		expect("other checks, other order", "DS", changed)
		more := service("www", faster, b, a, backend("10.0.0.3", 80))
		update(more)
		expect("a new backend waits", "DS-", more)
		time.Sleep(time.Second)
		expect("until its first success", "DSS", more)
		update()
		n := len(f.when()["10.0.0.1:80"])
		time.Sleep(10 * time.Second)
		if now := len(f.when()["10.0.0.1:80"]); now != n {
			t.Errorf("%d probes of a service that is gone", now-n)
		}
		if len(m.Report(list(m, more))) != 0 {
			t.Error("a service that is gone is reported")
		}
	})
}

// TestHeldStates is a start that finds a data plane: its states hold until a result.
func TestHeldStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		a, b, c := backend("10.0.0.1", 80), backend("10.0.0.2", 80), backend("10.0.0.3", 80)
		for _, dead := range []string{"10.0.0.1:80", "10.0.0.2:80"} {
			f.set(dead, errors.New("refused"))
		}
		web := service("web", checked, a, b, c)
		m.Update(list(m, web), func(_ string, who model.BackendAddress) model.HealthState {
			return map[string]model.HealthState{"10.0.0.1:80": up, "10.0.0.2:80": down}[who.String()]
		})
		if got := states(m, web); got != "SD-" {
			t.Fatalf("adopted: %s", got)
		}
		if r := m.Report(list(m, web)); !r[0].Adopted || !r[1].Adopted || r[2].Adopted {
			t.Errorf("the report is %+v", r)
		}
		time.Sleep(3 * time.Second)
		if got := states(m, web); got != "SDS" {
			t.Errorf("after less than fall failures: %s", got)
		}
		time.Sleep(4 * time.Second)
		if got := states(m, web); got != "DDS" {
			t.Errorf("after fall failures: %s", got)
		}
	})
}

func TestSlowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		h := checked
		h.Rise, h.Fall, h.SlowStart = 1, 1, 20*time.Second
		web := service("web", h, backend("10.0.0.1", 80))
		m.Update(list(m, web), func(string, model.BackendAddress) model.HealthState { return up })
		if got := states(m, web); got != "S" {
			t.Fatalf("adopted: %s", got)
		}
		f.set("10.0.0.1:80", errors.New("refused"))
		seen := []string{}
		go func() { time.Sleep(3 * time.Second); f.set("10.0.0.1:80", nil) }()
		for began := time.Now(); time.Since(began) < time.Minute; {
			select {
			case <-m.Changed():
				if got := states(m, web); len(seen) == 0 || seen[len(seen)-1] != got {
					seen = append(seen, got)
				}
			case <-time.After(time.Minute):
			}
		}
		joins := service("web", h, backend("10.0.0.1", 80), backend("10.0.0.2", 80))
		m.Update(list(m, joins), nil)
		time.Sleep(h.Interval)
		if got := states(m, joins); got != "S10" {
			t.Errorf("a backend that joins others: %s", got)
		}
		fresh := service("new", h, backend("10.0.0.3", 80), backend("10.0.0.4", 80))
		m.Update(list(m, fresh), nil)
		time.Sleep(h.Interval)
		if got := states(m, fresh); got != "SS" {
			t.Errorf("the backends of a new service: %s", got)
		}
		if want := []string{"D", "10", "20", "30", "40", "50", "60", "70", "80", "90", "S"}; !slices.Equal(seen, want) {
			t.Errorf("it went through %v, want %v", seen, want)
		}
	})
}

// TestFlappingIsSaidOnce counts the changes of the tables by a backend that is well and ill in turns.
func TestFlappingIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		h := checked
		h.Rise, h.Fall = 1, 1
		m.Update(list(m, service("web", h, backend("10.0.0.1", 80), backend("10.0.0.2", 80))), nil)
		stop := make(chan struct{})
		go func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Second):
				}
				if i%2 == 0 {
					f.set("10.0.0.1:80", errors.New("refused"))
				} else {
					f.set("10.0.0.1:80", nil)
				}
			}
		}()
		time.Sleep(10 * time.Minute)
		close(stop)
		m.Close()
		counts := map[model.HealthState]int{}
		rests := 0
		for _, tr := range f.transitions() {
			if tr.RestsUntil.IsZero() {
				counts[tr.To]++
			} else {
				rests++
			}
		}
		if counts[up] < 3 || counts[up] > 20 {
			t.Errorf("it came up %d times in ten minutes: %v", counts[up], f.transitions())
		}
		if rests == 0 || rests > counts[down] {
			t.Errorf("it was said %d times that it is kept down, for %d times down", rests, counts[down])
		}
	})
}

// TestFaultsOfThisMachine: a check that fails on this machine says nothing about its backend.
func TestFaultsOfThisMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		web := service("web", checked, backend("10.0.0.1", 80))
		m.Update(list(m, web), nil)
		time.Sleep(time.Second)
		for _, errno := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EADDRNOTAVAIL} {
			f.set("10.0.0.1:80", cause("tcp connect", &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", errno)}, time.Second))
			m.TakeTrouble()
			time.Sleep(20 * time.Second)
			if got := states(m, web); got != "S" {
				t.Errorf("%v makes a backend that was up %s", errno, got)
			}
			if tr := m.TakeTrouble(); tr.Failed < 9 || !errors.Is(tr.Why, errno) {
				t.Errorf("%v: the trouble is %+v", errno, tr)
			}
		}
		f.set("10.0.0.1:80", cause("tcp connect", &net.OpError{Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}, time.Second))
		time.Sleep(10 * time.Second)
		if got := states(m, web); got != "D" {
			t.Errorf("without a way to the backend it is %s", got)
		}
	})
}

// TestProbesAreBounded has more backends hang than there are permits.
func TestProbesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		f.takes = time.Hour
		h := checked
		h.Check, h.Exec = model.CheckExec, []string{"/bin/true"}
		var backends []model.Backend
		for i := range 3 * execsMax {
			backends = append(backends, backend("10.0.0.1", uint16(i+1)))
		}
		web := service("web", checked, backend("10.0.0.2", 80))
		m.Update(list(m, service("slow", h, backends...), web), nil)
		time.Sleep(900 * time.Millisecond)
		if n := len(f.when()); n != execsMax && n != execsMax+1 {
			t.Errorf("%d programs run at once, want %d", n, execsMax)
		}
		f.mu.Lock()
		f.takes = 0
		f.mu.Unlock()
		if len(f.when()["10.0.0.2:80"]) == 0 {
			t.Error("programs that hang keep a check over the network waiting")
		}
		l := m.TakeTrouble()
		time.Sleep(10 * time.Second)
		if l = m.TakeTrouble(); l.Late == 0 || l.Max < lateFrom {
			t.Errorf("nothing was late, though all permits were taken: %+v", l)
		}
	})
}

// TestSpread expects first probes apart from each other, and all within an interval.
func TestSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		var backends []model.Backend
		for i := range 5000 {
			backends = append(backends, backend("10.0.0.1", uint16(i+1)))
		}
		began := time.Now()
		m.Update(list(m, service("web", checked, backends...)), nil)
		time.Sleep(checked.Interval)
		synctest.Wait()
		if len(f.when()) != 5000 {
			t.Fatalf("%d of 5000 asked within an interval", len(f.when()))
		}
		buckets := map[time.Duration]int{}
		for _, times := range f.when() {
			buckets[times[0].Sub(began)/(200*time.Millisecond)]++
		}
		for _, b := range slices.Sorted(maps.Keys(buckets)) {
			if n := buckets[b]; b < 10 && (n < 300 || n > 700) {
				t.Errorf("%d first probes in the %d. tenth of the interval, want about 500", n, b+1)
			}
		}
	})
}

// TestRandomChanges has services, backends and their health change at random, and expects that
// every backend's state in the end is its answer, and that no backend is checked that no service has.
func TestRandomChanges(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		h := checked
		h.Jitter = 10
		var services []model.Service
		for range 300 {
			services = nil
			for s := range random.IntN(4) {
				var backends []model.Backend
				for b := range random.IntN(6) {
					if random.IntN(3) > 0 {
						backends = append(backends, backend("10.0.0.1", uint16(b+1)))
					}
				}
				services = append(services, service(fmt.Sprint("s", s), h, backends...))
			}
			m.Update(list(m, services...), nil)
			for b := range 6 {
				if random.IntN(4) == 0 {
					f.set(fmt.Sprint("10.0.0.1:", b+1), errors.New("refused"))
				} else {
					f.set(fmt.Sprint("10.0.0.1:", b+1), nil)
				}
			}
			time.Sleep(time.Duration(random.IntN(5000)) * time.Millisecond)
		}
		time.Sleep(10 * time.Minute) // also for the backends that the flap limit keeps down
		for _, s := range m.Serve(list(m, services...), false, nobodyLost) {
			for _, b := range s.Backends {
				if want := f.causes[b.BackendAddress.String()] != nil; b.Observed.Down != want || b.Observed.Idle != want {
					t.Errorf("%s in %s: down is %t, want %t (seed %d)", b.BackendAddress, s.Name, b.Observed.Down, want, seed)
				}
			}
		}
		f.mu.Lock()
		clear(f.asked)
		f.mu.Unlock()
		time.Sleep(20 * time.Second)
		wanted := map[string]int{}
		for _, s := range services {
			for _, b := range s.Backends {
				wanted[b.BackendAddress.String()]++
			}
		}
		for who, times := range f.when() {
			if n := len(times); n > 12*wanted[who] || n < 8*wanted[who] {
				t.Errorf("%s was asked %d times in 10 intervals by %d services (seed %d)", who, n, wanted[who], seed)
			}
		}
	})
}

// TestProbed: the most specific address and port count; with direct return that is the VIP.
func TestProbed(t *testing.T) {
	web := model.Service{Frontends: []model.Frontend{{Ports: value.PortRange{First: 80, Last: 80}}}}
	wide := model.Service{Frontends: []model.Frontend{{Ports: value.PortRange{First: 80, Last: 90}}}}
	checked := web
	checked.Health.Port = 7
	own, other := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.9.0.2")
	direct := model.Service{Forwarding: model.ForwardingDSRGUE, Frontends: []model.Frontend{
		{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 80, Last: 80}},
		{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.PortRange{First: 80, Last: 80}},
	}}
	only6, program := direct, direct
	only6.Frontends = only6.Frontends[:1]
	program.Health.Check = model.CheckExec
	for _, c := range []struct {
		service model.Service
		port    uint16
		at      model.BackendAddress
		want    string
	}{
		{web, 0, model.BackendAddress{}, "10.0.0.2:80"},
		{wide, 0, model.BackendAddress{}, "10.0.0.2:0"},
		{wide, 8080, model.BackendAddress{}, "10.0.0.2:8080"},
		{checked, 8080, model.BackendAddress{}, "10.0.0.2:7"},
		{checked, 8080, model.BackendAddress{Port: 9}, "10.0.0.2:9"},
		{checked, 8080, model.BackendAddress{Address: other}, "10.9.0.2:7"},
		{wide, 0, model.BackendAddress{Address: other, Port: 9}, "10.9.0.2:9"},
		{direct, 0, model.BackendAddress{}, "dsr-gue 192.0.2.10:80"},
		{only6, 0, model.BackendAddress{}, "dsr-gue [2001:db8::10]:80"},
		{direct, 0, model.BackendAddress{Port: 9}, "dsr-gue 192.0.2.10:9"},
		{direct, 0, model.BackendAddress{Address: other}, "10.9.0.2:80"},
		{program, 0, model.BackendAddress{}, "10.0.0.2:80"},
	} {
		b := model.Backend{BackendAddress: model.BackendAddress{Address: own, Port: c.port}, CheckAt: c.at}
		p := probed(&c.service, b)
		if got := strings.TrimSpace(string(p.direct) + " " + p.at.String()); got != c.want {
			t.Errorf("%+v: %s, want %s", b, got, c.want)
		}
	}
}

// TestPool: a backend of a pool is checked once for all its services, and once for each port that is checked.
// A service that joins a pool, or leaves one, keeps the known states.
func TestPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := newFleet(t)
		a, b := backend("10.0.0.1", 80), backend("10.0.0.2", 80)
		f.set("10.0.0.2:80", errors.New("refused"))
		of := func(pool, name string, h model.Health) model.Service {
			s := service(name, h, a, b)
			s.Pool = pool
			return s
		}
		expect := func(what, want string, s ...model.Service) {
			t.Helper()
			if got := states(m, s...); got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
		web, shop := of("servers", "web", checked), of("servers", "shop", checked)
		m.Update(list(m, web, shop), nil)
		expect("at first", "----", web, shop)
		time.Sleep(10 * time.Second)
		expect("later", "SDSD", web, shop)
		if n := len(f.when()["10.0.0.1:80"]); n < 4 || n > 6 {
			t.Errorf("a backend of two services was asked %d times in 5 intervals", n)
		}
		for _, tr := range f.transitions() {
			if tr.Pool != "servers" || tr.Service != "" || tr.String()[:28] != "pool servers: backend 10.0.0" {
				t.Errorf("a transition says %q", tr)
			}
		}
		if log := f.transitions(); len(log) != 2 {
			t.Errorf("%d transitions, want 2: %v", len(log), log)
		}
		if report := m.Report(list(m, web, shop)); len(report) != 4 || report[2].Service != "shop" || report[3].State != down {
			t.Errorf("the report is %+v", report)
		}
		elsewhere := checked
		elsewhere.Port = 9
		web, shop = of("servers", "web", elsewhere), of("servers", "shop", elsewhere)
		m.Update(list(m, web, shop), nil)
		expect("asked at another port", "SDSD", web, shop)
		shop = of("", "shop", checked)
		m.Update(list(m, web, shop), nil)
		expect("one on its own", "SDSD", web, shop)
		shop, mail := of("others", "shop", checked), of("others", "mail", checked)
		m.Update(list(m, web, shop, mail), nil)
		expect("in another pool, with a new service", "SDSDSD", web, shop, mail)
	})
}

// TestPoolHeld: at a start, the state that any service of a pool held holds for all.
func TestPoolHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, m := newFleet(t)
		web, shop := service("web", checked, backend("10.0.0.1", 80)), service("shop", checked, backend("10.0.0.1", 80))
		web.Pool, shop.Pool = "servers", "servers"
		m.Update(list(m, web, shop), func(service string, _ model.BackendAddress) model.HealthState {
			return map[string]model.HealthState{"shop": up}[service]
		})
		if got := states(m, web, shop); got != "SS" {
			t.Errorf("adopted: %s", got)
		}
	})
}
