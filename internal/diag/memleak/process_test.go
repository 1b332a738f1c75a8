package memleak

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// compilers are those of C libraries whose memory is watched.
var compilers = []struct {
	name string
	args []string
}{
	{"glibc", []string{"gcc"}},
	{"glibc, static", []string{"gcc", "-static"}},
	{"musl", []string{"musl-gcc"}},
}

// leakyFile is for machines without a compiler.
var leakyFile = flag.String("leaky", "", "the program of testdata/leaky.c, in the place of what tests compile")

// compile makes the program of testdata/leaky.c, or with g++ of leaky.cc. It has frame pointers, so that stacks are
// whole, and the compiler does not take its own functions for malloc.
func compile(t *testing.T, args ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "leaky")
	if *leakyFile != "" {
		made, err := os.ReadFile(*leakyFile)
		if err := errors.Join(err, os.WriteFile(program, made, 0o700)); err != nil {
			t.Fatal(err)
		}
		return program
	}
	if _, err := exec.LookPath(args[0]); err != nil {
		t.Skipf("needs %s", args[0])
	}
	standard, source := "-std=gnu11", "testdata/leaky.c"
	if args[0] == "g++" {
		standard, source = "-std=gnu++17", "testdata/leaky.cc"
	}
	all := append(args[1:len(args):len(args)], standard, "-O1", "-g0", "-fno-builtin", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls",
		"-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, source)
	if out, err := exec.Command(args[0], all...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// leaky is the program at work.
type leaky struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out io.Reader
}

func startLeaky(t *testing.T, program string) *leaky {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	l := &leaky{cmd: exec.Command(program)}
	l.cmd.Stderr = os.Stderr
	var err1, err2 error
	l.in, err1 = l.cmd.StdinPipe()
	l.out, err2 = l.cmd.StdoutPipe()
	if err := errors.Join(err1, err2, l.cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.cmd.Process.Kill() // it may have ended
		_ = l.cmd.Wait()
	})
	l.wait(t)
	return l
}

func (l *leaky) do(t *testing.T, what string, n int) {
	t.Helper()
	if _, err := fmt.Fprintf(l.in, "%s%04d", what, n); err != nil {
		t.Fatal(err)
	}
	l.wait(t)
}

func (l *leaky) wait(t *testing.T) {
	t.Helper()
	if _, err := io.ReadFull(l.out, make([]byte, 1)); err != nil {
		t.Fatalf("the process does not answer: %v", err)
	}
}

