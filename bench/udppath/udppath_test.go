package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv(subjectVariable) != "" { // the test's binary is the subject in Go
		main()
		return
	}
	os.Exit(m.Run())
}

// Each way answers and receives, and has its row.
func TestQuick(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler")
	}
	r, err := run(t.Context(), options{rounds: 1, each: 20 * time.Millisecond, frames: 1 << 14})
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	if err := r.page(&page); err != nil {
		t.Fatal(err)
	}
	for _, w := range ways {
		if why := r.missing[w.peer]; why != "" {
			if !strings.Contains(page.String(), "\n- "+w.peer+": "+why+".\n") {
				t.Errorf("of %s, which is missing, the page does not say why: %s\n%s", w.peer, why, page.String())
			}
			continue
		}
		if got := r.results[w.name]; !w.limit && (len(got) != 1 || got[0].P50 <= 0 || got[0].P999 < got[0].P50) {
			t.Errorf("%s: %+v", w.name, got)
		}
		if got := r.rates[w.name]; len(got) != 1 || got[0].Taken <= 0 || got[0].Taken > got[0].Offered {
			t.Errorf("%s, receiving: %+v", w.name, got)
		}
		if strings.Count(page.String(), "\n| "+w.name+" | ") < 1 {
			t.Errorf("%s has no row\n%s", w.name, page.String())
		}
	}
}
