package net

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/moving"
)

// mountsVariable is "new" for a child that makes a mount namespace with folders of its own for
// shunt and stays there, "bare" for one without bpffs, or the path of such a namespace to run
// in.
const mountsVariable = "SHUNT_NET_MOUNTS"

// sandboxVariable makes a child lack capabilities of its ancestors, as in a unit's sandbox.
const sandboxVariable = "SHUNT_NET_SANDBOX"

// ownMounts are the folders where shunt leaves files on a machine.
var ownMounts = map[string]string{"/run": "tmpfs", "/var/lib": "tmpfs", "/sys/fs/bpf": "bpf"}

// enterMounts makes or enters a mount namespace. A namespace is a thread's, so a process that
// enters one executes itself again there.
func enterMounts(mounts string) {
	runtime.LockOSThread()
	die := func(what string, err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, what+":", err)
			os.Exit(1)
		}
	}
	if filepath.IsAbs(mounts) {
		f, err := os.Open(mounts)
		die("open the namespace", err)
		die("leave what threads share", unix.Unshare(unix.CLONE_FS))
		die("enter the namespace", unix.Setns(int(f.Fd()), unix.CLONE_NEWNS))
		os.Unsetenv(mountsVariable)
		if os.Getenv(sandboxVariable) != "" { // so it cannot inspect processes that have them
			die("give a capability up", unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_PTRACE, 0, 0, 0))
			die("give another up", unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_TIME, 0, 0, 0))
		}
		die("begin anew", unix.Exec(os.Args[0], os.Args, os.Environ()))
	}
	// As a service manager's sandbox: it sees the mounts of others, but they see none of its
	// own.
	die("make a mount namespace", unix.Unshare(unix.CLONE_NEWNS))
	die("make it one to be a slave of", unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	master, err := os.Open("/proc/thread-self/ns/mnt") // it goes with its last holder
	die("hold it", err)
	die("make another", unix.Unshare(unix.CLONE_NEWNS))
	die("keep it apart", unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""))
	for path, kind := range ownMounts {
		if mounts == "bare" && path == "/sys/fs/bpf" {
			for err := error(nil); err == nil; { // they may lie on top of each other
				err = unix.Unmount(path, unix.MNT_DETACH)
			}
			continue
		}
		die("mount "+path, unix.Mount(kind, path, kind, 0, ""))
	}
	// The thread is the process's first, whose namespace /proc/PID/ns shows.
	fmt.Println("ready")
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // until the test ends
	_ = master.Close()
	os.Exit(0)
}

func init() {
	if os.Getenv(mountsVariable) != "" {
		runtime.LockOSThread() // TestMain then runs in the first thread
	}
}

// apart is a bed whose shunt does not see the files that others leave on the machine.
type apart struct {
	*bed
	holder *exec.Cmd
}

func newApart(t *testing.T, mounts string, options lab.Options) *apart {
	t.Helper()
	a := &apart{bed: newBed(t, options), holder: exec.Command(os.Args[0])}
	a.holder.Env = append(os.Environ(), mountsVariable+"="+mounts)
	in, err1 := a.holder.StdinPipe()
	out, err2 := a.holder.StdoutPipe()
	a.holder.Stderr = os.Stderr
	if err := errors.Join(err1, err2, a.holder.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = a.holder.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("make a mount namespace: %q, %v", line, err)
	}
	return a
}

func (a *apart) command(args ...string) *lab.Command {
	c := command(a.Balancer, args...)
	c.Env = append(c.Env, a.env...)
	c.Env = append(c.Env, fmt.Sprintf("%s=/proc/%d/ns/mnt", mountsVariable, a.holder.Process.Pid))
	return c
}

// background starts a command there and waits until it has printed a text.
func (a *apart) background(text string, args ...string) *process {
	a.t.Helper()
	p := starts(a.t, a.command(args...))
	a.others = append(a.others, p)
	a.awaits(p, text)
	return p
}

// run runs a command there to its end.
func (a *apart) run(stdin string, args ...string) (code int, output string) {
	a.t.Helper()
	c := a.command(args...)
	c.Stdin = strings.NewReader(stdin)
	stop := time.AfterFunc(patience*time.Minute, func() { _ = c.Process.Kill() })
	defer stop.Stop()
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), string(out)
	}
	if err != nil {
		a.t.Fatalf("shunt %s: %v", strings.Join(args, " "), err)
	}
	return 0, string(out)
}

// files lists everything in the folders where shunt may leave files.
func (a *apart) files() (all []string) {
	for path := range ownMounts {
		root := fmt.Sprintf("/proc/%d/root%s", a.holder.Process.Pid, path)
		_ = filepath.WalkDir(root, func(file string, _ fs.DirEntry, err error) error {
			if err != nil {
				a.t.Error(err)
			} else if file != root {
				all = append(all, path+strings.TrimPrefix(file, root))
			}
			return nil
		})
	}
	slices.Sort(all)
	return all
}

