package memleak

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
)

// TestMain is also the process whose kernel memory is watched: it keeps, drops and churns as the test says on its
// standard input, and answers each line when it has done so.
func TestMain(m *testing.M) {
	if os.Getenv("SHUNT_TEST_MEMLEAK") == "" {
		os.Exit(m.Run())
	}
	// An orphan ends too: nothing is left behind if the test is killed.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		os.Exit(1)
	}
	_ = rlimit.RemoveMemlock()
	k := keeper{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		what, number, _ := strings.Cut(lines.Text(), " ")
		n, _ := strconv.Atoi(number)
		if err := k.do(what, n); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("done")
	}
}

// keeper holds kernel memory.
type keeper struct {
	pipes [][2]int
	maps  []*ebpf.Map
}

func (k *keeper) do(what string, n int) error {
	switch what {
	case "pipes": // of each: a struct and its buffers by kmalloc, two files of a slab cache, one page with a byte in it
		for range n {
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				return err
			}
			if _, err := unix.Write(p[1], []byte{1}); err != nil {
				return err
			}
			k.pipes = append(k.pipes, p)
		}
	case "ranges": // of each: a range of vmalloc, as it is too large for kmalloc
		for range n {
			if err := k.add(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 64 << 10, MaxEntries: 4}); err != nil {
				return err
			}
		}
	case "percpu": // one map with n pieces of memory of each CPU
		return k.add(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: uint32(n)})
	case "drop":
		return k.drop()
	case "fault/slab", "fault/page", "fault/vmalloc", "fault/drop":
		return os.WriteFile(filepath.Join(faults, filepath.Base(what)), []byte(strconv.Itoa(n)), 0)
	case "churn":
		for range n {
			for _, one := range []string{"pipes 5", "ranges 1", "percpu 5", "drop"} {
				what, number, _ := strings.Cut(one, " ")
				count, _ := strconv.Atoi(number)
				if err := k.do(what, count); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (k *keeper) add(spec *ebpf.MapSpec) error {
	m, err := ebpf.NewMap(spec)
	if err == nil {
		k.maps = append(k.maps, m)
	}
	return err
}

func (k *keeper) drop() error {
	for _, p := range k.pipes {
		if err := unix.Close(p[0]); err != nil {
			return err
		}
		if err := unix.Close(p[1]); err != nil {
			return err
		}
	}
	for _, m := range k.maps {
		if err := m.Close(); err != nil {
			return err
		}
	}
	k.pipes, k.maps = nil, nil
	return nil
}

// process is a keeper at work.
type process struct {
	pid uint32
	in  io.Writer
	out *bufio.Reader
}

func begin(t *testing.T) process {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^$")
	c.Env = append(os.Environ(), "SHUNT_TEST_MEMLEAK=1")
	c.Stderr = os.Stderr
	in, err1 := c.StdinPipe()
	out, err2 := c.StdoutPipe()
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	p := process{uint32(c.Process.Pid), in, bufio.NewReader(out)}
	p.do(t, "drop") // it is there
	return p
}

func (p process) tell(t *testing.T, what string) {
	t.Helper()
	if _, err := fmt.Fprintln(p.in, what); err != nil {
		t.Fatal(err)
	}
}

func (p process) wait(t *testing.T) {
	t.Helper()
	if line, err := p.out.ReadString('\n'); line != "done\n" {
		t.Fatalf("the process answers %q, %v", line, err)
	}
}

func (p process) do(t *testing.T, what string) {
	t.Helper()
	p.tell(t, what)
	p.wait(t)
}

// noise churns in another process until the test ends.
func noise(t *testing.T) {
	p := begin(t)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if _, err := fmt.Fprintln(p.in, "churn 1"); err != nil {
				stopped <- err
				return
			}
			if line, err := p.out.ReadString('\n'); line != "done\n" {
				stopped <- fmt.Errorf("the noise answers %q, %w", line, err)
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
}

// watched is the tool at work for one process: others allocate too.
type watched struct {
	c *collector
	a *account
	p process
}

func watchOne(t *testing.T, o Options) watched {
	t.Helper()
	p := begin(t)
	functions, err := symbol.Read()
	if err != nil {
		t.Fatal(err)
	}
	c, err := open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.release(); err != nil {
			t.Error(err)
		}
	})
	for _, r := range c.set.Results {
		t.Log(r)
	}
	return watched{c, newAccount(o.Interval, c.sample, c, functions.Name, false), p}
}

func (w watched) snapshot(t *testing.T) (Snapshot, Counts) {
	t.Helper()
	all, err := w.c.live()
	if err != nil {
		t.Fatal(err)
	}
	counts, err := w.c.counts()
	if err != nil {
		t.Fatal(err)
	}
	mine := all[:0]
	for _, one := range all {
		if one.PID == w.p.pid {
			mine = append(mine, one)
		}
	}
	at := now()
	return w.a.take(mine, at, float64(at)/1e9, counts.missed(), nil), counts
}

// of returns the row that grows most of a kind with a function at the top of the stack, and the number of live
// allocations in all such rows.
func (s Snapshot) of(kind Kind, functions ...string) (first Row, live uint64) {
	for _, r := range s.Rows {
		if r.Kind == kind && len(r.Stack) > 0 && isFunction(r.Stack[0], functions) && (kind != Slab || ofPipes(r)) {
			if live == 0 {
				first = r
			}
			live += r.Live
		}
	}
	return first, live
}

// ofPipes: a map is a file, too, and the runtime may open one.
func ofPipes(r Row) bool {
	return slices.ContainsFunc(r.Stack, func(f string) bool { return strings.HasPrefix(f, "create_pipe_files") })
}

// files are the functions that allocate a file, by kernel. Its cache may be merged with another one.
var files = []string{"alloc_empty_file", "__alloc_file"}

// TestEachKindIsCountedExactly keeps known numbers of each kind beside a process that churns, and drops them.
func TestEachKindIsCountedExactly(t *testing.T) {
	noise(t)
	w := watchOne(t, Options{Interval: time.Second})
	const pipes, ranges, percpu = 150, 20, 64
	kept := []struct {
		kind      Kind
		n         uint64
		functions []string // by kernel
	}{
		{Kmalloc, 2 * pipes, []string{"alloc_pipe_info"}},
		{Slab, 2 * pipes,
			files},
		{Pages, pipes, []string{"pipe_write", "anon_pipe_write", "anon_pipe_get_page"}},
		{Vmalloc, ranges, []string{"__bpf_map_area_alloc", "bpf_map_area_alloc", "array_map_alloc"}},
		{Percpu, percpu, []string{"bpf_map_alloc_percpu", "bpf_array_alloc_percpu", "array_map_alloc"}},
	}
	w.p.do(t, fmt.Sprint("pipes ", pipes))
	w.p.do(t, fmt.Sprint("ranges ", ranges))
	w.p.do(t, fmt.Sprint("percpu ", percpu))
	s, _ := w.snapshot(t)
	for _, one := range kept {
		r, live := s.of(one.kind, one.functions...)
		t.Logf("%+v", r)
		if want := one.n; live != want && !w.c.blind[one.kind] {
			t.Errorf("%v: %d of %d", one.kind, live, want)
		}
	}
	w.p.do(t, "drop")
	// Files are freed when the process returns from its calls, and maps after a grace period of RCU.
	var counts Counts
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		s, counts = w.snapshot(t)
		left := map[Kind]uint64{}
		for _, one := range kept {
			if _, live := s.of(one.kind, one.functions...); live > 0 {
				left[one.kind] = live
			}
		}
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("still live: %v", left)
		}
	}
	t.Logf("%+v, confidence %.2f %%", counts.sum(), counts.Confidence())
	for _, r := range s.Rows[:min(3, len(s.Rows))] {
		t.Logf("%+v", r)
	}
}

