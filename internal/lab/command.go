package lab

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
)

// Command is a child process in a host's namespace. It is an exec.Cmd whose Start, Run, Output and
// CombinedOutput happen there; the rest is as in exec.Cmd. /proc/sys/net is the namespace's, /sys
// is the machine's (unlike under `ip netns exec`).
type Command struct {
	*exec.Cmd
	host *Host
}

// Command prepares a child process; ctx ends it, and so does Close of the lab.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Command {
	return &Command{Cmd: exec.CommandContext(ctx, name, args...), host: h}
}

// Start starts the process; the caller must Wait for it.
func (c *Command) Start() error {
	// A child inherits the namespace of the thread that forks it.
	if err := c.host.Run(c.Cmd.Start); err != nil {
		return fmt.Errorf("host %s: start %s: %w", c.host.name, c.Path, err)
	}
	c.host.lab.atClose(func() error {
		c.Process.Kill() // fails only where the process has ended
		return nil
	})
	return nil
}

// Run starts the process and waits for its end.
func (c *Command) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the process and returns its standard output.
func (c *Command) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// CombinedOutput runs the process and returns its standard output and error.
func (c *Command) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}
