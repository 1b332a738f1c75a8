package kernel

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// RefusedError means that the kernel, or a driver, refused to attach a program.
type RefusedError struct {
	Program string // its name; empty if the caller names the program
	Target  string // the attach point, and the kind of the attempt: "interface eth0 in native mode"
	Reason  string // in words
	Remedy  string // an instruction; empty if nothing is known to help
	Err     error
}

func (e *RefusedError) Error() string {
	text := fmt.Sprintf("attach to %s: %s", e.Target, e.Reason)
	if e.Program != "" {
		text = fmt.Sprintf("attach %s to %s: %s", e.Program, e.Target, e.Reason)
	}
	if e.Remedy != "" {
		text += "; " + e.Remedy
	}
	return text
}

func (e *RefusedError) Unwrap() error { return e.Err }

// refused returns a RefusedError with the reason in words.
func refused(program, target, remedy string, err error) error {
	return &RefusedError{program, target, oneLine(err), remedy, err}
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// Why returns the reason why the kernel refused to load or to attach a program, in one line.
func Why(err error) string {
	var v *ebpf.VerifierError
	if errors.As(err, &v) && len(v.Log) > 0 {
		return fmt.Sprintf("%v: %s", v.Cause, complaint(v.Log))
	}
	if errors.Is(err, unix.EPERM) {
		return "EPERM, without a log: this kernel does not permit it"
	}
	var r *RefusedError
	if errors.As(err, &r) {
		return r.Reason
	}
	return oneLine(err)
}

// complaint returns the line of the verifier's log with the fault: the last one before the statistics.
func complaint(log []string) string {
	for i := len(log) - 1; i >= 0; i-- {
		line := strings.TrimSpace(log[i])
		if line != "" && !strings.HasPrefix(line, "processed ") && !strings.HasPrefix(line, "verification time") && !strings.HasPrefix(line, "stack depth") {
			return line
		}
	}
	return "no complaint in the verifier's log"
}
