package demo_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/command"
	"github.com/shunt-lb/shunt/internal/diag/demo"
	"github.com/shunt-lb/shunt/internal/lab"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

// secondsMax is the demo's own limit. Alone it takes about 10 s.
const secondsMax = 60

func TestMain(m *testing.M) { storytest.Main(m, lb.Line(nil, command.Product)) }

// left lists the remains of this process's demo: names of files, and command lines of shunt.
func left(t *testing.T, pid int) (all []string) {
	t.Helper()
	root, unmount, err := lab.MountCgroup2()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unmount(); err != nil {
			t.Error(err)
		}
	}()
	id := fmt.Sprintf("shunt-diag%d", pid)
	for _, pattern := range []string{"/run/netns/" + id + "-*", filepath.Join(root, id), filepath.Join(os.TempDir(), id+"-*")} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	for pattern, holds := range map[string]string{"/sys/block/loop*/loop/backing_file": id + "-", "/proc/[0-9]*/cmdline": storytest.Binary(t)} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			// A file that is gone by now is no leftover.
			if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(holds)) {
				all = append(all, file+": "+strings.ReplaceAll(string(text), "\x00", " "))
			}
		}
	}
	return all
}

func TestFacts(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "diag", "-o", "json")
	text, out := storytest.NewTranscript(), &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, text
	if err := cmd.Run(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, text)
	}
	if rest := left(t, cmd.Process.Pid); len(rest) > 0 {
		t.Errorf("left behind: %q", rest)
	}
	var facts demo.Facts
	storytest.Decode(t, out.Bytes(), &facts)
	if !facts.OK || len(facts.Claims) != 8 || facts.Claims.Untrue() != 0 || facts.Seconds > secondsMax {
		t.Errorf("ok %v, %d claims in %.1f s:\n%s", facts.OK, len(facts.Claims), facts.Seconds, text)
	}
	if facts.Disk.Held != 20 || facts.Disk.Writes == 0 || facts.Packet.Longest == "" || facts.Memory.Kept == 0 || len(facts.Memory.Stack) == 0 || facts.CPU.Waits == 0 {
		t.Errorf("%+v", facts)
	}
}

// Ctrl-C at any time: everything is removed, and no claim is untrue for it.
func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{`\$ shunt diag io`, `\$ shunt diag ping -c`, `\$ shunt diag memleak`, `\$ shunt diag runq`} {
		t.Run(at, func(t *testing.T) {
			cmd := storytest.Command(t, "demo", "diag")
			storytest.Interrupt(t, cmd, at)
			if rest := left(t, cmd.Process.Pid); len(rest) > 0 {
				t.Errorf("left behind: %q", rest)
			}
		})
	}
}

// A run that is killed in any of its steps leaves no disk, and `shunt demo --clean` removes its remains, and has
// nothing to do the second time.
func TestKilled(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{`\$ shunt diag io`, `\$ shunt diag ping -c`, `\$ shunt diag memleak`, `\$ shunt diag runq`} {
		t.Run(at, func(t *testing.T) {
			cmd := storytest.Command(t, "demo", "diag")
			text := storytest.NewTranscript()
			cmd.Stdout, cmd.Stderr = text, text
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			text.Await(t, at)
			id := fmt.Sprintf("diag%d", cmd.Process.Pid)
			if out, err := storytest.Command(t, "demo", "--clean", id).CombinedOutput(); err == nil || !strings.Contains(string(out), "it still runs") {
				t.Errorf("a demo that goes on: %v, %s", err, out)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			// A worker sees the end of its input, which may be before this looks.
			for turn := range 2 {
				out, err := storytest.Command(t, "demo", "--clean", id).CombinedOutput()
				if nothing := strings.Contains(string(out), "there is nothing of demo"); err != nil && !nothing || turn == 1 && !nothing {
					t.Errorf("clean, turn %d: %v\n%s", turn, err, out)
				}
			}
			for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // the kernel releases the disk
				rest := left(t, cmd.Process.Pid)
				if len(rest) == 0 {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("left behind: %q", rest)
				}
			}
		})
	}
}

// Tools that do not run make claims untrue, one each, and the demo goes on and cleans up.
func TestWithoutTools(t *testing.T) {
	storytest.NeedsRoot(t)
	facts, err := demo.Run(t.Context(), demo.Options{Executable: "/bin/false", Out: io.Discard})
	if err != nil || facts.OK || len(facts.Claims) != 4 || facts.Claims.Untrue() != 4 {
		t.Errorf("%v, %+v", err, facts)
	}
	for _, one := range facts.Claims {
		if !strings.Contains(one.Text, "ended: ") {
			t.Errorf("%q", one.Text)
		}
	}
	if rest := left(t, os.Getpid()); len(rest) > 0 {
		t.Errorf("left behind: %q", rest)
	}
}
