package sensor

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// ErrPrivilege is in the error of Open without the needed capabilities.
var ErrPrivilege = errors.New("observing the kernel needs root, or the capabilities CAP_BPF and CAP_PERFMON")

// privileged refuses early and plainly. The kernel would refuse late, each way with EPERM, the same
// error as for a kind of attachment that it does not allow.
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

// reason is the kernel's reason for a refusal, in one line.
func reason(way Way, err error) string {
	var v *ebpf.VerifierError
	hasLog := errors.As(err, &v) && len(v.Log) > 0
	if (way.Kind == Fentry || way.Kind == Fexit) && errors.Is(err, unix.EPERM) && !hasLog {
		return "EPERM, without a log: this kernel refuses BPF trampolines"
	}
	if hasLog && isConfidential(lockdownFile) {
		return kernel.Why(err) + "; the kernel is locked down (confidentiality): BPF programs may not read its memory, and only another boot changes that"
	}
	return kernel.Why(err)
}

// lockdownFile lists the levels of lockdown, with the present one in brackets (kernel_lockdown(7)).
const lockdownFile = "/sys/kernel/security/lockdown"

// isConfidential is false if the file cannot be read.
func isConfidential(file string) bool {
	text, err := os.ReadFile(file)
	return err == nil && strings.Contains(string(text), "[confidentiality]")
}