// TestGrowthIsFound keeps more and more, and then a constant number: that is no growth.
func TestGrowthIsFound(t *testing.T) {
	noise(t)
	w := watchOne(t, Options{Interval: 100 * time.Millisecond})
	rounds := func(what string, until func(r Row) bool) (r Row) {
		t.Helper()
		for deadline := time.Now().Add(5 * time.Minute); ; {
			if len(what) > 0 {
				w.p.do(t, what)
			}
			s, _ := w.snapshot(t)
			r, _ = s.of(Kmalloc, "alloc_pipe_info")
			if until(r) {
				return r
			}
			if time.Now().After(deadline) {
				t.Fatalf("after %q: %+v", what, r)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	r := rounds("pipes 3", func(r Row) bool { return r.State == Growing })
	t.Logf("%+v", r)
	if r.Growth <= 0 || r.Rate <= 0 {
		t.Errorf("it grows by %v a second, and %v bytes", r.Growth, r.Rate)
	}
	rounds("", func(r Row) bool { return r.State == Steady })
}

// TestChurnDoesNotGrow looks at each interval: none may say that something grows.
func TestChurnDoesNotGrow(t *testing.T) {
	const interval = 100 * time.Millisecond
	w := watchOne(t, Options{Interval: interval})
	for n := range 14 {
		w.p.tell(t, "churn 5")
		time.Sleep(time.Duration(n%4) * interval / 4) // snapshots shall find the process at different points
		s, _ := w.snapshot(t)
		w.p.wait(t)
		for _, r := range s.Rows {
			if r.State == Growing {
				t.Errorf("%+v", r)
			}
		}
	}
	_, counts := w.snapshot(t)
	t.Logf("%+v, confidence %.2f %%", counts.sum(), counts.Confidence())
}

var soakFor = flag.Duration("soak", 0, "how long TestChurnForMinutes churns; it is for a machine on which nothing else runs")

// TestChurnForMinutes watches the whole machine while processes churn with pipes, maps, files, sockets, directories and other processes, and leak nothing:
// no interval may say that something grows. In a virtual machine:
//
//	go run ./test/kernel --kernels 6.12 --packages './internal/diag/memleak=TestChurnForMinutes' --args '-soak 5m'
func TestChurnForMinutes(t *testing.T) {
	if *soakFor == 0 {
		t.Skip("takes minutes of a machine on which nothing else runs; -args -soak 5m runs it")
	}
	w, err := Watch(Options{Interval: 2 * time.Second}, View{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	noise(t)
	noise(t)
	rounds := filesAndProcesses(t)
	ticks := time.NewTicker(2 * time.Second)
	defer ticks.Stop()
	states := map[State]int{}
	var i Interval
	for end := time.Now().Add(*soakFor); time.Now().Before(end); {
		<-ticks.C
		if i, err = w.Interval(); err != nil {
			t.Fatal(err)
		}
		for _, r := range i.Rows {
			if states[r.State]++; r.State == Growing {
				t.Errorf("after %.0f s: %+v", i.Seconds, r)
			}
		}
	}
	all := i.Counts.sum()
	t.Logf("%d rounds of files and processes in %.0f s; %+v; rows by state: %v; confidence %.2f %%", rounds(), i.Seconds, all, states, i.Confidence)
	if states[Steady] == 0 || all.Allocs < 10_000 {
		t.Error("there was too little to judge")
	}
}

// filesAndProcesses makes and removes them until the test ends, and returns the number of rounds.
func filesAndProcesses(t *testing.T) (rounds func() uint64) {
	var n atomic.Uint64
	folder := t.TempDir()
	stop, stopped := make(chan struct{}), make(chan error, 1)
	round := func() error {
		below := filepath.Join(folder, "a", "b")
		if err := os.MkdirAll(below, 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(below, "file"), make([]byte, 100_000), 0o600); err != nil {
			return err
		}
		if err := os.RemoveAll(filepath.Join(folder, "a")); err != nil {
			return err
		}
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		if _, err := unix.Write(pair[0], []byte("x")); err != nil {
			return err
		}
		if err := errors.Join(unix.Close(pair[0]), unix.Close(pair[1])); err != nil {
			return err
		}
		c := exec.Command("/proc/self/exe", "-test.run", "^$")
		c.Env = append(os.Environ(), "SHUNT_TEST_MEMLEAK=1") // it ends at the end of its input
		return c.Run()
	}
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := round(); err != nil {
				stopped <- err
				return
			}
			n.Add(1)
		}
	}()
	t.Cleanup(func() {
		close(stop)
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
	return n.Load
}

// TestFullTableIsCounted has room for few allocations.
func TestFullTableIsCounted(t *testing.T) {
	w := watchOne(t, Options{Interval: time.Second, Table: 16})
	w.p.do(t, "pipes 50")
	s, counts := w.snapshot(t)
	if all := counts.sum(); all.Full == 0 || s.Live > 16 {
		t.Errorf("%d live, %+v", s.Live, all)
	}
}

// TestSampleEstimates watches one address of 8, then of 16: each estimate is within five times its error, which one of
// many million is not.
func TestSampleEstimates(t *testing.T) {
	w := watchOne(t, Options{Interval: time.Second, Sample: 8})
	const pipes = 450
	w.p.do(t, fmt.Sprint("pipes ", pipes))
	check := func() {
		t.Helper()
		s, _ := w.snapshot(t)
		r, _ := s.of(Slab, files...)
		if r.Estimate == nil {
			t.Fatalf("no estimate: %+v", r)
		}
		t.Logf("1/%d: %d±%d of %d", w.c.sample, r.Estimate.Live, r.Estimate.LiveError, pipes)
		if r.Live >= pipes/2 || math.Abs(float64(r.Estimate.Live)-pipes) > 5*float64(r.Estimate.LiveError) {
			t.Errorf("%+v", r.Estimate)
		}
	}
	check()
	if err := w.c.sampleLess(2 * w.c.sample); err != nil {
		t.Fatal(err)
	}
	w.a.sample = w.c.sample
	w.a.restart()
	check()
	w.p.do(t, "drop")
	w.p.do(t, fmt.Sprint("pipes ", pipes))
	check()
}

// TestExamineTellsOfAllSensors holds for each kernel: the tool can run.
func TestExamineTellsOfAllSensors(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	spec := sensors()
	results, err := Examine(Options{}.BTF)
	if err != nil || len(results) != len(spec) {
		t.Errorf("%d results, %v", len(results), err)
	}
}
