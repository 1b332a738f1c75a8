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

// Path is a path of names, the last one first, each with its zero: as programs write one down on the way from a file to
// the root. No names are "".
func Path(raw []int8) string {
	var path strings.Builder
	for end := len(raw); end > 0; {
		begin := end - 1
		for begin > 0 && raw[begin-1] != 0 {
			begin--
		}
		path.WriteString("/" + Text(raw[begin:end]))
		end = begin
	}
	return path.String()
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
