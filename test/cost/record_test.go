package cost

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var mergeFile = flag.String("merge", "", "take what TestNoLoadedProgramGrowsUnapproved has said in this file, of other kernels, into record.txt")

// anyKernel is the record's name for figures that do not depend on the kernel.
const anyKernel = "any"

// The figures of a program.
const (
	instructions = "instructions"
	lookups      = "look-ups" // calls of bpf_map_lookup_elem in the code
	calls        = "calls"    // of other helpers
	stack        = "stack"    // bytes on the deepest chain of calls
	verified     = "verified" // instructions that the verifier went through, of its limit of a million
)

// measures are in the order of a line.
var measures = []string{instructions, lookups, calls, stack, verified}

// weight is the cost of one program, by measure. A missing measure was not measured.
type weight map[string]int

// slack is the growth that needs no approval, because the program is not its only cause: one stable release of a
// kernel prunes a little better than another, and may replace a call by a few instructions more or less. The
// compiler's figures have none.
func slack(what string, isCompiled bool, before int) int {
	switch {
	case what == verified:
		return before / 20
	case what == instructions && !isCompiled:
		return max(before/100, 8)
	}
	return 0
}

// grown names the measures that are larger than before, or were missing.
func (w weight) grown(before weight) (what []string) {
	_, isLoaded := w[verified]
	for _, name := range measures {
		now, isMeasured := w[name]
		was, ok := before[name]
		switch {
		case isMeasured && !ok:
			what = append(what, fmt.Sprintf("%d %s, and it has none on record", now, name))
		case now > was+slack(name, !isLoaded, was):
			what = append(what, fmt.Sprintf("%d %s, %d before", now, name, was))
		}
	}
	return what
}

// with is the weight with numbers of another in place of its own.
func (w weight) with(other weight) weight {
	both := maps.Clone(w)
	maps.Copy(both, other)
	return both
}

func (w weight) String() string {
	var parts []string
	for _, name := range measures {
		if n, ok := w[name]; ok {
			parts = append(parts, fmt.Sprintf("%s=%d", name, n))
		}
	}
	return strings.Join(parts, " ")
}

// record is record.txt.
type record struct {
	complete []string                     // kernels that have a line for each program
	rows     map[string]map[string]weight // by kernel or anyKernel, and program, "6.1" and "xdp/sh_xdp/generic"
	refused  map[string]map[string]string // names of refusals, by kernel and program
}

const head = `# The size of the programs. Growth can be a fault in the code, a slower path, or a step towards a verifier's limit,
# so test/cost fails when a program grows. "make approve-weight" approves the new figures.
#
# any: on any kernel and CPU. instructions, look-ups (calls of bpf_map_lookup_elem) and calls (of other helpers) are
# counted in the compiled program, with all its functions. stack: bytes along the deepest chain of calls, each
# function's part rounded up to 32; a 6.1 kernel refuses more than 512.
#
# A kernel's series, such as 6.1: on this kernel, on amd64. instructions: the program's length after the verifier has
# removed the instructions that constants exclude and has rewritten others, so kernels differ. verified: the
# instructions that the verifier went through, at most 1000000. Releases of a series differ a little, and the test
# allows for that. refused: the kernel does not load the program; the word is the error's name, or no-target if the
# kernel lacks the hook or function that the program is for. Only programs of diagnosis and the guard may be refused.
# complete: kernels with a line for each program.
#
`

// String is the text of record.txt.
func (r record) String() string {
	return fmt.Sprintf("%scomplete %s\n%s", head, strings.Join(r.complete, " "), r.lines())
}

// lines are the lines of the programs.
func (r record) lines() string {
	var out strings.Builder
	for _, series := range slices.SortedFunc(maps.Keys(r.rows), compareSeries) {
		lines := map[string]string{}
		for name, w := range r.rows[series] {
			lines[name] = w.String()
		}
		for name, refusal := range r.refused[series] {
			lines[name] = refusedIs + refusal
		}
		for _, name := range slices.Sorted(maps.Keys(lines)) {
			fmt.Fprintf(&out, "%-6s %-36s %s\n", series, name, lines[name])
		}
	}
	return out.String()
}

