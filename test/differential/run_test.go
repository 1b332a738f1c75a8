package differential_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestDifferential: the loaded program and the model agree on every packet.
func TestDifferential(t *testing.T) {
	r := newRun(newWorld(t))
	t.Logf("%d packets, episodes from seed %d on", *packetsFlag, *seedFlag)
	f := r.until(*seedFlag, *packetsFlag)
	t.Log(r)
	if f != nil {
		t.Fatalf("%s\n%s", f, r.shrunk(f))
	}
	if *packetsFlag < longRun {
		return
	}
	for _, reason := range reachable {
		if r.counts[reason] == 0 {
			t.Errorf("no packet was counted as %s: the test does not test it", reason)
		}
	}
}

// longRun is the number of packets from which a run has to reach every reachable reason. The rarest come up a few dozen
// times in so many.
const longRun = 100_000

// run is many episodes in one world.
type run struct {
	world  *world
	oracle *oracle
	begin  time.Time
	counts map[reason]int // of judged packets, by the model
	// The number of judged packets, of episodes, and of episodes that ended early: for want of time, or because the
	// model cannot know.
	packets, episodes, late, undecided int
}

func newRun(w *world) *run {
	return &run{world: w, oracle: newOracle(services()), begin: time.Now(), counts: map[reason]int{}}
}

// until plays episodes until so many packets are judged, or one fails.
func (r *run) until(seed uint64, packets int) *failure {
	for goal := r.packets + packets; r.packets < goal; seed++ {
		e := r.play(seed, stepsOf(seed), false)
		r.packets, r.episodes = r.packets+e.judged, r.episodes+1
		if e.late {
			r.late++
		}
		if e.undecided {
			r.undecided++
		}
		if e.failure != nil {
			return e.failure
		}
	}
	return nil
}

func (r *run) String() string {
	var out strings.Builder
	took := time.Since(r.begin)
	fmt.Fprintf(&out, "%d packets in %d episodes and %s, %.0f a second; %d episodes were cut short by the time and %d by what nobody can know",
		r.packets, r.episodes, took.Round(time.Millisecond), float64(r.packets)/took.Seconds(), r.late, r.undecided)
	for _, reason := range slices.Sorted(maps.Keys(r.counts)) {
		name := reason.String()
		if reason == none {
			name = "forwarded, or no reason"
		}
		fmt.Fprintf(&out, "\n%10d %s", r.counts[reason], name)
	}
	return out.String()
}

// shrink plays a failure again with fewer packets before it, and returns the ones that are enough. None: played again,
// it does not fail.
func (r *run) shrink(f *failure) (steps []step, last *failure) {
	try := func(fewer []step) bool {
		e := r.play(f.seed, fewer, true)
		if e.failure != nil {
			steps, last = e.failure.before, e.failure
		}
		return e.failure != nil
	}
	end := time.Now().Add(shrinkTime)
	if !try(f.before) {
		return nil, f
	}
	for size := len(steps) / 2; size > 0 && time.Now().Before(end); {
		removed := false
		for at := 0; at+size < len(steps) && time.Now().Before(end); {
			if try(slices.Concat(steps[:at], steps[at+size:])) {
				removed = true
			} else {
				at += size
			}
		}
		if size = min(size, len(steps)); !removed {
			size /= 2
		}
	}
	return steps, last
}

// shrinkTime bounds the search for fewer packets, so that the failure is reported.
const shrinkTime = 20 * time.Second

// shrunk describes the failure again, with as few packets before it as shrink found.
func (r *run) shrunk(f *failure) string {
	steps, last := r.shrink(f)
	if steps == nil {
		return "Played again it does not fail; the source ports that the program draws are then others."
	}
	e := r.play(f.seed, steps, true)
	var out strings.Builder
	fmt.Fprintf(&out, "These %d packets are enough:\n", len(steps))
	for _, s := range steps {
		d := e.played[s.number]
		if d.in == nil {
			continue
		}
		fmt.Fprintf(&out, "%4d  %s\n", s.number, describe(d.arm, d.in))
		if d.out != nil {
			fmt.Fprintf(&out, "      left: %s\n", describe(d.outArm, d.out))
		}
	}
	return out.String() + last.text
}
