// Package systemd has tests of the package and the unit as users get them: dpkg installs the .deb, systemd runs the
// unit, and traffic passes all the time.
//
//	client ── up0 ─┬─ this machine: systemd, shunt ─┬─ down0 ── backend
//
// Before the boot, boot.sh installs the package and enables the guard, as after a restart.
//
// The tests change the machine that they run on, so they run in the virtual machine of test/kernel only, where systemd
// is the first process (`make test-systemd`).
package systemd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/stranger"
)

// patience suits a virtual machine, emulated on a busy host, where an upgrade of the guard has taken three minutes.
const patience = 10 * time.Minute

const config = `interfaces: [{name: up0, attach: native}, {name: down0, attach: native}]
limits: {flows: 20000}
services:
  - name: web
    address: [192.0.2.10, "2001:db8::10"]
    port: 80
    backends:
      - {address: 10.0.0.2, port: 8080}
      - {address: "2001:db8:1::2", port: 8080}
`

var vips = []string{"192.0.2.10:80", "[2001:db8::10]:80"}

// sh runs a command and requires its exit code.
func sh(t *testing.T, want int, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if ctx.Err() != nil {
		t.Fatalf("%s %s: not over within %s:\n%s", name, strings.Join(args, " "), patience, out)
	}
	var exit *exec.ExitError
	code := 0
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else if err != nil {
		t.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
	}
	if code != want {
		journal, _ := exec.Command("journalctl", "-u", "shunt", "-u", "shunt-guard", "-n", "40", "--no-pager").CombinedOutput()
		t.Fatalf("%s %s: exit code %d, want %d\n%s\n%s", name, strings.Join(args, " "), code, want, out, journal)
	}
	return strings.TrimSpace(string(out))
}

func property(t *testing.T, name string) string {
	t.Helper()
	return sh(t, 0, "systemctl", "show", "shunt", "--value", "-p", name)
}

func eventually(t *testing.T, what string, ready func() error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s: %v", what, patience, err)
		}
	}
}

// newNetwork makes the network of the drawing above.
func newNetwork(t *testing.T) (client *lab.Host) {
	t.Helper()
	l, err := lab.New("systemd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	client, err1 := l.AddHost("client")
	backend, err2 := l.AddHost("b1")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, side := range []struct {
		name          string
		host          *lab.Host
		here4, there4 string
		here6, there6 string
		more          []string // more routes there
	}{
		{"up0", client, "198.51.100.1/24", "198.51.100.7/24", "2001:db8:c::1/64", "2001:db8:c::7/64", []string{"192.0.2.10/32", "2001:db8::10/128"}},
		{"down0", backend, "10.0.0.1/24", "10.0.0.2/24", "2001:db8:1::1/64", "2001:db8:1::2/64", nil},
	} {
		ns := side.host.Namespace()
		sh(t, 0, "ip", "link", "add", side.name, "type", "veth", "peer", "name", "eth0", "netns", ns)
		sh(t, 0, "ip", "address", "add", side.here4, "dev", side.name)
		sh(t, 0, "ip", "address", "add", side.here6, "dev", side.name, "nodad")
		sh(t, 0, "ip", "link", "set", side.name, "up")
		sh(t, 0, "ip", "-n", ns, "address", "add", side.there4, "dev", "eth0")
		sh(t, 0, "ip", "-n", ns, "address", "add", side.there6, "dev", "eth0", "nodad")
		sh(t, 0, "ip", "-n", ns, "link", "set", "eth0", "up")
		for _, to := range side.more {
			sh(t, 0, "ip", "-n", ns, "route", "add", to, "dev", "eth0")
		}
		if err := side.host.SetOffload("eth0", map[string]bool{"gro": true}); err != nil { // NAPI, for redirected packets
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", side.name).Run() })
	}
	if _, err := backend.ServeHTTP(":8080", "b1"); err != nil {
		t.Fatal(err)
	}
	return client
}

// load is traffic without a pause: connections that stay, and new ones.
type load struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	mu     sync.Mutex
	failed []error
	count  int
}

// ask makes a request on a connection.
func ask(conn net.Conn, reader *bufio.Reader) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: lab\r\n\r\n"); err != nil {
		return err
	}
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return err
}