// refusedIs begins the field of a refusal.
const refusedIs = "refused="

// unrecorded reports each refusal that the record does not have.
func (r *record) unrecorded(series string, refused map[string]string) (complaints []string) {
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		switch was := r.refused[series][name]; {
		case was == refused[name]:
		case was != "":
			complaints = append(complaints, fmt.Sprintf("%s on %s: refused with %s, and %s has %s", name, series, refused[name], recordFile, was))
		default:
			complaints = append(complaints, fmt.Sprintf("%s on %s: refused with %s, and %s does not have this refusal", name, series, refused[name], recordFile))
		}
	}
	return complaints
}

// compareSeries puts 6.2 before 6.12, and a name that is no number before both.
func compareSeries(a, b string) int {
	split := func(s string) (out []int) {
		for _, part := range strings.Split(s, ".") {
			n, _ := strconv.Atoi(part)
			out = append(out, n)
		}
		return out
	}
	return cmp.Or(slices.Compare(split(a), split(b)), strings.Compare(a, b))
}

var mayLose = flag.Bool("lose", false, "with -update and -merge: programs may go from record.txt that a kernel has loaded before, and refuses now")

// lost are programs that the kernel once loaded, that still exist, and that it refuses now.
func (r *record) lost(series string, loaded map[string]weight, ways []string) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(r.rows[series])) {
		if loaded[name] == nil && slices.Contains(ways, name) {
			names = append(names, name)
		}
	}
	return names
}

// keep ends the test if the record would lose programs silently.
func (r *record) keep(t *testing.T, series string, loaded map[string]weight, ways []string) {
	t.Helper()
	if names := r.lost(series, loaded, ways); len(names) > 0 && !*mayLose {
		t.Fatalf("kernel %s has loaded these programs before, and refuses them now: %s: load one there to see why (a test of its product says it); if that is meant, `make approve-weight LOSE=1`",
			series, strings.Join(names, ", "))
	}
}

// take replaces a kernel's measurements and refusals by new ones. It removes the lines of programs that are not
// among ways, the list of all, from other kernels too. Stacks of programs that only other kernels load stay.
func (r *record) take(series string, stacks, loaded map[string]weight, refused map[string]string, ways []string) {
	for name, w := range r.rows[anyKernel] {
		isElsewhere := stacks[name] == nil && slices.Contains(ways, name)
		if _, isCompiled := w[instructions]; isCompiled && !isElsewhere {
			delete(w, stack)
			stacks[name] = w.with(stacks[name])
		} else if isElsewhere {
			stacks[name] = w
		}
	}
	r.rows[anyKernel], r.rows[series], r.refused[series] = stacks, loaded, refused
	for other, rows := range r.rows {
		if other != anyKernel {
			maps.DeleteFunc(rows, func(name string, _ weight) bool { return !slices.Contains(ways, name) })
		}
	}
	for _, rows := range r.refused {
		maps.DeleteFunc(rows, func(name, _ string) bool { return !slices.Contains(ways, name) })
	}
	if !slices.Contains(r.complete, series) {
		r.complete = append(r.complete, series)
		slices.SortFunc(r.complete, compareSeries)
	}
}

