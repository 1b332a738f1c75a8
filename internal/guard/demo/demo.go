// Package demo shows the guard to a user who has nothing but the binary: a folder of a business, its
// program, and other programs that try to change the same file.
//
//	shunt demo guard ─► shunt demo guard-stage     in a mount namespace of its own, with pins of its own; or
//	                └─► qemu ─► guard-stage        as the first process of a virtual machine, where the host's
//	                                               kernel does not let BPF programs decide
//
// The stage is the same in both cases. It runs shunt guard run as any user would, tells the story, and ends with the
// facts on one line, which begins with a record separator.
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
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/story"
)

// patience limits the whole demo: an emulated machine on a busy host takes its time.
const patience = 5 * time.Minute

// Places of the stage.
const (
	OnHost    = "host"
	InMachine = "virtual machine"
)

// Facts are the findings of a run.
type Facts struct {
	OK       bool            `json:"ok"`
	Seconds  float64         `json:"seconds"`
	Where    string          `json:"where"`            // OnHost or InMachine
	Why      string          `json:"why,omitempty"`    // why it cannot be on the host
	Kernel   string          `json:"kernel,omitempty"` // release
	Attempts []judge.Attempt `json:"attempts"`         // attempts that the guard reported
	Claims   story.Claims    `json:"claims"`
}

// Options configure the demo.
type Options struct {
	Executable string    // shunt, which runs as stage, guard and business program
	Kernel     string    // path of the image for a virtual machine; empty: one of this machine's
	Out        io.Writer // where the story is printed
}

// Demo is a demo that can run here.
type Demo struct {
	opts  Options
	why   string // why the stage cannot be on this kernel; empty: it can
	guest *guest // nil: the stage is on this kernel
}

// New finds out where the demo can run. The error names the missing packages.
func New(opts Options) (*Demo, error) {
	d := &Demo{opts: opts}
	err := protect.Enforces()
	var refusal *protect.Refusal
	switch {
	case errors.As(err, &refusal):
		d.why = refusal.Reason
	case err != nil:
		d.why = err.Error()
	case opts.Kernel == "":
		return d, nil
	}
	d.guest, err = newGuest(opts.Kernel)
	return d, err
}

// Run runs the whole demo, once. It cleans up before it returns. A statement that turned out to be false is a claim that makes
// Facts.OK false. The error is ctx's if ctx ended, or that of a failed cleanup.
func (d *Demo) Run(parent context.Context) (*Facts, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(parent, patience, fmt.Errorf("the demo took longer than %v", patience))
	defer cancel()
	facts, teller := &Facts{Where: OnHost, Attempts: []judge.Attempt{}}, story.NewTeller(d.opts.Out)
	folder, fault := os.MkdirTemp("", "shunt-demo-guard-")
	if fault == nil {
		fault = d.play(ctx, teller, folder, facts)
	}
	facts.Claims = append(teller.Claims, facts.Claims...)
	if fault != nil && parent.Err() == nil {
		teller.Claim(false, "%v", fault)
		facts.Claims = append(facts.Claims, teller.Claims[len(teller.Claims)-1])
	}
	err := errors.Join(parent.Err(), remove(folder))
	facts.Seconds = time.Since(began).Seconds()
	facts.OK = err == nil && facts.Claims.Untrue() == 0
	return facts, err
}

// remove removes the folder. If the stage was killed, the folder is protected until the kernel has removed its pins.
func remove(folder string) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := os.RemoveAll(folder)
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// play runs the stage on this kernel, or in a virtual machine.
func (d *Demo) play(ctx context.Context, teller *story.Teller, folder string, facts *Facts) error {
	teller.Begin("A kernel that lets BPF programs decide")
	if d.guest == nil {
		teller.Say("  This kernel does. The demo has a mount namespace, a network and pins of its own, which end with it.\n")
		cmd := exec.CommandContext(ctx, d.opts.Executable, "demo", "guard-stage", "--folder", folder)
		// The namespaces, and with them the programs, end with the last process in them.
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET}
		return watch(ctx, cmd, func() string { return "" }, d.opts.Out, facts)
	}
	facts.Where = InMachine
	if facts.Why = d.why; d.why != "" {
		teller.Say("  This kernel does not: %s.\n", d.why)
	}
	teller.Say("  A virtual machine's kernel does. It is emulated, with the kernel %s,\n  and has only this program, sh and sed of this machine. Emulation is slow.\n", d.guest.kernel)
	if err := d.guest.pack(ctx, d.opts.Executable, folder); err != nil {
		return err
	}
	return watch(ctx, d.guest.command(ctx), d.guest.console, d.opts.Out, facts)
}

// separator begins the line of facts (RFC 7464).
const separator = "\x1e"

// watch runs a stage and passes its story on. A stage that ends without facts is an error, with its last words;
// more returns the errors that it has not written to standard error.
func watch(ctx context.Context, cmd *exec.Cmd, more func() string, out io.Writer, facts *Facts) error {
	var said strings.Builder
	cmd.Stderr = &said
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// The stage ends with this process. Ctrl-C at the terminal reaches only this process, which then ends the stage.
	cmd.SysProcAttr.Setpgid = true
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.WaitDelay = 5 * time.Second
	if err := process.StartTied(cmd); err != nil {
		return fmt.Errorf("start the demo's stage: %w", err)
	}
	var found error = errors.New("it ended in the middle")
	for lines := bufio.NewReader(pipe); ; {
		line, err := lines.ReadString('\n')
		line = strings.TrimRight(line, "\r\n")
		if text, is := strings.CutPrefix(line, separator); is {
			found = json.Unmarshal([]byte(text), facts)
		} else if err == nil || line != "" {
			fmt.Fprintln(out, line)
		}
		if err != nil {
			break
		}
	}
	ended := cmd.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if found != nil {
		return fmt.Errorf("run the demo's stage: %w (%v). Its last output:\n%s%s", found, ended, said.String(), more())
	}
	return nil
}
