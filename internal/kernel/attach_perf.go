package kernel

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// timers are perf events, one a CPU.
type timers []int

// AttachTimer runs the program at each period of a timer on each CPU that is online now. The timer is an
// interrupt, so it is late while interrupts are off. CPUs that come online later have no timer.
func AttachTimer(p *ebpf.Program, every time.Duration) (io.Closer, error) {
	all, err := attachTimers(p, every)
	if err != nil {
		return nil, refused("", fmt.Sprintf("a timer of %v of each CPU by perf", every), "/proc/sys/kernel/perf_event_paranoid and perf_event_max_sample_rate limit it", err)
	}
	return all, nil
}

func attachTimers(p *ebpf.Program, every time.Duration) (timers, error) {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, fmt.Errorf("list the CPUs: %w", err)
	}
	cpus, err := ParseCPUs(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, err
	}
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_CPU_CLOCK, Sample: uint64(every.Nanoseconds()),
		Bits: unix.PerfBitDisabled, Size: uint32(unix.PERF_ATTR_SIZE_VER5)}
	var all timers
	for _, cpu := range cpus {
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open a timer of CPU %d: %w", cpu, err), all.Close())
		}
		all = append(all, fd)
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, p.FD()); err != nil {
			return nil, errors.Join(fmt.Errorf("give the timer of CPU %d its program: %w", cpu, err), all.Close())
		}
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0); err != nil {
			return nil, errors.Join(fmt.Errorf("start the timer of CPU %d: %w", cpu, err), all.Close())
		}
	}
	return all, nil
}

// Close ends the timers.
func (t timers) Close() error {
	var errs []error
	for _, fd := range t {
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}

// ParseCPUs parses a list of the kernel, such as 0-3,8 (Documentation/admin-guide/cputopology.rst).
func ParseCPUs(list string) (cpus []int, err error) {
	for part := range strings.SplitSeq(list, ",") {
		first, last, ranged := strings.Cut(part, "-")
		if !ranged {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 13)
		to, err2 := strconv.ParseUint(last, 10, 13)
		if err := errors.Join(err1, err2); err != nil || to < from {
			return nil, fmt.Errorf("read the list of CPUs %q: %q is no range", list, part)
		}
		for cpu := from; cpu <= to; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	return cpus, nil
}