func (r record) write(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(recordFile, []byte(r.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readRecord(t *testing.T) record {
	t.Helper()
	text, err := os.ReadFile(recordFile)
	if err != nil && !(errors.Is(err, os.ErrNotExist) && *update) {
		t.Fatal(err)
	}
	r, err := parseRecord(text)
	if err != nil {
		t.Fatalf("%s: %v", recordFile, err)
	}
	return r
}

func parseRecord(text []byte) (record, error) {
	r := record{rows: map[string]map[string]weight{}, refused: map[string]map[string]string{}}
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line))
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if fields[0] == "complete" {
			r.complete = append(r.complete, fields[1:]...)
			continue
		}
		if len(fields) < 3 {
			return r, fmt.Errorf("%q: want a kernel, a program and what it weighs", line)
		}
		if refusal, ok := strings.CutPrefix(fields[2], refusedIs); ok {
			if refusal == "" || len(fields) > 3 {
				return r, fmt.Errorf("%q: want the name of one refusal, and nothing after it", line)
			}
			if r.refused[fields[0]] == nil {
				r.refused[fields[0]] = map[string]string{}
			}
			r.refused[fields[0]][fields[1]] = refusal
			continue
		}
		w := weight{}
		for _, field := range fields[2:] {
			name, number, _ := strings.Cut(field, "=")
			n, err := strconv.Atoi(number)
			if err != nil || !slices.Contains(measures, name) {
				return r, fmt.Errorf("%q: %q is not one of %s with \"=\" and a number", line, field, strings.Join(measures, ", "))
			}
			w[name] = n
		}
		if r.rows[fields[0]] == nil {
			r.rows[fields[0]] = map[string]weight{}
		}
		r.rows[fields[0]][fields[1]] = w
	}
	return r, nil
}

// rowSaid matches a line of the record in the log of a test.
var rowSaid = regexp.MustCompile(`(?m)^ *(\d+\.\d+|any) +\S+/\S+ +\S+=[^\r\n]*`)

// TestMerge takes over the figures of another kernel's test, of which a virtual machine leaves nothing but its
// log.
func TestMerge(t *testing.T) {
	text := []byte("    cost_test.go:9: on this kernel:\r\n        any    x/a   stack=7\r\n        6.9    x/a   instructions=1 verified=2\r\n        6.9    x/elsewhere   refused=EPERM\r\n[    1.0] other\r\n")
	all := record{refused: map[string]map[string]string{"6.1": {"x/gone": "EACCES"}, "6.9": {"x/a": "EPERM"}}, rows: map[string]map[string]weight{
		anyKernel: {"x": {instructions: 1}, "x/a": {instructions: 3, stack: 9}, "x/gone": {stack: 9}, "x/elsewhere": {stack: 2}}, "6.1": {"x/elsewhere": {instructions: 2, verified: 3}, "x/a": {instructions: 5, verified: 6}, "x/gone": {instructions: 5, verified: 6}}}}
	ways := []string{"x/a", "x/elsewhere"}
	if *mergeFile != "" {
		var err error
		ways, _ = waysOf(t)
		if text, err = os.ReadFile(*mergeFile); err != nil {
			t.Fatal(err)
		}
		all = readRecord(t)
	}
	said, err := parseRecord(bytes.Join(rowSaid.FindAll(text, -1), []byte("\n")))
	if err != nil {
		t.Fatal(err)
	}
	stacks := said.rows[anyKernel]
	delete(said.rows, anyKernel)
	if len(said.rows) != 1 || len(stacks) == 0 {
		t.Fatalf("there are lines of %d kernels, want one: did TestNoLoadedProgramGrowsUnapproved run?", len(said.rows))
	}
	for series, rows := range said.rows {
		if *mergeFile != "" {
			all.keep(t, series, rows, ways)
		}
		all.take(series, stacks, rows, said.refused[series], ways)
	}
	if *mergeFile != "" {
		all.write(t)
		return
	}
	want := "complete 6.9\nany    x                                    instructions=1\nany    x/a                                  instructions=3 stack=7\nany    x/elsewhere                          stack=2\n" +
		"6.1    x/a                                  instructions=5 verified=6\n6.1    x/elsewhere                          instructions=2 verified=3\n6.9    x/a                                  instructions=1 verified=2\n6.9    x/elsewhere                          refused=EPERM\n"
	if got := strings.TrimPrefix(all.String(), head); got != want {
		t.Errorf("merged:\n%s\nwant\n%s", got, want)
	}
}

