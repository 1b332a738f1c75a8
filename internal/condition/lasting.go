package condition

import "time"

// Lasting are conditions that come and go with the traffic: each ends some time after it was last
// seen; otherwise they would fill the log. It is for one caller at a time.
type Lasting struct {
	Set *Set
	// Hold is the time that a condition stays after it was last seen.
	Hold time.Duration
	seen map[about]time.Time
}

// about identifies a condition.
type about struct{ code, subject string }

// See raises a condition, which was seen at a moment.
func (l *Lasting) See(c Condition, at time.Time) {
	if l.seen == nil {
		l.seen = map[about]time.Time{}
	}
	l.seen[about{c.Code, c.Subject}] = at
	l.Set.Raise(c)
}

// Holds reports whether a condition has been seen and has not ended.
func (l *Lasting) Holds(code, subject string) bool {
	_, holds := l.seen[about{code, subject}]
	return holds
}

// End ends a condition at once.
func (l *Lasting) End(code, subject string) {
	if l.Holds(code, subject) {
		delete(l.seen, about{code, subject})
		l.Set.Clear(code, subject)
	}
}

// Pass ends the conditions that were last seen Hold ago or before that.
func (l *Lasting) Pass(now time.Time) {
	for a, at := range l.seen {
		if now.Sub(at) >= l.Hold {
			l.End(a.code, a.subject)
		}
	}
}
