// Package condition holds the present faults, as values a user can read: each has a stable code, its
// subject, a sentence, and a remedy. The component that finds a fault raises it and clears it again,
// and logs, status and documentation all read the same list. It imports no package of shunt but model.
package condition

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
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
	// Text says which operation on which object went wrong, and how.
	Text string `json:"text"`
	// Remedy is the next step for the user.
	Remedy string `json:"remedy"`
	// Since is the time when it was first raised; a change of text keeps it.
	Since time.Time `json:"since"`
}

// Change is one step of a Set: a condition that appeared or has another text now, or one that has gone.
type Change struct {
	Condition Condition
	Cleared   bool
	// Joined: the cleared condition still holds, and is one of Several now.
	Joined bool
}

// Several is the subject of a condition that stands for all conditions of its code.
const Several = "several"

const (
	// Up to apartMax conditions of one code are separate; more are shown as one, so that a failing
	// switch is one line and not one for each of 50,000 backends. They are separate again when half as
	// many are left; otherwise each that comes and goes would be an event of all.
	apartMax = 10
	// namedMax of them are named, with so many remedies.
	namedMax = 3
)

// Set holds the conditions that are true now. Many of one code are shown as one, with Several as the
// subject, their number, and the first few. The zero value is ready, and a nil *Set accepts everything
// and holds nothing. All methods may be called concurrently.
type Set struct {
	// OnChange, if set before first use, is called once per change, in order, one at a time. It may
	// call List but not Raise or Clear. For Several it is called again when their number is twice the
	// last one that it was told, or half of it.
	OnChange func(Change)
	// Now is the clock, time.Now by default.
	Now func() time.Time

	order sync.Mutex // held across a change and its callback, so callbacks keep the order
	mu    sync.Mutex // guards kinds
	kinds map[string]*kind
}

// kind holds the conditions of one code.
type kind struct {
	held map[string]Condition // by subject
	told int                  // their number when they were last told as one; 0: they are separate
}

// Raise makes a condition true. Severity and Remedy are taken from Codes where empty. Raising a true
// condition in the same words does nothing; other words replace the old ones, keep Since and count as a
// change.
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
	s.tell(s.put(c))
}

func (s *Set) tell(changes []Change) {
	for _, c := range changes {
		if s.OnChange != nil {
			s.OnChange(c)
		}
	}
}

// put stores c, and returns the events to tell.
func (s *Set) put(c Condition) []Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[c.Code]
	if k == nil {
		k = &kind{held: map[string]Condition{}}
	}
	old, ok := k.held[c.Subject]
	switch {
	case ok:
		c.Since = old.Since
	case c.Since.IsZero() && s.Now != nil:
		c.Since = s.Now()
	case c.Since.IsZero():
		c.Since = time.Now()
	}
	if ok && old == c {
		return nil
	}
	if s.kinds == nil {
		s.kinds = make(map[string]*kind)
	}
	s.kinds[c.Code] = k
	k.held[c.Subject] = c
	switch count := len(k.held); {
	case k.told == 0 && count <= apartMax:
		return []Change{{Condition: c}}
	case k.told == 0:
		k.told = count
		changes := []Change{{Condition: k.together()}}
		for _, each := range k.sorted() {
			if each.Subject != c.Subject { // the new one was never told by itself
				changes = append(changes, Change{Condition: each, Cleared: true, Joined: true})
			}
		}
		return changes
	case count >= 2*k.told:
		k.told = count
		return []Change{{Condition: k.together()}}
	}
	return nil
}

// Clear makes a condition untrue. Clearing a condition that is not held does nothing.
func (s *Set) Clear(code, subject string) {
	if s == nil {
		return
	}
	s.order.Lock()
	defer s.order.Unlock()
	s.tell(s.take(code, subject))
}

// Only makes these the true conditions of a code, and clears all others of it.
func (s *Set) Only(code string, all []Condition) {
	if s == nil {
		return
	}
	still := map[string]bool{}
	for _, c := range all {
		still[c.Subject] = true
	}
	for _, subject := range s.subjects(code) {
		if !still[subject] {
			s.Clear(code, subject)
		}
	}
	for _, c := range all {
		c.Code = code
		s.Raise(c)
	}
}

