package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// ask has the agent switch something, as the command does.
func (s *sandbox) ask(name string, on, changes bool) {
	s.t.Helper()
	if changed, err := AskToSwitch(s.folder, name, on); err != nil || changed != changes {
		s.t.Errorf("switch %s to %v: changed %v, %v", name, on, changed, err)
	}
}

func (s *sandbox) offNames() (names []string) {
	s.t.Helper()
	for _, o := range s.status().Off {
		names = append(names, o.Name)
	}
	return names
}

// Detection, a rule of it and decoys are switched off and on by hand. A feature that is off stays off over reloads, the
// status says so, and each switch and each such reload is an alert.
func TestSwitchedByHand(t *testing.T) {
	data := t.TempDir()
	p := detects(runs("true", rule.Alert), runs("false", rule.Alert), ruleOn(rule.Exec, "any", "process.comm in ['true', 'cat']", rule.Alert))
	p.Decoys = []policy.Decoys{{Folders: []string{data}, Action: rule.Stop}}
	s := newSandbox(t, p)
	s.do("true")
	s.ask("detection/true", false, true)
	s.ask("detection/true", false, false)
	s.do("true") // by the rule any alone
	if names := s.offNames(); !slices.Equal(names, []string{"detection/true"}) {
		t.Errorf("off: %v", names)
	}
	if status := s.status(); status.Features[1].Rules != 2 || !slices.Equal(status.Features[1].Names, []string{"true", "false", "any"}) || status.Off[0].By.PID != int32(os.Getpid()) {
		t.Errorf("%+v", status)
	}
	if err := s.agent.Apply(p); err != nil { // a reload
		t.Fatal(err)
	}
	s.do("true")
	s.ask("detection", false, true)
	s.ask("decoys", false, true)
	if all, err := decoy.List(s.journal); err != nil || len(all) != 0 {
		t.Errorf("decoys that are off: %v, %v", all, err)
	}
	s.do("true") // nobody looks
	if err := s.agent.Apply(p); err != nil {
		t.Fatal(err)
	}
	if status := s.status(); status.IsOn() || status.Reloads != 2 || len(status.Off) != 3 {
		t.Errorf("%+v", status)
	}
	s.ask("decoys", true, true)
	if all, err := decoy.List(s.journal); err != nil || len(all) == 0 {
		t.Errorf("decoys that are on again: %v, %v", all, err)
	}
	s.ask("detection", true, true)
	s.do("true") // by the rule any alone
	s.ask("detection/true", true, true)
	s.do("true")
	if names := s.offNames(); names != nil {
		t.Errorf("off: %v", names)
	}
	if _, err := AskToSwitch(s.folder, "detection/nowhere", false); err == nil || !strings.Contains(err.Error(), ErrUnknownFeature.Error()) {
		t.Errorf("a rule that there is not: %v", err)
	}
	status := s.close()
	if n := len(s.told["true"]); n != 2 {
		t.Errorf("the rule that was off twice found %d processes, want 2: %v", n, s.told)
	}
	if n := len(s.told["any"]); n != 5 {
		t.Errorf("the other rule found %d processes, want 5: %v", n, s.told)
	}
	var said []string
	for _, one := range s.switched {
		word := "off "
		switch {
		case one.On:
			word = "on "
		case one.Kept:
			word = "kept "
		}
		said = append(said, word+one.Name)
	}
	want := []string{"off detection/true", "kept detection/true", "off detection", "off decoys", "kept detection/true", "kept detection", "kept decoys", "on decoys", "on detection", "on detection/true"}
	if !slices.Equal(said, want) || status.Alerts.Told != uint64(7+len(want)) {
		t.Errorf("%v, want %v; %+v", said, want, status)
	}
	if _, err := AskToSwitch(s.folder, "decoys", true); !errors.Is(err, ErrNoAgent) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := s.agent.Switch("decoys", false, By{}); err == nil {
		t.Error("an agent that has ended switches")
	}
}

