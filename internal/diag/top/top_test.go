package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/diag/memleak"
	"github.com/shunt-lb/shunt/internal/diag/sched"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/churn"
	"github.com/shunt-lb/shunt/test/golden"
)

var moment = time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)

// fullScreen has more of all than fits, and texts that are too long or not to be printed.
func fullScreen() Screen {
	s := Screen{Time: moment, Seconds: 2, Command: 1.25, IO: &io.Interval{Time: moment, Seconds: 2, Bytes: 1000, UnattributedBytes: 125, NotRun: map[string]uint64{}},
		Sched: &sched.Interval{Seconds: 2, Kinds: map[sched.Kind]uint64{sched.IRQOff: 1, sched.Steal: 2, sched.WaitKind: 10}}, Memory: &memleak.Interval{Time: moment, Sample: 64}}
	for n := range 5 {
		s.IO.Disks = append(s.IO.Disks, io.Disk{Name: fmt.Sprintf("vd%c", 'a'+n), ReadRate: 1e6, WriteRate: 2e6, ReadBytes: 1e9, WriteBytes: 2e9, Wait: 0.25, Device: 0.125, Util: 100})
		s.IO.Rows = append(s.IO.Rows, io.Row{Comm: "a b\x1b[2J", PID: uint32(n), ReadBytes: 4096, WriteBytes: 1 << 30, Unattributed: n == 1, Inode: 7, Device: "vda",
			Path: "/var/" + strings.Repeat("long/", n*5) + "file\n"})
		s.Sched.CPUs = append(s.Sched.CPUs, sched.Load{CPU: n, Waits: uint64(n) * 100, MeanNanos: 12_500, P99Nanos: 64_000, Runnable: 1.5})
		s.Sched.Waiters = append(s.Sched.Waiters, sched.Waiter{Comm: "waiter", TID: uint32(n), PID: 1, Waits: 3, Longest: sched.Wait{Nanos: 25_000_000, Time: moment,
			Behind: []sched.Competitor{{Comm: "competitor", TID: 99, Nanos: 24_000_000}, {Comm: "another one", TID: 98, Nanos: 900_000}}}})
		s.Memory.Rows = append(s.Memory.Rows, memleak.Row{Kind: memleak.Slab, Cache: "a cache with a long name", State: memleak.Growing, Rate: 1 << 20, Bytes: 1 << 24,
			Estimate: &memleak.Scaled{Bytes: 1 << 30}, Stack: []string{"a_function_that_allocates_and_has_a_long_name+0x12"}})
		s.NotSeen = append(s.NotSeen, fmt.Sprintf("part %d: much was not seen, and this sentence is longer than eighty columns allow", n))
	}
	// Names in which characters are two columns wide, and a device with a long name.
	wide := strings.Repeat("中文ひらがな한글🙂", 2)
	s.IO.Disks[1].Name = "a-disk-with-a-long-name"
	s.IO.Rows[2].Comm, s.IO.Rows[2].Path = wide[:15], "/"+strings.Repeat(wide+"/", 5)+"名"
	s.Sched.Waiters[1].Comm, s.Sched.Waiters[1].Longest.Behind[0].Comm = wide[:15], wide[:15]
	s.Sched.Longest = &sched.Stall{Kind: sched.IRQOff, Nanos: 31_000_000, CPU: 1, Comm: "holder", TID: 7, Stack: []string{"hold_interrupts+0x1"}}
	return s
}

// quietScreen is of a machine that does nothing, on which all sensors are attached.
func quietScreen() Screen {
	return Screen{Time: moment, Seconds: 2, IO: &io.Interval{Time: moment, Seconds: 2, Disks: []io.Disk{}, Rows: []io.Row{}, NotRun: map[string]uint64{}},
		Sched:  &sched.Interval{Seconds: 2, CPUs: []sched.Load{}, Waiters: []sched.Waiter{}, Kinds: map[sched.Kind]uint64{}},
		Memory: &memleak.Interval{Time: moment, Sample: 64, Live: 300, Rows: []memleak.Row{{State: memleak.Steady}}}, NotSeen: []string{}}
}

