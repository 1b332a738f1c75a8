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
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// endsWithin bounds the time until a process ends; it takes milliseconds.
const endsWithin = 10 * time.Second

// atMost ends a tool by itself in case the demo is killed.
const atMost = "1m"

// process is a child of the demo that writes lines.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan string // closed at the end of its output
	errors *bytes.Buffer
	ended  func() error
}

// start runs shunt, on a host or, with nil, on this one. The process ends with the step at the latest.
func (d *demo) start(ctx context.Context, on *lab.Host, prepare func(*exec.Cmd), args ...string) (*process, error) {
	p := &process{cmd: exec.CommandContext(ctx, d.self, args...), lines: make(chan string, 1000), errors: &bytes.Buffer{}}
	p.cmd.Stderr, p.cmd.WaitDelay = p.errors, endsWithin
	p.cmd.Env = append(os.Environ(), variable+"="+d.id)
	if prepare != nil {
		prepare(p.cmd)
	}
	in, err1 := p.cmd.StdinPipe()
	out, err2 := p.cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	p.in = in
	begin := p.cmd.Start
	if on != nil {
		begin = func() error { return on.Run(p.cmd.Start) } // a child inherits the namespace of the thread that forks it
	}
	if err := begin(); err != nil {
		return nil, fmt.Errorf("start %s: %w", strings.Join(args, " "), err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.lines)
		for lines := bufio.NewReader(out); ; {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			select {
			case p.lines <- line:
			case <-ctx.Done(): // no reader is left
			}
		}
	}()
	p.ended = sync.OnceValue(func() error {
		<-read // Wait closes the pipe
		return p.cmd.Wait()
	})
	d.atEnd(func() error {
		_ = p.cmd.Process.Kill() // it fails if the process has ended
		go func() {
			for range p.lines {
				continue // no reader is left
			}
		}()
		_ = p.ended() // it was killed
		return nil
	})
	return p, nil
}

// next returns the next line.
func (p *process) next(ctx context.Context) (string, error) {
	select {
	case line, is := <-p.lines:
		if !is {
			return "", fmt.Errorf("%s ended: %w. It said: %s", strings.Join(p.cmd.Args[1:], " "), errors.Join(io.ErrUnexpectedEOF, p.ended()), strings.TrimSpace(p.errors.String()))
		}
		return line, nil
	case <-ctx.Done():
		return "", fmt.Errorf("wait for %s: %w", strings.Join(p.cmd.Args[1:], " "), context.Cause(ctx))
	}
}

// tool is a tool that is running.
type tool struct{ *process }

// begin prints the command that a user types, runs it, and returns when its sensors are attached.
func (d *demo) begin(ctx context.Context, on *lab.Host, args ...string) (tool, error) {
	at := ""
	if on != nil {
		at = on.Name() + " "
	}
	d.Say("  %s$ shunt diag %s\n", at, strings.Join(args, " "))
	p, err := d.start(ctx, on, nil, append(append([]string{"diag"}, args...), "-o", "json")...)
	if err != nil {
		return tool{}, err
	}
	first, err := p.next(ctx)
	if err != nil {
		return tool{}, err
	}
	var line struct{ Type string }
	if err := json.Unmarshal([]byte(first), &line); err != nil || line.Type != "start" {
		return tool{}, fmt.Errorf("the first line of diag %s is no start: %w", args[0], errors.Join(err, errors.New(first)))
	}
	return tool{p}, nil
}

// end interrupts the tool, as Ctrl-C does, and reads its lines up to the summary.
func (t tool) end(ctx context.Context, read func(kind string, line []byte) error) error {
	if err := t.cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("interrupt %s: %w", t.cmd.Args[2], err)
	}
	return t.rest(ctx, read)
}

// rest reads the tool's lines up to the summary.
func (t tool) rest(ctx context.Context, read func(kind string, line []byte) error) error {
	for {
		text, err := t.next(ctx)
		if err != nil {
			return err
		}
		var line struct{ Type string }
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			return fmt.Errorf("read a line of diag %s: %w: %s", t.cmd.Args[2], err, text)
		}
		if err := read(line.Type, []byte(text)); err != nil {
			return err
		}
		if line.Type == "summary" {
			return t.ended()
		}
	}
}