// A switch that fails changes nothing, and is not remembered.
func TestSwitchThatFails(t *testing.T) {
	data := t.TempDir()
	p := detects(runs("true", rule.Alert))
	p.Decoys = []policy.Decoys{{Folders: []string{data}, Action: rule.Stop}}
	s := newSandbox(t, p)
	s.ask("decoys", false, true)
	if err := os.Remove(data); err != nil {
		t.Fatal(err)
	}
	if changed, err := AskToSwitch(s.folder, "decoys", true); changed || err == nil {
		t.Errorf("decoys in a folder that is gone: %v, %v", changed, err)
	}
	if names := s.offNames(); !slices.Equal(names, []string{"decoys"}) {
		t.Errorf("off: %v", names)
	}
	s.close()
	if n := len(s.switched); n != 1 {
		t.Errorf("%v", s.switched)
	}
}

func TestWithout(t *testing.T) {
	p := policy.Policy{Rules: []policy.Rule{{Name: "a"}, {Name: "b"}}, Detection: policy.Detection{IsOn: true, Rules: []rule.Rule{{Name: "mine"}}}, Decoys: []policy.Decoys{{}}}
	all := len(p.Detection.Active())
	for off, want := range map[string][3]int{
		"protection": {0, all, 1}, "detection": {2, 0, 1}, "decoys": {2, all, 0}, "protection/a": {1, all, 1}, "protection/nowhere": {2, all, 1},
		"detection/mine": {2, all - 1, 1}, "detection/reverse-shell": {2, all - 1, 1}, "detection/a": {2, all, 1},
	} {
		got := without(p, []Off{{Name: off}})
		if is := [3]int{len(got.Rules), len(got.Detection.Active()), len(got.Decoys)}; is != want {
			t.Errorf("without %s: %v, want %v", off, is, want)
		}
	}
	if len(p.Rules) != 2 || p.Rules[0].Name != "a" || len(p.Detection.Active()) != all {
		t.Errorf("the policy itself was changed: %+v", p)
	}
}

// Protection that is switched off leaves no program attached, and nothing is denied; switched on, it is enforced again.
func TestProtectionIsSwitched(t *testing.T) {
	if os.Getenv("SHUNT_KERNEL_TEST") != "" {
		_ = unix.Mount("securityfs", "/sys/kernel/security", "securityfs", 0, "")
	} else if err := protect.Enforces(); err != nil {
		var refused *protect.Refusal
		if os.Geteuid() != 0 || errors.As(err, &refused) {
			t.Skip(err)
		}
		t.Fatal(err)
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	one, other := filepath.Join(dir, "one"), filepath.Join(dir, "other")
	if err := errors.Join(os.WriteFile(one, nil, 0o600), os.WriteFile(other, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	p := policy.Policy{}
	for _, file := range []string{one, other} {
		p.Rules = append(p.Rules, policy.Rule{Name: filepath.Base(file), Paths: []string{file}, Deny: []string{policy.Write}, Mode: policy.Deny})
	}
	s := newSandbox(t, p)
	root := s.agent.options.Root
	t.Cleanup(func() {
		_, err := protect.Stop(root)
		if err := errors.Join(err, unix.Unmount(root, unix.MNT_DETACH)); err != nil {
			t.Error(err)
		}
	})
	expect := func(when string, oneIs, otherIs bool, rules int) {
		t.Helper()
		for file, denied := range map[string]bool{one: oneIs, other: otherIs} {
			if err := os.WriteFile(file, []byte("x"), 0o600); (err != nil) != denied {
				t.Errorf("%s: write %s: %v, denied is to be %v", when, file, err, denied)
			}
		}
		status, err := protect.Look(root)
		if err != nil {
			t.Fatal(err)
		}
		if is := status != nil; is != (rules > 0) || is && (len(status.Rules) != rules || status.Hooks == 0) {
			t.Errorf("%s: %+v, want %d rules", when, status, rules)
		}
	}
	expect("at first", true, true, 2)
	s.ask("protection/one", false, true)
	expect("without one rule", false, true, 1)
	s.ask("protection", false, true)
	expect("switched off", false, false, 0)
	if err := s.agent.Apply(p); err != nil {
		t.Fatal(err)
	}
	expect("after a reload", false, false, 0)
	s.ask("protection", true, true)
	expect("switched on", false, true, 1)
	s.ask("protection/one", true, true)
	expect("all on", true, true, 2)
	s.close()
}