// watchLeaky is the tool at work for it.
func watchLeaky(t *testing.T, l *leaky, o Options) *Watcher {
	t.Helper()
	o.PID = l.cmd.Process.Pid
	w, err := Watch(o, View{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, r := range w.Results() {
		t.Log(r)
	}
	return w
}

func interval(t *testing.T, w *Watcher) Interval {
	t.Helper()
	i, err := w.Interval()
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// in counts the live allocations of a function.
func (i Interval) in(function string) (live, bytes uint64) {
	for _, r := range i.Rows {
		if len(r.Stack) > 0 && strings.HasPrefix(r.Stack[0], function+"+") {
			live, bytes = live+r.Live, bytes+r.Bytes
		}
	}
	return live, bytes
}

// TestProcessIsCountedExactly leaks known numbers of each kind beside threads that churn, and frees them.
func TestProcessIsCountedExactly(t *testing.T) {
	for _, c := range compilers {
		t.Run(c.name, func(t *testing.T) {
			l := startLeaky(t, compile(t, c.args...))
			w := watchLeaky(t, l, Options{Interval: time.Second})
			l.do(t, "b", 0)
			kept := []struct {
				what, function string
				n              int
				bytes          uint64 // of one
			}{
				{"m", "leak_malloc", 150, 100}, {"c", "leak_calloc", 110, 200}, {"r", "leak_realloc", 120, 300}, {"l", "leak_large", 7, 1 << 20},
				{"p", "leak_memalign", 130, 400}, {"a", "leak_aligned", 140, 512}, {"v", "leak_map", 21, 64 << 10}, {"w", "leak_remap", 22, 128 << 10},
			}
			for _, one := range kept {
				l.do(t, one.what, one.n)
			}
			l.do(t, "f", 50)
			l.do(t, "u", 50)
			l.do(t, "e", 0)
			i := interval(t, w)
			for _, one := range kept {
				if live, bytes := i.in(one.function); live != uint64(one.n) || bytes != uint64(one.n)*one.bytes {
					t.Errorf("%s: %d live with %d bytes, of %d", one.function, live, bytes, one.n)
				}
			}
			if all := i.Counts.sum(); all.Unfreed+all.AllocsNotRun+all.FreesNotRun+all.Full+all.FreesBusy+all.AllocsBusy != 0 || all.Allocs < 1000 {
				t.Errorf("%+v", all)
			}
			for _, r := range i.Rows {
				t.Logf("%v %d %v", r.Kind, r.Live, r.Stack)
			}
			l.do(t, "d", 0)
			i = interval(t, w)
			for _, one := range kept {
				if live, _ := i.in(one.function); live != 0 {
					t.Errorf("%s: %d live after the last free", one.function, live)
				}
			}
			if live, _ := i.in("to_grow"); live != 0 {
				t.Errorf("%d that were moved are live", live)
			}
			if live, _ := i.in("churn"); live != 0 {
				t.Errorf("%d of the churn are live", live)
			}
		})
	}
}

// TestCallersOfOperatorNew has the callers of operator new at the top, and not operator new itself.
func TestCallersOfOperatorNew(t *testing.T) {
	if *leakyFile != "" {
		t.Skip("needs g++")
	}
	for _, args := range [][]string{{"g++"}, {"g++", "-static"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			l := startLeaky(t, compile(t, args...))
			w := watchLeaky(t, l, Options{Interval: time.Second})
			l.do(t, "o", 31)
			l.do(t, "a", 32)
			l.do(t, "n", 33)
			i := interval(t, w)
			for function, want := range map[string][2]uint64{"leak_object": {31, 24}, "leak_array": {32, 700}, "leak_nothrow": {33, 50}} {
				if live, bytes := i.in(function); live != want[0] || bytes != want[0]*want[1] {
					t.Errorf("%s: %d live with %d bytes, of %d", function, live, bytes, want[0])
				}
			}
			l.do(t, "d", 0)
			if i = interval(t, w); i.Live != 0 || i.Counts[Malloc].AllocsNotRun != 0 {
				t.Errorf("%d live after the last delete: %+v, %+v", i.Live, i.Rows, i.Counts[Malloc])
			}
		})
	}
}

// TestProcessThatGrows leaks again and again beside churn: its row grows, and no other.
func TestProcessThatGrows(t *testing.T) {
	l := startLeaky(t, compile(t, "gcc"))
	w := watchLeaky(t, l, Options{Interval: 100 * time.Millisecond})
	l.do(t, "b", 0)
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		l.do(t, "m", 5)
		i := interval(t, w)
		for _, r := range i.Rows {
			if r.State == Growing && !strings.HasPrefix(r.Stack[0], "leak_malloc+") {
				t.Errorf("%+v", r)
			}
		}
		if i.Growing > 0 {
			t.Logf("%+v", i.Rows[0])
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", i.Rows)
		}
	}
}

// TestOlderMemoryOfAProcessIsNobodysLeak moves and frees memory that was allocated before the start.
func TestOlderMemoryOfAProcessIsNobodysLeak(t *testing.T) {
	l := startLeaky(t, compile(t, "gcc"))
	l.do(t, "m", 200)
	w := watchLeaky(t, l, Options{Interval: time.Second})
	l.do(t, "g", 0)
	i := interval(t, w)
	if i.Live != 0 || i.Counts[Malloc].FreesOlder != 200 {
		t.Errorf("%d live, %+v", i.Live, i.Counts[Malloc])
	}
	l.do(t, "d", 0)
	if i = interval(t, w); i.Live != 0 || i.Counts[Malloc].FreesOlder != 400 || i.Counts[Malloc].Unfreed != 0 {
		t.Errorf("%d live, %+v", i.Live, i.Counts[Malloc])
	}
}

// TestProcessEnds has a summary of the memory that the process has not given back; a process that runs another program
// has none.
func TestProcessEnds(t *testing.T) {
	l := startLeaky(t, compile(t, "gcc"))
	var out bytes.Buffer
	started := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- Run(t.Context(), Options{PID: l.cmd.Process.Pid, Interval: time.Hour}, View{}, true, &beginningSeen{Writer: &out, seen: started})
	}()
	<-started
	l.do(t, "m", 33)
	_ = l.in.Close() // it ends
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if text := out.String(); !strings.Contains(text, `"process_ended":true`) || !strings.Contains(text, `"live":33,`) || !strings.Contains(text, "leak_malloc+") {
		t.Error(text)
	}

	l = startLeaky(t, compile(t, "gcc", "-static")) // it is at the same addresses each time
	w := watchLeaky(t, l, Options{Interval: time.Second})
	interval(t, w) // which finds the program that was there
	l.do(t, "x", 0)
	if _, err := w.Interval(); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("after exec: %v", err)
	}
}

