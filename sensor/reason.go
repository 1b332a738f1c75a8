package sensor

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ErrPrivilege is in the error of Open without the needed capabilities.
var ErrPrivilege = errors.New("observing the kernel needs root, or the capabilities CAP_BPF and CAP_PERFMON")

// privileged refuses early and plainly what the kernel would refuse late and oddly: each way with EPERM,
// as it also refuses a kind of attachment that it does not allow.
func privileged() error {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of this process: %w", err)
	}
	has := func(capability uint) bool { return data[capability/32].Effective&(1<<(capability%32)) != 0 }
	if has(unix.CAP_SYS_ADMIN) || has(unix.CAP_BPF) && has(unix.CAP_PERFMON) {
		return nil
	}
	return ErrPrivilege
}

// reason is why the kernel refused, in one line.
func reason(way Way, err error) string {
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) && len(refused.Log) > 0 {
		return fmt.Sprintf("%v: %s", refused.Cause, complaint(refused.Log))
	}
	trampoline := way.Kind == Fentry || way.Kind == Fexit
	switch {
	case trampoline && errors.Is(err, syscall.EPERM):
		return "EPERM, without a log: this kernel refuses BPF trampolines"
	case errors.Is(err, syscall.EPERM):
		return "EPERM, without a log: this kernel does not permit it"
	}
	return strings.Join(strings.Fields(err.Error()), " ")
}

// complaint is the line of the verifier's log that says what is wrong: the last but the statistics.
func complaint(log []string) string {
	for i := len(log) - 1; i >= 0; i-- {
		line := strings.TrimSpace(log[i])
		if line != "" && !strings.HasPrefix(line, "processed ") && !strings.HasPrefix(line, "verification time") && !strings.HasPrefix(line, "stack depth") {
			return line
		}
	}
	return "no complaint in the verifier's log"
}
