package cost

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

var verifying = flag.Int("verifying", 0, "with -v: print for each program so many functions that the verifier spends the most instructions on")

// verifierLogSize is room for a line for each instruction that the verifier goes through, with its
// state there. The kernel takes no more than a quarter of 4 GiB.
const verifierLogSize = 256 << 20

// loading returns the options to load a program for weighing.
func loading() ebpf.ProgramOptions {
	if *verifying == 0 {
		return ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}
	}
	return ebpf.ProgramOptions{LogLevel: ebpf.LogLevelInstruction | ebpf.LogLevelStats, LogSizeStart: verifierLogSize}
}

// visited is an instruction in the verifier's log: its number in the program, and its code.
var visited = regexp.MustCompile(`(?m)^(\d+): \([0-9a-f]{2}\)`)

// function is a part of a program, and the verifier's work on it.
type function struct {
	name         string
	offset, size int // instructions
	verified     int // instructions that the verifier went through, each as often as it did
}

// verifiedFunctions returns a program's functions in their order, with the counts from a verifier's
// log.
func verifiedFunctions(log string, spec *ebpf.ProgramSpec) []function {
	var all []function
	end := 0
	for i := spec.Instructions.Iterate(); i.Next(); {
		if name := i.Ins.Symbol(); name != "" {
			all = append(all, function{name: name, offset: int(i.Offset)})
		}
		end = int(i.Offset) + int(i.Ins.Width())
	}
	for i := range all {
		all[i].size = end - all[i].offset
		if i+1 < len(all) {
			all[i].size = all[i+1].offset - all[i].offset
		}
	}
	for _, line := range visited.FindAllStringSubmatch(log, -1) {
		at, err := strconv.Atoi(line[1])
		i, exact := slices.BinarySearchFunc(all, at, func(f function, at int) int { return cmp.Compare(f.offset, at) })
		if !exact {
			i--
		}
		if err == nil && i >= 0 {
			all[i].verified++
		}
	}
	return all
}

// explain prints the functions that the verifier spent its instructions on.
func explain(t *testing.T, name string, program *ebpf.Program, spec *ebpf.ProgramSpec) {
	t.Helper()
	if *verifying == 0 {
		return
	}
	all := verifiedFunctions(program.VerifierLog, spec)
	slices.SortStableFunc(all, func(a, b function) int { return cmp.Compare(b.verified, a.verified) })
	var text strings.Builder
	for _, f := range all[:min(*verifying, len(all))] {
		fmt.Fprintf(&text, "%8d  %-24s %5d instructions, each %.1f times\n", f.verified, f.name, f.size, float64(f.verified)/float64(max(f.size, 1)))
	}
	t.Logf("%s: what the verifier went through:\n%s", name, &text)
}

// TestVerifiedFunctions: a log's lines count for their functions.
func TestVerifiedFunctions(t *testing.T) {
	spec := programs(t)["xdp/sh_xdp"]
	first := verifiedFunctions("", spec)
	if len(first) < 2 || first[0].offset != 0 {
		t.Fatalf("sh_xdp has the functions %+v", first)
	}
	last := first[len(first)-1]
	log := fmt.Sprintf("0: R1=ctx() R10=fp0\n0: (bf) r6 = r1\n; code\n%d: (b7) r0 = 0 ; R0_w=0\nfrom 1 to %d: R0=0\n%d: R0=0\n%d: (95) exit\n%d: (95) exit\n",
		last.offset, last.offset, last.offset, last.offset+last.size-1, first[1].offset-1)
	got := map[string]int{}
	for _, f := range verifiedFunctions(log, spec) {
		if f.verified != 0 {
			got[f.name] += f.verified
		}
	}
	want := map[string]int{first[0].name: 2, last.name: 2}
	if !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}
