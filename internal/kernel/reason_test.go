package kernel

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/test/golden"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var reasonLine = regexp.MustCompile(`^\s+REASON_(\w+) = (\d+),\s+/\* (pass|drop|answer|note|refused): (.+) \*/$`)

// TestReasonsReference makes the reference page of the reasons from their comments.
func TestReasonsReference(t *testing.T) {
	source, err := os.ReadFile("../../bpf/core/reasons.h")
	must(t, err)
	kinds := map[string]string{
		"pass":    "The packet goes on to the host's stack, unchanged.",
		"drop":    "The packet ends here.",
		"answer":  "shunt replied in the packet's place.",
		"note":    "Something worth counting on the way; the packet goes on.",
		"refused": "The kernel dropped the frame after shunt had decided to send it.",
	}
	var out strings.Builder
	out.WriteString("# Reasons\n\nWhy a packet was not simply forwarded. The name is the same word in `shunt status`, metrics and logs;\n" +
		"a number is given once and never used again.\n\n" +
		"This page is made from the comments in `bpf/core/reasons.h` by `go test ./internal/kernel -update`.\n")
	described, last := map[Reason]bool{}, ""
	for line := range strings.Lines(string(source)) {
		m := reasonLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		if m[3] != last {
			last = m[3]
			fmt.Fprintf(&out, "\n## %s\n\n%s\n\n| number | name | kind | meaning |\n|---:|---|---|---|\n", last, kinds[last])
		}
		fmt.Fprintf(&out, "| %s | `%s` | %s | %s |\n", m[2], strings.ToLower(m[1]), m[3], m[4])
		for _, r := range Reasons() {
			if fmt.Sprint(uint32(r)) == m[2] && r.String() == strings.ToLower(m[1]) {
				described[r] = true
			}
		}
	}
	for _, r := range Reasons() {
		if !described[r] {
			t.Errorf("reason %s (%d) has no comment of the form `kind: meaning` on its line in reasons.h, or the committed object is older than it", r, r)
		}
	}
	if out := Reason(77).String(); out != "reason_77" {
		t.Errorf("an unknown reason is called %q", out)
	}
	golden.Require(t, "../../docs/reference/reasons.md", out.String())
}

// TestReasonCounts: the counters of all CPUs are added up, the first and the last reason included, and a map that ends
// before a reason is refused by that one's name.
func TestReasonCounts(t *testing.T) {
	needRoot(t)
	all := Reasons()
	first, last := all[0], all[len(all)-1]
	counters := func(size uint32) *ebpf.Map {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: size})
		must(t, err)
		t.Cleanup(func() { _ = m.Close() })
		return m
	}
	m := counters(uint32(last) + 1)
	each := make([]coreCount, ebpf.MustPossibleCPU())
	want := map[string]Count{first.String(): {}, last.String(): {}}
	for i := range each {
		each[i] = coreCount{Packets: uint64(i) + 1, Bytes: 100}
		for name, sum := range want {
			want[name] = Count{sum.Packets + each[i].Packets, sum.Bytes + each[i].Bytes}
		}
	}
	for _, r := range []Reason{first, last} {
		must(t, m.Put(uint32(r), each))
	}
	got, err := ReasonCounts(m)
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	if got, err := ReasonCounts(counters(uint32(last))); err == nil || !strings.Contains(err.Error(), last.String()) {
		t.Errorf("of a map without the last reason: %v, %v", got, err)
	}
}
