package sched

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// init keeps TestMain on the process's first thread, so that the watched task has the process's id.
func init() { runtime.LockOSThread() }

// TestMain is also the task that is watched: it does the work that SHUNT_TEST_SCHED names on one CPU until it is
// killed.
func TestMain(m *testing.M) {
	does := os.Getenv("SHUNT_TEST_SCHED")
	if does == "" {
		os.Exit(m.Run())
	}
	var cpus unix.CPUSet
	cpus.Set(aCPU())
	if err := unix.SchedSetaffinity(0, &cpus); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// An orphan ends too: nothing is left behind if the test is killed.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		os.Exit(1)
	}
	fmt.Println("ready")
	for {
		if does == "sleep" {
			time.Sleep(time.Millisecond)
		}
	}
}

// aCPU is the first that this process may use.
func aCPU() int {
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		return 0
	}
	for n := range 8192 {
		if cpus.IsSet(n) {
			return n
		}
	}
	return 0
}

// begin starts a task on the CPU of aCPU, and returns its id when it is there.
func begin(t *testing.T, does string) uint32 {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^$")
	// Otherwise the Go runtime interrupts a busy task every 10 ms, and it gives up its CPU.
	c.Env = append(os.Environ(), "SHUNT_TEST_SCHED="+does, "GODEBUG=asyncpreemptoff=1")
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the task does not begin: %q, %v", line, err)
	}
	return uint32(c.Process.Pid)
}

// signal stops or continues a task, and waits until all its threads have done so.
func signal(t *testing.T, pid uint32, s unix.Signal) {
	t.Helper()
	if err := unix.Kill(int(pid), s); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); s == unix.SIGSTOP; time.Sleep(time.Millisecond) {
		stopped := true
		for _, folder := range threads(t, pid) {
			text, err := os.ReadFile(folder + "/stat")
			if err != nil {
				t.Fatal(err)
			}
			_, rest, _ := strings.Cut(string(text), ") ")
			stopped = stopped && strings.HasPrefix(rest, "T")
		}
		if stopped {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d does not stop", pid)
		}
	}
}

func threads(t *testing.T, pid uint32) []string {
	t.Helper()
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(all) == 0 {
		t.Fatalf("the threads of process %d: %v", pid, err)
	}
	return all
}

// schedstat is the kernel's own account of a process: ns that its threads waited for a CPU, and the number of times
// that they got one.
func schedstat(t *testing.T, pid uint32) (delay, times uint64) {
	t.Helper()
	for _, folder := range threads(t, pid) {
		text, err := os.ReadFile(folder + "/schedstat")
		if err != nil {
			t.Fatal(err)
		}
		var ran, waited, n uint64
		if _, err := fmt.Sscan(string(text), &ran, &waited, &n); err != nil {
			t.Fatal(err)
		}
		delay, times = delay+waited, times+n
	}
	return delay, times
}

// inEachWay runs a test with the sensors of runq, and with each way to see switches alone.
func inEachWay(t *testing.T, test func(t *testing.T, sensors []sensor.Sensor)) {
	for n, way := range waitSensors()[0].Ways {
		t.Run(way.Program, func(t *testing.T) {
			sensors := runqSensors()
			sensors[0].Ways = sensors[0].Ways[n : n+1]
			test(t, sensors)
		})
	}
}

// observe watches a process from a stop to a stop, until it has enough waits, and compares with the kernel's account.
func observe(t *testing.T, pid uint32, sensors []sensor.Sensor, threshold time.Duration, enough func(all []Wait, waits uint64) bool) ([]Wait, Queues) {
	t.Helper()
	signal(t, pid, unix.SIGSTOP)
	delay, times := schedstat(t, pid)
	c, err := open(Options{PID: pid, Threshold: threshold}, sensors, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.release(); err != nil {
			t.Error(err)
		}
	}()
	for _, r := range c.set.Results {
		t.Log(r)
	}
	signal(t, pid, unix.SIGCONT)
	var waits []Wait
	take := func(e event.Event) error {
		w, err := decodeWait(e)
		waits = append(waits, w)
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		short, done := context.WithTimeout(ctx, 50*time.Millisecond)
		err := c.read(short, take, nil)
		done()
		q, failed := c.queues()
		if err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		if enough(waits, count(q)) {
			break
		}
	}
	signal(t, pid, unix.SIGSTOP)
	delayAfter, timesAfter := schedstat(t, pid)
	ending, err := c.end(func(e event.Event) {
		if err := take(e); err != nil {
			t.Error(err)
		}
	})
	if err != nil || ending.Lost != 0 || ending.Missed.Total() != ending.Missed.Unseen || int(ending.Received) != len(waits) {
		t.Errorf("the end: %+v, %v, %d waits", ending, err, len(waits))
	}
	q, err := c.queues()
	if err != nil {
		t.Fatal(err)
	}
	sum := uint64(0)
	for _, cpu := range q.CPUs {
		sum += cpu.WaitNanos
	}
	want, wantTimes := delayAfter-delay, timesAfter-times
	// Linux 6.18 leaves runs of programs out; the sensor counts the waits that it has not seen, but for two switches in
	// a row.
	unseen := ending.Missed.Unseen
	t.Logf("waited %d ns in %d waits, and %d not seen; the kernel has %d ns in %d", sum, count(q), unseen, want, wantTimes)
	tolerance := uint64(0) // the kernel's account
	if !strings.HasPrefix(c.set.Results[0].Got.Program, "sh_queued") {
		// A stamp of the sensor is some µs from the kernel's own, at both ends of a wait, and an interrupt or the hypervisor may take the CPU
		// between the two. An emulated machine (-short) takes tenths of a ms.
		tolerance = want/50 + wantTimes*20_000 + 20_000_000
		if testing.Short() {
			tolerance = math.MaxUint64 / 2
		}
	}
	if difference := max(sum, want) - min(sum, want); difference > tolerance+unseen*20_000_000 {
		t.Errorf("waited %d ns, and the kernel has %d ns", sum, want)
	}
	if n := count(q) + unseen; max(n, wantTimes)-min(n, wantTimes) > 1+wantTimes/100 || unseen > wantTimes/10 {
		t.Errorf("%d waits, %d not seen, and the kernel has %d", n, unseen, wantTimes)
	}
	return waits, q
}

