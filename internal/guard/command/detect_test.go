package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/lab"
)

const detectPolicy = `guard:
  detect:
    kill: [reverse-shell]
    rules:
      - {name: tar, on: exec, if: process.name == 'tar', severity: low, action: log}
`

func guardWith(in string, arguments ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = Main(append([]string{"guard"}, arguments...), strings.NewReader(in), &o, &e)
	return code, o.String(), e.String()
}

// recorded are events as `shunt guard events --all -o json` tells them.
func recorded(t *testing.T, events ...rule.Event) string {
	t.Helper()
	var b strings.Builder
	lines := json.NewEncoder(&b)
	for i := range events {
		if err := lines.Encode(detectionLine{Event: &events[i]}); err != nil {
			t.Fatal(err)
		}
	}
	return b.String() + `{"counts":{}}` + "\n"
}

func TestGuardTest(t *testing.T) {
	far := rule.Descriptor{Kind: rule.Inet, Direction: rule.Out, Remote: "192.0.2.1", RemotePort: 4444}
	shell := rule.Event{Type: rule.Exec, Process: rule.Process{PID: 7, Program: "/bin/sh"}, FDs: [4]rule.Descriptor{far, far}}
	tar := rule.Event{Type: rule.Exec, Process: rule.Process{PID: 8, Program: "/bin/tar"}}
	events := recorded(t, shell, tar)
	code, out, errOut := guardWith(events, "test", "reverse-shell")
	if code != cli.ExitOK || !strings.Contains(out, "alert critical reverse-shell (T1059.004): /bin/sh has its stdin and stdout on a connection to 192.0.2.1:4444; exec, pid 7") || errOut != "reverse-shell finds 1 of 2 events.\n" {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	file := filepath.Join(t.TempDir(), "events")
	if err := os.WriteFile(file, []byte(events), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := guardWith("", "test", "tar", "--policy", guardFile(t, detectPolicy), file, "-o", "json"); code != cli.ExitOK || !strings.Contains(out, `"rule":"tar"`) {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	for want, c := range map[string]struct {
		code      int
		arguments []string
		in        string
	}{
		"bpf-load finds 0 of 2 events":                  {cli.ExitRefused, []string{"bpf-load"}, events},
		`there is no rule "reverse-shel": did you mean`: {cli.ExitRefused, []string{"reverse-shel"}, events},
		"A rule of your own needs --policy":             {cli.ExitRefused, []string{"tar"}, events},
		"line 1 of standard input is not an event":      {cli.ExitRefused, []string{"bpf-load"}, "x\n"},
		"there are no events in standard input":         {cli.ExitRefused, []string{"bpf-load"}, ""},
		"read the events: open " + file + "x":           {cli.ExitRefused, []string{"bpf-load", file + "x"}, ""},
		"name a rule, and a file of events or none":     {cli.ExitUsage, nil, ""},
	} {
		if code, _, errOut := guardWith(c.in, append([]string{"test"}, c.arguments...)...); code != c.code || !strings.Contains(errOut, want) {
			t.Errorf("%v: exit %d: %s", c.arguments, code, errOut)
		}
	}
}

func TestGuardCheckOfDetection(t *testing.T) {
	file := guardFile(t, detectPolicy)
	code, out, errOut := guardWith("", "check", file)
	if want := file + " detects by 35 rules, 1 of its own. `shunt guard run --policy " + file + "` watches for them.\n"; code != cli.ExitOK || out != want {
		t.Errorf("exit %d: %s%s, want %s", code, out, errOut, want)
	}
	code, out, _ = guardWith("", "check", guardFile(t, strings.Replace(detectPolicy, "process.name", "process.nam", 1)))
	if code != cli.ExitRefused || !strings.Contains(out, `the condition, column 1: there is no field "process.nam"; did you mean process.name?`) {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, _, errOut := guardWith("", "run", "--policy", file, "--logsize", "0"); code != cli.ExitUsage || !strings.Contains(errOut, "--logsize must be at least 1") {
		t.Errorf("run: exit %d: %s", code, errOut)
	}
	protects := guardFile(t, "guard: {protect: [{name: a, paths: [/srv], deny: [write], mode: audit}]}\n")
	if code, _, errOut := guardWith("", "events", "--policy", protects); code != cli.ExitRefused || !strings.Contains(errOut, "has no rules that detect: write detect: {}") {
		t.Errorf("events: exit %d: %s", code, errOut)
	}
	if code, _, _ := guardWith("", "events", "--duration", "-1s"); code != cli.ExitUsage {
		t.Errorf("events for less than no time: exit %d", code)
	}
}

func TestGuardLists(t *testing.T) {
	if code, out, _ := guardWith("", "rules"); code != cli.ExitOK || !strings.Contains(out, "connect-with-low-socket  off  medium    T1059.004  connect by a process that has a socket as descriptor 0, 1, 2 or 3; so do every client") {
		t.Errorf("exit %d: %s", code, out)
	}
	var answer struct{ Rules []struct{ Name, If string } }
	if code, out, _ := guardWith("", "rules", "-o", "json"); code != cli.ExitOK || json.Unmarshal([]byte(out), &answer) != nil || len(answer.Rules) < 25 || answer.Rules[0].If == "" {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out, _ := guardWith("", "fields"); code != cli.ExitOK || !strings.Contains(out, "stdin.direction") || !strings.Contains(out, "file.write") {
		t.Errorf("exit %d: %s", code, out)
	}
}

// TestGuardRunDetects runs the guard with a file that only detects, as a user does: findings go to the log, SIGHUP
// loads another rule, a bad file changes nothing, and the status has the counts.
func TestGuardRunDetects(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	group, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-guard-run-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	const text = "guard:\n  detect:\n    rules:\n      - {name: mine, on: exec, if: process.comm == 'true', severity: low, action: log}\n"
	file, log := guardFile(t, text), filepath.Join(t.TempDir(), "log")
	p, _, err := policy.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := &cobra.Command{}
	c.SetContext(ctx)
	var said transcript
	var failed error
	path := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close() //nolint:errcheck // of a test
	t.Setenv("NOTIFY_SOCKET", path)
	ended := make(chan struct{})
	defer func() { // also if the test fails: there is one guard a machine
		cancel()
		<-ended
	}()
	go func() {
		defer close(ended)
		failed = runGuard(c, cli.Streams{Out: &said, Err: &said}, p, guardRun{file: file, output: "text", folder: agent.RunDirectory, cgroup: group, log: log, logSize: 1, logBackups: 1})
	}()
	said.await(t, "Detecting by 35 rules.\n")
	var word [64]byte
	if err := manager.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if n, err := manager.Read(word[:]); err != nil || string(word[:n]) != "READY=1" {
		t.Errorf("the service manager was told %q: %v", word[:n], err)
	}
	awaitLog := func(want string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			runIn(t, group, "true")
			if text, _ := os.ReadFile(log); strings.Contains(string(text), want) {
				return
			}
		}
		t.Errorf("the log has no %s", want)
	}
	awaitLog(`{"found":{"rule":"mine","severity":"low"`)
	code, status, _ := guardMain("status")
	if code != cli.ExitOK || !strings.Contains(status, "Nothing is protected") || !strings.Contains(status, "  protection: off\n  detection: on for ") || !strings.Contains(status, "by 35 rules; ") {
		t.Errorf("status: exit %d: %s", code, status)
	}
	for _, step := range []struct{ text, want string }{
		{strings.Replace(text, "mine", "yours", 1), "reloaded " + file + ": nothing is protected, detecting by 35 rules"},
		{strings.Replace(text, "process.comm", "process.com", 1), "reload " + file + ": it has the faults above. The earlier policy stays in force"},
	} {
		if err := errors.Join(os.WriteFile(file, []byte(step.text), 0o600), unix.Kill(os.Getpid(), unix.SIGHUP)); err != nil {
			t.Fatal(err)
		}
		said.await(t, step.want)
	}
	awaitLog(`{"found":{"rule":"yours"`)
	cancel()
	if <-ended; failed != nil {
		t.Error(failed)
	}
	said.await(t, ", 0 lost. Nothing is detected any more.\n")
	if code, status, _ := guardMain("status"); code != cli.ExitRefused || !strings.Contains(status, "Nothing is detected: no `shunt guard run` is running.") {
		t.Errorf("status after the end: exit %d: %s", code, status)
	}
	if info, err := os.Stat(log); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the log: %v, %v", info, err)
	}
}

// transcript is the output so far of a command at work.
type transcript struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (s *transcript) Write(p []byte) (int, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.text.Write(p)
}

func (s *transcript) String() string {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.text.String()
}

// await waits for a text in the command's output. An emulated machine takes long to load programs.
func (s *transcript) await(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Minute); !strings.Contains(s.String(), want); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not say %q but:\n%s", want, s)
		}
	}
}

// runIn runs a program of the machine in a cgroup.
func runIn(t *testing.T, folder, name string) {
	t.Helper()
	group, err := os.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close() //nolint:errcheck // only a folder
	one := exec.Command(name)
	one.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if err := one.Run(); err != nil {
		t.Fatal(err)
	}
}
