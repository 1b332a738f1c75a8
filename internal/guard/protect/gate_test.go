package protect

import (
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// gate has opens wait until the test ends.
func (b *bench) gate(p policy.Policy, o GateOptions) (g *Gate, told func() []Attempt) {
	b.t.Helper()
	var mu sync.Mutex
	var all []Attempt
	o.Tell = func(a Attempt) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, a)
		return nil
	}
	if o.Folder == "" {
		o.Folder = b.t.TempDir()
	}
	g, err := StartGate(p, o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := g.End(); err != nil {
			b.t.Error(err)
		}
		select {
		case err := <-g.failed:
			b.t.Error(err)
		default:
		}
	})
	return g, func() []Attempt {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// byOpens are the rows of the matrix and of reads that are denied where opens wait and there is nothing else.
var byOpens = map[string]bool{}

// TestGateMatrix tries the matrix, and the reads, where opens wait. What is denied is what byOpens has, and nothing else.
func TestGateMatrix(t *testing.T) {
	for name, rows := range map[string][]row{"matrix": matrix, "reads": reads} {
		t.Run(name, func(t *testing.T) {
			b := newDisk(t)
			rule := policy.Rule{Name: name, Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.trusted)}, Mode: policy.Deny}
			if name == "reads" {
				rule.Deny = []string{policy.Read}
			}
			var tries []*try
			for i := range rows {
				for _, a := range actors {
					one := b.prepare(&rows[i], a)
					tries = append(tries, one)
					if !a.isFree {
						rule.Paths = append(rule.Paths, filepath.Join(one.dir, "prot"))
						if name == "matrix" {
							rule.Trust.Programs = append(rule.Trust.Programs, policy.Program{Path: filepath.Join(one.dir, "out", "program")})
						}
					}
				}
			}
			g, told := b.gate(policy.Policy{Rules: []policy.Rule{rule}}, GateOptions{})
			b.evict()
			for _, one := range tries {
				one.was = snapshot(one.dir)
				t.Run(one.row.name+"/"+one.actor.name, func(t *testing.T) { b.judgeOpen(t, one, told) })
			}
			if s := g.Status(); s.Late+s.Unread > 0 || s.Audited > 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func (b *bench) judgeOpen(t *testing.T, one *try, told func() []Attempt) {
	h := one.helper
	if h == nil {
		var err error
		if h, err = begin(b.program(one.actor), one.row.name, one.dir); err != nil {
			t.Fatal(err)
		}
	}
	said, err := h.attempt()
	if err != nil {
		t.Fatalf("%s: %v", said, err)
	}
	if one.target != nil {
		_ = one.target.end() // it may have been killed
	}
	want := "done"
	isRefused := one.actor.name == "untrusted" && byOpens[one.row.name]
	if isRefused {
		want = "refused 1 "
	}
	if !strings.HasPrefix(said, want) {
		t.Errorf("%s, want %s", said, want)
	}
	if is := snapshot(one.dir); isRefused && is != one.was {
		t.Errorf("changed from\n%s\nto\n%s", one.was, is)
	}
	isTold := slices.ContainsFunc(told(), func(a Attempt) bool {
		return a.Denied && a.Program == b.program(one.actor) && strings.HasPrefix(a.Path, one.dir+"/")
	})
	if isTold != isRefused {
		t.Errorf("refused: %v, told: %v", isRefused, isTold)
	}
}
