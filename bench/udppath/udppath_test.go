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

// Each way answers, and has its row.
func TestQuick(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler")
	}
	r, err := run(t.Context(), options{rounds: 1, each: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	if err := r.page(&page); err != nil {
		t.Fatal(err)
	}
	for _, w := range ways {
		if got := r.results[w.name]; len(got) != 1 || got[0].P50 <= 0 || got[0].P999 < got[0].P50 || !strings.Contains(page.String(), "\n| "+w.name+" | ") {
			t.Errorf("%s: %+v\n%s", w.name, got, page.String())
		}
	}
}
