package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/test/kernel/suite"
)

// endLine is the guest's last line on the second serial line, after all tests have run.
const endLine = "end"

// bootLimit is the time that a guest may take for all but the tests: 2.5 s on an idle
// machine of 2026, so this is for busy ones.
const bootLimit = 5 * time.Minute

// virtual is a virtual machine that switches itself off.
type virtual struct {
	kernel  kernel
	image   string // path of the initramfs
	results string // path of the file for the second serial line
	memory  string // qemu's -m
	limit   time.Duration
}

// run boots the machine, passes its console on to out until it switches itself off, and
// reads the results.
func (m virtual) run(ctx context.Context, testCount int, out io.Writer) result {
	started := time.Now()
	r := result{Release: m.kernel.release}
	limited, cancel := context.WithTimeout(ctx, m.limit)
	defer cancel()
	// The time limit ends this one child, by its process handle.
	version, err := exec.CommandContext(limited, machine.Emulator, "--version").Output()
	if err != nil {
		r.Error = fmt.Sprintf("ask %s for its version: %v", machine.Emulator, err)
		return r
	}
	cmd := exec.CommandContext(limited, machine.Emulator,
		"-accel", machine.Accelerator(string(version)), "-cpu", "max", "-smp", "2", "-m", m.memory,
		"-no-reboot", "-nodefaults", "-no-user-config", "-display", "none",
		"-kernel", m.kernel.image, "-initrd", m.image,
		"-append", "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic tsc=unstable net.ifnames=0",
		"-serial", "stdio", "-serial", "file:"+m.results)
	cmd.Stdin = nil
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 5 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		r.Error = err.Error()
		return r
	}
	if err := cmd.Start(); err != nil {
		r.Error = fmt.Sprintf("starting %s: %v", machine.Emulator, err)
		return r
	}
	machine.CopyConsole(out, stdout)
	waitErr := cmd.Wait()
	r.Seconds = time.Since(started).Round(time.Millisecond).Seconds()

	ended, err := readResults(m.results, &r)
	switch {
	case err != nil:
		r.Error = err.Error()
	case ctx.Err() != nil:
		r.Error = "interrupted"
	case limited.Err() != nil:
		r.Error = fmt.Sprintf("stopped after %s; --timeout sets the limit of a package", m.limit)
	case waitErr != nil:
		r.Error = fmt.Sprintf("%s: %v", machine.Emulator, waitErr)
	case !ended:
		r.Error = "the guest died before it had run all tests; its last words are above"
	case len(r.Packages) != testCount:
		r.Error = fmt.Sprintf("the guest ran %d of %d packages", len(r.Packages), testCount)
	}
	r.Passed = r.Error == ""
	for _, p := range r.Packages {
		r.Passed = r.Passed && p.Good()
	}
	return r
}

// readResults reads the guest's report; ended says whether it is complete.
func readResults(file string, r *result) (ended bool, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return false, fmt.Errorf("read the guest's report: %w", err)
	}
	for _, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
		case line == endLine:
			ended = true
		default:
			var p suite.Report
			if err := json.Unmarshal([]byte(line), &p); err != nil {
				return ended, fmt.Errorf("the guest's report has a line that is not a result: %q", line)
			}
			r.Packages = append(r.Packages, p)
		}
	}
	return ended, nil
}
