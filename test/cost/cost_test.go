// Package cost records the weight of the programs, and the cost of packets: the instructions, look-ups and calls that
// run for each. It fails when a figure grows without an approval. See record.txt and packets.txt. Bytes of machine code
// are in neither: they depend on the CPU (a CPU that guards returns against speculation makes each four or five bytes
// longer).
//
//	go test ./test/cost                                                     (as root)
//	go test ./test/cost -run TestNoPacketCostsMoreUnapproved -v -where 10   where the instructions are
//	go test ./test/cost -run TestNoLoadedProgramGrowsUnapproved -v -verifying 10   and the verifier's work
package cost

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write this kernel's part of record.txt, and what is the same on all, instead of comparing with it")

// objects are the patterns of the objects with programs that the binary embeds, by product; paths begin at this
// package.
var objects = map[string][]string{
	"balancer":      {"../../internal/lb/*/*_bpfel.o", "../../internal/lb/datapath/*/*_bpfel.o"},
	"UDP path":      {"../../internal/udp/*/*_bpfel.o"},
	"pod shortcuts": {"../../internal/pod/*/*_bpfel.o"},
	"diagnosis":     {"../../internal/diag/*/*_bpfel.o"},
	"guard":         {"../../internal/guard/*/*_bpfel.o"},
}

// hasAlternatives are the products with programs that a kernel may refuse: the product then takes another program of the
// same purpose, or names the feature that the kernel lacks. The record names each refusal.
var hasAlternatives = map[string]bool{"diagnosis": true, "guard": true}

const recordFile = "record.txt"

// mapSize replaces the placeholders in maps.h. Real sizes take memory, but change no instruction; 4096 takes as many
// bytes in machine code as they do.
const mapSize = 4096

// variant has the constants of one way to load an object. Constants that an object does not have are left out.
type variant struct {
	name      string
	constants map[string]any
}

// variants of the balancer's programs, as internal/lb/datapath/load.go has them. Each number stands for any number.
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

// with returns the constants of a variant: its features, whether it is for generic mode, and whether sending back is a
// redirect, as on veth.
func with(features uint32, generic, back uint8) map[string]any {
	return map[string]any{"features": features, "generic_mode": generic, "redirect_back": back, "interface_index": uint32(1),
		"handshake_count": uint32(mapSize), "tracked_count": uint32(mapSize), "jiffies_per_second": uint32(250), "tick_shift": uint8(8)}
}

// at adds the direction at tc: packets that come in, or packets that the host sends.
func at(outbound uint8, constants map[string]any) map[string]any {
	constants["outbound"] = outbound
	return constants
}

// TestNoProgramGrowsUnapproved compares the compiled programs, before any kernel has loaded them.
func TestNoProgramGrowsUnapproved(t *testing.T) {
	now := map[string]weight{}
	for name, spec := range programs(t) {
		now[name] = compiledWeight(t, name, spec)
	}
	all := readRecord(t)
	before := all.rows[anyKernel]
	if *update {
		ways, _ := waysOf(t)
		for name, w := range before {
			if depth, ok := w[stack]; ok && slices.Contains(ways, name) { // for the test below
				now[name] = weight{stack: depth}.with(now[name])
			}
		}
		all.rows[anyKernel] = now
		all.write(t)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		compare(t, name, now[name], before[name])
	}
	hint(t)
}

// TestNoLoadedProgramGrowsUnapproved compares the programs as this kernel has loaded them.
func TestNoLoadedProgramGrowsUnapproved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	series := kernelSeries(t)
	all := readRecord(t)
	stacks, loaded, refused := weighAll(t)
	ways, everywhere := waysOf(t)
	if *update {
		all.keep(t, series, loaded, ways)
		all.take(series, stacks, loaded, refused, ways)
		all.write(t)
		return
	}
	t.Logf("on this kernel:\n%s", record{rows: map[string]map[string]weight{anyKernel: stacks, series: loaded}, refused: map[string]map[string]string{series: refused}}.lines())
	isMeasured := runtime.GOARCH == "amd64" && all.rows[series] != nil
	if !isMeasured {
		t.Logf("%s has nothing of kernel %s on %s: only the stack is compared", recordFile, series, runtime.GOARCH)
	}
	for _, name := range slices.Sorted(maps.Keys(loaded)) {
		_, known := all.rows[series][name]
		if !known && !slices.Contains(everywhere, name) {
			continue // builds of a series differ: this one loads a program that another one has refused
		}
		compare(t, name, stacks[name], all.rows[anyKernel][name])
		if isMeasured && (known || slices.Contains(all.complete, series)) {
			compare(t, name+" on "+series, loaded[name], all.rows[series][name])
		}
	}
	if runtime.GOARCH == "amd64" && slices.Contains(all.complete, series) {
		for _, complaint := range all.unrecorded(series, refused) {
			t.Error(complaint)
		}
	}
	hint(t)
}

