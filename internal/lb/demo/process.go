package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/story"
)

// process is a child. Children are in process groups of their own: Ctrl-C is for the demo,
// which then ends them in the right order.
type process struct {
	cmd  *lab.Command
	done chan struct{} // closed when it has ended; err is valid then
	err  error
}

func (d *demo) spawn(cmd *lab.Command) (*process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// kill ends the process without asking it.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL) // fails only when it has ended
	<-p.done
}

// terminate asks the process to end, and waits.
func (p *process) terminate(ctx context.Context) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", p.cmd.Process.Pid, err)
	}
	return until(ctx, patience, fmt.Sprintf("process %d has ended after SIGTERM", p.cmd.Process.Pid), func() (bool, error) {
		return p.ended(), nil
	})
}

// startBackend starts the servers of one backend, and waits until they listen.
func (d *demo) startBackend(host *lab.Host) (*process, error) {
	args := []string{"demo", "backend", "--lab", d.top.ID(), "--name", host.Name()}
	if d.opts.Keep {
		args = append(args, "--hold")
	}
	cmd := host.Command(context.Background(), d.opts.Executable, args...)
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var complaint bytes.Buffer
	if d.opts.Keep { // a pipe would break when the demo ends
		cmd.Stderr = nil
	} else {
		cmd.Stderr = &complaint
		if _, err := cmd.StdinPipe(); err != nil { // closed with this process, which ends the child
			return nil, err
		}
	}
	p, err := d.spawn(cmd)
	if err != nil {
		return nil, err
	}
	line, readErr := bufio.NewReader(ready).ReadString('\n')
	if strings.TrimSpace(line) != backendReady {
		<-p.done
		return nil, fmt.Errorf("start the servers of %s: %w: %s", host.Name(), errors.Join(readErr, p.err), strings.TrimSpace(complaint.String()))
	}
	return p, nil
}

// startDaemon starts `shunt run`, and waits until it answers and forwards.
func (d *demo) startDaemon(ctx context.Context) (*shuntv1.GetStatusResponse, error) {
	log, err := os.OpenFile(d.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the daemon's log: %w", err)
	}
	defer log.Close() //nolint:errcheck // the child has its own
	cmd := d.top.Balancer.Command(context.Background(), d.opts.Executable, "run",
		"--config", d.configPath(), "--instance", d.facts.Instance, "--log-format", "text")
	cmd.Stdout, cmd.Stderr = log, log
	// The file names the socket; overrides of a demo that is kept are removed with its folder.
	cmd.Env = append(os.Environ(), "SHUNT_SOCKET=", "STATE_DIRECTORY="+d.folder)
	if d.daemon, err = d.spawn(cmd); err != nil {
		return nil, err
	}
	var status *shuntv1.GetStatusResponse
	err = until(ctx, 2*patience, "`shunt run` forwards", func() (bool, error) {
		if d.daemon.ended() {
			return false, fmt.Errorf("the process has ended: %w", d.daemon.err)
		}
		var err error
		status, err = d.control().Status(ctx)
		if errors.Is(err, control.ErrNoDaemon) {
			return false, nil
		}
		return int(status.GetDaemon().GetPid()) == d.daemon.cmd.Process.Pid, err
	})
	return status, err
}

// showLog shows the end of the daemon's log, which says more than the demo knows.
func (d *demo) showLog() {
	text, err := os.ReadFile(d.logPath())
	if err != nil || len(text) == 0 {
		return
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	d.Say("\n  The last lines of the daemon's log:\n%s\n\n", story.Indent(strings.Join(lines[max(0, len(lines)-12):], "\n")))
}

// status is the part of `shunt status -o json` that the demo uses.
type status struct {
	Forwarding bool `json:"forwarding"`
	Daemon     *struct {
		PID int `json:"pid"`
	} `json:"daemon"`
	Attached []Attachment     `json:"attached"`
	Services []serviceStatus  `json:"services"`
	Reasons  map[string]Count `json:"reasons"`
}

type serviceStatus struct {
	Name string `json:"name"`
	Traffic
	Backends []backendStatus `json:"backends"`
}

type backendStatus struct {
	Address string `json:"address"`
	Slots   int    `json:"slots"`
	Traffic
}

func (s status) service(name string) serviceStatus {
	for _, service := range s.Services {
		if service.Name == name {
			return service
		}
	}
	return serviceStatus{}
}

func (s serviceStatus) backend(address string) backendStatus {
	for _, b := range s.Backends {
		if b.Address == address {
			return b
		}
	}
	return backendStatus{}
}

// statusOutput is the output of `shunt status`.
func (d *demo) statusOutput(ctx context.Context, output string) ([]byte, error) {
	cmd := d.top.Balancer.Command(ctx, d.opts.Executable, "status", "--instance", d.facts.Instance, "--socket", d.socket(), "-o", output)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run `shunt status`: %w: %s", err, strings.TrimSpace(complaint.String()))
	}
	return out, nil
}

func (d *demo) status(ctx context.Context) (status, error) {
	var s status
	out, err := d.statusOutput(ctx, "json")
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(out, &s); err != nil {
		return s, fmt.Errorf("read the output of `shunt status -o json`: %w", err)
	}
	return s, nil
}

// copyFile copies a program.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	out, err := os.OpenFile(filepath.Clean(to), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
