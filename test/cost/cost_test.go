// Package cost records what the programs weigh on each kernel, and what packets cost: how many
// instructions, look-ups and calls are run for each. It fails when one grows without anybody
// having said so. See record.txt and packets.txt.
//
//	go test ./test/cost                                                     (as root)
//	go test ./test/cost -run TestNoPacketCostsMoreUnapproved -v -where 10   where the instructions are
package cost

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write this kernel's part of record.txt instead of comparing with it")

// objects are all that the binary carries, seen from this package.
const objects = "../../internal/lb/*/*_bpfel.o"

const recordFile = "record.txt"

// mapSize replaces the placeholders in maps.h. Real sizes take memory, and differ from this
// one in no instruction; 4096 takes as many bytes in machine code as they do.
const mapSize = 4096

// jitedSlack is how much machine code may grow unapproved, because it is not the program's
// alone: a kernel that guards returns against speculation writes five bytes for one.
const jitedSlack = 0.02

// verifiedSlack is the same of the instructions verified: one stable release of a kernel prunes
// a little better than another.
const verifiedSlack = 0.05

// constants of one way of loading an object. What an object does not have is left out.
type variant struct {
	name      string
	constants map[string]any
}

// variants of the balancer's programs, as internal/lb/datapath/load.go has them. Numbers stand for
// any.
var (
	plain    = variant{"native", with(0, 0, 0)}
	variants = map[ebpf.ProgramType][]variant{
		ebpf.XDP: {
			plain,
			{"native-all", with(^uint32(0), 0, 0)},
			{"native-veth-all", with(^uint32(0), 0, 1)},
			{"generic-all", with(^uint32(0), 1, 0)},
		},
		ebpf.SchedCLS: {
			{"in", at(0, with(0, 1, 0))},
			{"in-all", at(0, with(^uint32(0), 1, 0))},
			{"out-all", at(1, with(^uint32(0), 1, 0))},
		},
	}
)

// with is without features or with all, of the other modes and native.
func with(features uint32, generic, back uint8) map[string]any {
	return map[string]any{"features": features, "generic_mode": generic, "redirect_back": back, "interface_index": uint32(1),
		"handshake_count": uint32(mapSize), "tracked_count": uint32(mapSize), "jiffies_per_second": uint32(250), "tick_shift": uint8(8)}
}

// at is that at tc, for what comes in or for what the host sends.
func at(outbound uint8, constants map[string]any) map[string]any {
	constants["outbound"] = outbound
	return constants
}

// weight is what one program costs a kernel.
type weight struct {
	instructions int // after the verifier has rewritten the program
	jited        int // bytes of machine code; 0: the kernel has no JIT
	verified     int // instructions that the verifier went through, of a million
	stack        int // bytes on the deepest chain of calls
}

func (w weight) String() string {
	return fmt.Sprintf("%12d %8d %8d %6d", w.instructions, w.jited, w.verified, w.stack)
}

// grown names what is more than before.
func (w weight) grown(before weight) (what []string) {
	for _, f := range []struct {
		name        string
		now, before int
		slack       float64
	}{
		{"instructions", w.instructions, before.instructions, 0},
		{"bytes of machine code", w.jited, before.jited, jitedSlack},
		{"instructions verified", w.verified, before.verified, verifiedSlack},
		{"bytes of stack", w.stack, before.stack, 0},
	} {
		if float64(f.now) > float64(f.before)*(1+f.slack) {
			what = append(what, fmt.Sprintf("%d %s, %d before", f.now, f.name, f.before))
		}
	}
	return what
}

// record is weights by kernel and program, "6.1" and "xdp/sh_xdp/generic".
type record map[string]map[string]weight