func count(q Queues) (waits uint64) {
	for _, cpu := range q.CPUs {
		waits += cpu.Waits
	}
	return waits
}

// TestCompetitorIsNamed has two busy tasks on one CPU: one waits for the other.
func TestCompetitorIsNamed(t *testing.T) { inEachWay(t, testCompetitorIsNamed) }

func testCompetitorIsNamed(t *testing.T, sensors []sensor.Sensor) {
	competitor, waiter := begin(t, "spin"), begin(t, "spin")
	named := func(waits []Wait) (n int) {
		for _, w := range waits {
			for _, c := range w.Behind {
				if c.TID == competitor {
					n++
				}
			}
		}
		return n
	}
	// Other tasks of the machine may be ahead too, so this waits for the competitor's name.
	waits, q := observe(t, waiter, sensors, time.Millisecond, func(all []Wait, _ uint64) bool { return named(all) >= 3 })
	if named(waits) < 3 {
		t.Errorf("%d of %d waits name process %d", named(waits), len(waits), competitor)
	}
	takenOff := 0
	for _, w := range waits {
		if w.PID != waiter || w.Nanos < uint64(time.Millisecond) {
			t.Errorf("want waits of process %d of more than 1 ms: %+v", waiter, w)
		}
		if !w.Woken {
			takenOff++
		}
		sum := w.UnknownNanos
		for _, c := range w.Behind {
			sum += c.Nanos
			if c.TID == w.TID {
				t.Errorf("a task waits for itself: %+v", w)
			}
		}
		if sum != w.Nanos {
			t.Errorf("the parts of a wait are %d ns together: %+v", sum, w)
		}
		if w.TID == waiter && (w.CPU != uint32(aCPU()) || w.Moved) {
			t.Errorf("the task is on CPU %d alone: %+v", aCPU(), w)
		}
		t.Log(w.Reason())
	}
	if takenOff == 0 {
		t.Errorf("the task is busy, and was never taken off the CPU in %d waits", len(waits))
	}
	longest := uint64(0)
	for _, cpu := range q.CPUs {
		longest = max(longest, cpu.LengthMax)
	}
	if longest < 2 {
		t.Errorf("two tasks have to run on one CPU, and no run queue was longer than %d", longest)
	}
}

// TestSleeperHasNoOtherWaits has a task that asks for nothing: all its waits are those of the kernel's account, and
// most are of wake-ups.
func TestSleeperHasNoOtherWaits(t *testing.T) {
	inEachWay(t, func(t *testing.T, sensors []sensor.Sensor) {
		sleeper := begin(t, "sleep")
		_, q := observe(t, sleeper, sensors, time.Hour, func(_ []Wait, waits uint64) bool { return waits >= 200 })
		woken := uint64(0)
		for _, task := range q.Tasks {
			woken += task.Wakeups
			if task.PID != sleeper || task.Wakeups == 0 || task.MeanNanos > task.MaxNanos {
				t.Errorf("wake-ups of process %d: %+v", sleeper, task)
			}
		}
		if woken*2 < count(q) || woken > count(q) {
			t.Errorf("%d of %d waits are of wake-ups", woken, count(q))
		}
	})
}

