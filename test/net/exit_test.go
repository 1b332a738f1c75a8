package net

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestKeepOnExit: `run --on-exit keep`, one daemon after the other. No flow fails, as after kill -9, and the messages
// about it are true.
func TestKeepOnExit(t *testing.T) {
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		t.Run(forwarding, func(t *testing.T) {
			b, vips := exitBed(t, forwarding)
			b.start("--on-exit", "keep")
			eventually(t, 10*time.Second, "announcement", b.announced)
			c := b.newChurn(t, vips, 4)
			for range 3 {
				begin := time.Now().Truncate(time.Second)
				pid := b.daemon.command.Process.Pid
				counted, held := b.status().Services, b.traces(t)
				stopped := b.daemon
				b.keep()
				// `shunt status` counts in ticks of the kernel, of at most 10 ms (CONFIG_HZ=100).
				end := time.Now().Add(10 * time.Millisecond)
				if difference := cmp.Diff(held, b.traces(t)); difference != "" {
					t.Errorf("what the daemon held changed when it let go (-before +now):\n%s", difference)
				}
				lines := strings.Split(strings.TrimSpace(stopped.log()), "\n")
				says := fmt.Sprintf(`till forwarding 2 services without health checks since (.*); .shunt detach --instance %s. ends it`, b.instance)
				_, text := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
				for what, where := range map[string]string{"the last log line": lines[len(lines)-1], "shunt status": text} {
					found := regexp.MustCompile(says).FindStringSubmatch(where)
					if found == nil {
						t.Fatalf("%s of process %d does not say that it goes on without health checks:\n%s", what, pid, where)
					}
					since, err := time.ParseInLocation(time.DateTime, found[1], time.Local)
					if err != nil || since.Before(begin) || since.After(end) {
						t.Errorf("%s: since %s (%v), but the daemon stopped between %s and %s", what, found[1], err, begin, end)
					}
				}
				if s := b.status(); s.Daemon != nil || s.Services[0].PacketsIn < counted[0].PacketsIn || s.Unattended.Before(begin) || s.Unattended.After(end) {
					t.Errorf("after keep: %+v\nbefore: %+v", s, counted)
				}
				b.start("--on-exit", "keep")
				if s := b.status(); s.Services[0].PacketsIn < counted[0].PacketsIn || !s.Unattended.IsZero() {
					t.Errorf("the successor: %+v\nbefore: %+v", s, counted)
				}
			}
			c.end(t)
		})
	}
}

// exitBed is a bed with services web and one more, over TCP and UDP, not started.
func exitBed(t *testing.T, forwarding string) (*bed, []netip.Addr) {
	t.Helper()
	if forwarding == "nat" {
		b := newBed(t, lab.Options{Layout: lab.TwoArm})
		b.write(b.file(settings{}))
		return b, vips
	}
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 2}, 2)
	b.decap(append(directVIPs(0), directVIPs(1)...), b.Backends...)
	var lines []string
	for _, backend := range b.Backends {
		lines = append(lines, line(backend.Addr6()))
	}
	b.write(b.one(forwarding, "", lines...))
	return b, directVIPs(0)
}

// TestDrainOnExit: `run --on-exit drain`. New connections are refused, open ones go on. When they have ended, so does
// the daemon, and nothing is left.
func TestDrainOnExit(t *testing.T) {
	b, vips := exitBed(t, "nat")
	before := b.traces(t)
	b.start("--on-exit", "drain")
	sessions := b.open(t, 3)
	b.stopDraining(t)
	for _, vip := range vips {
		b.refuses(t, "while flows drain", vip)
	}
	if code, out := b.shunt("reload", "--socket", b.socket); code != 1 || !strings.Contains(out, "stopping") {
		t.Errorf("a reload while flows drain: exit code %d\n%s", code, out)
	}
	if text := b.status().condition("node_draining"); text == "" {
		t.Error("shunt status does not say that the node drains")
	}
	b.awaits(b.daemon, "open_flows=6") // reported from time to time
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Errorf("while flows drain: %v", err)
		}
		s.Close()
	}
	b.endsByItself(t, "drained: all flows have ended")
	b.nothingLeft(t, before)
}

// TestDrainTimeout: connections that have not ended at the timeout are given up; with direct return too.
func TestDrainTimeout(t *testing.T) {
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		t.Run(forwarding, func(t *testing.T) {
			b, vips := exitBed(t, forwarding)
			before := b.traces(t)
			b.start("--on-exit", "drain", "--drain-timeout", (patience * 3 * time.Second).String())
			sessions := b.sessionsOf(t, vips[0], 4)
			b.stopDraining(t)
			b.refuses(t, "while flows drain", vips[0])
			for _, s := range sessions {
				if err := b.alive(s); err != nil {
					t.Errorf("while flows drain: %v", err)
				}
			}
			b.endsByItself(t, "the timeout is over")
			b.nothingLeft(t, before)
		})
	}
}

