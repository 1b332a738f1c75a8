package command

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/test/golden"
)

func TestGuardFeaturePrints(t *testing.T) {
	login, since := uint32(1000), time.Date(2026, 11, 29, 10, 0, 0, 0, time.UTC)
	off := func(name string) agent.Off {
		return agent.Off{Name: name, Since: since, By: agent.By{Login: &login, PID: 42}}
	}
	status := &agent.Status{Features: []agent.Feature{
		{Name: "protection", Why: "it is too old", Names: []string{"data"}},
		{Name: "detection", On: true, Names: []string{"reverse-shell", "mine"}},
		{Name: "decoys", Names: []string{}},
	}, Off: []agent.Off{off("detection/mine"), off("decoys"), off("protection/gone")}}
	var out bytes.Buffer
	for _, rules := range []bool{false, true} {
		if err := printSwitches(&out, switchesOf(status, rules)); err != nil {
			t.Fatal(err)
		}
		out.WriteString("\n")
	}
	if err := cli.WriteJSON(&out, map[string]any{"features": switchesOf(status, false)}); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/guard-feature.golden", out.String())

	out.Reset()
	warnNotAtWork(&out, switchesOf(status, true), "protection")
	warnNotAtWork(&out, switchesOf(status, true), "detection")
	if out.String() != "warning: protection does not work: it is too old\n" {
		t.Error(out.String())
	}
	out.Reset()
	printAllStatus(&out, nil, status, since.Add(time.Hour))
	if !strings.HasPrefix(out.String(), "SWITCHED OFF by hand: detection/mine, for 1h0m0s, by user 0, logged in as 1000. Switch it on with `shunt guard feature enable detection/mine`.\nSWITCHED OFF by hand: decoys, ") {
		t.Error(out.String())
	}
}

func TestGuardFeature(t *testing.T) {
	for _, arguments := range [][]string{{"nosuch"}, {"enable"}, {"disable", "a", "b"}, {"list", "a"}, {"list", "-o", "xml"}} {
		if code, _, errOut := guardMain(append([]string{"feature"}, arguments...)...); code != cli.ExitUsage && !strings.Contains(errOut, "needs root") {
			t.Errorf("%v: exit %d: %s", arguments, code, errOut)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	folder, data := filepath.Join(t.TempDir(), "run"), t.TempDir()
	do := func(arguments ...string) (string, error) {
		var out bytes.Buffer
		c := newGuardFeature(cli.Streams{Out: &out, Err: &out}, folder)
		c.SetArgs(append([]string{}, arguments...)) // of nil, cobra takes the arguments of this process
		c.SilenceErrors, c.SilenceUsage = true, true
		err := c.Execute()
		return out.String(), err
	}
	for _, arguments := range [][]string{{"list"}, {"disable", "decoys"}} {
		if _, err := do(arguments...); err == nil || err.Error() != agent.ErrNoAgent.Error() {
			t.Errorf("%v without an agent: %v", arguments, err)
		}
	}
	a, err := agent.Start(policy.Policy{Decoys: []policy.Decoys{{Folders: []string{data}, Action: rule.Stop}}}, agent.Options{
		Root: t.TempDir(), Folder: folder, Decoys: t.TempDir(), Log: slog.New(slog.DiscardHandler), Say: t.Output(), Tell: func(agent.Line) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ command, want string }{
		{"list", "protection   off: the policy has no rules for it\ndetection    off: the policy has no rules for it\ndecoys       on\nconnections  off: the policy has no rules for it\n"},
		{"disable decoys", "decoys is switched off.\n"},
		{"disable decoys", "decoys is already switched off.\n"},
		{"enable decoys", "decoys is switched on.\n"},
		{"enable decoys", "decoys is already switched on.\n"},
		{"enable protection", "protection is already switched on.\nwarning: protection does not work: the policy has no rules for it\n"},
	} {
		if got, err := do(strings.Fields(step.command)...); err != nil || got != step.want {
			t.Errorf("%s: %q, want %q, %v", step.command, got, step.want, err)
		}
	}
	if _, err := do("disable", "nowhere"); err == nil || !strings.Contains(err.Error(), "feature list --rules") {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
