package systemd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	guardPolicy = "guard: {self: true, protect: [{name: data, paths: [/srv/data], deny: [write, create, delete], mode: %s}]}\n"
	guardFile   = "/etc/shunt/guard.yaml"
	guardLog    = "/var/log/shunt-guard.json"
)

// writerPause leaves the emulated CPUs to the guard.
const writerPause = time.Millisecond

// writer tries to write to a protected file all the time.
type writer struct {
	end            chan struct{}
	done           sync.WaitGroup
	wrote, refused int
	failed         error
}

func write(path string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func beginWriting(path string) *writer {
	w := &writer{end: make(chan struct{})}
	w.done.Go(func() {
		for {
			switch err := write(path); {
			case err == nil:
				w.wrote++
			case errors.Is(err, unix.EPERM):
				w.refused++
			default:
				w.failed = err
				return
			}
			select {
			case <-w.end:
				return
			case <-time.After(writerPause):
			}
		}
	})
	return w
}

// stop fails if a write was allowed.
func (w *writer) stop(t *testing.T, when string) {
	t.Helper()
	close(w.end)
	w.done.Wait()
	if w.wrote > 0 || w.refused == 0 || w.failed != nil {
		t.Errorf("%s: %d writes to a protected file were let through, %d refused, %v", when, w.wrote, w.refused, w.failed)
	}
}

func guardProperty(t *testing.T, name string) string {
	t.Helper()
	return sh(t, 0, "systemctl", "show", "shunt-guard", "--value", "-p", name)
}

// TestGuardOfThePackage follows the guard through the life of a package: installed, started, read again, stopped,
// upgraded, removed, purged. From its start to its removal no write is allowed.
func TestGuardOfThePackage(t *testing.T) {
	needMachine(t)
	old, next := packages(t)
	t.Cleanup(func() { _ = exec.Command("dpkg", "-P", "shunt").Run() }) // after a failure, for the next test
	data := "/srv/data/f"
	if err := errors.Join(os.MkdirAll(filepath.Dir(data), 0o755), os.WriteFile(data, []byte("kept"), 0o644)); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "dpkg", "-i", old)
	if state := sh(t, 1, "systemctl", "is-enabled", "shunt-guard"); state != "disabled" {
		t.Errorf("after the installation the unit is %s: nobody has asked for it", state)
	}
	sh(t, 0, "systemctl", "start", "shunt-guard")
	if state := guardProperty(t, "ActiveState"); state != "inactive" {
		t.Errorf("without a policy the unit is %s", state)
	}
	if err := os.WriteFile(guardFile, []byte(fmt.Sprintf(guardPolicy, "deny")), 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "systemctl", "enable", "--now", "shunt-guard")
	w := beginWriting(data)
	sh(t, 0, "systemctl", "restart", "shunt-guard")
	sh(t, 0, "systemctl", "reload", "shunt-guard")
	sh(t, 0, "systemctl", "stop", "shunt-guard")
	if out := sh(t, 0, "shunt", "guard", "status"); !strings.Contains(out, "data") {
		t.Errorf("shunt guard status after the unit was stopped:\n%s", out)
	}
	sh(t, 0, "systemctl", "start", "shunt-guard")

	pid := guardProperty(t, "MainPID")
	sh(t, 0, "dpkg", "-i", next)
	if now, state := guardProperty(t, "MainPID"), guardProperty(t, "ActiveState"); now == pid || now == "0" || state != "active" {
		t.Errorf("after the upgrade the guard is %s, process %s, before %s", state, now, pid)
	}
	w.stop(t, "until after the upgrade")

	sh(t, 0, "dpkg", "-r", "shunt")
	if err := write(data); err != nil {
		t.Errorf("after the package was removed: %v", err)
	}
	for _, path := range []string{"/sys/fs/bpf/shunt", "/lib/systemd/system/shunt-guard.service", "/etc/systemd/system/sysinit.target.wants/shunt-guard.service"} {
		if exists(path) {
			t.Errorf("%s is there after the package was removed", path)
		}
	}
	for _, path := range []string{guardFile, guardLog} {
		if !exists(path) {
			t.Errorf("%s is gone, though the package was only removed", path)
		}
	}
	sh(t, 0, "dpkg", "-P", "shunt")
	for _, path := range []string{"/etc/shunt", guardLog} {
		if exists(path) {
			t.Errorf("%s is there after the package was purged", path)
		}
	}
}

// TestRemovalUnderAGuard: dpkg does not remove the package while a guard runs that was started by hand, and names it;
// once it is killed, dpkg does.
func TestRemovalUnderAGuard(t *testing.T) {
	needMachine(t)
	_, next := packages(t)
	data := "/srv/data/f"
	if err := errors.Join(os.MkdirAll(filepath.Dir(data), 0o755), os.WriteFile(data, []byte("kept"), 0o644)); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "dpkg", "-i", next)
	t.Cleanup(func() { sh(t, 0, "dpkg", "-P", "shunt") })
	if err := os.WriteFile(guardFile, []byte(fmt.Sprintf(guardPolicy, "deny")), 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "systemd-run", "--unit=by-hand", "-p", "Type=notify", "-p", "KillMode=process", "shunt", "guard", "run", "--policy", guardFile)
	if out := sh(t, 1, "dpkg", "-r", "shunt"); !strings.Contains(out, "a `shunt guard run` is running") {
		t.Errorf("removing under a guard does not name it:\n%s", out)
	}
	if err := write(data); !errors.Is(err, unix.EPERM) {
		t.Errorf("after a removal that was refused, a write: %v", err)
	}
	sh(t, 0, "systemctl", "kill", "-s", "KILL", "by-hand")
	eventually(t, "the guard's end", func() error {
		if sh(t, 0, "systemctl", "show", "by-hand", "--value", "-p", "MainPID") != "0" {
			return errors.New("it runs")
		}
		return nil
	})
	sh(t, 0, "dpkg", "-r", "shunt")
	if err := write(data); err != nil {
		t.Errorf("after the package was removed: %v", err)
	}
}