// stopDraining sends SIGTERM and waits until the daemon takes no new flows.
func (b *bed) stopDraining(t *testing.T) {
	t.Helper()
	if err := b.daemon.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	b.awaits(b.daemon, "draining: no new flows from now on")
}

// endsByItself waits for the daemon's orderly end, and for words in its log.
func (b *bed) endsByItself(t *testing.T, says string) {
	t.Helper()
	requireEnd(t, b.daemon, says)
}

func requireEnd(t *testing.T, daemon *process, says string) {
	t.Helper()
	select {
	case <-daemon.ended:
	case <-time.After(patience * 30 * time.Second):
		t.Fatalf("the daemon has not ended:\n%s", daemon.log())
	}
	if daemon.Err() != nil || !strings.Contains(daemon.log(), says) {
		t.Errorf("the daemon ended with %v, and did not say %q:\n%s", daemon.Err(), says, daemon.log())
	}
}

// TestInterruptDetaches: SIGINT detaches with any --on-exit, also in the middle of a drain, where SIGTERM changes
// nothing any more.
func TestInterruptDetaches(t *testing.T) {
	b, _ := exitBed(t, "nat")
	before := b.traces(t)
	b.start("--on-exit", "keep")
	if err := b.daemon.end(syscall.SIGINT); err != nil {
		t.Errorf("SIGINT with --on-exit keep: %v", err)
	}
	b.nothingLeft(t, before)

	b.start("--on-exit", "drain")
	sessions := b.open(t, 1)
	b.stopDraining(t)
	if err := b.daemon.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Errorf("after two SIGTERM: %v", err)
		}
	}
	if err := b.daemon.end(syscall.SIGINT); err != nil {
		t.Errorf("SIGINT in a drain: %v", err)
	}
	b.nothingLeft(t, before)
}

// TestSeveralInterrupts: interrupts at the same time count as one, in whichever way they came: nothing is left. A later
// one does not wait, and leaves the rest.
func TestSeveralInterrupts(t *testing.T) {
	b, _ := exitBed(t, "nat")
	before := b.traces(t)
	interruptUntilEnd := func() error {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-b.daemon.ended:
				err := b.daemon.Err()
				b.daemon = nil
				return err
			case <-tick.C:
				_ = b.daemon.command.Process.Signal(syscall.SIGINT)
			}
		}
	}
	b.start()
	_ = b.daemon.command.Process.Signal(syscall.SIGINT)
	_ = b.daemon.command.Process.Signal(syscall.SIGINT)
	if err := b.daemon.end(syscall.SIGINT); err != nil {
		t.Errorf("after three SIGINT at once: %v", err)
	}
	b.nothingLeft(t, before)

	b.start()
	b.holdAttaching(t)
	b.write(b.file(settings{attach: "generic"}))
	if err := b.daemon.command.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience*10*time.Second, "a reload that waits for the lock", func() error {
		locks, err := os.ReadFile("/proc/locks") // proc_locks(5): a waiting process has an arrow
		if err == nil && !regexp.MustCompile(fmt.Sprintf(`-> FLOCK +ADVISORY +WRITE +%d `, b.daemon.command.Process.Pid)).Match(locks) {
			err = fmt.Errorf("the locks are\n%s", locks)
		}
		return err
	})
	log := b.daemon
	err := interruptUntilEnd() // a stop waits for the reload
	if exit, is := err.(*exec.ExitError); !is || exit.ExitCode() != 130 {
		t.Errorf("after many SIGINT: %v, want exit code 130\n%s", err, log.log())
	}
}

// TestLoopbackIsSharedByInstances: forwarding on lo is restored when the last instance has gone, and not earlier.
func TestLoopbackIsSharedByInstances(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	before := b.traces(t)
	const setting = "net/ipv4/conf/lo/forwarding"
	var all []*process
	for n, i := range b.Balancer.Interfaces() {
		path := fmt.Sprint(b.path, n)
		config := fmt.Sprintf("interfaces: [{name: %s}]\nservices:\n  - {name: a, address: 192.0.2.%d, port: 80, announce: none, backends: [{address: %s}]}\n",
			i.Name, 80+n, b.Backends[0].Addr4())
		if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		instance := fmt.Sprint(b.instance, "-", n)
		p := b.spawn(b.Balancer, "run", "--config", path, "--instance", instance, "--socket", fmt.Sprint(b.socket, n))
		b.others = append(b.others, p)
		b.awaits(p, "msg=running")
		all = append(all, p)
	}
	// As `sysctl --system` does with net.ipv4.ip_forward and net.ipv6.conf.all.forwarding.
	for _, on := range []bool{true, false} {
		if err := b.Balancer.SetForwarding(on); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 10*time.Second, "lo forwards again", func() error {
		now := b.traces(t)
		for _, name := range []string{setting, "net/ipv6/conf/lo/forwarding"} {
			if now[name] == before[name] {
				return fmt.Errorf("%s is %s", name, now[name])
			}
		}
		return nil
	})
	if err := all[0].end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if now := b.traces(t)[setting]; now == before[setting] {
		t.Errorf("%s is %s again, although an instance is left", setting, now)
	}
	if err := all[1].end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	b.nothingLeft(t, before)
}

