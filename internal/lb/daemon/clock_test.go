package daemon

import (
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// clocks are a machine's two clocks: one that can be set, and one that cannot.
type clocks struct {
	wall    time.Time
	elapsed time.Duration
}

func (c *clocks) pass(d time.Duration) { c.wall, c.elapsed = c.wall.Add(d), c.elapsed+d }

// A drain takes as long as it was given, even if the wall clock is set meanwhile, and a
// daemon that is started afterwards knows the moved deadline.
func TestDeadlinesFollowTheClock(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": time.Hour, "back": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			machine := &clocks{wall: time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)}
			clock := newSteadyClock(func() time.Time { return machine.wall }, func() time.Duration { return machine.elapsed })
			path := filepath.Join(t.TempDir(), "overrides.json")
			writer, err := state.Open(path, clock.now)
			if err != nil {
				t.Fatal(err)
			}
			service := model.Service{Name: "web", Backends: []model.Backend{{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.2")}, Weight: 1}}}
			if _, err := writer.Replace(state.Declaration{Source: "file", Services: []model.Service{service}}); err != nil {
				t.Fatal(err)
			}
			if _, err := writer.Set("10.0.0.2", state.Setting{Kind: state.KindDrain, Deadline: clock.now().Add(10 * time.Minute)}); err != nil {
				t.Fatal(err)
			}
			conditions := &condition.Set{}
			d := newDeadlines(clock, writer, conditions, slog.New(slog.DiscardHandler))
			over := func() bool { writer.PassDeadlines(); return writer.Overrides()[0].Over }

			machine.pass(4 * time.Minute)
			d.follow()
			if list := conditions.List(); len(list) != 0 {
				t.Errorf("nobody has set the clock: %+v", list)
			}
			machine.wall = machine.wall.Add(step)
			if over() {
				t.Error("the deadline has passed before the step was noticed")
			}
			d.follow()
			if list := conditions.List(); len(list) != 1 || list[0].Code != condition.ClockStepped || !strings.Contains(list[0].Text, name+" by 1h0m0s") {
				t.Errorf("conditions: %+v", list)
			}
			machine.pass(5 * time.Minute)
			d.follow()
			if over() {
				t.Error("the deadline has passed after 9 of 10 minutes")
			}
			again, err := state.Open(path, func() time.Time { return machine.wall })
			if err != nil || again.Overrides()[0].Over || again.Overrides()[0].Deadline.Sub(machine.wall) != time.Minute {
				t.Errorf("the next daemon at %s: %v, %+v", machine.wall, err, again.Overrides())
			}
			machine.pass(time.Minute)
			d.follow()
			if !over() {
				t.Error("the deadline has not passed after 10 minutes")
			}
			machine.pass(clockStepHold)
			d.follow()
			if list := conditions.List(); len(list) != 0 {
				t.Errorf("long after the step: %+v", list)
			}
		})
	}
}
