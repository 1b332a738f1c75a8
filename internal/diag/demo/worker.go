package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Order is a worker's task; the command line carries it as JSON.
type Order struct {
	Name  string  `json:"name"`           // of the process, as tools show it
	Size  uint64  `json:"size,omitempty"` // of a slow file: to serve it at descriptor 3, bytes
	Delay int64   `json:"delay_ns,omitempty"`
	Disk  string  `json:"disk,omitempty"`
	Count int     `json:"count,omitempty"`
	Rate  float64 `json:"rate,omitempty"` // of a slow file that the worker serves at descriptor 3, bytes
	CPU   int     `json:"cpu"`            // counted from 1; 0: any
	Nice  int     `json:"nice"`
	Burn  int64   `json:"burn_ns,omitempty"` // of the CPU; 0: until it is ended, with CPU
}

// report is the result of a worker.
type report struct {
	TID   int     `json:"tid"`
	Count int     `json:"count"`
	Mean  float64 `json:"mean_ms"` // of a write
}

// Work runs a worker of the demo: it reports that it is ready, waits for a line, does its task, reports, keeps
// its objects, and ends when its standard input does.
func Work(order string, in io.Reader, out io.Writer) error {
	var o Order
	if err := json.Unmarshal([]byte(order), &o); err != nil {
		return fmt.Errorf("read the demo's order: %w", err)
	}
	runtime.LockOSThread() // this thread has the name, the CPU and the weight
	if err := o.prepare(); err != nil {
		return err
	}
	lines := bufio.NewReader(in)
	fmt.Fprintln(out, "ready")
	if _, err := lines.ReadString('\n'); err != nil {
		return nil // the demo has ended
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, lines) // the demo has ended
		close(ended)
	}()
	r, err := o.do(ended)
	if err != nil {
		return err
	}
	r.TID = unix.Gettid()
	if err := json.NewEncoder(out).Encode(r); err != nil {
		return err
	}
	<-ended
	return nil
}

func (o Order) prepare() error {
	for _, path := range []string{"/proc/self/comm", "/proc/thread-self/comm"} {
		if err := os.WriteFile(path, []byte(o.Name), 0); err != nil {
			return fmt.Errorf("name the worker: %w", err)
		}
	}
	if o.CPU > 0 {
		var set unix.CPUSet
		set.Set(o.CPU - 1)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("bind the worker to CPU %d: %w", o.CPU-1, err)
		}
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, o.Nice); err != nil {
			return fmt.Errorf("set the worker's weight: %w", err)
		}
	}
	return nil
}

func (o Order) do(ended <-chan struct{}) (report, error) {
	switch {
	case o.Size > 0:
		go func() { // it waits for a request
			<-ended
			os.Exit(0)
		}()
		return report{}, slowFile{3, o.Size, time.Duration(o.Delay)}.serve()
	case o.Disk != "":
		return writeDisk(o.Disk, o.Count)
	case o.Rate > 0:
		return keepEvents(o.Count, o.Rate, ended)
	}
	return report{}, burn(time.Duration(o.Burn), ended)
}

// writeBytes is the size of a write to the disk.
const writeBytes = 4096

// writeDisk writes past the page cache, one write after the other, so that each waits for the disk.
func writeDisk(path string, count int) (report, error) {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return report{}, fmt.Errorf("open the disk: %w", err)
	}
	defer unix.Close(fd)
	buffer, err := unix.Mmap(-1, 0, writeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return report{}, fmt.Errorf("make a buffer: %w", err)
	}
	begin := time.Now()
	for i := range count {
		if _, err := unix.Pwrite(fd, buffer, int64(i*writeBytes)); err != nil {
			return report{}, fmt.Errorf("write to the disk: %w", err)
		}
	}
	return report{Count: count, Mean: float64(time.Since(begin).Nanoseconds()) / 1e6 / float64(count)}, nil
}

// keepEvents makes event descriptors at a rate, and closes none.
func keepEvents(count int, rate float64, ended <-chan struct{}) (report, error) {
	begin := time.Now()
	for made := 0; made < count; {
		for due := min(count, int(rate*time.Since(begin).Seconds())); made < due; made++ {
			if _, err := unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
				return report{}, fmt.Errorf("make an event descriptor: %w", err)
			}
		}
		select {
		case <-ended:
			return report{Count: made}, nil
		case <-time.After(time.Duration(float64(time.Second) / rate)):
		}
	}
	return report{Count: count}, nil
}

// burn computes for an amount of CPU time; 0: until the end.
func burn(atLeast time.Duration, ended <-chan struct{}) error {
	for {
		for range 10_000 { // some microseconds
			select {
			case <-ended:
				return nil
			default:
			}
		}
		var used unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
			return fmt.Errorf("read the worker's CPU time: %w", err)
		}
		if atLeast > 0 && time.Duration(used.Nano()) > atLeast {
			return nil
		}
	}
}

// worker is a process that makes a fault.
type worker struct{ *process }

// hire starts a worker and waits until it is ready.
func (d *demo) hire(ctx context.Context, o Order, prepare func(*exec.Cmd)) (worker, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return worker{}, err
	}
	p, err := d.start(ctx, nil, prepare, "demo", "diag-worker", "--order", string(text))
	if err != nil {
		return worker{}, err
	}
	if line, err := p.next(ctx); err != nil || line != "ready\n" {
		return worker{}, errors.Join(err, fmt.Errorf("the worker %s is not ready: %q", o.Name, line))
	}
	return worker{p}, nil
}

// work has the worker begin.
func (w worker) work() error {
	if _, err := io.WriteString(w.in, "\n"); err != nil {
		return fmt.Errorf("tell a worker to begin: %w", err)
	}
	return nil
}

// report waits until the worker has done its task.
func (w worker) report(ctx context.Context) (r report, err error) {
	line, err := w.next(ctx)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return r, fmt.Errorf("read a worker's report: %w: %s", err, line)
	}
	return r, nil
}
