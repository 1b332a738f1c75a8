package event

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Text is a string of C: the bytes before the first zero.
func Text(raw []int8) string { return string(AppendText(nil, raw)) }

// AppendText adds the string that Text returns.
func AppendText(to []byte, raw []int8) []byte {
	for _, c := range raw {
		if c == 0 {
			break
		}
		to = append(to, byte(c))
	}
	return to
}

// Path is a path of names, the last one first, each with its zero: as programs write one down on the way from a file to
// the root. No names are "".
func Path(raw []int8) string { return string(AppendPath(nil, raw)) }

// AppendPath adds the path that Path returns.
func AppendPath(to []byte, raw []int8) []byte {
	for end := len(raw); end > 0; {
		begin := end - 1
		for begin > 0 && raw[begin-1] != 0 {
			begin--
		}
		to = AppendText(append(to, '/'), raw[begin:end])
		end = begin
	}
	return to
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
func Time(bootNs uint64) time.Time { return new(Clock).Time(bootNs) }

// clockLasts is the time after which a Clock reads the distance of the two clocks again: the clock on the wall may be
// set meanwhile.
const clockLasts = time.Second / 4

// Clock is for many readings: it asks the kernel now and then, and not for each. It is for one goroutine.
type Clock struct {
	asked time.Time
	boot  time.Time // when CLOCK_BOOTTIME was 0
}

// Time is a reading of CLOCK_BOOTTIME, in nanoseconds, by the clock on the wall.
func (c *Clock) Time(bootNs uint64) time.Time {
	if now := time.Now(); now.Sub(c.asked) >= clockLasts {
		var boot unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) // cannot fail with this clock
		c.asked, c.boot = now, now.Add(-time.Duration(boot.Nano()))
	}
	return c.boot.Add(time.Duration(bootNs))
}
