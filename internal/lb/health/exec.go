package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// execOutputMax is the number of bytes of a program's output that are kept.
	execOutputMax = 4 << 10
	// execGrace is the time that other processes may keep the pipes of a killed program open.
	execGrace = 100 * time.Millisecond
)

// execProber runs a program that learns the backend from its environment. The program and all processes that it
// has started are killed at the timeout.
type execProber struct{ target }

func (p execProber) probe(ctx context.Context) error {
	output := &limited{}
	command := exec.Command(p.health.Exec[0], p.health.Exec[1:]...)
	command.Env = append(os.Environ(),
		"SHUNT_SERVICE="+p.service, "SHUNT_POOL="+p.pool, "SHUNT_BACKEND="+p.name,
		"SHUNT_ADDRESS="+p.at.Addr().String(), "SHUNT_PORT="+strconv.Itoa(int(p.at.Port())))
	command.Stdout, command.Stderr = output, output
	command.Dir = "/"
	// It has a process group of its own, so that the processes that it has started end with it.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.WaitDelay = execGrace
	if err := command.Start(); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	err := waitGroup(ctx, command)
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("exec: the program did not finish within %s and was killed%s", p.health.Timeout, output.says())
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // it ended well, and other processes still have its output
		return nil
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return fmt.Errorf("exec: exit code %d%s", exit.ExitCode(), output.says())
	}
	return fmt.Errorf("exec: %w%s", err, output.says())
}

// waitGroup waits for a program, and ends it and its group when ctx ends. Processes that the program has left
// running end with it. The group is signalled only while the program is not reaped: until then no other process
// can have its number.
func waitGroup(ctx context.Context, command *exec.Cmd) error {
	pid := command.Process.Pid
	kill := func() { _ = syscall.Kill(-pid, syscall.SIGKILL) } // it may have ended already
	killed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { kill(); close(killed) })
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break // it has ended, or Wait reports the fault
		}
	}
	if !stop() {
		<-killed
	}
	kill()
	return command.Wait()
}

// limited is a writer that keeps the beginning of the output.
type limited struct{ text bytes.Buffer }

func (l *limited) Write(text []byte) (int, error) {
	l.text.Write(text[:min(len(text), execOutputMax-l.text.Len())])
	return len(text), nil
}

// says returns the first line, to append to a cause.
func (l *limited) says() string {
	line, _, _ := strings.Cut(strings.TrimSpace(l.text.String()), "\n")
	if line == "" {
		return ""
	}
	return ": " + excerpt([]byte(line))
}
