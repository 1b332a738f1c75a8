package tuning

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"golang.org/x/sys/unix"
)

// bed is a server with eth0, and a /sys that shows it.
type bed struct {
	*testing.T
	host *lab.Host
	sys  string
	path string // of the record
}

func newBed(t *testing.T) *bed {
	n := udptest.New(t, lab.Cable{Queues: 1})
	b := &bed{T: t, host: n.Server, sys: t.TempDir(), path: filepath.Join(t.TempDir(), "record")}
	b.must(b.host.Run(func() error { return unix.Mount("sysfs", b.sys, "sysfs", 0, "") })) // of the thread's network namespace
	t.Cleanup(func() { b.must(unix.Unmount(b.sys, 0)) })
	return b
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bed) net() string { return filepath.Join(b.sys, "class/net") }

func (b *bed) tuner() *Tuner { return New(b.path, b.net()) }

// keep is Keep by a process of its own, which knows only the record.
func (b *bed) keep(wanted map[string]time.Duration) (failed map[string]error) {
	b.Helper()
	b.must(b.host.Run(func() error { failed = b.tuner().Keep(wanted); return nil }))
	return failed
}

func (b *bed) write(file, text string) {
	b.Helper()
	b.must(os.WriteFile(filepath.Join(b.net(), "eth0", file), []byte(text), 0))
}

// is requires the two values, and a record or none.
func (b *bed) is(flush, polls string, recorded bool) {
	b.Helper()
	for file, want := range map[string]string{files[0]: flush, files[1]: polls} {
		if text, err := os.ReadFile(filepath.Join(b.net(), "eth0", file)); err != nil || strings.TrimSpace(string(text)) != want {
			b.Errorf("%s is %q, want %s: %v", file, text, want, err)
		}
	}
	if _, err := os.Stat(b.path); os.IsNotExist(err) == recorded {
		b.Errorf("there is a record: %v, want %v", !recorded, recorded)
	}
}

func TestKeepAndPutBack(t *testing.T) {
	b := newBed(t)
	b.write(files[0], "7000") // it had been set by somebody
	eth0 := func(quiet time.Duration) map[string]time.Duration { return map[string]time.Duration{"eth0": quiet} }
	for _, step := range []struct {
		what         string
		wanted       map[string]time.Duration
		flush, polls string
		recorded     bool
	}{
		{"begin", eth0(200 * time.Microsecond), "200000", "2", true},
		{"again, after a crash", eth0(200 * time.Microsecond), "200000", "2", true},
		{"another time", eth0(50 * time.Microsecond), "50000", "2", true},
		{"no more", nil, "7000", "0", false},
		{"no more, again", nil, "7000", "0", false},
	} {
		if failed := b.keep(step.wanted); len(failed) != 0 {
			t.Errorf("%s: %v", step.what, failed)
		}
		b.is(step.flush, step.polls, step.recorded)
	}
	// A value that somebody has changed meanwhile stays.
	b.keep(eth0(50 * time.Microsecond))
	b.write(files[1], "9")
	var names []string
	b.must(b.host.Run(func() (err error) { names, err = b.tuner().PutBackAll(); return err }))
	b.is("7000", "9", false)
	if fmt.Sprint(names) != "[eth0]" {
		t.Errorf("put back: %v", names)
	}
	// A value that was right already is not put back.
	b.write(files[0], "50000")
	b.write(files[1], "2")
	b.keep(eth0(50 * time.Microsecond))
	b.is("50000", "2", false)
}

// A crash between the two files leaves the first one changed, which is in the record.
func TestHalfDone(t *testing.T) {
	b := newBed(t)
	b.keep(map[string]time.Duration{"eth0": time.Millisecond})
	b.write(files[1], "0")
	b.keep(nil)
	b.is("0", "0", false)
}

func TestFailures(t *testing.T) {
	b := newBed(t)
	wanted := map[string]time.Duration{"eth0": time.Millisecond, "none0": time.Millisecond}
	failed := b.keep(wanted)
	if len(failed) != 1 || !strings.Contains(failed["none0"].Error(), "switch interrupts of none0 off for busy polling") {
		t.Errorf("%v", failed)
	}
	b.is("1000000", "2", true)
	b.keep(nil)
	// A /sys of another network namespace has an eth0 of its own, or none: nothing of it is touched.
	elsewhere := t.TempDir()
	b.must(os.MkdirAll(filepath.Join(elsewhere, "eth0"), 0o755))
	for file, text := range map[string]string{"ifindex": "99999", files[0]: "0", files[1]: "0"} {
		b.must(os.WriteFile(filepath.Join(elsewhere, "eth0", file), []byte(text), 0o600))
	}
	b.must(b.host.Run(func() error { failed = New(b.path, elsewhere).Keep(wanted); return nil }))
	if err := failed["eth0"]; err == nil || !strings.Contains(err.Error(), "does not show this network namespace") {
		t.Errorf("%v", failed)
	}
	if text, err := os.ReadFile(filepath.Join(elsewhere, "eth0", files[0])); err != nil || string(text) != "0" {
		t.Errorf("it has %q: %v", text, err)
	}
	// A /sys that must not be written to, as under systemd: there is a remedy, and nothing to put back.
	b.must(unix.Mount("", b.sys, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	if err := b.keep(wanted)["eth0"]; err == nil || !strings.Contains(err.Error(), "ProtectKernelTunables=no") {
		t.Errorf("%v", err)
	}
	b.must(unix.Mount("", b.sys, "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	b.is("0", "0", true)
	b.keep(nil)
	b.is("0", "0", false)
	// A record that cannot be read is no reason to forget its contents.
	b.must(os.WriteFile(b.path, []byte("{"), 0o600))
	if err := b.keep(wanted)[""]; err == nil || !strings.Contains(err.Error(), "then delete "+b.path) {
		t.Errorf("%v", err)
	}
	b.is("0", "0", true)
}

// An interface that is made anew has the kernel's default values: nothing is put back there.
func TestAnotherInterface(t *testing.T) {
	b := newBed(t)
	b.write(files[0], "7000")
	b.keep(map[string]time.Duration{"eth0": time.Millisecond})
	text, err := os.ReadFile(b.path)
	b.must(err)
	gone := strings.Replace(string(text), `"index":`, `"index":9999`, 1)
	b.must(os.WriteFile(b.path, []byte(gone), 0o600))
	b.keep(map[string]time.Duration{"eth0": 2 * time.Millisecond})
	b.is("2000000", "2", true)
	b.keep(nil)
	b.is("1000000", "2", false) // its values when it was met
}
