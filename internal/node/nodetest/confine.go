package nodetest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/node"
	"golang.org/x/sys/unix"
)

// capabilities and families are the values that a need may have.
var (
	capabilities = map[string]uintptr{"CAP_CHOWN": unix.CAP_CHOWN, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW,
		"CAP_PERFMON": unix.CAP_PERFMON, "CAP_BPF": unix.CAP_BPF, "CAP_KILL": unix.CAP_KILL}
	families = map[string]uint32{"AF_UNIX": unix.AF_UNIX, "AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_NETLINK": unix.AF_NETLINK,
		"AF_PACKET": unix.AF_PACKET, "AF_XDP": unix.AF_XDP}
)

// Confine runs this binary again, without the variable, with these capabilities and kinds of sockets alone, as a
// service manager does. It returns if that fails.
func Confine(needs []node.Need, variable string) error {
	runtime.LockOSThread() // capabilities and filters belong to a thread
	keep := map[uintptr]bool{}
	for _, name := range node.NeedValues(needs, node.NeedCapability) {
		number, known := capabilities[name]
		if !known {
			return fmt.Errorf("the test does not know %s", name)
		}
		keep[number] = true
	}
	for number := uintptr(0); number <= unix.CAP_LAST_CAP; number++ {
		if keep[number] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, number, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) { // an older kernel's last one
			return err
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := confineSockets(node.NeedValues(needs, node.NeedFamily)); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, variable+"=") }))
}

// confineSockets makes socket(2) refuse other families, as systemd's RestrictAddressFamilies= does
// (Documentation/userspace-api/seccomp_filter.rst).
func confineSockets(names []string) error {
	const number, firstArgument, refuse = 0, 16, unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT) // offsets in struct seccomp_data
	load, equal, end := uint16(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS), uint16(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K), uint16(unix.BPF_RET|unix.BPF_K)
	filter := []unix.SockFilter{{Code: load, K: number}, {Code: equal, Jt: 1, K: unix.SYS_SOCKET}, {Code: end, K: unix.SECCOMP_RET_ALLOW}, {Code: load, K: firstArgument}}
	for _, name := range names {
		family, known := families[name]
		if !known {
			return fmt.Errorf("the test does not know %s", name)
		}
		filter = append(filter, unix.SockFilter{Code: equal, Jf: 1, K: family}, unix.SockFilter{Code: end, K: unix.SECCOMP_RET_ALLOW})
	}
	filter = append(filter, unix.SockFilter{Code: end, K: refuse})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}
