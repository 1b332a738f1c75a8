package kernel

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// needRoot also has the host's bpffs mounted, which a machine that has just booted may lack.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts")
	}
	if err := Mount(DefaultPinRoot, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
}

// TestOneMount: of many that find no bpffs, one mounts it.
func TestOneMount(t *testing.T) {
	needRoot(t)
	for range 20 {
		root := t.TempDir()
		t.Cleanup(func() {
			for unix.Unmount(root, unix.MNT_DETACH) == nil { // all mounts there
			}
		})
		var all sync.WaitGroup
		begin := make(chan struct{})
		for range 8 {
			all.Go(func() {
				<-begin
				if err := mountOnce(root); err != nil {
					t.Error(err)
				}
			})
		}
		close(begin)
		all.Wait()
		text, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), " "+root+" "); n != 1 {
			t.Fatalf("%d bpffs are mounted on one another, want 1", n)
		}
	}
}

func TestPinsOfAnotherProcess(t *testing.T) {
	needRoot(t)
	if taken, err := sharePinsOf(os.Getpid(), DefaultPinRoot); taken || err != nil {
		t.Errorf("of this process itself: %t, %v", taken, err)
	}
	if _, err := sharePinsOf(os.Getpid(), t.TempDir()); err == nil || !strings.Contains(err.Error(), "has no bpffs on") {
		t.Errorf("without a bpffs: %v", err)
	}
	if err := graft(1<<30, DefaultPinRoot); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a process that does not exist: %v", err)
	}
}

// TestPrivateMounts: with a bpffs that few processes see, the data plane works and the log warns; where
// one would have to be mounted first, none is.
func TestPrivateMounts(t *testing.T) {
	needRoot(t)
	why := errors.New("it cannot be reached")
	var log bytes.Buffer
	if err := ensureBPFFS(DefaultPinRoot, false, why, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
		t.Error(err)
	}
	if text := log.String(); !strings.Contains(text, "level=WARN") || !strings.Contains(text, "nsenter --net=") || !strings.Contains(text, why.Error()) {
		t.Errorf("the log says %q", text)
	}
	empty := t.TempDir()
	err := ensureBPFFS(empty, false, why, slog.New(slog.DiscardHandler))
	if err == nil || !errors.Is(err, why) || !strings.Contains(err.Error(), "mount it outside") {
		t.Errorf("without a bpffs: %v", err)
	}
	if is, err := isBPFFS(empty); is || err != nil {
		t.Errorf("something was mounted: %t, %v", is, err)
	}
}

// TestOutermost: the ancestor whose mounts are compared with ours, and the one that hides further
// ancestors.
func TestOutermost(t *testing.T) {
	for name, c := range map[string]struct {
		mounts        []string // of process 1, and of those from there to this process's parent; "" is hidden
		outer, hidden int
	}{
		"all have ours":                                      {[]string{"ours", "ours"}, 0, 0},
		"the machine's are others":                           {[]string{"host", "ours"}, 1, 0},
		"a container's first process is hidden":              {[]string{"", "ours"}, 0, 1},
		"the launcher is gone, and the first process hidden": {[]string{""}, 0, 1},
		"one outside can be looked at":                       {[]string{"", "host", "ours"}, 2, 1},
		"a hidden one between does not matter":               {[]string{"host", "", "ours"}, 1, 0},
		"two are hidden":                                     {[]string{"", "", "ours"}, 0, 2},
		"nobody is there":                                    {nil, 0, 0},
	} {
		mounts := func(process string) string {
			if process == "self" {
				return "ours"
			}
			pid, err := strconv.Atoi(process)
			if err != nil {
				t.Fatal(err)
			}
			return c.mounts[pid-1]
		}
		outer, hidden := outermost(len(c.mounts), mounts, func(pid int) int { return pid - 1 })
		if outer != c.outer || hidden != c.hidden {
			t.Errorf("%s: outermost = %d, %d, want %d, %d", name, outer, hidden, c.outer, c.hidden)
		}
	}
}
