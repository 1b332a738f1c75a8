package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/process"
)

// Process is a child that does not end by itself, with its output so far.
type Process struct {
	*Command
	Ended <-chan struct{} // closed when it has ended

	mu     sync.Mutex
	output bytes.Buffer
	err    error // once ended
}

// Spawn starts the command and waits for its end in the background. Its standard output and error
// are kept for Log.
func (c *Command) Spawn() (*Process, error) {
	ended := make(chan struct{})
	p := &Process{Command: c, Ended: ended}
	c.Stdout, c.Stderr = p, p
	if err := c.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = c.Wait()
		close(ended)
	}()
	return p, nil
}

// CPUTime is the process's CPU time so far, in user and kernel mode.
func (p *Process) CPUTime() (time.Duration, error) {
	stat, err := process.ReadStat(p.Process.Pid)
	if err != nil {
		return 0, err
	}
	user, err1 := stat.Number(process.UserTicks)
	system, err2 := stat.Number(process.SystemTicks)
	if err := errors.Join(err1, err2); err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", p.Process.Pid, err)
	}
	return time.Duration(user+system) * time.Second / process.TicksPerSecond, nil
}

// Write takes the process's output.
func (p *Process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.Write(text)
}

// Log is the process's output so far.
func (p *Process) Log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.String()
}

// Err is the error with which the process ended: nil also where it was killed. Call it after Ended.
func (p *Process) Err() error {
	<-p.Ended
	var exit *exec.ExitError
	if errors.As(p.err, &exit) {
		status, _ := exit.Sys().(syscall.WaitStatus)
		if status.Signaled() && status.Signal() == syscall.SIGKILL {
			return nil
		}
	}
	return p.err
}

// End sends a signal, waits, and kills a process that does not end within the time, which is an
// error. A process that has ended is left as it is.
func (p *Process) End(signal syscall.Signal, timeout time.Duration) error {
	if err := p.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.Ended:
	case <-time.After(timeout):
		_ = p.Process.Kill()
		<-p.Ended
		return fmt.Errorf("process %d did not end within %s of signal %s", p.Process.Pid, timeout, signal)
	}
	return p.Err()
}