func begin(t *testing.T, client *lab.Host) *load {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop}
	dial := func(vip string) (net.Conn, error) {
		limited, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return client.Dial(limited, "tcp", vip)
	}
	for _, vip := range vips {
		stays, err := dial(vip)
		if err != nil {
			t.Fatalf("connect to %s: %v", vip, err)
		}
		reader := bufio.NewReader(stays)
		for _, do := range []func() error{
			func() error { return ask(stays, reader) },
			func() error {
				conn, err := dial(vip)
				if err != nil {
					return err
				}
				defer conn.Close()
				return ask(conn, bufio.NewReader(conn))
			},
		} {
			l.done.Go(func() {
				for ctx.Err() == nil {
					err := do()
					l.mu.Lock()
					l.count++
					if err != nil {
						l.failed = append(l.failed, fmt.Errorf("%s: %w", vip, err))
					}
					over := len(l.failed) > 5
					l.mu.Unlock()
					if over {
						return
					}
				}
			})
		}
	}
	t.Cleanup(func() { stop(); l.done.Wait() })
	return l
}

// still fails the test if a request has failed, or if none is made.
func (l *load) still(t *testing.T, when string) {
	t.Helper()
	l.mu.Lock()
	before := l.count
	l.mu.Unlock()
	eventually(t, when+": traffic goes on", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.failed) > 0 {
			t.Fatalf("%s: %v", when, errors.Join(l.failed...))
		}
		if l.count < before+20 {
			return fmt.Errorf("%d requests", l.count-before)
		}
		return nil
	})
}

// packages returns two versions of the package, older first. Neither is installed: the one of the boot (boot.sh) is
// removed.
func packages(t *testing.T) (old, next string) {
	t.Helper()
	if exists("/usr/bin/shunt") {
		sh(t, 0, "dpkg", "-P", "shunt")
	}
	found, _ := filepath.Glob("/packages/*_amd64.deb")
	if len(found) != 2 {
		t.Fatalf("/packages has %q, want an older and a newer .deb", found)
	}
	return found[0], found[1]
}

