package daemon

import (
	"fmt"
	"log/slog"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/missed"
)

// framesMissed returns how many frames each interface has missed, for interfaces whose count can be read.
func framesMissed(names []string, log *slog.Logger) map[string]uint64 {
	counts := map[string]uint64{}
	for _, name := range names {
		count, err := missed.Frames(name)
		if err != nil {
			log.Debug("cannot read how many frames the interface missed", "interface", name, "error", err)
			continue
		}
		counts[name] = count
	}
	return counts
}

// showMissed adds these numbers to a status.
func showMissed(attached []*shuntv1.Attachment, counts map[string]uint64) {
	for _, a := range attached {
		if count, known := counts[a.Interface]; known {
			a.FramesMissed = &count
		}
	}
}

// missedWatch turns interfaces that miss frames into conditions, which last as long as conditions of shortages.
// One caller at a time may use it.
type missedWatch struct {
	lasting condition.Lasting
	last    map[string]uint64 // by interface
	missed  map[string]uint64 // since the condition came
}

func newMissedWatch(conditions *condition.Set) *missedWatch {
	return &missedWatch{lasting: condition.Lasting{Set: conditions, Hold: shortageHold}, missed: map[string]uint64{}}
}

// look compares with the last call. Frames that an interface missed before its first call do not count, and an
// interface that was made anew begins anew.
func (w *missedWatch) look(counts map[string]uint64, now time.Time) {
	for name, count := range counts {
		before, known := w.last[name]
		if !known || count <= before {
			continue
		}
		w.missed[name] += count - before
		w.lasting.See(condition.Condition{Code: condition.FramesMissed, Subject: name,
			Text: fmt.Sprintf("the interface's receive ring had no room for incoming frames: they were dropped before any program saw them (%s)", magnitude(w.missed[name]))}, now)
	}
	w.lasting.Pass(now)
	for name := range w.missed {
		if _, there := counts[name]; !there {
			w.lasting.End(condition.FramesMissed, name)
		}
		if !w.lasting.Holds(condition.FramesMissed, name) {
			delete(w.missed, name)
		}
	}
	w.last = counts
}

// magnitude describes a number in words that change seldom, so that the condition does not change every second.
func magnitude(n uint64) string {
	for least := uint64(1_000_000_000); least > 1; least /= 10 {
		if n >= least {
			return fmt.Sprintf("more than %d so far", least-1)
		}
	}
	return "a few so far"
}
