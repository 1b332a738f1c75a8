package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	burnFor     = 200 * time.Millisecond // CPU time of the process that has to wait
	waitsLonger = time.Millisecond
	hogName     = "demo-hog"
	// lightNice gives the process a third of the hog's share (sched_prio_to_weight of the kernel), so that it waits.
	lightNice = 5
)

// CPU is the CPU with too much work, and the findings of `shunt diag runq`.
type CPU struct {
	CPU     int     `json:"cpu"`
	Waits   int     `json:"told_waits"` // of the process, longer than 1 ms
	Behind  int     `json:"told_behind_hog"`
	Waited  float64 `json:"told_waited_ms"`
	Hog     float64 `json:"told_behind_hog_ms"`
	Burnt   float64 `json:"burnt_ms"`
	Seconds float64 `json:"seconds"` // for the burn
}

func (d *demo) busyCPU(ctx context.Context) error {
	cpu, err := lastCPU()
	if err != nil {
		return err
	}
	hog, err := d.hire(ctx, Order{Name: hogName, CPU: cpu}, nil)
	if err != nil {
		return err
	}
	light, err := d.hire(ctx, Order{Name: "demo-late", CPU: cpu, Nice: lightNice, Burn: burnFor.Nanoseconds()}, nil)
	if err != nil {
		return err
	}
	d.Say("  On CPU %d, the process %s computes without an end. The process demo-late, %d, has to\n  compute for %v on the same CPU.\n\n", cpu-1, hogName, light.cmd.Process.Pid, burnFor)
	t, err := d.begin(ctx, nil, "runq", "--pid", fmt.Sprint(light.cmd.Process.Pid), "--threshold", waitsLonger.String(), "--duration", atMost)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := hog.work(); err != nil {
		return err
	}
	if err := light.work(); err != nil {
		return err
	}
	r, err := light.report(ctx)
	if err != nil {
		return err
	}
	c := &d.facts.CPU
	*c = CPU{CPU: cpu - 1, Burnt: float64(burnFor) / 1e6, Seconds: time.Since(begin).Seconds()}
	if err := t.end(ctx, func(kind string, text []byte) error { return d.readWait(kind, text, r.TID) }); err != nil {
		return err
	}
	d.Say("\n  It took %.0f ms. runq says: demo-late waited %d times, %.0f ms in all, and %s, %d, ran for\n  %.0f ms of them.\n\n", 1e3*c.Seconds, c.Waits, c.Waited, hogName, hog.cmd.Process.Pid, c.Hog)
	d.Claim(c.Waits > 0 && c.Waited <= 1e3*c.Seconds, "runq sees the process wait: %.0f ms of the %.0f ms that it took", c.Waited, 1e3*c.Seconds)
	// Other tasks may run on this CPU, too, but each wait is one turn of all of them.
	d.Claim(2*c.Behind > c.Waits, "runq names who had the CPU meanwhile: %s, in %d of %d waits", hogName, c.Behind, c.Waits)
	return nil
}

// lastCPU returns the last CPU that this process may use, counted from 1.
func lastCPU() (last int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, fmt.Errorf("read the CPUs that the demo may use: %w", err)
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			last = cpu + 1
		}
	}
	return last, nil
}

func (d *demo) readWait(kind string, text []byte, waiter int) error {
	if kind != "wait" {
		return nil
	}
	var line struct {
		TID    int
		Nanos  float64 `json:"wait_ns"`
		Behind []struct {
			TID   int
			Comm  string
			Nanos float64 `json:"ran_ns"`
		}
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return err
	}
	if line.TID != waiter {
		return nil // it was a thread of the worker's runtime
	}
	c := &d.facts.CPU
	c.Waits++
	c.Waited += line.Nanos / 1e6
	for _, one := range line.Behind {
		if one.Comm == hogName {
			c.Behind++
			c.Hog += one.Nanos / 1e6
		}
	}
	return nil
}
