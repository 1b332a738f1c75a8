package command

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/detect"
)

func TestMaxCPU(t *testing.T) {
	for text, want := range map[string]float64{"": 0, "3%": 3, "0.5%": 0.5, "250%": 250} {
		if got, err := percentOf(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"3", "0%", "-1%", "%", "NaN%", "inf%", "1e300%", "three%"} {
		if got, err := percentOf(text); err == nil || !strings.Contains(err.Error(), "for example 3%") {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	if code, _, errOut := guardMain("run", "--policy", guardFile(t, guardPolicy), "--max-cpu", "3"); code != cli.ExitUsage || !strings.Contains(errOut, "--max-cpu") {
		t.Errorf("exit %d: %s", code, errOut)
	}
}

func TestGuardBudgetPrints(t *testing.T) {
	now := time.Now()
	status := &agent.Status{PID: 7, Began: now, Budget: &agent.Budget{MaxCPU: 3, Cgroup: "/sys/fs/cgroup/shunt-guard", Throttled: 2}, Features: []agent.Feature{{Name: "detection", On: true, Since: now,
		Thinned: []detect.Thinned{{Type: "exec", OneOf: 1, LeftOut: 3}, {Type: "open", OneOf: 16, LeftOut: 5}, {Type: "dup", LeftOut: 6}}}}}
	var out bytes.Buffer
	printAllStatus(&out, nil, status, now)
	for _, want := range []string{
		"It may use 3 % of a CPU, by the cgroup /sys/fs/cgroup/shunt-guard; it had to wait in 2 periods of 100 ms.\n",
		"    3 events of exec were left out to save CPU; none are now\n",
		"    LEFT OUT to save CPU: all but one in 16 events of open; 5 so far\n",
		"    LEFT OUT to save CPU: all events of dup; 6 so far\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	out.Reset()
	printBudget(&out, &agent.Budget{MaxCPU: 3, Why: "there is none"})
	if out.String() != "Its limit is 3 % of a CPU, but the kernel does not enforce it: there is none\n" {
		t.Error(out.String())
	}
}

// `shunt uninstall` lists the cgroup of a guard that was killed.
func TestUninstallFindsLimits(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	name := fmt.Sprintf("shunt-left-%d", os.Getpid())
	l, err := cgroup.LimitCPU(name, 50)
	if err != nil {
		t.Skip(err)
	}
	folder := l.Folder
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if left := leftLimits(name); len(left) != 0 {
		t.Errorf("%+v", left)
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if left := leftLimits(name); len(left) != 1 || left[0].What != folder {
		t.Errorf("%+v", left)
	}
	if err := os.Remove(folder); err != nil {
		t.Error(err)
	}
}
