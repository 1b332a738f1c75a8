package protect

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// reload switches between two policies that number the same rules in another order, while an untrusted program, a
// trusted one and a program that a trusted one starts write all the time.
func reload(t *testing.T, f *trial.Family, g *Guard, times int) {
	t.Helper()
	forth := f.Rules()
	back := slices.Clone(forth)
	slices.Reverse(back)
	for _, rules := range [][]policy.Rule{forth, back} { // from here on the rules are the same
		if err := g.Apply(policy.Policy{Rules: rules}); err != nil {
			t.Fatal(err)
		}
	}
	var all []*trial.Helper
	for _, one := range [][2]string{{"test/bin/copy", "hammer-write"}, {"test/bin/app", "hammer-write"}, {"test/bin/app", "hammer-script"}} {
		h, err := trial.Begin(f.Path(one[0]), one[1], f.Path("test/data"))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
	began := time.Now()
	for i := range times {
		if err := g.Apply(policy.Policy{Rules: [][]policy.Rule{forth, back}[i%2]}); err != nil {
			t.Fatalf("reload %d: %v", i, err)
		}
		if step := max(times/10, 10); i%step == step-1 {
			t.Logf("%d of %d reloads, after %v", i+1, times, time.Since(began).Round(time.Second))
		}
	}
	for i, h := range all {
		var done, refused int
		said, err := h.Attempt()
		if _, scanErr := fmt.Sscanf(said, "%d done, %d refused", &done, &refused); err != nil || scanErr != nil {
			t.Errorf("%q: %v", said, err)
		}
		t.Logf("%s, in %d reloads: %s", []string{"an untrusted program", "a trusted program", "a script that a trusted program starts"}[i], times, said)
		if isUntrusted := i == 0; isUntrusted && (done > 0 || refused == 0) || !isUntrusted && (done == 0 || refused > 0) {
			t.Errorf("that is not as it should be")
		}
	}
}

// reloadsFlag is for `make soak`: an emulated machine takes seconds for each.
var reloadsFlag = flag.Int("reloads", 0, "how often policies are loaded under load; 0: a thousand times, or thirty with -short")

// TestFamily tries which programs are trusted, and then loads policies many times: there is no moment without
// protection.
func TestFamily(t *testing.T) {
	b := newBench(t)
	f := b.NewFamily()
	g := b.start(policy.Policy{Rules: f.Rules()})
	told := b.listen(g)
	t.Run("trust", f.Test)
	times := *reloadsFlag
	switch {
	case times > 0:
	case testing.Short():
		times = 30
	default:
		times = 1000
	}
	began := time.Now()
	t.Run("no window", func(t *testing.T) { reload(t, f, g, times) })
	status, err := Look(kernel.DefaultPinRoot)
	if err != nil {
		t.Fatal(err)
	}
	if status.Missed+status.Untrusted > 0 {
		t.Errorf("%d operations not examined, %d processes without trust", status.Missed, status.Untrusted)
	}
	for _, a := range told() {
		if a.Program == f.Path("test/bin/app") && a.Path == f.Path("test/data") && a.Time.After(began) {
			t.Logf("a trusted program was refused: %s", a)
		}
	}
}