// TestWaitThatMoves has a busy task moved to and fro between two CPUs, each with another busy task: a wait that moves is one wait.
func TestWaitThatMoves(t *testing.T) {
	here, other := twoCPUs(t)
	inEachWay(t, func(t *testing.T, sensors []sensor.Sensor) {
		begin(t, "spin")
		there, waiter := begin(t, "spin"), begin(t, "spin")
		if err := unix.SchedSetaffinity(int(there), &other); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		moves := make(chan error, 1)
		go func() {
			ticks := time.NewTicker(1500 * time.Microsecond)
			defer ticks.Stop()
			for n := 0; ctx.Err() == nil; n++ {
				<-ticks.C
				if err := unix.SchedSetaffinity(int(waiter), []*unix.CPUSet{&here, &other}[n%2]); err != nil {
					moves <- err
					return
				}
			}
			moves <- nil
		}()
		moved := func(waits []Wait) (n int) {
			for _, w := range waits {
				if w.TID == waiter && w.Moved {
					n++
				}
			}
			return n
		}
		waits, _ := observe(t, waiter, sensors, time.Millisecond, func(all []Wait, _ uint64) bool { return moved(all) >= 10 })
		cancel()
		if err := <-moves; err != nil {
			t.Fatal(err)
		}
		if moved(waits) < 10 {
			t.Errorf("%d of %d waits moved", moved(waits), len(waits))
		}
	})
}

// twoCPUs returns the CPU on which begin starts tasks, and another one.
func twoCPUs(t *testing.T) (here, other unix.CPUSet) {
	t.Helper()
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		t.Fatal(err)
	}
	if cpus.Count() < 2 {
		t.Skip("needs two CPUs")
	}
	here.Set(aCPU())
	for n := aCPU() + 1; other.Count() == 0; n++ {
		if cpus.IsSet(n) {
			other.Set(n)
		}
	}
	return here, other
}

// TestFirstWaitThatMoves has a task that is there before the sensors wait behind a task with a fixed priority, and moved to a free CPU then: its
// first wait has the time before the move.
func TestFirstWaitThatMoves(t *testing.T) {
	here, other := twoCPUs(t)
	inEachWay(t, func(t *testing.T, sensors []sensor.Sensor) {
		runtime.LockOSThread() // and not unlocked: the thread ends with the test, and its CPU with it
		if err := unix.SchedSetaffinity(0, &other); err != nil {
			t.Fatal(err)
		}
		ahead, waiter := begin(t, "spin"), begin(t, "spin")
		if err := unix.SchedSetaffinity(int(ahead), &here); err != nil {
			t.Fatal(err)
		}
		signal(t, waiter, unix.SIGSTOP)
		policy := func(policy, priority uint32) {
			a := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy, Priority: priority}
			if err := unix.SchedSetAttr(int(ahead), &a, 0); err != nil {
				t.Fatal(err)
			}
		}
		const streamsMax = 10
		for n := 1; ; n++ {
			if err := unix.SchedSetaffinity(int(waiter), &here); err != nil {
				t.Fatal(err)
			}
			policy(unix.SCHED_FIFO, 1)
			isMoved := false
			var first *Wait
			observe(t, waiter, sensors, 0, func(all []Wait, _ uint64) bool {
				for _, w := range all {
					if w.TID == waiter && first == nil {
						first = &w
					}
				}
				if !isMoved {
					if err := unix.SchedSetaffinity(int(waiter), &other); err != nil {
						t.Fatal(err)
					}
					policy(unix.SCHED_NORMAL, 0)
					isMoved = true
				}
				return first != nil
			})
			if first != nil && first.Moved && first.Nanos > uint64(20*time.Millisecond) {
				return
			}
			// If this thread is late, the kernel takes the other one off its CPU before the move: it has 95 % of each second.
			if n == streamsMax {
				t.Fatalf("the first wait is %+v", first)
			}
		}
	})
}

// TestKernelThatNotesNothing has types without the kernel's account of waits: programs run at each wake-up then, and the line says why.
func TestKernelThatNotesNothing(t *testing.T) {
	sleeper := begin(t, "sleep")
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		t.Fatal(err)
	}
	kernel = kernel.Copy()
	var account *btf.Struct
	if err := kernel.TypeByName("sched_info", &account); err != nil {
		t.Fatal(err)
	}
	account.Members = nil
	c, err := open(Options{PID: sleeper, Threshold: time.Hour, BTF: sensor.BTF{Spec: kernel}}, runqSensors(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.release(); err != nil {
			t.Error(err)
		}
	}()
	r := c.set.Results[0]
	t.Log(r)
	if len(r.Refused) < 2 || !strings.Contains(r.Got.Loses, withoutNotes) || !c.set.Holds(wakeups) || !c.set.Holds(newTasks) {
		t.Errorf("got %v, and %v", r, c.set.Results[1:])
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		q, err := c.queues()
		if err != nil {
			t.Fatal(err)
		}
		if count(q) >= 20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a task that sleeps and wakes has %d waits", count(q))
		}
	}
}

// Where there is room for one task that waits, and three want a CPU, waits are not measured, and counted.
func TestWaitsWithoutRoomAreCounted(t *testing.T) {
	for range 3 {
		begin(t, "spin")
	}
	c, err := open(Options{Threshold: time.Hour, waiting: 1}, runqSensors(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.release(); err != nil {
			t.Error(err)
		}
	}()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		missed, err := c.missed()
		if err != nil {
			t.Fatal(err)
		}
		if missed.Waits > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no wait was without room: %+v", missed)
		}
	}
}
