package command

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/test/golden"
)

func exampleExplanation() *judge.Explanation {
	none := []string{}
	return &judge.Explanation{
		From: judge.FromKernel, Enforced: true, Policy: 3,
		File: judge.Object{Path: "/srv/data/today", Exists: true, Inode: 131, Device: "254:0", Rules: []string{"data", "logs"}, By: "its inode's label", Above: none, Program: none},
		Process: judge.Subject{PID: 4713, Protected: []string{"app"},
			Trusted:   []judge.Reason{{Rule: "logs", Why: "it comes from process 4711 (app), whose executable /usr/sbin/app the rule names", PID: 4711}},
			Untrusted: []judge.Reason{{Rule: "data", Why: "process 4711 (app) is trusted, and process 4712 is not: it runs /usr/bin/dash, an interpreter that the rule does not list in interpreters", PID: 4712}},
			Chain: []judge.Ancestor{
				{PID: 4713, Comm: "vi\x1b[31m", Program: "/usr/bin/vi", Trusted: []string{"logs"}, Gives: none},
				{PID: 4712, Comm: "sh", Program: "/usr/bin/dash", Trusted: []string{"logs"}, Gives: none},
				{PID: 4711, Comm: "app", Program: "/usr/sbin/app", Trusted: []string{"data", "logs"}, Gives: []string{"data", "logs"}},
				{PID: 1, Comm: "systemd", Program: "/usr/lib/systemd/systemd", Trusted: none, Gives: none},
			}},
		Operations: []judge.Answer{
			{Operation: "write", Verdict: judge.Denied, Rules: []string{"data"}, Trusted: []string{"logs"}},
			{Operation: "create", Verdict: judge.NoObject, Rules: none, Trusted: none},
			{Operation: "delete", Verdict: judge.Allowed, Rules: none, Trusted: []string{"logs"}},
			{Operation: "rename", Verdict: judge.Audited, Rules: []string{"data"}, Trusted: none},
			{Operation: "link", Verdict: judge.Allowed, Rules: none, Trusted: none},
		},
	}
}

func TestGuardExplainPrints(t *testing.T) {
	var text bytes.Buffer
	e := exampleExplanation()
	if err := printExplanation(&text, e, ""); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/guard-explain.golden", text.String())
	text.Reset()
	if err := cli.WriteJSON(&text, e); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/guard-explain.json.golden", text.String())
	text.Reset()
	e.From, e.Enforced, e.Why = judge.FromPolicy, false, "it is too old"
	e.File = judge.Object{Path: "/srv/data/new", Rules: []string{"data"}, By: "its folder", Above: []string{"logs"}, Program: []string{"logs"}}
	if err := printExplanation(&text, e, "guard.yaml"); err != nil {
		t.Fatal(err)
	}
	want := "NOT IN FORCE: this is the answer of guard.yaml.\nNot enforced: it is too old.\n" +
		"File: /srv/data/new, which does not exist; under data, by its folder; files below it are protected by logs; a program that is trusted by logs\n"
	if !strings.HasPrefix(text.String(), want) {
		t.Error(text.String())
	}
}

// Without BPF LSM the first line names the source of the answer, and an operation that no open asks for is
// not enforced.
func TestGuardExplainPrintsOpens(t *testing.T) {
	e := exampleExplanation()
	e.From, e.Policy = judge.FromOpens, 0
	e.Operations[3].Verdict = judge.Unenforced
	var text bytes.Buffer
	if err := printExplanation(&text, e, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"This is the answer of `shunt guard run`, which opens of protected files wait for: this kernel has no BPF LSM.\nFile: ", "  write   DENIED by data\n", "  rename  NOT ENFORCED: data would need BPF LSM\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, &text)
		}
	}
}

func TestGuardExplain(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dir, "f")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	me := strconv.Itoa(os.Getpid())
	file := guardFile(t, "guard: {protect: [{name: data, paths: ["+target+"], deny: [write], mode: deny}]}\n")
	for _, arguments := range [][]string{{}, {target}, {target, "me"}, {target, "-1"}, {target, me, "-o", "xml"}} {
		if code, _, errOut := guardMain(append([]string{"explain"}, arguments...)...); code != cli.ExitUsage || errOut == "" {
			t.Errorf("%v: exit %d: %s", arguments, code, errOut)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	code, out, errOut := guardMain("explain", target, me, "--policy", file, "-o", "json")
	var e judge.Explanation
	if err := json.Unmarshal([]byte(out), &e); err != nil || code != cli.ExitOK || e.Operations[0].Verdict != judge.Denied || e.From != judge.FromPolicy || e.Process.Chain[0].PID != os.Getpid() {
		t.Errorf("exit %d, %v: %s%s", code, err, out, errOut)
	}
	if code, _, errOut := guardMain("explain", target, "4194305", "--policy", file); code != cli.ExitRefused || !strings.Contains(errOut, "there is no process 4194305") {
		t.Errorf("exit %d: %s", code, errOut)
	}
	if code, _, errOut := guardMain("explain", target, me, "--policy", file+"x"); code != cli.ExitRefused || !strings.Contains(errOut, "no such file") {
		t.Errorf("exit %d: %s", code, errOut)
	}
	if code, _, errOut := guardMain("explain", target, me); code != cli.ExitRefused || !strings.Contains(errOut, "nothing is protected") {
		t.Errorf("exit %d: %s", code, errOut)
	}
}