// TestRecordIsComplete: a kernel that is listed as complete has a line for each program, with its weight or the
// kernel's refusal; a program that all kernels load has its weight. No kernel has a line for a removed program. The
// test needs neither root nor these kernels.
func TestRecordIsComplete(t *testing.T) {
	if *update {
		t.Skip("the record is being written")
	}
	all := readRecord(t)
	ways, everywhere := waysOf(t)
	if len(all.complete) == 0 {
		t.Errorf("%s says of no kernel that it is complete", recordFile)
	}
	for _, series := range all.complete {
		for _, name := range ways {
			if all.rows[series][name] == nil && (all.refused[series][name] == "" || slices.Contains(everywhere, name)) {
				t.Errorf("%s claims to be complete for kernel %s, and lacks %s: run `make approve-weight OTHERS=%s`, or take the kernel out of its line \"complete\" until somebody does",
					recordFile, series, name, series)
			}
		}
	}
	of := programs(t)
	isGone := func(series, name string) {
		if _, isProgram := of[name]; !slices.Contains(ways, name) && !(series == anyKernel && isProgram) {
			t.Errorf("%s has %s of kernel %s, and there is no such program: run `make approve-weight`", recordFile, name, series)
		}
	}
	for series, rows := range all.rows {
		for name := range rows {
			isGone(series, name)
		}
	}
	for series, rows := range all.refused {
		for name := range rows {
			isGone(series, name)
			if all.rows[series][name] != nil {
				t.Errorf("%s has two lines of %s for kernel %s, and only one can be true: run `make approve-weight OTHERS=%s`", recordFile, name, series, series)
			}
		}
	}
}

// loadedByTests are objects that only tests load, so the record leaves them out.
var loadedByTests = []string{
	"internal/diag/ping/late/late_bpfel.o",
	"internal/diag/sched/hold/hold_bpfel.o",
	"internal/event/storm/storm_bpfel.o",
}

// TestRecordLeavesNoObjectOut: an object with programs is one of a product, or only tests load it.
func TestRecordLeavesNoObjectOut(t *testing.T) {
	const root = "../.."
	recorded := slices.Clone(loadedByTests)
	for _, patterns := range objects {
		for _, pattern := range patterns {
			found, err := filepath.Glob(pattern)
			must(t, err)
			for _, file := range found {
				name, err := filepath.Rel(root, file)
				must(t, err)
				recorded = append(recorded, name)
			}
		}
	}
	met := 0
	must(t, filepath.WalkDir(filepath.Join(root, "internal"), func(file string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_bpfel.o") {
			return err
		}
		spec, err := ebpf.LoadCollectionSpec(file)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if met++; len(spec.Programs) > 0 && !slices.Contains(recorded, name) {
			t.Errorf("%s has programs, and %s leaves them out: add the object to a product of objects, or to loadedByTests if only tests load it", name, recordFile)
		}
		return nil
	}))
	if met < len(loadedByTests) {
		t.Errorf("there are %d objects in %s/internal, fewer than only tests load", met, root)
	}
}

// compare reports growth, and programs that are not in the record.
func compare(t *testing.T, name string, now, before weight) {
	t.Helper()
	for _, what := range now.grown(before) {
		t.Errorf("%s: %s", name, what)
	}
}

