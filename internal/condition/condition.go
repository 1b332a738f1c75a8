// Package condition holds what is wrong right now, as values a user can read: each has
// a stable code, the thing it is about, a sentence, and what to do. Whoever finds a fault
// raises it, whoever sees it gone clears it, and logs, status and documentation all read
// the same list. It imports nothing of ours.
package condition

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Severity says how bad a condition is.
type Severity string

// The severities, from harmless to traffic being lost.
const (
	Info    Severity = "info"    // works as asked; worth knowing
	Warning Severity = "warning" // works, with less than was asked for
	Error   Severity = "error"   // something asked for does not work
)

// Condition is one fault, or one notable fact, that holds now.
type Condition struct {
	// Code is stable, snake_case, and one of Codes.
	Code     string   `json:"code"`
	Severity Severity `json:"severity"`
	// Subject is the thing it is about: an address, an interface, a service. With
	// Code it identifies the condition.
	Subject string `json:"subject"`
	// Text says what was attempted on what, and what went wrong.
	Text string `json:"text"`
	// Remedy says what to do next.
	Remedy string `json:"remedy"`
	// Since is when it was first raised; a change of text keeps it.
	Since time.Time `json:"since"`
}

// Change is one step of a Set: a condition that appeared or says something else now, or
// one that has gone.
type Change struct {
	Condition Condition
	Cleared   bool
}

// Set holds the conditions that are true now. The zero value is ready, and a nil *Set
// takes everything and holds nothing. All methods may be called concurrently.
type Set struct {
	// OnChange, if set before first use, is called once per change, in order, one at a
	// time. It may call List but not Raise or Clear.
	OnChange func(Change)
	// Now is the clock, time.Now by default.
	Now func() time.Time

	order sync.Mutex // held across a change and its callback, so callbacks keep the order
	mu    sync.Mutex // guards held
	held  map[identity]Condition
}

type identity struct{ code, subject string }

// Raise makes a condition true. Severity and Remedy are taken from Codes where empty.
// Raising what is already true in the same words does nothing; other words replace the
// old ones, keep Since and count as a change.
func (s *Set) Raise(c Condition) {
	if s == nil {
		return
	}
	if d, ok := Lookup(c.Code); ok {
		c.Severity = cmp.Or(c.Severity, d.Severity)
		c.Remedy = cmp.Or(c.Remedy, d.Remedy)
	}
	s.order.Lock()
	defer s.order.Unlock()
	if c, changed := s.put(c); changed && s.OnChange != nil {
		s.OnChange(Change{Condition: c})
	}
}

// put stores c and reports whether that says something new.
func (s *Set) put(c Condition) (Condition, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := identity{c.Code, c.Subject}
	old, ok := s.held[id]
	switch {
	case ok:
		c.Since = old.Since
	case c.Since.IsZero() && s.Now != nil:
		c.Since = s.Now()
	case c.Since.IsZero():
		c.Since = time.Now()
	}
	if ok && old == c {
		return c, false
	}
	if s.held == nil {
		s.held = make(map[identity]Condition)
	}
	s.held[id] = c
	return c, true
}

// Clear makes a condition untrue. Clearing what is not held does nothing.
func (s *Set) Clear(code, subject string) {
	if s == nil {
		return
	}
	s.order.Lock()
	defer s.order.Unlock()
	id := identity{code, subject}
	s.mu.Lock()
	c, ok := s.held[id]
	delete(s.held, id)
	s.mu.Unlock()
	if ok && s.OnChange != nil {
		s.OnChange(Change{Condition: c, Cleared: true})
	}
}

// List is what is true now, worst first, then by code and subject. It is never nil, so
// that JSON shows an empty list.
func (s *Set) List() []Condition {
	list := []Condition{}
	if s == nil {
		return list
	}
	s.mu.Lock()
	for _, c := range s.held {
		list = append(list, c)
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Condition) int {
		return cmp.Or(
			cmp.Compare(rank(b.Severity), rank(a.Severity)),
			cmp.Compare(a.Code, b.Code),
			cmp.Compare(a.Subject, b.Subject),
		)
	})
	return list
}

func rank(s Severity) int {
	return slices.Index([]Severity{Info, Warning, Error}, s)
}
