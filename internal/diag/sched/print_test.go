package sched

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/golden"
)

func runQueues(t *testing.T, p runqPrinter) {
	t.Helper()
	sensors := runqSensors()
	way := sensors[0].Ways[1]
	results := []sensor.Result{{Sensor: sensors[0], Got: &way, Refused: []sensor.Refusal{{Way: sensors[0].Ways[0], Reason: "EPERM"}}}, {Sensor: sensors[4]}}
	if err := p.start(results, "a file"); err != nil {
		t.Fatal(err)
	}
	moment := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	for _, w := range []Wait{
		{Time: moment, CPU: 1, Comm: "a b\x1b[2J", TID: 11, PID: 10, Nanos: 12_000_000, Woken: true,
			Behind: []Competitor{{"spin", 20, 11_000_000}, {"swapper/1", 0, 500_000}, {"c", 3, 300_000}, {"d", 4, 100_000}, {"e", 5, 100_000}}},
		{Time: moment, CPU: 0, Comm: "x", TID: 12, PID: 12, Nanos: 20_000_000, Moved: true, Behind: []Competitor{}, UnknownNanos: 20_000_000},
	} {
		if err := p.wait(w); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.budget(sensor.Spending{Percent: 4, Change: "a change"}); err != nil {
		t.Fatal(err)
	}
	q := Queues{Seconds: 2, CPUs: []CPU{{CPU: 0, Buckets: []uint64{}}, {CPU: 1, Waits: 6, WaitNanos: 12_000_000, Buckets: []uint64{1, 0, 5}, Samples: 200, LengthMean: 1.5, LengthMax: 3}},
		Tasks: []Task{{"a b\x1b[2J", 11, 10, 3, 1500, 4000}, {"x", 12, 12, 1, 10, 10}}}
	ending := Ending{event.Summary{Received: 5, Lost: 2, Broken: 1}, Missed{Waits: 1, Wakeups: 2, Unseen: 3, NotRun: map[string]uint64{"switches": 4}}, &sensor.Spending{Percent: 2.5, Change: "a change"}}
	if err := p.summary(q, ending); err != nil {
		t.Fatal(err)
	}
}

func TestRunqOutput(t *testing.T) {
	var people, programs bytes.Buffer
	runQueues(t, runqText{&people, 10 * time.Millisecond, 1})
	runQueues(t, runqLines{json.NewEncoder(&programs)})
	golden.Require(t, "testdata/runq.txt", people.String())
	golden.Require(t, "testdata/runq.json", programs.String())
}

// TestBehindIsWhatOverlaps has runs before, in, and over both ends of the wait, and one whose beginning is not known.
func TestBehindIsWhatOverlaps(t *testing.T) {
	raw := schedSchedWait{BeginNs: 100, EndNs: 200}
	raw.Runs[0] = schedSchedRun{BeginNs: 10, EndNs: 100, Tid: 1}
	raw.Runs[1] = schedSchedRun{BeginNs: 100, EndNs: 130, Tid: 2}
	raw.Runs[2] = schedSchedRun{BeginNs: 130, EndNs: 140, Tid: 3}
	raw.Runs[3] = schedSchedRun{BeginNs: 140, EndNs: 150, Tid: 2}
	raw.Runs[4] = schedSchedRun{BeginNs: 190, EndNs: 260, Tid: 3}
	all, unknown := behind(raw)
	if want := []Competitor{{"", 2, 40}, {"", 3, 20}}; !reflect.DeepEqual(all, want) || unknown != 40 {
		t.Errorf("got %v and %d not known, want %v and 40", all, unknown, want)
	}
	raw.Runs = [len(raw.Runs)]schedSchedRun{{EndNs: 150, Tid: 7}}
	if all, unknown := behind(raw); len(all) != 0 || unknown != 100 {
		t.Errorf("a run whose beginning is not known: %v, %d", all, unknown)
	}
}

func TestStallOutput(t *testing.T) {
	moment := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	for path, asJSON := range map[string]bool{"testdata/irqoff.txt": false, "testdata/irqoff.json": true} {
		var out bytes.Buffer
		v := stallView{out: &out, json: asJSON, threshold: 10 * time.Millisecond, kinds: map[Kind]uint64{}, uncounted: "none is counted"}
		err := v.start([]sensor.Result{{Sensor: runqSensors()[4]}}, "a file", nil)
		stack := []string{"unlock+0x19", "sleep+0x5"}
		for _, s := range []Stall{
			{IRQOff, moment, 1, "a b\x1b[2J", 11, 10, 12_000_000, 2_000_000, 500_000, "", stack, 0},
			{Softirq, moment, 1, "c", 12, 12, 13_000_000, 0, 0, "NET_RX", stack, 0},
			{Preempt, moment, 0, "d", 13, 13, 14_000_000, 4_000_000, 0, "", stack, 0},
			{Steal, moment, 0, "e", 14, 14, 15_000_000, 2_000_000, 15_000_000, "", []string{}, 0},
			{Idle, moment, 0, "swapper/0", 0, 0, 90_000_000, 2_000_000, 0, "", stack, 0},
		} {
			err = errors.Join(err, v.stall(s))
		}
		err = errors.Join(err, v.budget(sensor.Spending{Percent: 4, Change: "a change"}))
		err = errors.Join(err, v.wait(Wait{Time: moment, Comm: "x", TID: 15, PID: 15, Nanos: 11_000_000, Behind: []Competitor{{"spin", 20, 11_000_000}}}))
		err = errors.Join(err, v.summary(2*time.Second, Ending{event.Summary{Received: 6}, Missed{Untold: 7, NotRun: map[string]uint64{}}, nil}))
		if err != nil {
			t.Fatal(err)
		}
		golden.Require(t, path, out.String())
	}
}

// TestWhereInterruptsComeIn has the code before an interrupted instruction.
func TestWhereInterruptsComeIn(t *testing.T) {
	for _, test := range []struct {
		name string
		code []byte
		want bool
	}{
		{"popf", []byte{0x90, 0x90, 0x9d}, true},
		{"sti, nop", []byte{0x90, 0xfb, 0x90}, true},
		{"sti, nop of 4 bytes", []byte{0xfb, 0x0f, 0x1f, 0x40, 0x00}, true},
		{"sti, and two instructions", []byte{0xfb, 0x90, 0x90}, false},
		{"sti alone", []byte{0x90, 0x90, 0xfb}, false},
		{"a constant that looks like sti", []byte{0xb8, 0xfb, 0x00, 0x00, 0x00}, false},
		{"nothing", []byte{0x90, 0x90, 0x90}, false},
	} {
		if got := letsInterruptsIn(test.code); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
	idle := schedSchedStall{Tid: 0}
	idle.Code[len(idle.Code)-1] = 0x9d
	if got := lateKind(idle, []string{"do_idle+0x1"}); got != Idle {
		t.Errorf("an idle CPU: %s", got)
	}
	if got := lateKind(idle, []string{"handle_softirqs+0x1"}); got != IRQOff {
		t.Errorf("a softirq on an idle CPU: %s", got)
	}
	idle.Tid, idle.IsUser = 5, 1
	if got := lateKind(idle, nil); got != Steal {
		t.Errorf("user space: %s", got)
	}
}

func TestStealThatIsNotCounted(t *testing.T) {
	const metal, guest = "processor\t: 0\nflags\t\t: fpu vme\nbugs\t\t:\n", "processor\t: 0\nflags\t\t: fpu hypervisor vme\nbugs\t\t:\n"
	const none, some = "cpu  1 2 3 4 5 6 7 0 0 0\ncpu0 1 2\n", "cpu  1 2 3 4 5 6 7 8 0 0\ncpu0 1 2\n"
	for _, test := range []struct {
		cpus, times string
		told        bool
	}{{metal, none, false}, {guest, none, true}, {guest, some, false}} {
		if got := stealOf(test.cpus, test.times); got != "" != test.told {
			t.Errorf("%q, %q: %q", test.cpus, test.times, got)
		}
	}
}
