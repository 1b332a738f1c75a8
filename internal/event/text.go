package event

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Text is a string of C: the bytes before the first zero.
func Text(raw []int8) string {
	var b strings.Builder
	for _, c := range raw {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// Printable keeps names that others chose, as of processes and files, from controlling the terminal: control
// characters are "?".
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// Time is a reading of CLOCK_BOOTTIME, in nanoseconds, by the clock on the wall.
func Time(bootNs uint64) time.Time {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail with this clock
	return time.Now().Add(time.Duration(int64(bootNs) - now.Nano()))
}
