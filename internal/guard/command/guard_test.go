package command

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
)

func guardFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "guard.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const guardPolicy = "guard: {protect: [{name: data, paths: [/srv/data], deny: [write], mode: deny}]}\n"

func guardMain(arguments ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = Main(append([]string{"guard"}, arguments...), strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

func TestGuardCheck(t *testing.T) {
	good, bad := guardFile(t, guardPolicy), guardFile(t, strings.Replace(guardPolicy, "write", "wirte", 1))
	if code, out, _ := guardMain("check", good); code != cli.ExitOK || !strings.Contains(out, "is a policy of 1 rule.\n  data: deny: write of /srv/data by all\n") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out, _ := guardMain("check", bad); code != cli.ExitRefused || !strings.Contains(out, `unknown deny "wirte"`) {
		t.Errorf("exit %d: %s", code, out)
	}
	code, out, _ := guardMain("check", bad, "-o", "json")
	var answer struct {
		OK     bool
		Faults []struct{ Line, Column int }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != cli.ExitRefused || answer.OK || len(answer.Faults) != 1 || answer.Faults[0].Line != 1 {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
}

// A rule that denies is shown as the kernel enforces it, is refused by name where it cannot be decided, and needs a
// kernel that enforces.
func TestGuardCheckOfScripts(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := guardFile(t, "guard: {processes: [{name: app, program: "+script+", deny: [kill], mode: deny}]}\n")
	if code, out, _ := guardMain("check", file); code != cli.ExitRefused || !strings.Contains(out, file+":1:21: error: rule \"app\": "+script+" is a script") || !strings.Contains(out, "pid-file") {
		t.Errorf("exit %d: %s", code, out)
	}
}

func TestGuardCheckOfDenials(t *testing.T) {
	const text = "guard: {detect: {rules: [{name: tool, on: exec, if: \"process.program == '/usr/bin/nc'\", action: deny}]}}\n"
	if code, out, _ := guardMain("check", guardFile(t, text)); code != cli.ExitOK || !strings.HasSuffix(out, "watches for them.\n  tool: deny: exec of /usr/bin/nc by all: the kernel refuses it beforehand\n") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out, _ := guardMain("check", guardFile(t, strings.Replace(text, "process.program", "process.name", 1))); code != cli.ExitRefused ||
		!strings.Contains(out, "process.name == '/usr/bin/nc' cannot be decided before the operation") {
		t.Errorf("exit %d: %s", code, out)
	}
	var out bytes.Buffer
	p, _, err := policy.Load(guardFile(t, text))
	if err != nil {
		t.Fatal(err)
	}
	if err := notEnforced(cli.Streams{Err: &out}, p, &protect.Refusal{Reason: "it is too old", Remedy: "Boot another one"}); err == nil || !strings.Contains(out.String(), "tool is not enforced: deny: exec of /usr/bin/nc by all\n") {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestGuardRefuses(t *testing.T) {
	good := guardFile(t, guardPolicy)
	for _, arguments := range [][]string{{"check"}, {"check", good, good}, {"run"}, {"run", "--policy", good, "-o", "xml"}, {"nosuch"}, {"stop", "now"}} {
		if code, _, errOut := guardMain(arguments...); code != cli.ExitUsage || errOut == "" {
			t.Errorf("%v: exit %d: %s", arguments, code, errOut)
		}
	}
	if code, _, errOut := guardMain("run", "--policy", guardFile(t, "guard: {}")); code != cli.ExitRefused || !strings.Contains(errOut, "protect") {
		t.Errorf("a bad policy: exit %d: %s", code, errOut)
	}
	if code, _, errOut := guardMain("check", good+"x"); code != cli.ExitRefused || !strings.Contains(errOut, "no such file") {
		t.Errorf("a missing file: exit %d: %s", code, errOut)
	}
}

// The first line names the rules that a user must not rely on.
func TestGuardSaysFirstWhatIsNotEnforced(t *testing.T) {
	var out bytes.Buffer
	p := policy.Policy{Rules: []policy.Rule{{Name: "data", Paths: []string{"/srv/data"}, Deny: []string{policy.Write, policy.Delete}, Mode: policy.Deny}}}
	err := notEnforced(cli.Streams{Err: &out}, p, &protect.Refusal{Reason: "it is too old", Remedy: "Boot another one"})
	want := "NOT PROTECTED: nothing of the policy is enforced on this kernel, and nothing was attached.\n" +
		"  data is not enforced: deny: write, delete of /srv/data by all\nwhy: it is too old\nwhat to do: Boot another one.\n"
	if err == nil || out.String() != want+"With degraded: allow in the policy, this is not a failure.\n" {
		t.Errorf("%v:\n%s", err, out.String())
	}
	refuses := func() error { return &protect.Refusal{Reason: "it is too old", Remedy: "Boot another one"} }
	p.IsDegraded = true
	out.Reset()
	if err := notEnforced(cli.Streams{Err: &out}, p, refuses().(*protect.Refusal)); err != nil || out.String() != want {
		t.Errorf("degraded: %v:\n%s", err, out.String())
	}
	p.IsDegraded, p.Rules[0].Mode = false, policy.Audit
	if err := notEnforced(cli.Streams{Err: &out}, p, refuses().(*protect.Refusal)); err != nil {
		t.Errorf("audit: %v", err)
	}
	if os.Geteuid() != 0 {
		return
	}
	p.Rules[0].Mode = policy.Deny
	out.Reset()
	if err := checkHost(cli.Streams{Err: &out}, p, refuses); err == nil || !strings.HasPrefix(out.String(), "NOT PROTECTED") {
		t.Errorf("check --host: %v: %s", err, out.String())
	}
	out.Reset()
	if err := checkHost(cli.Streams{Err: &out}, p, func() error { return nil }); err != nil || out.String() != "This kernel enforces the whole policy.\n" {
		t.Errorf("check --host: %v: %s", err, out.String())
	}
}

func TestGuardStatusPrints(t *testing.T) {
	var out bytes.Buffer
	now := time.Now()
	status := &protect.Status{Since: now.Add(-time.Hour), Loaded: now.Add(-time.Minute), Heard: now.Add(-10 * time.Second), Hooks: 26, Denied: 5, Audited: 2, Unheard: 3,
		Rules: []policy.RuleStatus{{Name: "data", Text: "deny: write of /srv/data by all"}}}
	printGuardStatus(&out, status, now)
	want := "Protected for 1h0m0s, by 1 rule at 26 hooks; the policy was loaded 1m0s ago.\n" +
		"No `shunt guard run` has run for 10s. Files stay protected; start it again to get reports.\n" +
		"5 denied, 2 audited, 3 of these reported to no process.\n  data: deny: write of /srv/data by all\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	out.Reset()
	status.Listening, status.Unrecord, status.Untrusted, status.Missed = true, 1, 2, 3
	if printGuardStatus(&out, status, now); !strings.Contains(out.String(), "`shunt guard run` is running.\n") || !strings.Contains(out.String(), "warning: 1 new files") || !strings.Contains(out.String(), "warning: 3 operations were not examined") ||
		!strings.Contains(out.String(), "warning: 2 processes were neither trusted nor protected") {
		t.Error(out.String())
	}
}

// TestGuardAtWork runs, asks and stops the guard as a user does, on a kernel that allows it.
func TestGuardAtWork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dir, "f")
	if err := os.WriteFile(target, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := policy.Policy{Rules: []policy.Rule{{Name: "data", Paths: []string{target}, Deny: []string{policy.Write}, Mode: policy.Deny}}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &cobra.Command{}
	c.SetContext(ctx)
	var out, errOut bytes.Buffer
	done := make(chan error, 1)
	file := guardFile(t, "guard: {protect: [{name: data, paths: ["+target+"], deny: [write], mode: deny}]}\n")
	go func() {
		done <- runGuard(c, cli.Streams{Out: &out, Err: &errOut}, p, guardRun{file: file, output: "text", folder: agent.RunDirectory})
	}()
	write := func() error { return os.WriteFile(target, []byte("changed"), 0o600) }
	for write() == nil {
		select {
		case err := <-done:
			if strings.HasPrefix(errOut.String(), "NOT PROTECTED") && os.Getenv("SHUNT_KERNEL_TEST") == "" {
				t.Skip(errOut.String())
			}
			t.Fatal(err, out.String(), errOut.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	if code, text, _ := guardMain("status"); code != cli.ExitOK || !strings.Contains(text, "`shunt guard run` is running.") {
		t.Errorf("status: exit %d: %s", code, text)
	}
	if _, err := leftProtection(); err == nil || !strings.Contains(err.Error(), "end it first") {
		t.Errorf("`shunt uninstall` while it runs: %v", err)
	}
	if code, _, text := guardMain("stop"); code != cli.ExitRefused || !strings.Contains(text, "end it first") {
		t.Errorf("stop while it runs: exit %d: %s", code, text)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), " denied write of "+target+" by ") || !strings.Contains(out.String(), "Protection goes on") {
		t.Errorf("it said:\n%s", out.String())
	}
	if err := write(); err == nil {
		t.Error("after the end of the process, the file is not protected")
	}
	code, status, _ := guardMain("status")
	if code != cli.ExitOK || !strings.Contains(status, "No `shunt guard run` has run for ") {
		t.Errorf("status: exit %d: %s", code, status)
	}
	if left, err := leftProtection(); err != nil || len(left) != 1 || left[0].What != "protection of files by 1 rule" {
		t.Errorf("`shunt uninstall` would list %v, %v", left, err)
	}
	t.Logf("run:\n%sstatus:\n%s", out.String(), status)
	if code, text, _ := guardMain("stop"); code != cli.ExitOK || text != "Nothing is protected any more.\n" {
		t.Errorf("stop: exit %d: %s", code, text)
	}
	if code, text, _ := guardMain("status"); code != cli.ExitRefused || !strings.HasPrefix(text, "Nothing is protected") {
		t.Errorf("status after stop: exit %d: %s", code, text)
	}
	if err := write(); err != nil {
		t.Error(err)
	}
}

// applied records the calls that a guard would have got.
type applied struct {
	policies chan policy.Policy
	err      error
}

func (a *applied) Apply(p policy.Policy) error {
	a.policies <- p
	return a.err
}

func (a *applied) Warn(io.Writer) {}

// TestGuardReloads sends this process SIGHUP: a good file is applied, a bad one is not, and errors are reported.
func TestGuardReloads(t *testing.T) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP)
	defer signal.Stop(hangup)
	file := guardFile(t, guardPolicy)
	in, write := io.Pipe()
	said := bufio.NewScanner(in)
	read := &reloads{}
	a := &applied{policies: make(chan policy.Policy, 1)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		reload(ctx, a, hangup, file, write, read.note)
	}()
	for _, step := range []struct {
		text    string
		err     error
		applied bool
		want    string
	}{
		{guardPolicy, nil, true, "reloaded " + file + ": protecting by 1 rule"},
		{strings.Replace(guardPolicy, "write", "wirte", 1), nil, false, "reload " + file + ": it has the faults above. The earlier policy stays in force"},
		{guardPolicy, errors.New("there are too many files"), true, "reload " + file + ": there are too many files. The earlier policy stays in force"},
	} {
		a.err = step.err
		if err := errors.Join(os.WriteFile(file, []byte(step.text), 0o600), unix.Kill(os.Getpid(), unix.SIGHUP)); err != nil {
			t.Fatal(err)
		}
		for said.Scan() && !strings.HasPrefix(said.Text(), "reload") {
		}
		if said.Text() != step.want {
			t.Errorf("%q, want %q", said.Text(), step.want)
		}
		if r := read.get(); r.Refused != strings.HasPrefix(step.want, "reload ") || r.Applied.IsZero() {
			t.Errorf("%s: the metrics say %+v", step.want, r)
		}
		if is := len(a.policies) == 1; is != step.applied {
			t.Errorf("%s: applied %v", step.want, is)
		} else if is {
			<-a.policies
		}
	}
	cancel()
	<-ended
}
