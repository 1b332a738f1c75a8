package net

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestMountsOfItsOwn: `ip netns exec` gives a program mounts of its own with a new /sys, where bpffs
// is missing. Maps and programs that shunt pins there still have to outlive the program.
func TestMountsOfItsOwn(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 1})
	b.write(b.file(settings{}))
	b.daemon = starts(t, b.isolated("", "run", "--config", b.path, "--instance", b.instance, "--socket", b.socket))
	b.awaits(b.daemon, "msg=running")
	if !strings.Contains(b.daemon.log(), "its maps and programs are pinned outside") {
		t.Errorf("the log does not say where the pins are:\n%s", b.daemon.log())
	}
	sessions := b.open(t, 2)
	b.kill()
	b.goOn(t, "after kill -9", sessions)
	if s := b.status(); !s.Forwarding {
		t.Error("status outside sees nothing")
	}
	if out, err := b.isolated("", "status", "--instance", b.instance, "--summary").CombinedOutput(); err != nil || !strings.Contains(string(out), "web (nat)") {
		t.Errorf("status there says %v:\n%s", err, out)
	}
	b.start() // takes it over, outside
	b.goOn(t, "with a daemon outside", sessions)
}

// TestBPFFSOfItsOwn: a bpffs in a program's own mounts is used as it is, with a warning.
func TestBPFFSOfItsOwn(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 1})
	b.write(b.file(settings{}))
	b.daemon = starts(t, b.isolated("mount -t bpf bpf /sys/fs/bpf && ", "run", "--config", b.path, "--instance", b.instance, "--socket", b.socket))
	b.awaits(b.daemon, "msg=running")
	if log := b.daemon.log(); !strings.Contains(log, "level=WARN") || !strings.Contains(log, "disappear when the last process with these mounts ends") {
		t.Errorf("the log does not say what becomes of the pins:\n%s", log)
	}
	if _, err := os.Stat("/sys/fs/bpf/shunt/" + b.instance); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is pinned outside: %v", err)
	}
	if err := b.daemon.end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	b.daemon = nil
}

// TestMountsWithoutLauncher: if the process that gave the daemon its mounts has ended, the pins are
// still outside if another process there can be inspected. If none can, the daemon does not start,
// because its data plane would end with it.
func TestMountsWithoutLauncher(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 1})
	b.write(b.file(settings{}))
	out := b.path + ".log"
	launch := b.isolated("", "run", "--config", b.path, "--instance", b.instance, "--socket", b.socket)
	for i, arg := range launch.Args {
		launch.Args[i] = strings.Replace(arg, `exec "$@"`, `{ setsid "$@" >`+out+` 2>&1 & echo $!; }`, 1)
	}
	launched, err := launch.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, launched)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(launched)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) }) // in case the test ends early
	ended := func() bool {                                       // its new parent may not wait for it
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		return errors.Is(err, os.ErrNotExist)
	}
	var log string
	eventually(t, 30*time.Second, "the daemon runs, or has ended", func() error {
		text, _ := os.ReadFile(out)
		if log = string(text); strings.Contains(log, "msg=running") || ended() {
			return nil
		}
		return errors.New(log)
	})
	if _, err := os.Readlink("/proc/1/ns/mnt"); err != nil {
		eventually(t, 10*time.Second, "the daemon has ended", func() error {
			if ended() {
				return nil
			}
			return errors.New(log)
		})
		if !strings.Contains(log, "does not let its mounts be compared with ours") || !strings.Contains(log, "mount it outside") {
			t.Errorf("the log does not say why it has not started:\n%s", log)
		}
		return
	}
	sessions := b.open(t, 2)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.goOn(t, "after kill -9", sessions)
}

// isolated is shunt on the balancer with mounts and a /sys of its own, after other commands.
func (b *bed) isolated(before string, args ...string) *lab.Command {
	b.t.Helper()
	plain := command(b.Balancer, args...)
	script := "umount -l /sys && mount -t sysfs sysfs /sys && " + before + `exec "$@"`
	c := b.Balancer.Command(b.t.Context(), "unshare", append([]string{"--mount", "--propagation", "slave", "sh", "-c", script, "sh"}, plain.Args...)...)
	c.Env = append(plain.Env, b.env...)
	return c
}
