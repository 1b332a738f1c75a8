package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/guard/detect"
)

// LimitName is the name of the cgroup that `shunt guard run` is in while it has a limit of CPU.
const LimitName = "shunt-guard"

// budgetStep is the interval at which the agent decides whether detection has to take less.
const budgetStep = time.Second

// The shares of the limit above which events are left out, and below which more are kept again. A step halves or doubles the quantity of a type,
// so the two have to differ by more than a factor of two.
const (
	budgetHigh = 0.8
	budgetLow  = 0.3
)

// budget keeps the process's use of CPU below a limit: by a cgroup, which makes it wait, and by leaving out events of detection, so that the
// remaining events are read in time. Protection works in the kernel, and needs no CPU of the process.
type budget struct {
	max   float64          // percent of one CPU
	limit *cgroup.CPULimit // nil: there is none, and why has the reason
	why   string
	levels
	run run
}

// levels has by type the part of events that is left out; see detect.Watch.Thin.
type levels map[string]int

// step returns the next levels, after the process has used a share of its limit and read events of these types: it halves the most
// frequent type, or doubles the type of which the smallest part is kept.
func (l levels) step(used float64, received map[string]uint64) levels {
	next := maps.Clone(l)
	if next == nil {
		next = levels{}
	}
	switch {
	case used >= budgetHigh:
		most := ""
		for _, of := range slices.Sorted(maps.Keys(received)) {
			if received[of] > 0 && l[of] < detect.ThinMax && (most == "" || received[of] > received[most]) {
				most = of
			}
		}
		if most != "" {
			next[most]++
		}
	case used < budgetLow:
		least := ""
		for _, of := range slices.Sorted(maps.Keys(l)) {
			if least == "" || l[of] > l[least] {
				least = of
			}
		}
		if least == "" {
			return next
		}
		if next[least]--; next[least] == 0 {
			delete(next, least)
		}
	}
	return next
}

// startBudget moves the process into its cgroup, and begins to watch its use of CPU.
func (a *Agent) startBudget() {
	b := &budget{max: a.options.MaxCPU, levels: levels{}}
	var err error
	if b.limit, err = cgroup.LimitCPU(a.options.Limit, b.max); err != nil {
		b.why = err.Error()
		a.warn(fmt.Errorf("the kernel does not enforce the limit of %v %% of a CPU, and only detection keeps to it, by leaving out events: %w", b.max, err))
	}
	a.mutex.Lock()
	a.budget = b
	decoys := len(a.policy.Decoys) > 0
	a.mutex.Unlock()
	if decoys && b.limit != nil {
		fmt.Fprintln(a.options.Say, "warning: the CPU limit also holds for judging decoys: a program that opens a decoy waits up to 100 ms longer each time that the limit is reached")
	}
	b.run = begin(a.failed, func(ctx context.Context) error {
		every := time.NewTicker(budgetStep)
		defer every.Stop()
		before, at, seen := cpuTime(), time.Now(), map[string]uint64{}
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-every.C:
			}
			now := cpuTime()
			used := float64(now-before) / float64(time.Since(at)) * 100 / b.max
			before, at = now, time.Now()
			var err error
			if seen, err = a.keepBudget(used, seen); err != nil {
				return err
			}
		}
	})
}

func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail with this argument
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// keepBudget makes detection leave out more or fewer events, and returns the counts from which the next call computes the events since.
func (a *Agent) keepBudget(used float64, seen map[string]uint64) (map[string]uint64, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	f := a.detects
	if f.watch == nil {
		a.budget.levels = levels{}
		return map[string]uint64{}, nil
	}
	received := f.watch.Received()
	fresh := map[string]uint64{}
	for of, n := range received {
		fresh[of] = n - min(n, seen[of]) // a new watch begins at 0
	}
	next := a.budget.step(used, fresh)
	if maps.Equal(next, a.budget.levels) {
		return received, nil
	}
	if err := f.watch.Thin(next); err != nil {
		return received, err
	}
	if was, is := len(a.budget.levels) > 0, len(next) > 0; was != is {
		a.sayThinned(is)
	}
	a.budget.levels = next
	return received, nil
}

// sayThinned says that detection leaves out events, or none any more.
func (a *Agent) sayThinned(is bool) {
	if is {
		fmt.Fprintf(a.options.Say, "warning: detection leaves out events, to keep to %v %% of a CPU; `shunt guard status` says how many. Protection goes on unchanged\n", a.budget.max)
		return
	}
	fmt.Fprintln(a.options.Say, "detection no longer leaves out events")
}

// lifted runs do without the limit: loading programs takes more CPU than a small limit allows in a minute.
func (a *Agent) lifted(do func() error) error {
	if a.budget == nil || a.budget.limit == nil {
		return do()
	}
	if err := a.budget.limit.Lift(); err != nil {
		a.warn(fmt.Errorf("lift the limit of CPU while the policy is switched: %w", err))
	}
	err := do()
	if restored := a.budget.limit.Restore(); restored != nil {
		a.warn(fmt.Errorf("set the limit of CPU again: %w", restored))
	}
	return err
}

// endBudget must be called without the mutex.
func (a *Agent) endBudget() error {
	a.mutex.Lock()
	b := a.budget
	a.mutex.Unlock()
	if b == nil {
		return nil
	}
	b.run.stop()
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.budget = nil
	if b.limit == nil {
		return nil
	}
	return b.limit.Close()
}

// Budget is a limit of CPU, and its state.
type Budget struct {
	MaxCPU    float64 `json:"max_cpu"`             // percent of one CPU
	Cgroup    string  `json:"cgroup,omitempty"`    // the cgroup with the limit; empty: there is none
	Why       string  `json:"why,omitempty"`       // why there is none
	Throttled uint64  `json:"throttled,omitempty"` // periods of 100 ms in which the process had to wait
}

func (b *budget) status() (*Budget, error) {
	if b == nil {
		return nil, nil
	}
	s := &Budget{MaxCPU: b.max, Why: b.why}
	if b.limit == nil {
		return s, nil
	}
	s.Cgroup = b.limit.Folder
	var err error
	s.Throttled, err = b.limit.Throttled()
	return s, err
}
