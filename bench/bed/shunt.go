package bed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	// patience bounds waits for steps that take milliseconds.
	patience = 30 * time.Second
	// patienceShunt bounds the waits for shunt, which needs a minute in an emulated machine: it loads its programs.
	patienceShunt = 5 * time.Minute
)

// ErrEnded is the error of a process for which nobody needs to wait any more.
var ErrEnded = errors.New("the process is gone")

// Until waits for a condition. It gives up at ErrEnded.
func Until(ctx context.Context, holds func() error) error { return until(ctx, patience, holds) }

func until(ctx context.Context, patience time.Duration, holds func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := holds()
		if err == nil || errors.Is(err, ErrEnded) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Shunt is a `shunt run` on a host, as its users start it.
type Shunt struct {
	Host    *lab.Host
	Folder  string   // for the file; its name is that of the instance
	Config  string   // text of the file
	Program []string // the command, without arguments of shunt
	Env     []string // added to this process's
}

// Start starts it, and returns when it works. stop ends it, and has it remove its programs.
func (s Shunt) Start(ctx context.Context) (stop func() error, err error) {
	file := filepath.Join(s.Folder, "shunt.yaml")
	if err := os.WriteFile(file, []byte(s.Config), 0o600); err != nil {
		return nil, err
	}
	c := s.Host.Command(context.Background(), s.Program[0], append(s.Program[1:], "run", "--config", file, "--instance", filepath.Base(s.Folder))...)
	c.Env = append(os.Environ(), s.Env...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the benchmark, which then ends it
	p, err := c.Spawn()
	if err != nil {
		return nil, err
	}
	stop = func() error {
		if err := p.End(syscall.SIGINT, patienceShunt); err != nil {
			return fmt.Errorf("shunt run: %w\n%s", err, p.Log())
		}
		return nil
	}
	if err := until(ctx, patienceShunt, func() error {
		select {
		case <-p.Ended:
			return fmt.Errorf("shunt has ended: %w\n%s", errors.Join(p.Err(), ErrEnded), p.Log())
		default:
		}
		if !strings.Contains(p.Log(), "msg=running") {
			return fmt.Errorf("shunt does not run:\n%s", p.Log())
		}
		return nil
	}); err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}