func TestOutput(t *testing.T) {
	for path, asJSON := range map[string]bool{"testdata/top.txt": false, "testdata/top.json": true} {
		var out bytes.Buffer
		var p printer = &text{out: &out, size: func() (int, int) { return screenColumns, screenLines }, threshold: 10 * time.Millisecond}
		if asJSON {
			p = jsonLines{json.NewEncoder(&out)}
		}
		early := quietScreen()
		early.Memory.Rows[0].State = memleak.Early
		early.Sched.Longest = &sched.Stall{Kind: sched.Softirq, Nanos: 12_000_000, CPU: 1, Comm: "x", TID: 7, Softirq: "NET_RX"}
		percent := 99.5
		err := errors.Join(p.start([]sensor.Result{{Sensor: io.Sensors[0]}}, "a file"), p.screen(fullScreen()), p.screen(quietScreen()), p.screen(early),
			p.screen(Screen{Time: moment, Seconds: 2, NotSeen: []string{"IO cannot be shown: no way"}}),
			p.summary(Summary{Seconds: 4, Names: &event.Summary{Received: 5, Lost: 1}, Late: &sched.Ending{Summary: event.Summary{Received: 7}}, Confidence: &percent, Spending: &sensor.Spending{Percent: 2.5, Change: "a change"}}))
		if err != nil {
			t.Fatal(err)
		}
		golden.Require(t, path, out.String())
	}
}

// drawnColumns is the width of a line on a terminal.
func drawnColumns(l string) (n int) {
	for _, r := range l {
		n++
		if unicode.In(r, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Hangul) || r >= 0x1f300 && r < 0x1fb00 {
			n++
		}
	}
	return n
}

// TestScreenFits has no screen scroll a terminal, and parts of a redrawn one stay where they are.
func TestScreenFits(t *testing.T) {
	for _, size := range []struct{ width, height, want int }{{80, 24, 24}, {80, 50, 24}, {200, 24, 24}, {40, 10, 10}, {1, 1, 1}} {
		titles := ""
		for _, s := range []Screen{fullScreen(), quietScreen()} {
			s.NotSeen = append(s.NotSeen, "something")
			var out bytes.Buffer
			p := &text{out: &out, size: func() (int, int) { return size.width, size.height }, threshold: 10 * time.Millisecond, redraws: true}
			if err := p.screen(s); err != nil {
				t.Fatal(err)
			}
			drawn, is := strings.CutPrefix(out.String(), toTop)
			drawn, ended := strings.CutSuffix(drawn, endOfLine+endOfAll)
			all := strings.Split(drawn, endOfLine+"\n")
			if !is || !ended || len(all) != size.want {
				t.Errorf("%v: %d lines: %q", size, len(all), out.String())
			}
			at := ""
			for n, l := range all {
				if length := drawnColumns(l); length > size.width {
					t.Errorf("%v: a line of %d columns: %q", size, length, l)
				}
				if strings.ContainsAny(l, "\x1b\n") {
					t.Errorf("%v: a line has codes of the terminal: %q", size, l)
				}
				if title := strings.Fields(l + " -")[0]; size.width >= 40 && title == strings.ToUpper(title) && strings.Contains("DISK IO CPU WAITED LATE MEMORY NOT", title) {
					at += fmt.Sprint(title, " ", n, " ")
				}
			}
			if titles == "" {
				titles = at
			}
			if at != titles {
				t.Errorf("%v: parts move from %s to %s", size, titles, at)
			}
		}
	}
}

func TestNotSeenIsTold(t *testing.T) {
	lost := sched.Ending{Summary: event.Summary{Lost: 3, Broken: 1}, Missed: sched.Missed{Unseen: 4, NotRun: map[string]uint64{"timer": 2}}}
	missed := io.Interval{MissedBytes: 2048, NotRun: map[string]uint64{"disks": 5}}
	got := strings.Join(append(lateNotSeen(lost), ioNotSeen(missed)...), "\n")
	want := `CPUs: events lost: 3, broken: 1
CPUs: waits, wake-ups and runs of a sensor that were missed: 6
IO: 2.0KB are in no row, because there were too many
disks: 5 were not seen, because the sensor was interrupted on its CPU`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if lines := append(lateNotSeen(sched.Ending{}), ioNotSeen(io.Interval{})...); len(lines) > 0 {
		t.Errorf("nothing was lost, and it says %q", lines)
	}
}

// TestPartThatCannotRun leaves the others at work; without any there is no screen.
func TestPartThatCannotRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	fails := func(err error) part {
		return part{"memory", func(*collector, Options) error { return err }}
	}
	c, err := open(Options{Interval: time.Second, Threshold: time.Second}, []part{fails(sensor.ErrNoWay), parts[1]})
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	s, err := c.screen(ended)
	if err != nil || s.IO == nil || s.Sched != nil || s.Memory != nil || !strings.Contains(strings.Join(s.NotSeen, "\n"), "memory cannot be shown: "+sensor.ErrNoWay.Error()) {
		t.Errorf("got %+v, %v", s, err)
	}
	if sum, err := c.close(); err != nil || sum.Names == nil || sum.Late != nil || sum.Confidence != nil {
		t.Errorf("got %+v, %v", sum, err)
	}
	if _, err := open(Options{}, []part{fails(sensor.ErrNoWay)}); !errors.Is(err, sensor.ErrNoWay) {
		t.Errorf("without any part: %v", err)
	}
	if _, err := open(Options{Interval: time.Second}, []part{parts[1], fails(sensor.ErrPrivilege)}); !errors.Is(err, sensor.ErrPrivilege) {
		t.Errorf("without privileges: %v", err)
	}
}

