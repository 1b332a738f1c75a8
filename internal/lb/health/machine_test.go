package health

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

const (
	up, down, waiting = model.HealthUp, model.HealthDown, model.HealthWaiting
	failed            = "tcp connect: connection refused"
)

// spared and alone report whether the service has other backends.
func spared() bool { return true }
func alone() bool  { return false }

var start = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// TestMachine feeds results, a second apart, and expects the states after each: + and - are
// results; U, D and W states.
func TestMachine(t *testing.T) {
	for _, c := range []struct {
		name       string
		from       model.HealthState
		rise, fall uint32
		results    string
		states     string
	}{
		{"the first success ends the wait", waiting, 3, 3, "+", "U"},
		{"failures before it do not delay it", waiting, 3, 3, "--+", "WWU"},
		{"a backend that never succeeds is down", waiting, 3, 3, "---", "WWD"},
		{"then it needs all of rise", waiting, 2, 2, "--++", "WDDU"},
		{"fall failures in a row", up, 2, 3, "---", "UUD"},
		{"a success in between begins anew", up, 2, 3, "--+---", "UUUUUD"},
		{"rise successes in a row", down, 2, 3, "+-++", "DDDU"},
		{"at once", up, 1, 1, "-+-", "DUD"},
		{"more of the same changes nothing", down, 2, 2, "-----", "DDDDD"},
	} {
		m := machine{state: c.from}
		for i, r := range c.results {
			cause := ""
			if r == '-' {
				cause = failed
			}
			before := m.state
			v := m.observe(start.Add(time.Duration(i)*time.Second), cause, c.rise, c.fall, spared)
			if got := strings.ToUpper(string(m.state[0])); got != string(c.states[i]) {
				t.Errorf("%s: after %q the state is %s, want %c", c.name, c.results[:i+1], m.state, c.states[i])
			}
			if v.changed != (m.state != before) {
				t.Errorf("%s: after %q changed is %t, from %s to %s", c.name, c.results[:i+1], v.changed, before, m.state)
			}
		}
	}
}

func TestLastErrorStaysUntilItIsOver(t *testing.T) {
	m := machine{state: up}
	m.observe(start, failed, 2, 2, spared)
	if m.lastError != failed {
		t.Errorf("after one failure of two the last error is %q", m.lastError)
	}
	m.observe(start, "", 2, 2, spared)
	if m.lastError != "" {
		t.Errorf("a backend that is up and succeeds has the error %q", m.lastError)
	}
	m.observe(start, failed, 2, 2, spared)
	m.observe(start, failed, 2, 2, spared)
	m.observe(start, "", 2, 2, spared)
	if m.state != down || m.lastError != failed {
		t.Errorf("one success of two makes it %s with %q, want down with its error", m.state, m.lastError)
	}
	m.observe(start, "", 2, 2, spared)
	if m.state != up || m.lastError != "" {
		t.Errorf("it is %s with %q", m.state, m.lastError)
	}
}

// TestFlapLimit has a backend fail and succeed every second, for ten minutes.
func TestFlapLimit(t *testing.T) {
	m := machine{state: up}
	ups, rests := 0, 0
	for i := range 600 {
		now := start.Add(time.Duration(i) * time.Second)
		cause := failed
		if m.state == down {
			cause = ""
		}
		v := m.observe(now, cause, 1, 1, spared)
		if v.changed && m.state == up {
			ups++
		}
		if v.resting {
			rests++
			if until := m.restsUntil(); !until.After(now) || until.After(now.Add(3*flapHalfLife)) {
				t.Fatalf("at %s it rests until %s", now, until)
			}
		}
		if cause == failed && m.state != down {
			t.Fatalf("at %s the limit has delayed going down", now)
		}
	}
	// 300 without a limit.
	if ups < 5 || ups > 15 {
		t.Errorf("it came up %d times in ten minutes, want about once a minute", ups)
	}
	if rests == 0 || rests > ups {
		t.Errorf("it was said %d times that it rests, for %d times up", rests, ups)
	}
}

// TestFlapLimitHoldsOnlyWithOthers: a backend that flaps and is the only one comes up with its checks.
func TestFlapLimitHoldsOnlyWithOthers(t *testing.T) {
	m, now := machine{state: up}, start
	next := func(cause string, others func() bool) {
		now = now.Add(time.Second)
		m.observe(now, cause, 1, 1, others)
	}
	for i := range 20 {
		next(failed, alone)
		next("", alone)
		if m.state != up {
			t.Fatalf("after %d times down it stays down, and is the only one", i+1)
		}
	}
	next(failed, spared)
	next("", spared)
	if m.state != down || m.restsUntil().IsZero() {
		t.Fatalf("it is %s beside others, after 21 times down", m.state)
	}
	next("", alone)
	if m.state != up {
		t.Error("it stays down after the others have gone")
	}
}

// TestMachineProperties checks the properties that hold for every history.
func TestMachineProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rise, fall := rapid.Uint32Range(1, 5).Draw(t, "rise"), rapid.Uint32Range(1, 5).Draw(t, "fall")
		m := machine{state: rapid.SampledFrom([]model.HealthState{up, down, waiting}).Draw(t, "from")}
		results := rapid.SliceOfN(rapid.Bool(), 1, 300).Draw(t, "results")
		row, last := uint32(0), false
		var downs []time.Time
		for i, ok := range results {
			now := start.Add(time.Duration(i) * time.Second)
			if i > 0 && ok == last {
				row++
			} else {
				row = 1
			}
			last = ok
			cause := failed
			if ok {
				cause = ""
			}
			before := m.state
			v := m.observe(now, cause, rise, fall, spared)
			switch {
			case !v.changed && !ok && m.state == up && row >= fall:
				t.Fatalf("at %d it is up after %d failures in a row", i, row)
			case !v.changed && ok && m.state == waiting:
				t.Fatalf("at %d it waits after a success", i)
			case !v.changed && ok && m.state == down && row >= rise && len(downs) <= flapLimit:
				t.Fatalf("at %d it is down after %d successes in a row, and has been down %d times", i, row, len(downs))
			case v.changed && m.state == up && before == down && row < rise:
				t.Fatalf("at %d it came up after %d successes in a row", i, row)
			case v.changed && m.state == down && row < fall:
				t.Fatalf("at %d it went down after %d failures in a row", i, row)
			case v.changed && m.since != now:
				t.Fatalf("at %d the state is since %s", i, m.since)
			}
			if v.changed {
				if before == up {
					downs = append(downs, now)
				}
			}
		}
	})
}

func TestTransitionText(t *testing.T) {
	b := backend("10.0.0.2", 8080)
	for _, c := range []struct {
		t    Transition
		want string
	}{
		{Transition{From: up, To: down, Cause: failed, Results: 3},
			"web: backend 10.0.0.2:8080 is down: tcp connect: connection refused (3 checks in a row failed)"},
		{Transition{From: down, To: up, Results: 1, Lasted: 90 * time.Second, Name: "green"},
			"web: backend 10.0.0.2:8080 (green) is up again after 1m30s (1 check passed)"},
		{Transition{From: waiting, To: up, Results: 1}, "web: backend 10.0.0.2:8080 is up (1 check passed)"},
		{Transition{From: down, To: down, RestsUntil: start},
			"web: backend 10.0.0.2:8080 is kept down until 12:00:00: its checks succeed, but it has gone down too often recently"},
	} {
		c.t.Service, c.t.Backend = "web", b.BackendAddress
		if got := c.t.String(); got != c.want {
			t.Errorf("%q\nwant %q", got, c.want)
		}
	}
}