func TestNoProgramGrowsUnapproved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	series := kernelSeries(t)
	now := weighAll(t)
	all := readRecord(t)
	before := all[series]
	all[series] = now
	if *update {
		if err := os.WriteFile(recordFile, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if before == nil {
		t.Errorf("%s has nothing for kernel %s", recordFile, series)
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		was, ok := before[name]
		if !ok && before != nil {
			t.Errorf("%s is new", name)
		}
		for _, what := range now[name].grown(was) {
			if ok {
				t.Errorf("%s has grown: %s", name, what)
			}
		}
	}
	for name := range before {
		if _, ok := now[name]; !ok {
			t.Errorf("%s is in the record, and no longer there", name)
		}
	}
	if t.Failed() {
		t.Logf("if this is meant, run `go test ./test/cost -update` on this kernel, or make this its part of test/cost/%s:\n%s",
			recordFile, record{series: now})
	} else if !maps.Equal(now, before) {
		t.Logf("some programs have become smaller; `go test ./test/cost -update` keeps them so:\n%s", record{series: now})
	}
}

// kernelSeries is "6.1" of "6.1.0-47-cloud-amd64".
func kernelSeries(t *testing.T) string {
	t.Helper()
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	release := unix.ByteSliceToString(name.Release[:])
	series := regexp.MustCompile(`^\d+\.\d+`).FindString(release)
	if series == "" {
		t.Fatalf("the kernel's release %q does not begin with two numbers", release)
	}
	return series
}

// weighAll loads every program of every object in every variant.
func weighAll(t *testing.T) map[string]weight {
	t.Helper()
	files, err := filepath.Glob(objects)
	if err != nil || len(files) < 3 {
		t.Fatalf("found %d objects at %s, %v", len(files), objects, err)
	}
	all := map[string]weight{}
	for _, file := range files {
		object := strings.TrimSuffix(filepath.Base(file), "_bpfel.o")
		spec, err := ebpf.LoadCollectionSpec(file)
		if err != nil {
			t.Fatalf("reading %s: %v", file, err)
		}
		ways := variantsOf(spec)
		if ways == nil {
			for program, w := range weigh(t, file, plain) {
				all[object+"/"+program] = w
			}
			continue
		}
		for _, v := range ways {
			for program, w := range weigh(t, file, v) {
				all[object+"/"+program+"/"+v.name] = w
			}
		}
	}
	return all
}

// variantsOf are the ways to load an object that balances at an interface; none for others, which
// have the constants of lb/config.h too, and do not use them.
func variantsOf(spec *ebpf.CollectionSpec) (ways []variant) {
	if _, ok := spec.Variables["generic_mode"]; !ok {
		return nil
	}
	for _, program := range spec.Programs {
		ways = variants[program.Type]
	}
	return ways
}

// weigh loads an object and asks the kernel about its programs.
func weigh(t *testing.T, file string, v variant) map[string]weight {
	t.Helper()
	spec, err := ebpf.LoadCollectionSpec(file)
	if err != nil {
		t.Fatalf("reading %s: %v", file, err)
	}
	for name, value := range v.constants {
		if variable, ok := spec.Variables[name]; ok {
			if err := variable.Set(value); err != nil {
				t.Fatalf("setting %s of %s: %v", name, file, err)
			}
		}
	}
	for name, m := range spec.Maps {
		if m.MaxEntries == 1 && !strings.HasPrefix(name, ".") {
			m.MaxEntries = mapSize
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
	if err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			t.Fatalf("loading %s (%s): %+v", file, v.name, refused)
		}
		t.Fatalf("loading %s (%s): %v", file, v.name, err)
	}
	defer coll.Close()
	all := map[string]weight{}
	for name, program := range coll.Programs {
		w, err := weightOf(program)
		if err == nil {
			w.stack, err = stackOf(program, spec.Programs[name].Instructions)
		}
		if err != nil {
			t.Fatalf("%s of %s (%s): %v", name, file, v.name, err)
		}
		all[name] = w
	}
	return all
}

// weightOf is what struct bpf_prog_info says of a program.
func weightOf(program *ebpf.Program) (w weight, err error) {
	info, err := program.Info()
	if err != nil {
		return w, err
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return w, err
	}
	w.instructions = size / asm.InstructionSize
	if jited, err := info.JitedSize(); err == nil {
		w.jited = int(jited)
	}
	verified, ok := info.VerifiedInstructions() // Linux 5.16
	if !ok {
		return w, errors.New("the kernel does not say how many instructions it verified")
	}
	w.verified = int(verified)
	return w, nil
}

var stackDepths = regexp.MustCompile(`(?m)^stack depth ([\d+]+)`)

// stackOf is the stack of the deepest chain of calls. The verifier's log has each function's
// own, in the order of the code; functions that nothing calls in this variant are no longer
// there.
func stackOf(program *ebpf.Program, code asm.Instructions) (int, error) {
	m := stackDepths.FindStringSubmatch(program.VerifierLog)
	if m == nil {
		return 0, fmt.Errorf("the verifier's log does not tell the depth of the stack: %q", program.VerifierLog)
	}
	info, err := program.Info()
	if err != nil {
		return 0, err
	}
	functions, err := info.FuncInfos()
	if err != nil {
		return 0, err
	}
	var names []string
	for _, f := range functions {
		names = append(names, f.Func.Name)
	}
	return deepestChain(names, m[1], code)
}

// deepestChain adds up "100+8+33", the stacks of the functions by name, along the calls. Each
// is rounded up to 32 bytes, as the verifier did until it knew of JITs' finer steps
// (check_max_stack_depth in kernel/bpf/verifier.c).
func deepestChain(names []string, depths string, code asm.Instructions) (int, error) {
	each := strings.Split(depths, "+")
	if len(each) != len(names) {
		return 0, fmt.Errorf("the verifier tells the stack of %d functions, and the program has %d: %s", len(each), len(names), depths)
	}
	own := map[string]int{}
	for i, name := range names {
		depth, err := strconv.Atoi(each[i])
		if err != nil {
			return 0, err
		}
		own[name] = (max(depth, 1) + 31) / 32 * 32
	}
	calls := map[string][]string{}
	from := ""
	for _, ins := range code {
		if symbol := ins.Symbol(); symbol != "" {
			from = symbol
		}
		if ins.IsFunctionReference() { // a call, or the address of a callback
			calls[from] = append(calls[from], ins.Reference())
		}
	}
	var deepest func(name string) int
	deepest = func(name string) int {
		if own[name] == 0 {
			return 0
		}
		most := 0
		for _, callee := range calls[name] {
			most = max(most, deepest(callee))
		}
		return own[name] + most
	}
	return deepest(names[0]), nil
}

const head = `# What the programs weigh, by kernel: a fault in the code, a slower path or a verifier's limit
# come in by growing. test/cost fails on growth; ` + "`go test ./test/cost -update`" + ` on that kernel approves.
#
# instructions: of the program as the verifier has rewritten it. jited: bytes of machine code.
# verified: instructions the verifier went through, at most 1000000. stack: bytes along the deepest
# chain of calls, each function's rounded up to 32; a 6.1 kernel refuses more than 512.
#
`

// String is the text of record.txt.
func (r record) String() string {
	var out strings.Builder
	out.WriteString(head)
	fmt.Fprintf(&out, "#%-5s %-36s %12s %8s %8s %6s\n", "kernel", "program", "instructions", "jited", "verified", "stack")
	for _, series := range slices.SortedFunc(maps.Keys(r), compareSeries) {
		for _, name := range slices.Sorted(maps.Keys(r[series])) {
			fmt.Fprintf(&out, "%-6s %-36s %s\n", series, name, r[series][name])
		}
	}
	return out.String()
}

// compareSeries puts 6.2 before 6.12.
func compareSeries(a, b string) int {
	split := func(s string) (out []int) {
		for _, part := range strings.Split(s, ".") {
			n, _ := strconv.Atoi(part)
			out = append(out, n)
		}
		return out
	}
	return slices.Compare(split(a), split(b))
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
	r := record{}
	for line := range bytes.Lines(text) {
		line := strings.TrimSpace(string(line))
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var series, name string
		var w weight
		if n, err := fmt.Sscan(line, &series, &name, &w.instructions, &w.jited, &w.verified, &w.stack); n != 6 || err != nil {
			return nil, fmt.Errorf("%q: want a kernel, a program and four numbers", line)
		}
		if r[series] == nil {
			r[series] = map[string]weight{}
		}
		r[series][name] = w
	}
	return r, nil
}

func TestGrowthIsSeen(t *testing.T) {
	before := weight{1000, 5000, 20000, 300}
	for _, now := range []weight{{1001, 5000, 20000, 300}, {1000, 5101, 20000, 300}, {1000, 5000, 21001, 300}, {1000, 5000, 20000, 301}} {
		if got := now.grown(before); len(got) != 1 {
			t.Errorf("%v after %v: %q, want one complaint", now, before, got)
		}
	}
	for _, now := range []weight{before, {999, 4000, 19999, 8}, {1000, 5100, 21000, 300}} {
		if got := now.grown(before); len(got) != 0 {
			t.Errorf("%v after %v: %q, want none", now, before, got)
		}
	}
}

func TestRecordReadsBack(t *testing.T) {
	r := record{"6.12": {"xdp/sh_xdp/native": {1, 2, 3, 4}}, "6.1": {"b": {5, 0, 6, 7}, "a": {8, 9, 10, 11}}}
	got, err := parseRecord([]byte(r.String()))
	if err != nil || got.String() != r.String() {
		t.Errorf("read back, %v:\n%s\nwant\n%s", err, got, r)
	}
	if text := r.String(); strings.Index(text, "6.1 ") > strings.Index(text, "6.12 ") {
		t.Errorf("6.12 comes before 6.1:\n%s", text)
	}
	if _, err := parseRecord([]byte("6.1 a 1 2 3\n")); err == nil {
		t.Error("a line with a number too few is read without complaint")
	}
}

func TestStackIsOfTheDeepestChain(t *testing.T) {
	call := func(name string) asm.Instruction {
		return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoCall, Constant: -1}.WithReference(name)
	}
	code := asm.Instructions{
		call("a").WithSymbol("main"), call("b"), asm.Return(),
		call("b").WithSymbol("a"), asm.Return(),
		asm.Return().WithSymbol("b"),
	}
	got, err := deepestChain([]string{"main", "a", "b"}, "100+8+33", code)
	if want := 128 + 32 + 64; got != want || err != nil {
		t.Errorf("stack is %d, %v, want %d", got, err, want)
	}
	got, err = deepestChain([]string{"main", "b"}, "100+33", code) // a was removed
	if want := 128 + 64; got != want || err != nil {
		t.Errorf("without a, stack is %d, %v, want %d", got, err, want)
	}
	if _, err := deepestChain([]string{"main", "a", "b"}, "100+8", code); err == nil {
		t.Error("a depth too few is not seen")
	}
}
