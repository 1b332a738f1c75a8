package health

import (
	"fmt"
	"math"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// The flap limit is that of route flap damping (RFC 2439): going down costs one point of penalty, which halves
// every flapHalfLife. A backend with more than flapLimit points when it goes down stays down until it has less
// than flapReuse. So the fourth time within about a minute is followed by two minutes of rest, and a backend
// that keeps flapping comes up about once a minute. The limit applies only while the service has other backends
// that are up: a backend that is the only one comes up as if there were no limit. Going down is never delayed:
// it costs only the change of the tables.
const (
	flapHalfLife = time.Minute
	flapLimit    = 3.0
	flapReuse    = 1.0
	flapMax      = 8.0 // three half-lives: the longest rest
)

// machine is the state of one backend in one service. Times are passed in, so that it
// is a function of its calls; it is not safe for concurrent use.
//
//	          success                     fall failures in a row
//	waiting ───────────► up ─────────────────────────────────────► down
//	   │                  ▲                                         │ ▲
//	   │                  └── rise successes in a row, and no rest ─┘ │
//	   └───────────── fall failures in a row ─────────────────────────┘
type machine struct {
	state  model.HealthState
	since  time.Time // zero: the state is older than this process
	streak uint32    // results in a row that contradict the state
	// lastError is the error of the last failure, until the next success; for a backend that is down, until it
	// comes up.
	lastError string
	result    bool // there has been one

	penalty   float64 // as of penaltyAt
	penaltyAt time.Time
	resting   bool // is kept down by the flap limit
	said      bool // since it went down

	// joined: the backend was added to a service that already had others serving.
	joined bool
	// ramps is the time since which its weight grows; zero: it came up with its service, or before.
	ramps time.Time
}

// verdict is the effect of a result.
type verdict struct {
	changed bool // of the state
	// resting: the backend would be up now if it did not flap; reported once.
	resting bool
	results uint32        // in a row, that have decided
	lasted  time.Duration // the state before; 0: not known
}

// observe takes a result; cause is empty for a success. rise and fall are at least 1. spared reports whether
// other backends are up instead; it is called if the flap limit would apply.
func (m *machine) observe(now time.Time, cause string, rise, fall uint32, spared func() bool) verdict {
	m.result = true
	success := cause == ""
	if !success {
		m.lastError = cause
	} else if m.state != model.HealthDown {
		m.lastError = ""
	}
	if m.state == model.HealthWaiting && success {
		return m.change(now, model.HealthUp, 1)
	}
	if success == (m.state == model.HealthUp) && m.state != model.HealthWaiting {
		m.streak = 0 // the result confirms the state
		return verdict{}
	}
	m.streak++
	switch {
	case success && m.streak >= rise:
		if m.rests(now) && spared() {
			v := verdict{resting: !m.said}
			m.said = true
			return v
		}
		return m.change(now, model.HealthUp, m.streak)
	case !success && m.streak >= fall && m.state != model.HealthDown:
		return m.change(now, model.HealthDown, m.streak)
	}
	return verdict{}
}

func (m *machine) change(now time.Time, state model.HealthState, results uint32) verdict {
	v := verdict{changed: true, results: results}
	if !m.since.IsZero() {
		v.lasted = now.Sub(m.since)
	}
	if m.state == model.HealthUp {
		m.penalty = min(m.penaltyNow(now)+1, flapMax)
		m.penaltyAt = now
		m.resting = m.resting || m.penalty > flapLimit
	}
	if state == model.HealthUp {
		m.lastError, m.ramps = "", time.Time{}
		if m.state == model.HealthDown || m.joined {
			m.ramps = now
		}
	}
	m.state, m.since, m.streak, m.said = state, now, 0, false
	return v
}

func (m *machine) penaltyNow(now time.Time) float64 {
	return m.penalty * math.Exp2(-now.Sub(m.penaltyAt).Seconds()/flapHalfLife.Seconds())
}

// rests reports whether the flap limit keeps it down now.
func (m *machine) rests(now time.Time) bool {
	m.resting = m.resting && m.penaltyNow(now) >= flapReuse
	return m.resting
}

// restsUntil returns the time at which the flap limit lets the backend come up again; zero: it is not kept
// down.
func (m *machine) restsUntil() time.Time {
	if !m.resting || m.state != model.HealthDown {
		return time.Time{}
	}
	return m.penaltyAt.Add(time.Duration(math.Log2(m.penalty/flapReuse) * float64(flapHalfLife)))
}

// Transition is a change of a backend's state, to be logged, counted and reported.
type Transition struct {
	Service string // "": the check of a pool
	Pool    string // the pool whose services have the backend; "": the check of a service
	Backend model.BackendAddress
	Name    string // of the backend
	At      time.Time
	From    model.HealthState
	To      model.HealthState
	// Cause is the cause of the last failure if the backend went down.
	Cause   string
	Results uint32        // in a row, that have decided
	Lasted  time.Duration // the state before; 0: not known
	// RestsUntil: the backend stays down until then, although its checks succeed, because it flaps. To equals
	// From then.
	RestsUntil time.Time
}

// String is the transition as the log has it:
//
//	web: backend 10.0.0.2:8080 is down: tcp connect: connection refused (3 checks in a row failed)
func (t Transition) String() string {
	who := t.Service
	if t.Pool != "" {
		who = "pool " + t.Pool
	}
	who += ": backend " + t.Backend.String()
	if t.Name != "" && t.Name != t.Backend.String() {
		who += " (" + t.Name + ")"
	}
	count := "1 check"
	if t.Results > 1 {
		count = fmt.Sprintf("%d checks in a row", t.Results)
	}
	switch {
	case !t.RestsUntil.IsZero():
		return fmt.Sprintf("%s is kept down until %s: its checks succeed, but it has gone down too often recently", who, t.RestsUntil.Format(time.TimeOnly))
	case t.To == model.HealthDown:
		return fmt.Sprintf("%s is down: %s (%s failed)", who, t.Cause, count)
	case t.From == model.HealthDown && t.Lasted > 0:
		return fmt.Sprintf("%s is up again after %s (%s passed)", who, t.Lasted.Round(time.Second), count)
	}
	return fmt.Sprintf("%s is up (%s passed)", who, count)
}