// TestUninstall: `shunt uninstall` refuses under a daemon, lists its finds, removes nothing
// without confirmation, and then removes everything that killed processes had left.
func TestUninstall(t *testing.T) {
	a := newApart(t, "new", lab.Options{Layout: lab.TwoArm})
	for _, i := range a.Balancer.Interfaces() {
		if err := a.Balancer.SetOffload(i.Name, map[string]bool{"gro": true}); err != nil { // as on a network card
			t.Fatal(err)
		}
	}
	before, files := a.traces(t), a.files() // bpffs has files of its own
	a.write(a.file(settings{attach: "generic", more: fmt.Sprintf(
		"  - {name: direct, address: 192.0.2.98, port: 80, forwarding: dsr-ipip, health: {tcp: {}}, backends: [{address: %s}]}\n", a.Backends[0].Addr4())}))
	daemon := a.background("msg=running", "run", "--config", a.path, "--instance", a.instance, "--socket", "/run/shunt/own.sock")
	eventually(t, 10*time.Second, "announcement", func() error {
		if !strings.Contains(daemon.log(), fmt.Sprintf("address=%s ", lab.VIP6)) {
			return errors.New(daemon.log())
		}
		return nil
	})
	eventually(t, 10*time.Second, "a health check with direct return", func() error {
		if devices, _ := a.devicesAndRules(t); !strings.Contains(devices, "shunt-check1\n") {
			return errors.New(devices)
		}
		return nil
	})
	sessions := a.open(t, 2)
	if code, out := a.run("", "backend", "drain", a.Backends[0].Addr4().String(), "--socket", "/run/shunt/own.sock"); code != 0 {
		t.Fatalf("shunt backend drain: exit code %d\n%s", code, out)
	}
	decap := a.background("192.0.2.99", "decap", "--attach", "none", "--interface", "eth1", "--vip", "192.0.2.99")
	refused := func(p *process, who string) {
		t.Helper()
		pid := fmt.Sprint("process ", p.command.Process.Pid)
		if code, out := a.run("", "uninstall", "--yes"); code != 1 || !strings.Contains(out, pid) || !strings.Contains(out, "nothing was removed") {
			t.Errorf("shunt uninstall under %s: exit code %d, want 1 and the words %q:\n%s", who, code, pid, out)
		}
	}
	refused(daemon, "a daemon")
	if err := daemon.end(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	refused(decap, "shunt decap")
	held := func() (is bool) { // the entry that `shunt-kube run --moving` leaves, which does not run here
		t.Helper()
		if err := a.Balancer.Run(func() (err error) { is, err = moving.Left(); return err }); err != nil {
			t.Fatal(err)
		}
		return is
	}
	if err := a.Balancer.Run(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: moving.Table})
		return conn.Flush()
	}); err != nil || !held() {
		t.Fatalf("make the table: %v", err)
	}
	if err := decap.end(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, answer := range []string{"", "n\n", "\n"} {
		code, out := a.run(answer, "uninstall")
		if code != 1 || !strings.Contains(out, "nothing was removed") {
			t.Errorf("shunt uninstall, answered %q: exit code %d\n%s", answer, code, out)
		}
		for _, what := range []string{
			"pin  ", "program on eth0", "program on eth1", a.Backends[1].Addr4().String() + " dev eth1", "ff02::1:ff00:10 on eth0", "eth0: rx-gro",
			"net/ipv4/conf/lo/forwarding: back to 0", "net/ipv6/conf/lo/forwarding: back to 0", "192.0.2.99 on lo", "shunt-check1: for health checks", "net/ipv4/conf/all/arp_ignore: back to 0",
			"nftables table inet shunt-moving", "/run/shunt/own.sock", "/run/shunt/" + a.instance + ".aggregation", "/var/lib/shunt/" + a.instance + ".overrides.json",
		} {
			if !strings.Contains(out, what) {
				t.Errorf("shunt uninstall does not list %q:\n%s", what, out)
			}
		}
	}
	a.goOn(t, "after an uninstall that was not wanted", sessions)
	if code, out := a.run("y\n", "uninstall"); code != 0 || !strings.Contains(out, "All of it is gone") {
		t.Errorf("shunt uninstall: exit code %d\n%s", code, out)
	}
	a.nothingLeft(t, before)
	if held() {
		t.Error("the nftables table is left")
	}
	if difference := cmp.Diff(files, a.files()); difference != "" {
		t.Errorf("files are left (-before +now):\n%s", difference)
	}
	a.notOnLoopback(t, netip.MustParseAddr("192.0.2.99"))
	code, out := a.run("", "uninstall", "-o", "json")
	var inventory struct {
		Removed           bool
		Traces, Elsewhere []struct{ Kind, What string }
	}
	if err := json.Unmarshal([]byte(out), &inventory); code != 0 || err != nil || inventory.Removed || len(inventory.Traces)+len(inventory.Elsewhere) > 0 {
		t.Errorf("a second shunt uninstall: exit code %d, %v:\n%s", code, err, out)
	}
	if difference := cmp.Diff(files, a.files()); difference != "" {
		t.Errorf("a second uninstall leaves files (-before +now):\n%s", difference)
	}
}

func (b *bed) notOnLoopback(t *testing.T, address netip.Addr) {
	t.Helper()
	lo, err := b.Balancer.Netlink().LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	list, err := b.Balancer.Netlink().AddrList(lo, unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if a.IP.Equal(address.AsSlice()) {
			t.Errorf("%s is still on lo", address)
		}
	}
}

// TestSandboxWithoutBPFFS: in a sandbox without bpffs shunt does not mount one of its own,
// which would end with the sandbox, and the data plane with it.
func TestSandboxWithoutBPFFS(t *testing.T) {
	a := newApart(t, "bare", lab.Options{Layout: lab.TwoArm})
	a.env = []string{sandboxVariable + "=1"}
	a.write(a.file(settings{}))
	code, out := a.run("", "run", "--config", a.path, "--instance", a.instance, "--socket", a.socket)
	if code != 1 || !strings.Contains(out, "mount it outside") {
		t.Errorf("shunt run: exit code %d\n%s", code, out)
	}
}
