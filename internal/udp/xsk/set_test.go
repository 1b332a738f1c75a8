package xsk

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A bad set of files is refused, and its files are closed.
func TestBadSetsAreRefused(t *testing.T) {
	plan, err := Plan(64, 2048, false)
	must(t, err)
	bad, outside := plan, plan
	bad.ReceiveRing = 63
	outside.Offset = plan.Size()
	far := plan
	far.Offset = 1<<63 - 2048
	for name, c := range map[string]struct {
		layout Layout
		files  int // after the memory, which is not there where it is -1
		want   string
	}{
		"no memory":         {plan, -1, "there are 0 files, and 2 are needed"},
		"no socket":         {plan, 0, "there are 1 files"},
		"too many files":    {plan, 2, "there are 3 files"},
		"a bad ring":        {bad, 1, "power of two"},
		"outside":           {outside, 1, "the memory has"},
		"far outside":       {far, 1, "the memory has"},
		"a file, no socket": {plan, 1, "read the offsets of the rings"},
	} {
		t.Run(name, func(t *testing.T) {
			before := openFiles(t)
			var files []int
			if c.files >= 0 {
				memory, err := NewMemory(plan.Size())
				must(t, err)
				fd, err := unix.FcntlInt(uintptr(memory.FD), unix.F_DUPFD_CLOEXEC, 0)
				must(t, err)
				must(t, memory.Close())
				files = append(files, fd)
			}
			for range c.files {
				fd, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
				must(t, err)
				files = append(files, fd)
			}
			if _, err := AdoptSet([]Layout{c.layout}, files); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v; want %q", err, c.want)
			}
			if after := openFiles(t); after != before {
				t.Errorf("%d files are open, %d were before", after, before)
			}
		})
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
