package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
)

// Missed frames are a condition of the interface from the first one until a while after the last,
// and no longer than shunt is attached to it.
func TestFramesMissed(t *testing.T) {
	conditions := &condition.Set{}
	w := newMissedWatch(conditions)
	now := time.Now()
	look := func(after time.Duration, counts map[string]uint64, want ...string) {
		t.Helper()
		now = now.Add(after)
		w.look(counts, now)
		holds(t, conditions, "eth0", want)
	}
	look(0, map[string]uint64{"eth0": 7}) // an earlier daemon's
	look(time.Second, map[string]uint64{"eth0": 7})
	look(time.Second, map[string]uint64{"eth0": 8}, condition.FramesMissed)
	look(shortageHold-time.Second, map[string]uint64{"eth0": 8}, condition.FramesMissed)
	look(time.Second, map[string]uint64{"eth0": 8})
	look(time.Second, map[string]uint64{"eth0": 2500}, condition.FramesMissed)
	if text := conditions.List()[0].Text; !strings.Contains(text, "(more than 999 so far)") {
		t.Errorf("the condition says %q", text)
	}
	look(time.Second, map[string]uint64{}) // detached
	look(time.Second, map[string]uint64{"eth0": 3000})
	look(time.Second, map[string]uint64{"eth0": 10}) // made anew
	look(time.Second, map[string]uint64{"eth0": 11}, condition.FramesMissed)
}