// TestDetachAsksTheDaemon: `shunt detach` makes a daemon detach with any --on-exit, in the middle of a drain too. When
// it returns, nothing is left and the next daemon may start.
func TestDetachAsksTheDaemon(t *testing.T) {
	b, _ := exitBed(t, "nat")
	before := b.traces(t)
	detach := []string{"detach", "--instance", b.instance, "--socket", b.socket}
	for range 3 {
		b.start("--on-exit", "keep")
		code, out := b.shunt(detach...)
		b.nothingLeft(t, before)
		want := fmt.Sprintf("Instance %q forwards nothing now, and nothing of it is left. Its daemon, process %d, has ended.\n", b.instance, b.daemon.command.Process.Pid)
		if code != 0 || out != want {
			t.Errorf("shunt detach: exit code %d\n%swant\n%s", code, out, want)
		}
		asked := b.daemon
		b.start() // at once
		requireEnd(t, asked, "asked to detach")
		if code, out := b.shunt("detach", "--instance", "another", "--socket", b.socket); code != 1 || !strings.Contains(out, `"another": nothing of it is on this machine, where there are `) {
			t.Errorf("shunt detach of an instance that is not there: exit code %d\n%s", code, out)
		}
		if code, out := b.shunt("detach", "--instance", b.instance, "--socket", b.socket+"x"); code != 1 ||
			!strings.Contains(out, fmt.Sprintf("is run by process %d, which does not answer at %sx", b.daemon.command.Process.Pid, b.socket)) {
			t.Errorf("shunt detach at a socket where nobody is: exit code %d\n%s", code, out)
		}
		if code, out := b.shunt(append(detach, "--unattended")...); code != 1 ||
			!strings.Contains(out, fmt.Sprintf("is run by process %d, and --unattended never ends a daemon", b.daemon.command.Process.Pid)) {
			t.Errorf("shunt detach --unattended under a daemon: exit code %d\n%s", code, out)
		}
		if b.status().Daemon == nil {
			t.Fatal("a refused `shunt detach` has ended the daemon")
		}
		if err := b.daemon.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	}

	b.start("--on-exit", "drain")
	b.open(t, 1)
	b.stopDraining(t)
	if code, out := b.shunt(detach...); code != 0 {
		t.Errorf("shunt detach in a drain: exit code %d\n%s", code, out)
	}
	b.endsByItself(t, "the drain ends before the flows: interrupted")
	b.nothingLeft(t, before)
	for _, args := range [][]string{detach, append(slices.Clone(detach), "--unattended")} {
		if code, out := b.shunt(args...); code != 1 || !strings.Contains(out, "nothing of it is on this machine") {
			t.Errorf("shunt %s with nothing there: exit code %d\n%s", strings.Join(args, " "), code, out)
		}
	}
}

// TestDetachNeedsRootWithoutADaemon: only root removes the state that a daemon has left, and the message says so.
func TestDetachNeedsRootWithoutADaemon(t *testing.T) {
	b, _ := exitBed(t, "nat")
	b.start("--on-exit", "keep")
	b.keep()
	c := command(b.Balancer)
	c.Path = forEverybody(t, c.Path)
	c.Args = append(c.Args, "detach", "--instance", b.instance, "--socket", c.Path+".sock")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54001, Gid: 54001}}
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "sudo shunt detach --instance "+b.instance) {
		t.Errorf("as another user: %v\n%s", err, out)
	}
}

// forEverybody copies a program to a folder where every user may run it.
func forEverybody(t *testing.T, program string) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "shunt-everybody")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	path := filepath.Join(folder, "shunt")
	// By a process: programs that other tests start inherit this process's open files for a moment, and a file open for
	// writing cannot be executed (ETXTBSY).
	out, err := exec.Command("install", "-m", "755", program, path).CombinedOutput()
	if err := errors.Join(err, os.Chmod(folder, 0o755)); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}
