// Package suite runs compiled tests one package after the other and counts the verdicts. The
// host and the guest of test/kernel share it, so tests in a virtual machine and tests on the
// host are counted alike.
package suite

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os/exec"
	"regexp"
	"time"
)

// Test is one package's compiled tests. In JSON, the host passes it to the guest.
type Test struct {
	Package string        `json:"package"` // import path
	Binary  string        `json:"binary"`  // path where it runs
	Dir     string        `json:"dir"`     // working directory where it runs
	Args    []string      `json:"args"`
	Timeout time.Duration `json:"timeout"`
}

// Report is the result of a Test. In JSON, the guest passes it to the host.
type Report struct {
	Package string   `json:"package"`
	Exit    int      `json:"exit"` // the test binary's; ExitTimeout when it was stopped for time
	Seconds float64  `json:"seconds"`
	Passed  int      `json:"passed"` // tests and subtests
	Failed  []string `json:"failed,omitempty"`
	Skipped []string `json:"skipped,omitempty"`
	Splats  int      `json:"splats"` // warnings and oopses in the kernel's log meanwhile
	Error   string   `json:"error,omitempty"`
}

// ExitTimeout is the exit status reported for tests stopped for time, as timeout(1) has it.
const ExitTimeout = 124

// Good reports whether all tests ran and passed, and the kernel did not complain.
func (r Report) Good() bool {
	return r.Exit == 0 && r.Error == "" && r.Splats == 0 && len(r.Failed) == 0 && r.Passed > 0
}

// Run runs the tests with -test.v to their end or their time limit. Their output goes to out.
// It does not look for splats.
func Run(ctx context.Context, t Test, env []string, out io.Writer) Report {
	r := Report{Package: t.Package}
	started := time.Now()
	limited, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	counted := &tally{report: &r}
	both := io.MultiWriter(out, counted)
	cmd := exec.CommandContext(limited, t.Binary, append([]string{"-test.v"}, t.Args...)...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = t.Dir, env, both, both
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		r.Exit, r.Error = 1, "interrupted"
	case limited.Err() != nil:
		r.Exit, r.Error = ExitTimeout, "stopped after "+t.Timeout.String()
	case errors.As(err, &exit):
		r.Exit = exit.ExitCode()
	case err != nil:
		r.Exit, r.Error = 1, err.Error()
	case r.Passed == 0:
		r.Error = "no test ran and passed, so this shows nothing"
	}
	r.Seconds = time.Since(started).Round(time.Millisecond).Seconds()
	return r
}

// verdict is the line with which `go test -v` ends a test; subtests are indented.
var verdict = regexp.MustCompile(`^( *)--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)`)

// tally is a writer that counts the verdicts in its input.
type tally struct {
	report *Report
	lines  lines
}

func (c *tally) Write(text []byte) (int, error) {
	c.lines.add(text, func(line []byte) {
		m := verdict.FindSubmatch(line)
		if m == nil {
			return
		}
		switch name := string(m[3]); string(m[2]) {
		case "PASS":
			c.report.Passed++
		case "FAIL":
			c.report.Failed = append(c.report.Failed, name)
		case "SKIP":
			c.report.Skipped = append(c.report.Skipped, name)
		}
	})
	return len(text), nil
}

// lines cuts a stream into lines.
type lines struct{ rest []byte }

// add calls each for every line that is complete now, without its end.
func (l *lines) add(text []byte, each func(line []byte)) {
	l.rest = append(l.rest, text...)
	for {
		line, rest, complete := bytes.Cut(l.rest, []byte("\n"))
		if !complete {
			return
		}
		each(bytes.TrimRight(line, "\r"))
		l.rest = rest
	}
}
