package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// The most frequent type is halved while too much is used, the least kept one is doubled while there is room, and in between nothing changes.
func TestBudgetSteps(t *testing.T) {
	for _, c := range []struct {
		before   levels
		used     float64
		received map[string]uint64
		want     levels
	}{
		{nil, 1, map[string]uint64{"exec": 5, "open": 9}, levels{"open": 1}},
		{levels{"open": 1}, 0.9, map[string]uint64{"exec": 5, "open": 4}, levels{"open": 1, "exec": 1}},
		{levels{"open": 1}, 0.9, map[string]uint64{}, levels{"open": 1}}, // something else uses it
		{levels{"open": detect.ThinMax}, 0.9, map[string]uint64{"exec": 1}, levels{"open": detect.ThinMax, "exec": 1}},
		{levels{"open": detect.ThinMax}, 0.9, map[string]uint64{"open": 9}, levels{"open": detect.ThinMax}},
		{levels{"open": 3, "exec": 1}, 0.1, map[string]uint64{"open": 9}, levels{"open": 2, "exec": 1}},
		{levels{"open": 1}, 0.1, nil, levels{}},
		{levels{}, 0.1, nil, levels{}},
		{levels{"open": 3}, 0.5, map[string]uint64{"open": 9}, levels{"open": 3}},
	} {
		before := maps.Clone(c.before)
		if got := c.before.step(c.used, c.received); !maps.Equal(got, c.want) || !maps.Equal(c.before, before) {
			t.Errorf("%v after %v of the limit and %v: %v, want %v", before, c.used, c.received, got, c.want)
		}
	}
	// For any cost of a type, the level settles: if half of the events would leave room and all of them are too many, the level does not
	// go back and forth.
	for _, cost := range []float64{0.1, 0.5, 1, 3, 100, 1e6} {
		l, changes := levels{}, 0
		for range 40 {
			kept := 1000 / float64(uint64(1)<<l["open"])
			if l["open"] >= detect.ThinMax {
				kept = 0
			}
			next := l.step(min(kept/1000*cost, 1), map[string]uint64{"open": uint64(kept)})
			if !maps.Equal(next, l) {
				changes++
			}
			l = next
		}
		if changes > detect.ThinMax && cost < 100 {
			t.Errorf("at a cost of %v it changed %d times", cost, changes)
		}
	}
}

// said keeps an agent's messages to people.
type said struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (s *said) Write(text []byte) (int, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.text.Write(text)
}

func (s *said) has(what string) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return strings.Contains(s.text.String(), what)
}

// With 1 % of a CPU and a storm of programs, the kernel has the limit, and events are left out, counted and reported. A
// reload keeps that, and the end leaves no cgroup.
func TestBudgetHolds(t *testing.T) {
	var storm *exec.Cmd
	var begin io.WriteCloser
	say := &said{}
	p := detects(runs("true", rule.Log))
	s := newSandboxWith(t, p, func(s *sandbox, o *Options) {
		o.MaxCPU, o.Limit, o.Say = 1, fmt.Sprintf("shunt-budget-%d", os.Getpid()), say
		// It begins before the limit, which it would inherit.
		storm = exec.Command("sh", "-c", "read x; while :; do /bin/true; done")
		storm.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(s.group.Fd())}
		var err error
		if begin, err = storm.StdinPipe(); err == nil {
			err = process.StartTied(storm)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	before, at := cpuTime(), time.Now()
	if _, err := io.WriteString(begin, "\n"); err != nil {
		t.Fatal(err)
	}
	var status Status
	waitFor(t, func() bool {
		status = s.status()
		thinned := status.Features[1].Thinned
		if len(thinned) > 0 && thinned[0].OneOf == 0 && thinned[0].LeftOut > 0 {
			return true
		}
		// On a machine that leaves the process less than its limit, the process does not come near the limit by itself.
		if _, err := s.agent.keepBudget(1, map[string]uint64{}); err != nil {
			t.Fatal(err)
		}
		return false
	})
	t.Logf("%v of CPU in %v; %+v, %+v", cpuTime()-before, time.Since(at).Round(time.Millisecond), *status.Budget, status.Features[1])
	if one := status.Features[1].Thinned[0]; one.Type != rule.Exec || one.OneOf != 0 || one.LeftOut == 0 {
		t.Errorf("%+v", one)
	}
	if !say.has("warning: detection leaves out events") {
		t.Error("it was not said")
	}
	b := status.Budget
	if b.MaxCPU != 1 || (b.Cgroup == "") == (b.Why == "") {
		t.Fatalf("%+v", b)
	}
	if b.Cgroup != "" {
		file, limit := s.agent.budget.limit.File()
		for range 2 { // also after a reload, which lifts it
			if text, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(text)) != limit {
				t.Errorf("%s has %q, %v", file, text, err)
			}
			if err := s.agent.Apply(p); err != nil {
				t.Fatal(err)
			}
		}
	}
	if status := s.status(); len(status.Features[1].Thinned) == 0 {
		t.Errorf("after a reload: %+v", status)
	}
	err := errors.Join(storm.Process.Kill(), begin.Close())
	_ = storm.Wait() // it was killed
	if err != nil {
		t.Error(err)
	}
	s.close()
	if _, err := os.Stat(b.Cgroup); b.Cgroup != "" && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the cgroup is still there: %v", err)
	}
}

// Where there can be no cgroup, a message says so, and events are left out all the same.
func TestBudgetWithoutCgroup(t *testing.T) {
	say := &said{}
	p := detects(runs("true", rule.Log))
	p.Decoys = []policy.Decoys{{Folders: []string{t.TempDir()}, Action: rule.Stop}}
	s := newSandboxWith(t, p, func(_ *sandbox, o *Options) { o.MaxCPU, o.Limit, o.Say = 1, "no/such/folder", say })
	if b := s.status().Budget; b.Cgroup != "" || b.Why == "" || !say.has("the kernel does not enforce the limit") {
		t.Errorf("%+v", b)
	}
	s.do("true")
	waitFor(t, func() bool { return s.status().Features[1].Events > 0 })
	if _, err := s.agent.keepBudget(1, map[string]uint64{}); err != nil {
		t.Fatal(err)
	}
	if thinned := s.status().Features[1].Thinned; len(thinned) != 1 {
		t.Errorf("%+v", thinned)
	}
	if status := s.close(); status.Budget != nil {
		t.Errorf("%+v", status.Budget)
	}
}

// waitFor waits for a condition, as long as a test may take.
func waitFor(t *testing.T, is func() bool) {
	t.Helper()
	for !is() {
		select {
		case <-t.Context().Done():
			t.Fatal("it does not come")
		case <-time.After(20 * time.Millisecond):
		}
	}
}
