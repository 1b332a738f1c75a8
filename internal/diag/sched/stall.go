package sched

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/arch/x86/x86asm"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Kind is the reason why a CPU or a task was late.
type Kind string

// The kinds.
const (
	IRQOff  Kind = "irqoff"  // interrupts were off
	Softirq Kind = "softirq" // a softirq took long
	Preempt Kind = "preempt" // kernel code did not yield to a waiting task
	// Steal: the timer came late although interrupts were on: the CPU itself did not run, or an interrupt took long.
	Steal Kind = "steal"
	Idle  Kind = "idle" // the timer came late to a CPU without work: no task was late
)

// Stall is a CPU that was late.
type Stall struct {
	Kind    Kind      `json:"kind"`
	Time    time.Time `json:"time"` // its end
	CPU     uint32    `json:"cpu"`
	Comm    string    `json:"comm"` // of the task that was running
	TID     uint32    `json:"tid"`
	PID     uint32    `json:"pid"`
	Nanos   uint64    `json:"latency_ns"`
	Error   uint64    `json:"error_ns"`          // the largest error of Nanos
	Steal   uint64    `json:"steal_ns"`          // of a late timer: time in which the hypervisor ran something else, as far as it reports it; not in Nanos of irqoff
	Softirq string    `json:"softirq,omitempty"` // its name
	Stack   []string  `json:"stack"`             // of the kernel, the innermost function first

	endNs uint64 // CLOCK_MONOTONIC
}

// period returns the period of the timer that finds delays longer than the threshold: two fifths of it, so that a delay of the
// threshold has two of its ticks.
func period(threshold time.Duration) time.Duration { return threshold * 2 / 5 }

// late returns the time after its last tick from which on a timer counts as late. The cause of its delay began within the period after that
// tick, in the mean after a half, so the delay was longer than the threshold.
func late(threshold time.Duration) time.Duration { return threshold + period(threshold)/2 }

func stallSensors(threshold time.Duration) []sensor.Sensor {
	return append(waitSensors(),
		timer("interrupts that come late, and what they interrupted", "", period(threshold)),
		without(at(softirqBegin, "softirqs that take long", "softirq_entry", "sh_soft_in"), withoutSoftirqs),
		without(at(softirqEnd, "softirqs that take long", "softirq_exit", "sh_soft_out"), withoutSoftirqs))
}

const withoutSoftirqs = "softirqs that take long are not reported"

// softirqs are the names of linux/interrupt.h, by number.
var softirqs = []string{"HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"}

func decodeStall(e event.Event, threshold time.Duration, s *symbol.Table) (Stall, error) {
	raw, err := decode[schedSchedStall](e.Payload)
	if err != nil {
		return Stall{}, err
	}
	half := uint64(period(threshold)) / 2
	took := raw.EndNs - min(raw.EndNs, raw.BeginNs)
	l := Stall{Time: event.Time(e.TimeNs), CPU: e.CPU, Comm: event.Text(raw.Comm[:]), TID: raw.Tid, PID: raw.Tgid, Nanos: took, Stack: stackOf(raw, s), endNs: raw.EndNs}
	switch schedSchedSensor(e.Sensor) {
	case schedSchedSensorSCHED_TIMER_LATE:
		l.Nanos, l.Error = took-min(took, half), half
		l.Kind = lateKind(raw, l.Stack)
		l.Time = l.Time.Add(-time.Duration(2 * half)) // it is reported at the next tick
		if raw.IsStealKnown != 0 {
			l.Steal = raw.StealNs
		}
		// A hypervisor often interrupts where interrupts are off for a moment, because there a CPU talks to it.
		if l.Kind == IRQOff && l.Nanos < l.Steal+uint64(threshold) {
			l.Kind = Steal
		} else if l.Kind == IRQOff {
			l.Nanos -= l.Steal
		}
	case schedSchedSensorSCHED_SOFTIRQ_LONG:
		l.Kind = Softirq
		if int(raw.Vector) < len(softirqs) {
			l.Softirq = softirqs[raw.Vector]
		}
	case schedSchedSensorSCHED_NOT_YIELDED:
		l.Kind, l.Error = Preempt, 2*half
	default:
		return Stall{}, fmt.Errorf("decode an event: its sensor is %d", e.Sensor)
	}
	return l, nil
}

// lateKind returns why a timer came late, from the code that it interrupted. An interrupt that was held back comes at the very
// instruction that enables interrupts. If it comes anywhere else, interrupts were on before, and the timer itself was late.
func lateKind(raw schedSchedStall, stack []string) Kind {
	inSoftirq := slices.ContainsFunc(stack, func(f string) bool { return strings.Contains(f, "softirq") })
	switch {
	case raw.Tid == 0 && !inSoftirq:
		return Idle
	case raw.IsUser == 0 && letsInterruptsIn(raw.Code[:]):
		return IRQOff
	}
	return Steal
}

// letsInterruptsIn reports whether the code before an interrupted x86 instruction ends with POPF, or with STI and one instruction:
// STI enables interrupts only after the next instruction (Intel SDM, volume 2B, STI).
func letsInterruptsIn(code []byte) bool {
	const popf, sti = 0x9d, 0xfb
	n := len(code)
	if code[n-1] == popf {
		return true
	}
	for at := n - 2; at >= 0; at-- {
		if code[at] != sti {
			continue
		}
		if next, err := x86asm.Decode(code[at+1:], 64); err == nil && next.Len == n-at-1 {
			return true
		}
	}
	return false
}

// uncountedSteal returns the reason why a CPU that the hypervisor took away may look like interrupts that are off: this is a virtual
// machine, and its kernel has counted no steal since it booted. "": it counts steal, or the machine is not virtual.
func uncountedSteal() string {
	cpus, err1 := os.ReadFile("/proc/cpuinfo")
	times, err2 := os.ReadFile("/proc/stat")
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Sprintf("not known whether the hypervisor counts it: %v", err)
	}
	return stealOf(string(cpus), string(times))
}

// isVirtual reports whether the text of /proc/cpuinfo is a virtual machine's.
func isVirtual(cpus string) bool {
	_, flags, _ := strings.Cut(cpus, "\nflags")
	flags, _, _ = strings.Cut(flags, "\n")
	return slices.Contains(strings.Fields(flags), "hypervisor")
}

// stealOf is uncountedSteal for the texts of /proc/cpuinfo and /proc/stat; the eighth number of the latter's first line
// is steal (proc_stat(5)).
func stealOf(cpus, times string) string {
	first, _, _ := strings.Cut(times, "\n")
	fields := strings.Fields(first)
	if !isVirtual(cpus) || len(fields) > 8 && fields[8] != "0" {
		return ""
	}
	return "this virtual machine has counted none, so a CPU that its hypervisor takes while interrupts are off for a moment is reported as irqoff"
}

// stackOf returns a stack of the kernel in words.
func stackOf(raw schedSchedStall, s *symbol.Table) []string {
	frames := []string{}
	for _, address := range raw.Stack[:min(int(raw.StackBytes)/8, len(raw.Stack))] {
		frames = append(frames, s.Name(address))
	}
	return frames
}
