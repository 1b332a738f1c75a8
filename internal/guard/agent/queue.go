package agent

import (
	"sync"

	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Line is a line of output; one of the fields is set.
type Line struct {
	Attempt    *judge.Attempt
	Connection *connect.Attempt
	Found      *detect.Found
	Switched   *Switched
}

// IsAlert reports whether the line must not be lost among notes: an operation was denied, a rule's action is not log, or
// a person has switched a feature or rule.
func (l Line) IsAlert() bool {
	switch {
	case l.Attempt != nil:
		return l.Attempt.Denied
	case l.Connection != nil:
		return l.Connection.Denied
	case l.Switched != nil:
		return true
	}
	return l.Found.Action != rule.Log
}

// String returns the line as text for people.
func (l Line) String() string {
	switch {
	case l.Attempt != nil:
		return l.Attempt.String()
	case l.Connection != nil:
		return l.Connection.String()
	case l.Switched != nil:
		return l.Switched.String()
	}
	return l.Found.String()
}

// waitMax limits the lines of a class that wait for a writer that is slower than the events.
const waitMax = 4096

// class is a part of the queue: its waiting lines and counts. Each has a limit of its own, so that notes cannot displace alerts.
type class struct {
	waits      []Line
	told, lost uint64
}

// queue holds the features' lines until the writer takes them. Putting a line in never waits.
type queue struct {
	mutex         sync.Mutex
	alerts, notes class
	by            map[string]*heard // by feature
	filled        chan struct{}     // holds an element if a line was put in
}

// heard counts a feature's lines, including lost ones.
type heard struct{ all, alerts uint64 }

func newQueue() *queue { return &queue{by: map[string]*heard{}, filled: make(chan struct{}, 1)} }

// put puts a feature's line into the queue; if its class is full, the line counts as lost.
func (q *queue) put(from string, l Line) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	by := q.by[from]
	if by == nil {
		by = &heard{}
		q.by[from] = by
	}
	by.all++
	c := &q.notes
	if l.IsAlert() {
		c = &q.alerts
		by.alerts++
	}
	if len(c.waits) >= waitMax {
		c.lost++
		return
	}
	c.told++
	c.waits = append(c.waits, l)
	select {
	case q.filled <- struct{}{}:
	default:
	}
}

// take returns the next line, alerts first; false: there is none.
func (q *queue) take() (Line, bool) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	for _, c := range []*class{&q.alerts, &q.notes} {
		if len(c.waits) > 0 {
			l := c.waits[0]
			c.waits = c.waits[1:]
			return l, true
		}
	}
	return Line{}, false
}

// counts returns the numbers of written and lost lines, of alerts and of notes.
func (q *queue) counts() (alerts, notes Told) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	return Told{q.alerts.told, q.alerts.lost}, Told{q.notes.told, q.notes.lost}
}

// heardOf returns the counts of a feature's lines.
func (q *queue) heardOf(name string) heard {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	if by := q.by[name]; by != nil {
		return *by
	}
	return heard{}
}
