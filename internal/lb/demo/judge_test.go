package demo

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// KillBackend ends a backend's process, for tests of claims that are not true.
func KillBackend(id, name string) error {
	for _, pid := range processesOf(id, "demo") {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(text), "--name\x00"+name+"\x00") {
			return syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return fmt.Errorf("demo %s has no backend %s", id, name)
}

func TestDistance(t *testing.T) {
	shares := func(a, b, c int) []Share {
		return []Share{{Flows: a, Expected: 400}, {Flows: b, Expected: 266.67}, {Flows: c, Expected: 133.33}}
	}
	for _, c := range []struct {
		shares []Share
		right  bool
	}{
		{shares(400, 267, 133), true},
		{shares(420, 250, 130), true},
		{shares(267, 267, 266), false}, // no weights at all
		{shares(400, 400, 0), false},   // one backend gets nothing
		{shares(334, 266, 200), false}, // weights 2.5:2:1.5
		{[]Share{{}, {}, {}}, false},   // no backend answered
	} {
		chiSquare, chance := distance(c.shares)
		if right := chance >= chanceMin; right != c.right {
			t.Errorf("%+v: chi-square %.1f, chance %g: right is %t, want %t", c.shares, chiSquare, chance, right, c.right)
		}
	}
}

func TestOdds(t *testing.T) {
	for p, want := range map[float64]string{0.34: "3 of 10", 0.01: "1 of 100", 1e-9: "fewer than 1 of a million"} {
		if got := odds(p); got != want {
			t.Errorf("odds(%g) = %q, want %q", p, got, want)
		}
	}
}

func TestIsPart(t *testing.T) {
	for _, c := range []struct {
		line string
		part string
		want bool
	}{
		{"shunt run --config x --instance demo-abc", "", true},
		{"shunt run --config x --instance demo-abc", "demo", false},
		{"shunt run --config x --instance demo-abcd", "", false},
		{"shunt demo backend --lab abc --name b1", "demo", true},
		{"shunt demo --clean abc", "", false},
		{"vi demo-abc", "", false},
		{"shunt", "", false},
	} {
		if got := isPart(strings.Fields(c.line), "abc", c.part); got != c.want {
			t.Errorf("isPart(%q, abc, %q) = %t", c.line, c.part, got)
		}
	}
}

func TestIDsStayInTheirFolder(t *testing.T) {
	for _, id := range []string{"", "../x", "a/b", "*", "A"} {
		if _, err := Left(id); err == nil {
			t.Errorf("Left(%q) accepts it", id)
		}
	}
}