func needMachine(t *testing.T) {
	t.Helper()
	comm, _ := os.ReadFile("/proc/1/comm")
	if os.Getenv("SHUNT_KERNEL_TEST") == "" || strings.TrimSpace(string(comm)) != "systemd" {
		t.Skip("changes the machine, and needs systemd as its first process: `make test-systemd` runs it in a virtual machine")
	}
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// TestPackageUnderSystemd follows the life of a package: installed, configured, started, restarted, reloaded, killed by
// the watchdog, upgraded, removed, purged. Until it is removed, no request fails.
func TestPackageUnderSystemd(t *testing.T) {
	needMachine(t)
	old, next := packages(t)
	client := newNetwork(t)
	t.Cleanup(func() { _ = exec.Command("dpkg", "-P", "shunt").Run() }) // after a failure, for the next test

	sh(t, 0, "dpkg", "-i", old)
	if state := property(t, "ActiveState"); state != "inactive" {
		t.Errorf("after the installation the service is %s: nobody has configured it", state)
	}
	t.Log(sh(t, 0, "systemctl", "--version"))
	t.Log(sh(t, 0, "systemd-analyze", "verify", "--man=no", "shunt.service"))
	t.Log(sh(t, 0, "systemd-analyze", "security", "--threshold=30", "shunt.service"))
	if err := os.WriteFile("/etc/shunt/shunt.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "shunt", "check", "--host")
	sh(t, 0, "systemctl", "start", "shunt")
	l := begin(t, client)
	l.still(t, "started")
	for range 3 {
		sh(t, 0, "systemctl", "restart", "shunt")
		l.still(t, "after a restart")
	}
	if !exists("/sys/fs/bpf/shunt/default/link-up0") {
		t.Error("the machine's bpffs has no pins: the sandbox hides them")
	}
	reloads(t, l)
	chained(t, l)
	watchdog(t, l)
	stopped(t, l)
	upgraded(t, l, next)
	l.stop()
	l.done.Wait()
	removed(t)
}

// reloads: RELOADING reaches systemd, and a wrong file fails only the command.
func reloads(t *testing.T, l *load) {
	t.Helper()
	sh(t, 0, "systemctl", "reload", "shunt")
	if err := os.WriteFile("/etc/shunt/shunt.yaml", []byte("services: 5\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, 1, "systemctl", "reload", "shunt")
	if state := property(t, "ActiveState"); state != "active" {
		t.Errorf("after a reload that failed the service is %s", state)
	}
	if err := os.WriteFile("/etc/shunt/shunt.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "systemctl", "kill", "--kill-whom=main", "-s", "HUP", "shunt")
	eventually(t, "SIGHUP is over", func() error {
		if state := property(t, "ActiveState"); state != "active" {
			return errors.New(state)
		}
		return nil
	})
	l.still(t, "after reloads")
}

// chained: a program before shunt's outlives a restart of a daemon without CAP_SYS_ADMIN.
func chained(t *testing.T, l *load) {
	t.Helper()
	chain, err := ebpf.LoadPinnedMap("/sys/fs/bpf/shunt/default/chain-up0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer chain.Close()
	if err := stranger.Filter(t, "filter", chain).Pin("/sys/fs/bpf/filter"); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "shunt", "chain", "set", "--interface", "up0", "--position", "before", "--program", "/sys/fs/bpf/filter")
	if err := os.Remove("/sys/fs/bpf/filter"); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "systemctl", "restart", "shunt")
	l.still(t, "after a restart behind another program")
	var all []struct {
		Interface string
		Before    *struct{ Name string }
	}
	out := sh(t, 0, "shunt", "chain", "list", "--interface", "up0", "-o", "json")
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 || all[0].Before == nil || all[0].Before.Name != "filter" {
		t.Errorf("the chain after a restart: %v\n%s", err, out)
	}
	eventually(t, "the daemon has measured the program before", func() error {
		if out := sh(t, 0, "shunt", "status"); !strings.Contains(out, "before    filter") {
			return errors.New(out)
		}
		return nil
	})
}

// watchdog: a daemon that hangs is killed and started again.
func watchdog(t *testing.T, l *load) {
	t.Helper()
	folder := "/run/systemd/system/shunt.service.d"
	if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(folder+"/watchdog.conf", []byte("[Service]\nWatchdogSec=20s\nTimeoutAbortSec=5s\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	sh(t, 0, "systemctl", "daemon-reload")
	sh(t, 0, "systemctl", "restart", "shunt")
	pid := property(t, "MainPID")
	number, err := strconv.Atoi(pid)
	if err == nil {
		err = syscall.Kill(number, syscall.SIGSTOP)
	}
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the watchdog's restart", func() error {
		if state, now := property(t, "ActiveState"), property(t, "MainPID"); state != "active" || now == pid || now == "0" {
			return fmt.Errorf("%s, process %s, before %s", state, now, pid)
		}
		return nil
	})
	if count := property(t, "NRestarts"); count != "1" {
		t.Errorf("systemd has restarted the service by itself %s times, want once", count)
	}
	l.still(t, "after the watchdog's restart")
}

// stopped: forwarding goes on, and shunt reports it.
func stopped(t *testing.T, l *load) {
	t.Helper()
	sh(t, 0, "systemctl", "stop", "shunt")
	l.still(t, "stopped")
	if out := sh(t, 0, "shunt", "status"); !strings.Contains(out, "Still forwarding 1 service without health checks since") {
		t.Errorf("shunt status after systemctl stop:\n%s", out)
	}
	sh(t, 0, "systemctl", "start", "shunt")
	l.still(t, "started again")
}

func upgraded(t *testing.T, l *load, next string) {
	t.Helper()
	before, pid := sh(t, 0, "shunt", "--version"), property(t, "MainPID")
	sh(t, 0, "dpkg", "-i", next)
	if after := sh(t, 0, "shunt", "--version"); after == before {
		t.Errorf("the version is %s, as before", after)
	}
	if now := property(t, "MainPID"); now == pid || now == "0" {
		t.Errorf("the upgrade has not restarted the service: process %s, before %s", now, pid)
	}
	if text, err := os.ReadFile("/etc/shunt/shunt.yaml"); err != nil || string(text) != config {
		t.Errorf("the configuration after an upgrade: %v\n%s", err, text)
	}
	l.still(t, "after an upgrade")
}

func removed(t *testing.T) {
	t.Helper()
	sh(t, 0, "shunt", "backend", "drain", "10.0.0.2")
	sh(t, 0, "systemctl", "enable", "shunt")
	sh(t, 0, "dpkg", "-r", "shunt")
	for _, path := range []string{"/sys/fs/bpf/shunt", "/usr/bin/shunt", "/lib/systemd/system/shunt.service", "/etc/systemd/system/multi-user.target.wants/shunt.service"} {
		if exists(path) {
			t.Errorf("%s is there after the package was removed", path)
		}
	}
	for _, path := range []string{"/etc/shunt/shunt.yaml", "/var/lib/shunt/default.overrides.json"} {
		if !exists(path) {
			t.Errorf("%s is gone, though the package was only removed", path)
		}
	}
	if out := sh(t, 0, "ip", "link", "show", "up0"); strings.Contains(out, "xdp") {
		t.Errorf("a program is still attached:\n%s", out)
	}
	sh(t, 0, "dpkg", "-P", "shunt")
	for _, path := range []string{"/etc/shunt", "/var/lib/shunt", "/run/shunt"} {
		if exists(path) {
			t.Errorf("%s is there after the package was purged", path)
		}
	}
}

// TestPackageWithoutSystemd: where systemd does not run, as in a container, the scripts leave it alone, and a daemon
// that was started by hand keeps the package from being removed.
func TestPackageWithoutSystemd(t *testing.T) {
	needMachine(t)
	old, next := packages(t)
	newNetwork(t)
	const inside = "mount -t tmpfs tmpfs /run && mkdir -p /run/lock && exec \"$@\"" // without /run/systemd
	container := func(want int, args ...string) string {
		t.Helper()
		return sh(t, want, "unshare", append([]string{"-m", "sh", "-c", inside, "sh"}, args...)...)
	}
	container(0, "dpkg", "-i", old)
	if err := os.WriteFile("/etc/shunt/shunt.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	container(0, "dpkg", "-i", next)
	daemon := exec.Command("shunt", "run")
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a daemon by hand", func() error {
		if !exists("/run/shunt/shunt.sock") {
			return errors.New("no socket")
		}
		return nil
	})
	if out := sh(t, 1, "dpkg", "-r", "shunt"); !strings.Contains(out, fmt.Sprint("process ", daemon.Process.Pid)) {
		t.Errorf("removing under a daemon does not name it:\n%s", out)
	}
	if err := daemon.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = daemon.Wait()
	container(0, "dpkg", "-r", "shunt")
	if exists("/sys/fs/bpf/shunt") || exists("/usr/bin/shunt") || !exists("/etc/shunt/shunt.yaml") {
		t.Error("removed: the data plane or the binary is still there, or the configuration is not")
	}
	container(0, "dpkg", "-P", "shunt")
	if exists("/etc/shunt") || exists("/var/lib/shunt") {
		t.Error("purged: configuration or state is still there")
	}
}
