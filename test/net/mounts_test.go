package net

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// `ip netns exec` gives a program mounts of its own with a new /sys, where bpffs is missing.
// What shunt pins there must outlive it all the same.
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

// A bpffs that somebody has mounted in a program's own mounts is used as it is, with a warning.
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

// isolated is shunt on the balancer with mounts and a /sys of its own, after other commands.
func (b *bed) isolated(before string, args ...string) *lab.Command {
	b.t.Helper()
	plain := command(b.Balancer, args...)
	script := "umount -l /sys && mount -t sysfs sysfs /sys && " + before + `exec "$@"`
	c := b.Balancer.Command(b.t.Context(), "unshare", append([]string{"--mount", "--propagation", "slave", "sh", "-c", script, "sh"}, plain.Args...)...)
	c.Env = append(plain.Env, b.env...)
	return c
}
