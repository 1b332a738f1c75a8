package event

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestText(t *testing.T) {
	for want, raw := range map[string][]int8{"": {0, 'a'}, "sh": {'s', 'h', 0, 'x'}, "full": {'f', 'u', 'l', 'l'}, "é": {-61, -87, 0}} {
		if got := Text(raw); got != want {
			t.Errorf("Text(%v) = %q, want %q", raw, got, want)
		}
	}
}

func TestPath(t *testing.T) {
	for want, raw := range map[string][]int8{"": {}, "/a/b": {'b', 0, 'a', 0}, "/b": {'b', 0}, "//b": {'b', 0, 0}, "/a": {'a'}} {
		if got := Path(raw); got != want {
			t.Errorf("Path(%v) = %q, want %q", raw, got, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for s, want := range map[string]string{
		"/srv/a b":         "/srv/a b",
		"\x1b[2Jgone\n":    "?[2Jgone?",
		"é\u009b31m\u007f": "é?31m?",
		"\xff":             "\uFFFD",
	} {
		if got := Printable(s); got != want {
			t.Errorf("Printable(%q) = %q, want %q", s, got, want)
		}
	}
}

func TestTime(t *testing.T) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	var clock Clock
	for range 2 {
		for _, got := range []time.Time{Time(uint64(now.Nano()) - uint64(time.Hour)), clock.Time(uint64(now.Nano()) - uint64(time.Hour))} {
			if off := begin.Add(-time.Hour).Sub(got).Abs(); off > time.Minute {
				t.Errorf("an hour before now is %s, which is off by %s", got, off)
			}
		}
	}
	// It asks again, as when the clock was set.
	clock.boot, clock.asked = clock.boot.Add(-24*time.Hour), clock.asked.Add(-clockLasts)
	if off := begin.Sub(clock.Time(uint64(now.Nano()))).Abs(); off > time.Minute {
		t.Errorf("now is off by %s", off)
	}
}