// beginningSeen closes a channel when the first line is written.
type beginningSeen struct {
	io.Writer
	seen chan struct{}
}

func (b *beginningSeen) Write(p []byte) (int, error) {
	if b.seen != nil {
		close(b.seen)
		b.seen = nil
	}
	return b.Writer.Write(p)
}

// isGoAlone reports whether this program is linked without the C library, as with CGO_ENABLED=0.
func isGoAlone(t *testing.T) bool {
	t.Helper()
	f, err := elf.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	return len(libraries) == 0
}

// TestProcessesThatAreRefused checks the reasons.
func TestProcessesThatAreRefused(t *testing.T) {
	if *leakyFile != "" {
		t.Skip("needs gcc: the program must have no symbols")
	}
	static := compile(t, "gcc", "-static", "-s")
	l := startLeaky(t, static)
	sleeper := begin(t)
	gone := exec.Command("/proc/self/exe", "-test.run", "^$")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	refused := map[int]string{l.cmd.Process.Pid: "linked statically", gone.Process.Pid: "there is no process"}
	if isGoAlone(t) {
		refused[int(sleeper.pid)] = "Go"
	}
	ctx, done := context.WithTimeout(t.Context(), time.Minute)
	defer done()
	for pid, want := range refused {
		err := Run(ctx, Options{PID: pid, Interval: time.Second}, View{}, false, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v, want %q", pid, err, want)
		}
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", sleeper.pid))
	if err != nil || len(tasks) < 2 {
		t.Fatalf("%d threads of a program in Go, %v", len(tasks), err)
	}
	var thread int
	if _, err := fmt.Sscan(tasks[len(tasks)-1].Name(), &thread); err != nil {
		t.Fatal(err)
	}
	if err := Run(ctx, Options{PID: thread, Interval: time.Second}, View{}, false, io.Discard); err == nil || !strings.Contains(err.Error(), "thread") {
		t.Errorf("a thread: %v", err)
	}
}

// TestCostOfAProcess measures the cost of a pair of malloc and free, for the guide.
func TestCostOfAProcess(t *testing.T) {
	if os.Getenv("SHUNT_SOAK") == "" {
		t.Skip("measures, and does not judge; SHUNT_SOAK=1 runs it")
	}
	l := startLeaky(t, compile(t, "gcc"))
	const rounds, calls = 2000, 54 // a round has 18 malloc, 10 realloc, 21 free, and 5 others
	cpu := func() time.Duration {
		l.do(t, "u", 1)
		before := usage(t, l.cmd.Process.Pid)
		l.do(t, "u", rounds)
		return usage(t, l.cmd.Process.Pid) - before
	}
	for turn := range 5 {
		without := cpu()
		w := watchLeaky(t, l, Options{Interval: time.Second})
		with := cpu()
		w.c.release() //nolint:errcheck // and again at the end
		t.Logf("turn %d: a call %v, watched %v", turn, without/(rounds*calls), with/(rounds*calls))
	}
}

// usage is the CPU time of a process.
func usage(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	var ns int64
	if err == nil {
		_, err = fmt.Sscan(string(text), &ns)
	}
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ns)
}