// hint names the command for an approval.
func hint(t *testing.T) {
	t.Helper()
	if t.Failed() {
		t.Logf("if this is meant, run `make approve-weight`, and for other kernels `make approve-weight OTHERS=6.1,6.12`")
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

// object is an object of a product.
type object struct {
	*ebpf.CollectionSpec
	product string
}

// objectsRead returns the objects by name, "xdp".
func objectsRead(t *testing.T) map[string]object {
	t.Helper()
	all := map[string]object{}
	for product, patterns := range objects {
		var files []string
		for _, pattern := range patterns {
			found, err := filepath.Glob(pattern)
			if err != nil || len(found) == 0 {
				t.Fatalf("found no object of the %s at %s, %v", product, pattern, err)
			}
			files = append(files, found...)
		}
		for _, file := range files {
			name := strings.TrimSuffix(filepath.Base(file), "_bpfel.o")
			if _, ok := all[name]; ok {
				t.Fatalf("two objects have the name of %s, and the record could not tell them apart", file)
			}
			spec, err := ebpf.LoadCollectionSpec(file)
			if err != nil {
				t.Fatalf("reading %s: %v", file, err)
			}
			all[name] = object{spec, product}
		}
	}
	return all
}

// programs returns the programs of all objects, by object and program, "xdp/sh_xdp".
func programs(t *testing.T) map[string]*ebpf.ProgramSpec {
	t.Helper()
	all := map[string]*ebpf.ProgramSpec{}
	for name, o := range objectsRead(t) {
		for program, spec := range o.Programs {
			all[name+"/"+program] = spec
		}
	}
	return all
}

// waysOf returns the names of all programs as they are loaded, "xdp/sh_xdp/native", and the names of the programs that
// every kernel has to load.
func waysOf(t *testing.T) (names, everywhere []string) {
	t.Helper()
	for object, o := range objectsRead(t) {
		for program := range o.Programs {
			name := object + "/" + program
			ways := variantsOf(o.CollectionSpec)
			before := len(names)
			if ways == nil {
				names = append(names, name)
			}
			for _, v := range ways {
				names = append(names, name+"/"+v.name)
			}
			if !hasAlternatives[o.product] {
				everywhere = append(everywhere, names[before:]...)
			}
		}
	}
	slices.Sort(names)
	slices.Sort(everywhere)
	return names, everywhere
}

// compiledWeight is a program's weight before a kernel has seen it, with all functions that it calls.
func compiledWeight(t *testing.T, name string, spec *ebpf.ProgramSpec) weight {
	t.Helper()
	g, err := newGraph(spec.Instructions)
	if err != nil {
		t.Fatalf("cutting %s into blocks: %v", name, err)
	}
	w := weight{instructions: len(spec.Instructions), lookups: 0, calls: 0}
	for _, b := range g.blocks {
		w[lookups] += total(b.lookups)
		w[calls] += total(b.calls)
	}
	return w
}

// weighAll loads every program of every object in every variant. Stacks are returned apart, because all kernels count
// them alike. A program that the kernel refuses is in refused, with the name of the refusal.
func weighAll(t *testing.T) (stacks, loaded map[string]weight, refused map[string]string) {
	t.Helper()
	stacks, loaded, refused = map[string]weight{}, map[string]weight{}, map[string]string{}
	take := func(name string, w weight) {
		stacks[name], loaded[name] = weight{stack: w[stack]}, w
		delete(w, stack)
	}
	for object, o := range objectsRead(t) {
		if hasAlternatives[o.product] {
			each, no := weighApart(t, object, o.CollectionSpec)
			for program, w := range each {
				take(object+"/"+program, w)
			}
			for program, name := range no {
				refused[object+"/"+program] = name
			}
			continue
		}
		ways, end := variantsOf(o.CollectionSpec), func(v variant) string { return "/" + v.name }
		if ways == nil {
			ways, end = []variant{plain}, func(variant) string { return "" }
		}
		for _, v := range ways {
			for program, w := range weigh(t, object, o.Copy(), v) {
				take(object+"/"+program+end(v), w)
			}
		}
	}
	return stacks, loaded, refused
}

// weighApart weighs each program of an object by itself, because the kernel may refuse some.
func weighApart(t *testing.T, object string, spec *ebpf.CollectionSpec) (all map[string]weight, refused map[string]string) {
	t.Helper()
	empty := spec.Copy()
	clear(empty.Programs)
	shared, err := ebpf.NewCollection(empty)
	if err != nil {
		t.Fatalf("making the maps of %s: %v", object, err)
	}
	defer shared.Close()
	all, refused = map[string]weight{}, map[string]string{}
	for program := range spec.Programs {
		one := spec.Copy()
		maps.DeleteFunc(one.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return name != program })
		coll, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{Programs: loading(), MapReplacements: shared.Maps})
		if err != nil {
			if refused[program] = refusalOf(err); refused[program] == "" {
				t.Fatalf("loading %s/%s: %+v", object, program, err)
			}
			t.Logf("%s/%s is refused: %v", object, program, err)
			continue
		}
		all[program], err = loadedWeight(coll.Programs[program], spec.Programs[program])
		coll.Close()
		if err != nil {
			t.Fatalf("%s/%s: %v", object, program, err)
		}
	}
	return all, refused
}

