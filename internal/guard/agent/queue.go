package agent

import (
	"sync"

	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Line is something to tell: one of these.
type Line struct {
	Attempt    *protect.Attempt
	Connection *connect.Attempt
	Found      *detect.Found
	Switched   *Switched
}

// IsAlert is whether it must not be lost among what is only noted: something was denied, a rule's action is not log, or
// somebody has switched something.
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

// String is one line, for people.
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

// waitMax bounds the lines of a class that wait to be written, where the writer is slower than what happens.
const waitMax = 4096

// class is a part of the queue: what waits in it, and how it went. Bounded apart, so that notes cannot take the place of alerts.
type class struct {
	waits      []Line
	told, lost uint64
}

// queue has what features tell wait for the writer. Nobody who puts something in waits.
type queue struct {
	mutex         sync.Mutex
	alerts, notes class
	by            map[string]*heard // by feature
	filled        chan struct{}     // has one if something was put in
}

// heard is how much a feature had to tell, also what was lost then.
type heard struct{ all, alerts uint64 }

func newQueue() *queue { return &queue{by: map[string]*heard{}, filled: make(chan struct{}, 1)} }

// put takes a feature's line in; where its class is full, it is counted as lost.
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

// take is the next line, alerts first; false: there is none.
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

// counts are how often something was told and lost, of alerts and of notes.
func (q *queue) counts() (alerts, notes Told) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	return Told{q.alerts.told, q.alerts.lost}, Told{q.notes.told, q.notes.lost}
}

// heardOf is how much a feature had to tell.
func (q *queue) heardOf(name string) heard {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	if by := q.by[name]; by != nil {
		return *by
	}
	return heard{}
}
