package detect

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/lab"
)

// quiet is a watch of opens and executed programs in a cgroup, that does not read yet.
type quiet struct {
	t     *testing.T
	watch *Watch
	group *os.File
	noise string
}

func newQuiet(t *testing.T, name string) *quiet { return newQuietIf(t, name, "true") }

// newQuietIf has a condition on opens. NOISE in it is the file.
func newQuietIf(t *testing.T, name, condition string) *quiet {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	folder, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-%s-%d", name, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	q := &quiet{t: t, noise: filepath.Join(t.TempDir(), "noise")}
	if q.group, err = os.Open(folder); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.group.Close() })
	noise := rule.Rule{Name: "noise", On: []string{rule.Open}, If: strings.ReplaceAll(condition, "NOISE", q.noise), Severity: "low", Action: rule.Log, Tell: "noise"}
	if _, err := noise.Prepare(); err != nil {
		t.Fatal(err)
	}
	if q.watch, err = Open(Options{Rules: []rule.Rule{noise}, Cgroup: folder}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.watch.Close() })
	return q
}

// open opens the file so often, and executes programs meanwhile: one more than it says.
func (q *quiet) open(times, programs int) {
	q.t.Helper()
	runtime.LockOSThread() // with whose thread it would end
	defer runtime.UnlockOSThread()
	c := exec.Command("/bin/sh", "-c", fmt.Sprintf("n=0; while [ $n -lt %d ]; do i=0; while [ $i -lt %d ]; do : > %s; i=$((i+1)); done; /bin/true; n=$((n+1)); done", programs, times/programs, q.noise))
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(q.group.Fd()), Pdeathsig: syscall.SIGKILL}
	if text, err := c.CombinedOutput(); err != nil {
		q.t.Fatalf("%v: %s", err, text)
	}
}

// read counts the buffered events: opens of the file, and executed programs.
func (q *quiet) read() (opens, programs int, c Counts) {
	q.t.Helper()
	ctx, cancel := context.WithCancel(q.t.Context())
	cancel()
	c, err := q.watch.Run(ctx, func(Found) error { return nil }, func(e *rule.Event) error {
		switch {
		case e.Type == rule.Exec:
			programs++
		case e.Path == q.noise:
			opens++
		}
		return nil
	})
	if err != nil {
		q.t.Fatal(err)
	}
	return opens, programs, c
}

// While nobody reads, ten times as many files are opened as the buffer has room for. Each program that is executed
// meanwhile is reported all the same.
func TestStormTakesNoRoomOfPrograms(t *testing.T) {
	q := newQuiet(t, "storm")
	const times, programs = 20_000, 20 // at some 4 KB each, of 8 MB
	q.open(times, programs)
	opens, executed, c := q.read()
	t.Logf("%d of %d opens were read: %+v", opens, times, c)
	if executed != programs+1 || c.LostBy["exec"] != 0 || c.LostBy["rare"] != 0 {
		t.Errorf("%d programs were told, want %d: %+v", executed, programs+1, c)
	}
	if c.Lost != c.LostBy["often"] || opens+int(c.Lost) < times || opens >= times/2 {
		t.Errorf("%d opens, and %+v: the test wants a storm", opens, c)
	}
}

// Events of a type are left out, and counted, as far as Thin was told; those of other types are kept.
func TestEventsAreThinned(t *testing.T) {
	const times, programs = 400, 4
	for _, c := range []struct{ level, least, most int }{{0, times, times}, {2, times / 4, times/4 + 1 + programs}, {ThinMax, 0, 0}} {
		t.Run(fmt.Sprint(c.level), func(t *testing.T) {
			q := newQuiet(t, "thin")
			if err := q.watch.Thin(map[string]int{rule.Open: c.level}); err != nil {
				t.Fatal(err)
			}
			q.open(times, programs)
			opens, executed, counts := q.read()
			thinned, err := q.watch.Thinned()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d of %d opens: %+v, %+v", opens, times, counts, thinned)
			// Beside the file, the shell may open others; each CPU begins with one that is kept.
			if opens > c.most+64 || opens < c.least/2 || executed != programs+1 || counts.Lost != 0 {
				t.Errorf("%d opens, %d programs, %+v", opens, executed, counts)
			}
			if c.level == 0 {
				if len(thinned) != 0 || counts.Shed != 0 || opens != times {
					t.Errorf("%+v, %+v, %d", thinned, counts, opens)
				}
				return
			}
			want := uint64(1) << c.level
			if c.level == ThinMax {
				want = 0
			}
			if len(thinned) != 1 || thinned[0].Type != rule.Open || thinned[0].OneOf != want || thinned[0].LeftOut != counts.Shed || int(counts.Shed)+opens < times || c.level == ThinMax && opens != 0 {
				t.Errorf("%+v, %+v, %d", thinned, counts, opens)
			}
		})
	}
}
