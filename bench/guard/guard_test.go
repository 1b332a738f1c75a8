package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/test/deed"
)

func TestMain(m *testing.M) {
	deed.Work()
	os.Exit(m.Run())
}

// Each arm and each deed has its figure, and nothing is left.
func TestEverythingIsMeasured(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs, makes a cgroup")
	}
	r := report{rounds: 1, share: 500, pieces: 2}
	if err := r.measure(t.Output()); err != nil {
		t.Fatal(err)
	}
	for _, a := range arms {
		if a.policy == protects && r.results[a.name] == nil && len(r.without) > 0 {
			continue
		}
		for _, d := range deed.All {
			if got := r.results[a.name][d.Name]; len(got) != 1 || got[0] <= 0 {
				t.Errorf("%s under %s: %v", d.Name, a.name, got)
			}
		}
	}
	for _, o := range openings {
		for _, d := range opens {
			if got := r.waits[o.name][d]; len(r.without) > 0 && (len(got) != 1 || got[0] <= 0) {
				t.Errorf("%s of %s: %v", d, o.name, got)
			}
		}
	}
	var page strings.Builder
	if err := r.page(&page); err != nil {
		t.Fatal(err)
	}
	if isThere := strings.Contains(page.String(), "| a protected file | "); isThere != (len(r.without) > 0) {
		t.Errorf("opens that wait: %v, in\n%s", isThere, &page)
	}
	for _, d := range deed.All {
		if !strings.Contains(page.String(), "| "+d.Name+" | ") {
			t.Errorf("%s is not in\n%s", d.Name, &page)
		}
	}
}

// TestUnderProtection measures in a guest, where time is the emulation's: it prints the ratios, and judges nothing.
func TestUnderProtection(t *testing.T) {
	if os.Getenv("SHUNT_KERNEL_TEST") == "" {
		t.Skip("runs only in a guest of test/kernel; elsewhere run ./bench/guard")
	}
	all := arms
	arms = slices.DeleteFunc(slices.Clone(arms), func(a arm) bool { return a.policy != "" && a.policy != protects })
	t.Cleanup(func() { arms = all })
	r := report{rounds: 3, share: 2, pieces: 1}
	if err := r.measure(t.Output()); err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	if err := r.page(&page); err != nil {
		t.Fatal(err)
	}
	t.Log(page.String())
}

func TestRatios(t *testing.T) {
	if got := ratios([]float64{3, 1}, []float64{2, 4}); !slices.Equal(got, []float64{1.5, 0.25}) {
		t.Error(got)
	}
}
