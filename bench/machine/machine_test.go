package machine

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestProcessor(t *testing.T) {
	file := write(t, t.TempDir(), "cpuinfo", "processor\t: 0\nmodel name\t: A: fast one\nmodel name\t: another\n")
	if got := processor(file); got != "A: fast one" {
		t.Errorf("%q", got)
	}
	if got := processor(file + "-missing"); got != "unknown CPU" {
		t.Errorf("%q", got)
	}
}

func TestMitigations(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "l1tf", "Not affected\n")
	write(t, dir, "spectre_v1", "Mitigation: barriers\n")
	write(t, dir, "spectre_v2", "Vulnerable\n")
	want := []string{"spectre_v1: Mitigation: barriers", "spectre_v2: Vulnerable"}
	if got := mitigations(dir); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := mitigations(dir + "-missing"); got != nil {
		t.Errorf("%q", got)
	}
	for _, m := range []Machine{{}, {Mitigations: want}} {
		if text := m.Faults(); !strings.HasSuffix(text, ".") || strings.Contains(text, "spectre_v2: Vulnerable") != (len(m.Mitigations) > 0) {
			t.Errorf("%q", text)
		}
	}
}

func TestDescribe(t *testing.T) {
	m, err := Describe()
	if err != nil || m.Kernel == "" || m.CPUs < 1 || m.MemoryGB == 0 || !strings.Contains(m.String(), m.Kernel) {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestReportName: a second report on a day does not replace the first.
func TestReportName(t *testing.T) {
	dir, m := t.TempDir(), Machine{Date: "2026-11-25T10:31:40Z", Kernel: "6.18.1"}
	first := m.ReportName(dir, "of-")
	write(t, dir, first+".md", "")
	if second := m.ReportName(dir, "of-"); first != "of-2026-11-25-6.18.1" || second != "of-2026-11-25T103140-6.18.1" {
		t.Errorf("%q, then %q", first, second)
	}
}
