package trial

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// Helper is a copy of this binary at work.
type Helper struct {
	Cmd *exec.Cmd
	In  *os.File
	Out *bufio.Reader
}

// Begin starts a program as operate, and waits until it is ready.
func Begin(program, name, dir string, environment ...string) (*Helper, error) {
	return BeginAs(program, name, dir, nil, environment...)
}

// BeginAs is Begin in other namespaces.
func BeginAs(program, name, dir string, as *syscall.SysProcAttr, environment ...string) (*Helper, error) {
	cmd := exec.Command(program, name, dir)
	cmd.SysProcAttr = as
	// Without the signals by which Go's threads preempt each other: one of them cancels operations that io_uring hands
	// to a worker.
	cmd.Env = append([]string{operateVariable + "=1", "GODEBUG=asyncpreemptoff=1"}, environment...)
	cmd.Stderr = os.Stderr
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close() //nolint:errcheck // the child has it
	cmd.Stdin = read
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h := &Helper{cmd, write, bufio.NewReader(out)}
	if line, err := h.Out.ReadString('\n'); line != "ready\n" {
		h.End()
		return nil, fmt.Errorf("%s of %s in %s did not get ready: %q %v", name, program, dir, line, err)
	}
	return h, nil
}

// Attempt has the helper try, and returns its answer: "done", or "refused ERRNO TEXT".
func (h *Helper) Attempt() (string, error) {
	if _, err := h.In.WriteString("\n"); err != nil {
		return "", err
	}
	line, err := h.Out.ReadString('\n')
	return strings.TrimSpace(line), errors.Join(err, h.End())
}

// End ends it, and returns the error with which it ended.
func (h *Helper) End() error {
	return errors.Join(h.In.Close(), h.Cmd.Wait())
}