// subjects are the subjects of a code's true conditions, sorted.
func (s *Set) subjects(code string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.kinds[code]; k != nil {
		return slices.Sorted(maps.Keys(k.held))
	}
	return nil
}

// take forgets a condition, and returns the events to tell.
func (s *Set) take(code, subject string) []Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[code]
	if k == nil {
		return nil
	}
	c, ok := k.held[subject]
	if !ok {
		return nil
	}
	var all Condition
	apart := k.told > 0 && len(k.held)-1 <= apartMax/2
	if apart {
		all = k.together() // the condition for all, as it was last
	}
	delete(k.held, subject)
	if len(k.held) == 0 {
		delete(s.kinds, code)
	}
	switch count := len(k.held); {
	case k.told == 0:
		return []Change{{Condition: c, Cleared: true}}
	case apart:
		k.told = 0
		var changes []Change
		for _, each := range k.sorted() {
			changes = append(changes, Change{Condition: each})
		}
		return append(changes, Change{Condition: all, Cleared: true})
	case 2*count <= k.told:
		k.told = count
		return []Change{{Condition: k.together()}}
	}
	return nil
}

// sorted lists the held conditions, by subject.
func (k *kind) sorted() []Condition {
	return slices.SortedFunc(maps.Values(k.held), func(a, b Condition) int { return cmp.Compare(a.Subject, b.Subject) })
}

// together is the condition that stands for all: its severity is the worst of them, and its age the
// oldest.
func (k *kind) together() Condition {
	all := k.sorted()
	c := all[0]
	var names, remedies []string
	for i, each := range all {
		if i < namedMax {
			names = append(names, each.Subject)
		}
		if len(remedies) < namedMax && !slices.Contains(remedies, each.Remedy) {
			remedies = append(remedies, each.Remedy)
		}
		if rank(each.Severity) > rank(c.Severity) {
			c.Severity = each.Severity
		}
		if each.Since.Before(c.Since) {
			c.Since = each.Since
		}
	}
	c.Text = fmt.Sprintf("%d times: %s and %d more; %s: %s", len(all), strings.Join(names, ", "), len(all)-len(names), c.Subject, c.Text)
	c.Subject, c.Remedy = Several, strings.Join(remedies, "; or ")
	return c
}

// List returns the conditions that hold now, many of one code as one, worst first, then by
// code and subject. It is never nil, so that JSON shows an empty list.
func (s *Set) List() []Condition { return s.list(true) }

// All returns the conditions that hold now, each separately, in the order of List.
func (s *Set) All() []Condition { return s.list(false) }

// Count is the number of true conditions of a code and a severity.
type Count struct {
	Code     string
	Severity Severity
	Count    int
}

// Counts has the number of true conditions of every code, also 0, sorted by code and from harmless to
// bad.
func (s *Set) Counts() []Count {
	if s == nil {
		return nil
	}
	type kindOf struct {
		code     string
		severity Severity
	}
	counts := map[kindOf]int{}
	for _, d := range Codes {
		counts[kindOf{d.Code, d.Severity}] = 0
	}
	s.mu.Lock()
	for _, k := range s.kinds {
		for _, c := range k.held {
			counts[kindOf{c.Code, c.Severity}]++
		}
	}
	s.mu.Unlock()
	var all []Count
	for k, n := range counts {
		all = append(all, Count{k.code, k.severity, n})
	}
	slices.SortFunc(all, func(a, b Count) int {
		return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(rank(a.Severity), rank(b.Severity)))
	})
	return all
}

func (s *Set) list(together bool) []Condition {
	list := []Condition{}
	if s == nil {
		return list
	}
	s.mu.Lock()
	for _, k := range s.kinds {
		if together && k.told > 0 {
			list = append(list, k.together())
			continue
		}
		list = slices.AppendSeq(list, maps.Values(k.held))
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