// noTarget is the refusal of a program whose hook or function the kernel does not have; the kernel is not asked.
const noTarget = "no-target"

// refusalOf names the reason why the kernel has not loaded a program: the name of its error, such as EPERM, or
// noTarget. It returns "" for an error that is not the kernel's.
func refusalOf(err error) string {
	var number unix.Errno
	switch {
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, btf.ErrNotFound):
		return noTarget
	case errors.As(err, &number):
		return unix.ErrnoName(number)
	}
	return ""
}

func TestRefusalHasAName(t *testing.T) {
	for want, err := range map[string]error{
		"EPERM": fmt.Errorf("program sh_open: %w", unix.EPERM), "EACCES": &ebpf.VerifierError{Cause: unix.EACCES},
		noTarget: fmt.Errorf("program sh_set_acl: %w", ebpf.ErrNotSupported), "": errors.New("no such file"),
	} {
		if got := refusalOf(err); got != want {
			t.Errorf("%v is called %q, want %q", err, got, want)
		}
	}
}

// loadedWeight is the kernel's weight of a program, and its stack.
func loadedWeight(program *ebpf.Program, spec *ebpf.ProgramSpec) (weight, error) {
	w, err := weightOf(program)
	if err == nil {
		w[stack], err = stackOf(program, spec.Instructions)
	}
	return w, err
}

// variantsOf returns the ways to load an object that balances at an interface, and none for other objects, which have
// the constants of lb/config.h too, but do not use them.
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
func weigh(t *testing.T, file string, spec *ebpf.CollectionSpec, v variant) map[string]weight {
	t.Helper()
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
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Programs: loading()})
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
		w, err := loadedWeight(program, spec.Programs[name])
		if err != nil {
			t.Fatalf("%s of %s (%s): %v", name, file, v.name, err)
		}
		all[name] = w
		explain(t, file+"/"+name+"/"+v.name, program, spec.Programs[name])
	}
	return all
}

// weightOf reads a program's struct bpf_prog_info.
func weightOf(program *ebpf.Program) (weight, error) {
	info, err := program.Info()
	if err != nil {
		return nil, err
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return nil, err
	}
	count, ok := info.VerifiedInstructions() // Linux 5.16
	if !ok {
		return nil, errors.New("the kernel does not say how many instructions it verified")
	}
	return weight{instructions: size / asm.InstructionSize, verified: int(count)}, nil
}

var stackDepths = regexp.MustCompile(`(?m)^stack depth ([\d+]+)`)

// stackOf is the stack of the deepest chain of calls. The verifier's log has the stack of each function, in the order
// of the code, without the functions that nothing calls in this variant.
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

// deepestChain adds up "100+8+33", the stacks of the functions by name, along the calls. Each is rounded up to 32
// bytes, as the verifier did before it knew the finer steps of JITs (check_max_stack_depth in kernel/bpf/verifier.c).
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
	callback := asm.Instructions{ // bpf_loop calls b
		asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc}.WithReference("b").WithSymbol("main"), asm.FnLoop.Call(), asm.Return(),
		asm.Return().WithSymbol("b"),
	}
	got, err = deepestChain([]string{"main", "b"}, "100+33", callback)
	if want := 128 + 64; got != want || err != nil {
		t.Errorf("with a callback, stack is %d, %v, want %d", got, err, want)
	}
	if _, err := deepestChain([]string{"main", "a", "b"}, "100+8", code); err == nil {
		t.Error("a depth too few is not seen")
	}
}
