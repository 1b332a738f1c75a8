package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/rule"
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
	if code != exitOK || !strings.Contains(out, "alert critical reverse-shell (T1059.004): /bin/sh has its stdin and stdout on a connection to 192.0.2.1:4444; exec, pid 7") || errOut != "reverse-shell finds 1 of 2 events.\n" {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	file := filepath.Join(t.TempDir(), "events")
	if err := os.WriteFile(file, []byte(events), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := guardWith("", "test", "tar", "--policy", guardFile(t, detectPolicy), file, "-o", "json"); code != exitOK || !strings.Contains(out, `"rule":"tar"`) {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	for want, c := range map[string]struct {
		code      int
		arguments []string
		in        string
	}{
		"bpf-load finds 0 of 2 events":                  {exitRefused, []string{"bpf-load"}, events},
		`there is no rule "reverse-shel": did you mean`: {exitRefused, []string{"reverse-shel"}, events},
		"A rule of your own needs --policy":             {exitRefused, []string{"tar"}, events},
		"line 1 of standard input is nothing that":      {exitRefused, []string{"bpf-load"}, "x\n"},
		"there are no events in standard input":         {exitRefused, []string{"bpf-load"}, ""},
		"read the events: open " + file + "x":           {exitRefused, []string{"bpf-load", file + "x"}, ""},
		"name a rule, and a file of events or none":     {exitUsage, nil, ""},
	} {
		if code, _, errOut := guardWith(c.in, append([]string{"test"}, c.arguments...)...); code != c.code || !strings.Contains(errOut, want) {
			t.Errorf("%v: exit %d: %s", c.arguments, code, errOut)
		}
	}
}

func TestGuardCheckOfDetection(t *testing.T) {
	file := guardFile(t, detectPolicy)
	code, out, errOut := guardWith("", "check", file)
	if want := file + " detects by 35 rules, 1 of its own. `shunt guard events --policy " + file + "` watches for them.\n"; code != exitOK || out != want {
		t.Errorf("exit %d: %s%s, want %s", code, out, errOut, want)
	}
	code, out, _ = guardWith("", "check", guardFile(t, strings.Replace(detectPolicy, "process.name", "process.nam", 1)))
	if code != exitRefused || !strings.Contains(out, `the condition, column 1: there is no field "process.nam"; did you mean process.name?`) {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, _, errOut := guardWith("", "run", "--policy", file); code != exitRefused || !strings.Contains(errOut, "protects nothing: its rules detect, and `shunt guard events") {
		t.Errorf("run: exit %d: %s", code, errOut)
	}
	protects := guardFile(t, "guard: {protect: [{name: a, paths: [/srv], deny: [write], mode: audit}]}\n")
	if code, _, errOut := guardWith("", "events", "--policy", protects); code != exitRefused || !strings.Contains(errOut, "has no rules that detect: write detect: {}") {
		t.Errorf("events: exit %d: %s", code, errOut)
	}
	if code, _, _ := guardWith("", "events", "--duration", "-1s"); code != exitUsage {
		t.Errorf("events for less than no time: exit %d", code)
	}
}

func TestGuardLists(t *testing.T) {
	if code, out, _ := guardWith("", "rules"); code != exitOK || !strings.Contains(out, "connect-with-low-socket  off  medium    T1059.004  connect by a process that has a socket as descriptor 0, 1, 2 or 3; so do every client") {
		t.Errorf("exit %d: %s", code, out)
	}
	var answer struct{ Rules []struct{ Name, If string } }
	if code, out, _ := guardWith("", "rules", "-o", "json"); code != exitOK || json.Unmarshal([]byte(out), &answer) != nil || len(answer.Rules) < 25 || answer.Rules[0].If == "" {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out, _ := guardWith("", "fields"); code != exitOK || !strings.Contains(out, "stdin.direction") || !strings.Contains(out, "file.write") {
		t.Errorf("exit %d: %s", code, out)
	}
}