// TestPartThatTakesLongIsTold has a part that goes on only after the message about it.
func TestPartThatTakesLongIsTold(t *testing.T) {
	told := make(chan string, 1)
	slow := part{"memory", func(*collector, Options) error {
		select {
		case sentence := <-told:
			if !strings.HasPrefix(sentence, "attaching the sensors of memory, ") {
				t.Errorf("got %q", sentence)
			}
		case <-time.After(time.Minute):
			t.Error("nobody was told")
		}
		return sensor.ErrNoWay
	}}
	if _, err := open(Options{Waits: func(sentence string) { told <- sentence }}, []part{slow}); !errors.Is(err, sensor.ErrNoWay) {
		t.Error(err)
	}
}

// TestScreenIsTrue has this process write and flush a file all the time, and a shell begin processes: the kernel memory
// that this process allocates is left out, and in a small guest no other process allocates any.
func TestScreenIsTrue(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	path := filepath.Join(t.TempDir(), "file of the test")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		t.Fatal(err)
	}
	onDisk := true
	if _, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))); err != nil {
		onDisk = false // the rest of the screen is shown all the same
	}
	done := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		block := make([]byte, 64<<10)
		for ctx.Err() == nil {
			_, err := file.WriteAt(block, 0)
			if err := errors.Join(err, file.Sync()); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	defer cancel()
	defer churn.Begin(t)()
	r := &reading{file: path, inode: stat.Ino, t: t}
	r.enough = func() bool { return r.screens >= 2 && r.waits > 0 && r.live > 0 && (r.wrote > 0 || !onDisk) }
	watching, stop := context.WithTimeout(t.Context(), 5*time.Minute)
	r.stop = stop
	err = Run(watching, Options{Interval: 100 * time.Millisecond, Threshold: time.Millisecond, Sample: 64}, true, r)
	stop()
	cancel()
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	if !r.enough() || !r.started || r.summary.Late == nil || r.summary.Names == nil || r.summary.Confidence == nil {
		t.Errorf("%d screens, %d bytes written by this process, %d waits, %d allocations, started %v, summary %+v", r.screens, r.wrote, r.waits, r.live, r.started, r.summary)
	}
	if r.wrote%4096 != 0 {
		t.Errorf("%d bytes are no pages", r.wrote)
	}
}

// reading takes the output of Run, and stops it when it has read enough.
type reading struct {
	t       *testing.T
	file    string
	inode   uint64
	enough  func() bool
	stop    func()
	started bool

	screens            int
	wrote, waits, live uint64
	summary            summaryLine
}

func (r *reading) Write(line []byte) (int, error) {
	var s struct {
		Type    string
		Seconds float64
		IO      io.Interval
		Sched   sched.Interval
		Memory  struct{ Live uint64 }
	}
	switch {
	case bytes.HasPrefix(line, []byte(`{"type":"start"`)):
		r.started = r.screens == 0
		return len(line), nil
	case bytes.HasPrefix(line, []byte(`{"type":"summary"`)):
		return len(line), json.Unmarshal(line, &r.summary)
	}
	if err := json.Unmarshal(line, &s); err != nil || s.Type != "screen" {
		r.t.Errorf("%v: a line of the type %q", err, s.Type)
	}
	r.screens++
	r.t.Logf("%.2f s, IO of %.2f s, CPUs of %.2f s", s.Seconds, s.IO.Seconds, s.Sched.Seconds)
	for _, row := range s.IO.Rows {
		if row.PID == uint32(os.Getpid()) && row.Inode == r.inode {
			r.wrote += row.WriteBytes
			if row.Path != r.file {
				r.t.Errorf("the path is %s, not %s", row.Path, r.file)
			}
		}
	}
	for _, l := range s.Sched.CPUs {
		r.waits += l.Waits
	}
	r.live += s.Memory.Live
	if r.enough() {
		r.stop()
	}
	return len(line), nil
}

// TestScreenWithoutTerminal expects one screen, for any duration.
func TestScreenWithoutTerminal(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var out bytes.Buffer
	if err := Run(t.Context(), Options{Interval: 100 * time.Millisecond, Threshold: time.Second}, false, &out); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); strings.Count(text, "shunt diag top") != 1 || !strings.Contains(text, "\nSummary of ") || !strings.Contains(text, "--memory watches it") || strings.Contains(text, "\x1b") {
		t.Errorf("got %s", text)
	}
}
