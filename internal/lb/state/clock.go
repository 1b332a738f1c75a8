package state

import (
	"maps"
	"time"
)

// ShiftDeadlines moves every deadline that has not passed. Deadlines are moments of the wall clock, so that
// they outlive the process; a caller that detects a step of that clock moves them along, and the remaining time
// stays the same. They are moved even if the file cannot be written, which the error reports: Save tries
// again.
func (w *Writer) ShiftDeadlines(by time.Duration) error {
	w.changing.Lock()
	defer w.changing.Unlock()
	next, moved := maps.Clone(w.overrides), false
	for key, o := range next {
		if !o.Over && !o.Deadline.IsZero() {
			o.Deadline = o.Deadline.Add(by)
			next[key], moved = o, true
		}
	}
	if !moved {
		return nil
	}
	w.take(next)
	return w.saveError
}
