package gate

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watchdog has the kernel end this process if it is not reset in time, also while the process is stopped or its threads
// hang: a timer of the process's own whose signal is SIGKILL (timer_create(2)). Otherwise opens of protected files
// would wait without end.
type watchdog struct{ timer int32 }

// sigevent is the structure of linux/asm-generic/siginfo.h.
type sigevent struct {
	value  uint64
	signal int32
	notify int32 // 0: SIGEV_SIGNAL
	_      [48]byte
}

func newWatchdog() (*watchdog, error) {
	w := &watchdog{}
	event := sigevent{signal: int32(unix.SIGKILL)}
	// CLOCK_MONOTONIC does not go on while the machine sleeps.
	if _, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)), uintptr(unsafe.Pointer(&w.timer))); errno != 0 {
		return nil, fmt.Errorf("make a timer that ends this process if it hangs: %w", errno)
	}
	return w, nil
}

// reset has it wait anew.
func (w *watchdog) reset(after time.Duration) error {
	value := [4]int64{0, 0, int64(after / time.Second), int64(after % time.Second)} // struct itimerspec
	if _, _, errno := unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(w.timer), 0, uintptr(unsafe.Pointer(&value)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("set the timer that ends this process if it hangs: %w", errno)
	}
	return nil
}

func (w *watchdog) close() error {
	if _, _, errno := unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(w.timer), 0, 0); errno != 0 {
		return errno
	}
	return nil
}
