package protect

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

// TestReads tries every way to read three times, as TestMatrix the others. Programs that may see the
// contents see them.
func TestReads(t *testing.T) {
	b := newBench(t)
	rule := policy.Rule{Name: "secret", Deny: []string{policy.Read}, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: policy.Deny}
	var tries []*trial.Try
	for i := range trial.Reads {
		for _, a := range trial.Actors {
			one := b.Prepare(&trial.Reads[i], a)
			tries = append(tries, one)
			if !a.IsFree {
				rule.Paths = append(rule.Paths, filepath.Join(one.Dir, "prot"))
			}
		}
	}
	g := b.start(policy.Policy{Rules: []policy.Rule{rule}})
	told := b.listen(g)
	b.Evict()
	for _, one := range tries {
		t.Run(one.Row.Name+"/"+one.Actor.Name, func(t *testing.T) {
			h := one.Helper
			if h == nil {
				var err error
				if h, err = trial.Begin(b.Program(one.Actor), one.Row.Name, one.Dir); err != nil {
					t.Fatal(err)
				}
			}
			want := "done"
			if one.Actor.Name == "untrusted" && one.Row.NotCovered == "" {
				want = "refused 1 " // EPERM
			}
			if said, err := h.Attempt(); err != nil || !strings.HasPrefix(said, want) {
				t.Errorf("%s, want %s: %v", said, want, err)
			}
		})
	}
	attempts := told()
	for i := range trial.Reads {
		dir := filepath.Join(b.Root, trial.Reads[i].Name+".untrusted")
		is := func(a judge.Attempt) bool {
			// Linux 6.1 has no path of a file that an overlay opens in its layer: it is "[DEVICE]/f".
			named := strings.HasPrefix(a.Path, dir) || trial.Reads[i].Name == trial.LowerRow && strings.HasSuffix(a.Path, "]/f")
			return a.Denied && a.Operation == policy.Read && a.Program == b.Other && named
		}
		if trial.Reads[i].NotCovered == "" && !slices.ContainsFunc(attempts, is) {
			t.Errorf("%s was denied, and no event says so: %+v", trial.Reads[i].Name, attempts)
		}
	}
	want := []Mapping{{Program: b.Other, Path: filepath.Join(b.Root, "old-readable-mapping.untrusted/prot/f"), Can: policy.Read}}
	for i := range g.Mapped {
		g.Mapped[i].PID = 0
	}
	if !slices.Equal(g.Mapped, want) {
		t.Errorf("mappings from before the policy: %+v, want %+v", g.Mapped, want)
	}
}