func TestLossIsSeen(t *testing.T) {
	r := record{rows: map[string]map[string]weight{"6.1": {"x/a": {instructions: 1}, "x/b": {instructions: 1}, "x/gone": {instructions: 1}}}}
	if got := r.lost("6.1", map[string]weight{"x/a": {instructions: 2}}, []string{"x/a", "x/b"}); !slices.Equal(got, []string{"x/b"}) {
		t.Errorf("lost are %q, want x/b", got)
	}
}

func TestRefusalIsSeen(t *testing.T) {
	r := record{refused: map[string]map[string]string{"6.1": {"x/a": "EPERM", "x/b": "EPERM", "x/loads": "EPERM"}}}
	got := r.unrecorded("6.1", map[string]string{"x/a": "EPERM", "x/b": "EACCES", "x/c": "EPERM"})
	if len(got) != 2 || !strings.Contains(got[0], "x/b on 6.1: refused with EACCES") || !strings.Contains(got[1], "x/c on 6.1: refused with EPERM") {
		t.Errorf("complaints are %q, want one of x/b and one of x/c", got)
	}
}

func TestGrowthIsSeen(t *testing.T) {
	compiled := weight{instructions: 1000, lookups: 20, calls: 5, stack: 300}
	loaded := weight{instructions: 1000, verified: 20000}
	for name := range compiled {
		more := maps.Clone(compiled)
		more[name]++
		if got := more.grown(compiled); len(got) != 1 {
			t.Errorf("%v after %v: %q, want one complaint", more, compiled, got)
		}
	}
	for _, now := range []weight{{instructions: 1011, verified: 20000}, {instructions: 1000, verified: 21001}} {
		if got := now.grown(loaded); len(got) != 1 {
			t.Errorf("%v after %v: %q, want one complaint", now, loaded, got)
		}
	}
	for _, now := range []weight{loaded, {instructions: 1010, verified: 21000}, {instructions: 900, verified: 1}} {
		if got := now.grown(loaded); len(got) != 0 {
			t.Errorf("%v after %v: %q, want none", now, loaded, got)
		}
	}
	if got := loaded.grown(nil); len(got) != 2 {
		t.Errorf("of a program without a line: %q, want a complaint for each number", got)
	}
	if got := (weight{stack: 0}).grown(nil); len(got) != 1 {
		t.Errorf("of a number that is 0 and has no line: %q, want a complaint", got)
	}
}

func TestRecordReadsBack(t *testing.T) {
	r := record{complete: []string{"6.1", "6.12"}, rows: map[string]map[string]weight{
		"6.12": {"xdp/sh_xdp/native": {instructions: 1, verified: 2}}, "6.1": {"b": {instructions: 5, verified: 0}, "a": {verified: 8}},
		anyKernel: {"a": {stack: 32}}}, refused: map[string]map[string]string{"6.1": {"0": "EPERM"}}}
	got, err := parseRecord([]byte(r.String()))
	if err != nil || got.String() != r.String() {
		t.Errorf("read back, %v:\n%s\nwant\n%s", err, got, r)
	}
	if text := r.lines(); strings.Index(text, "6.1 ") > strings.Index(text, "6.12 ") || !strings.HasPrefix(text, anyKernel) {
		t.Errorf("the order is not any, 6.1, 6.12:\n%s", text)
	}
	for _, wrong := range []string{"6.1 a", "6.1 a 1", "6.1 a jited=5", "6.1 a stack=x", "6.1 a refused=", "6.1 a refused=EPERM stack=1", "6.1 a stack=1 refused=EPERM"} {
		if _, err := parseRecord([]byte(wrong + "\n")); err == nil {
			t.Errorf("%q is read without complaint", wrong)
		}
	}
}
