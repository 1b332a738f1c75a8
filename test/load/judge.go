package load

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Failure is a failure of one flow.
type Failure struct {
	flow
	What  string    // broken, stall, lost
	Since time.Time // of a stall or a lost datagram: the time of its question
	At    time.Time
	Err   error // of a broken flow

	late time.Duration // the clock's lateness in that time
}

// Permission names the flows that an event may break: a backend's flows in a service.
type Permission struct {
	Service string
	Backend string // "": every backend
	UDP     bool   // of UDP alone
	New     bool   // only flows without an answer yet
}

// Event is an action on shunt.
type Event struct {
	Name       string
	May        []Permission
	Begin, End time.Time // End is zero while it goes on
}

// Event begins an event, which goes on until the returned function is called.
func (l *Load) Event(name string, may ...Permission) (end func()) {
	e := &Event{Name: name, May: may, Begin: time.Now()}
	l.mu.Lock()
	l.events = append(l.events, e)
	l.mu.Unlock()
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		e.End = time.Now()
	}
}

// allows reports whether the event may have caused the failure: it took something from the
// flow's backend while the flow lived. A flow without an answer yet may be with any backend.
func (e *Event) allows(f Failure) bool {
	if f.At.Before(e.Begin) || !e.End.IsZero() && f.begun.After(e.End) {
		return false
	}
	return slices.ContainsFunc(e.May, func(p Permission) bool {
		return p.Service == f.service && (!p.UDP || f.kind == UDP) && (!p.New || f.backend == "") &&
			(p.Backend == "" || f.backend == "" || p.Backend == f.backend)
	})
}

// lostLate is the clock's lateness in the second of a lost datagram from which the machine is
// blamed: queues that are not emptied for so long overflow.
const lostLate = datagramMax / 5

// Report is the outcome of the traffic.
type Report struct {
	Length   time.Duration
	Done     map[Kind]int
	Bytes    int64
	Failures []Failure // not allowed by any event
	Lost     []Failure // datagrams whose loss no event allows; a network may lose some
	Allowed  map[string]int
	Late     time.Duration // time for which the clock was late
	Excused  int           // stalls and lost datagrams that the machine had a part in

	events []*Event
}

// End stops the traffic and judges it.
func (l *Load) End() Report {
	l.stop()
	l.workers.Wait()
	return l.Report()
}

// Report judges the failures until now.
func (l *Load) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	r := Report{Length: now.Sub(l.began), Done: maps.Clone(l.done), Bytes: l.bytes, Allowed: map[string]int{},
		Late: l.clock.lateness(l.began, now), events: l.events}
	r.Failures = r.judge(l.failures, l.clock)
	r.Lost = r.judge(l.lost, l.clock)
	if err := l.clock.broken(); err != nil {
		r.Failures = append(r.Failures, Failure{flow: flow{kind: "clock", begun: l.began}, What: "broken", At: now, Err: err})
	}
	return r
}

// judge keeps the failures that neither an event nor the machine explains.
func (r *Report) judge(failures []Failure, c *clock) (left []Failure) {
	for _, f := range failures {
		i := slices.IndexFunc(r.events, func(e *Event) bool { return e.allows(f) })
		if i >= 0 {
			r.Allowed[r.events[i].Name]++
			continue
		}
		if f.What != "broken" {
			f.late = c.lateness(f.Since, f.At)
		}
		if f.What == "stall" && f.At.Sub(f.Since)-f.late <= stallMax || f.What == "lost" && f.late > lostLate {
			r.Excused++
			continue
		}
		left = append(left, f)
	}
	return left
}

// during names the events in progress at a moment, or the last one before it.
func (r *Report) during(at time.Time) string {
	var on []string
	last := "nothing was done yet"
	for _, e := range r.events {
		switch {
		case e.Begin.After(at):
		case e.End.IsZero() || e.End.After(at):
			on = append(on, fmt.Sprintf("during %q, begun %s before", e.Name, at.Sub(e.Begin).Round(time.Millisecond)))
		default:
			last = fmt.Sprintf("%s after %q", at.Sub(e.End).Round(time.Millisecond), e.Name)
		}
	}
	if len(on) > 0 {
		return strings.Join(on, " and ")
	}
	return last
}

// Explain describes a failure in words: its kind, the flow, the time, and the event then.
func (r *Report) Explain(f Failure) string {
	at := f.At
	what := f.What
	if f.What != "broken" {
		at = f.Since
		what = fmt.Sprintf("%s, %s without an answer", f.What, f.At.Sub(f.Since).Round(time.Millisecond))
	}
	backend := f.backend
	if backend == "" {
		backend = "nobody yet"
	}
	text := fmt.Sprintf("%s: %s of %s (%s) with %s, begun %s before: %s", at.Format("15:04:05.000"), f.kind, f.service, f.address, backend,
		at.Sub(f.begun).Round(time.Millisecond), what)
	if f.Err != nil {
		text += ": " + f.Err.Error()
	}
	if f.late > 0 {
		text += fmt.Sprintf(" (for %s of it the machine was late)", f.late.Round(time.Millisecond))
	}
	return text + "; " + r.during(at)
}

// String is the report in one line of figures.
func (r Report) String() string {
	var done []string
	for _, kind := range slices.Sorted(maps.Keys(r.Done)) {
		done = append(done, fmt.Sprintf("%d %s", r.Done[kind], kind))
	}
	text := fmt.Sprintf("%s: %s, %d MiB; %d failed, %d datagrams lost; the machine was late for %s (%d excused)",
		r.Length.Round(time.Second), strings.Join(done, ", "), r.Bytes>>20, len(r.Failures), len(r.Lost), r.Late.Round(10*time.Millisecond), r.Excused)
	for _, name := range slices.Sorted(maps.Keys(r.Allowed)) {
		text += fmt.Sprintf("; %d allowed by %s", r.Allowed[name], name)
	}
	return text
}
