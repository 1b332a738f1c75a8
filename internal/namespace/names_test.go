package namespace

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPrepare: however many ask for it at once, the folder becomes one mount, which is shared, so
// that `ip netns add` has no reason to put another one on top of it.
func TestPrepare(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	folder := filepath.Join(t.TempDir(), "netns")
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its mount namespace
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
		}()
		for range 3 {
			done <- prepare(folder)
		}
		text, err := os.ReadFile("/proc/thread-self/mountinfo") // proc_pid_mountinfo(5)
		mounts := 0
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if fields[4] != folder {
				continue
			}
			mounts++
			if !strings.HasPrefix(fields[6], "shared:") {
				t.Errorf("it is not shared: %s", line)
			}
		}
		if mounts != 1 {
			t.Errorf("it is mounted %d times, want once", mounts)
		}
		done <- err
	}()
	for range 5 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// TestPrepareAtOnce: processes that begin together wait for each other.
func TestPrepareAtOnce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	folder := t.TempDir()
	defer unix.Unmount(folder, unix.MNT_DETACH) //nolint:errcheck // seen below
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := prepare(folder); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	text, err := os.ReadFile("/proc/thread-self/mountinfo") // the first thread may be the other test's
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), " "+folder+" "); n != 1 {
		t.Errorf("it is mounted %d times, want once", n)
	}
}
