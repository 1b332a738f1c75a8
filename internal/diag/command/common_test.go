package command

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
)

func TestPercent(t *testing.T) {
	for text, want := range map[string]percent{"3%": 3, "3": 3, "0.5%": 0.5, "0": 0} {
		var p percent
		if err := p.Set(text); err != nil || p != want {
			t.Errorf("%q: got %v, %v", text, p, err)
		}
	}
	for _, text := range []string{"", "%", "-1", "3%%", "NaN", "+Inf", "x"} {
		var p percent
		if err := p.Set(text); err == nil || !strings.Contains(err.Error(), "3%") {
			t.Errorf("%q: got %v, %v", text, p, err)
		}
	}
}

// pieces hands on each write as one of the test's pieces.
type pieces []string

func (p *pieces) Write(b []byte) (int, error) {
	*p = append(*p, string(b))
	return len(b), nil
}

func TestLogHasWholeLines(t *testing.T) {
	var got pieces
	w := &wholeLines{out: &got}
	for _, text := range []string{"a", "b\nc", "d", "\n\ne"} {
		if n, err := w.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatal(n, err)
		}
	}
	if err := w.end(); err != nil {
		t.Fatal(err)
	}
	if want := (pieces{"ab\n", "cd\n\n", "e"}); fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestDiagLogs has tools write their output to a log.
func TestDiagLogs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	for _, arguments := range [][]string{
		{"io", "--duration", "100ms"}, {"runq", "--duration", "100ms", "-p", "4294967295"}, {"irqoff", "100ms", "-t", "10000"}, {"memleak", "--duration", "200ms", "-i", "100ms"},
		{"top", "--once", "-i", "100ms", "-o", "json"},
	} {
		log := filepath.Join(t.TempDir(), "log")
		var out, errOut bytes.Buffer
		if code := Main(append(append([]string{"diag"}, arguments...), "--log", log), strings.NewReader(""), &out, &errOut); code != cli.ExitOK || out.Len() > 0 {
			t.Fatalf("%v: exit code %d, %s%s", arguments, code, out.String(), errOut.String())
		}
		if text, err := os.ReadFile(log); err != nil || !strings.Contains(strings.ToLower(string(text)), "summary") || !strings.HasSuffix(string(text), "\n") {
			t.Errorf("%v: %v, the log has %q", arguments, err, text)
		}
		if code := Main(append(append([]string{"diag"}, arguments...), "--log", log+"/x"), strings.NewReader(""), &out, &errOut); code != cli.ExitRefused || !strings.Contains(errOut.String(), log) {
			t.Errorf("%v: a log that cannot be written to: exit code %d, %s", arguments, code, errOut.String())
		}
	}
}
