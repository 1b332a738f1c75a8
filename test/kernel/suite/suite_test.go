package suite

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// spoken is output of `go test -v`, cut at awkward places on its way.
const spoken = "=== RUN   TestA\n    a_test.go:1: quiet word\n--- PASS: TestA (0.00s)\r\n" +
	"=== RUN   TestB\n=== RUN   TestB/one\n    b_test.go:2: loud word\n        and its second line\n" +
	"=== RUN   TestB/two\n    b_test.go:3: why not\n--- FAIL: TestB (1.50s)\n    --- FAIL: TestB/one (1.00s)\n    --- SKIP: TestB/two (0.00s)\n" +
	"[  12.5] the kernel speaks\nFAIL\n"

func TestTally(t *testing.T) {
	for _, piece := range []int{1, 7, len(spoken)} {
		var r Report
		c := &tally{report: &r}
		for text := spoken; text != ""; {
			n := min(piece, len(text))
			_, _ = c.Write([]byte(text[:n]))
			text = text[n:]
		}
		if r.Passed != 1 || !slices.Equal(r.Failed, []string{"TestB", "TestB/one"}) || !slices.Equal(r.Skipped, []string{"TestB/two"}) {
			t.Errorf("in pieces of %d bytes: %+v", piece, r)
		}
	}
}

func TestProgress(t *testing.T) {
	var out strings.Builder
	_, _ = NewProgress(&out).Write([]byte(spoken))
	for _, want := range []string{"--- PASS: TestA", "loud word", "and its second line", "--- FAIL: TestB/one", "--- SKIP: TestB/two", "the kernel speaks"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, not := range []string{"quiet word", "=== RUN"} {
		if strings.Contains(out.String(), not) {
			t.Errorf("%q is there", not)
		}
	}
	if t.Failed() {
		t.Logf("printed:\n%s", out.String())
	}
}

const behaviour = "SHUNT_SUITE_BEHAVIOUR"

// TestRun runs this binary again, as tests that behave in various ways.
func TestRun(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		behaviour string
		timeout   time.Duration
		good      bool
		exit      int
		err       string
	}{
		{"pass", time.Minute, true, 0, ""},
		{"fail", time.Minute, false, 1, ""},
		{"skip", time.Minute, false, 0, "shows nothing"},
		{"hang", 200 * time.Millisecond, false, ExitTimeout, "stopped after"},
	} {
		t.Run(test.behaviour, func(t *testing.T) {
			var out strings.Builder
			r := Run(context.Background(), Test{Package: "p", Binary: self, Dir: t.TempDir(), Args: []string{"-test.run=^TestBehaviour$"}, Timeout: test.timeout},
				append(os.Environ(), behaviour+"="+test.behaviour), &out)
			if r.Good() != test.good || r.Exit != test.exit || !strings.Contains(r.Error, test.err) {
				t.Errorf("good %v: %+v\n%s", r.Good(), r, out.String())
			}
		})
	}
}

// TestBehaviour runs only in the processes of TestRun.
func TestBehaviour(t *testing.T) {
	switch os.Getenv(behaviour) {
	case "fail":
		t.Error("as asked")
	case "skip":
		t.Skip("as asked")
	case "hang":
		<-time.After(time.Hour) // is killed long before
	}
}
