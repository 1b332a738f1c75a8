package cost

import (
	"maps"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// small is a program whose path is known: a loop of five, a branch, a function that is called
// three times and looks into a map, and a second function that nothing calls.
func small() *ebpf.CollectionSpec {
	call := func(name string) asm.Instruction {
		return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoCall, Constant: -1}.WithReference(name)
	}
	return &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{"table": {Name: "table", Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 1}},
		Programs: map[string]*ebpf.ProgramSpec{"main": {Name: "main", Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{
			// R6 to R9 and R0 are in use in the loop's block: a counter has to find its place.
			asm.Mov.Reg(asm.R9, asm.R1).WithSymbol("main"), // 1
			asm.Mov.Imm(asm.R6, 5),                         // 2
			asm.Mov.Imm(asm.R7, 0),                         // 3
			asm.Mov.Imm(asm.R8, 3),                         // 4
			asm.Mov.Imm(asm.R0, 7),                         // 5
			asm.Add.Reg(asm.R7, asm.R0).WithSymbol("loop"), // 5 times 3
			asm.Sub.Imm(asm.R6, 1),
			asm.JNE.Imm(asm.R6, 0, "loop"),
			asm.JEq.Imm(asm.R7, 35, "called"), // 21: 5 times 7
			asm.Mov.Imm(asm.R0, 0),            // never
			asm.Return(),
			call("sub").WithSymbol("called"), // 3 times 3
			asm.Sub.Imm(asm.R8, 1),
			asm.JGT.Imm(asm.R8, 0, "called"),
			asm.FnGetPrandomU32.Call(), // 31
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.FnJiffies64.Call(),
			asm.Add.Reg(asm.R0, asm.R7),
			asm.Return(),                                             // 35
			asm.StoreImm(asm.RFP, -4, 0, asm.Word).WithSymbol("sub"), // 3 times 7
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, 0).WithReference("table"),
			asm.FnMapLookupElem.Call(),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(), // 56
		}}},
	}
}

// loadCounting loads a collection's main program so that it counts.
func loadCounting(t *testing.T, spec *ebpf.CollectionSpec) *counted {
	t.Helper()
	c, err := count(spec, "main")
	must(t, err)
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(coll.Close)
	c.take(coll, "main")
	return c
}

func TestCounting(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	c := loadCounting(t, small())
	for range 2 {
		if err := c.begin(1000, 234); err != nil {
			t.Fatal(err)
		}
		verdict, err := c.program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		if err != nil || verdict != 1234 {
			t.Errorf("the program returns %d, %v, want 1234", verdict, err)
		}
		got, err := c.end()
		if err != nil {
			t.Fatal(err)
		}
		want := cost{56, map[string]int{"table": 3}, map[string]int{"get_prandom_u32": 1, "jiffies64": 1}}
		if got.instructions != want.instructions || !maps.Equal(got.lookups, want.lookups) || !maps.Equal(got.calls, want.calls) {
			t.Errorf("counted %v, want %v", got, want)
		}
	}
}

// crowded is a program with a branch, taken or not, in which all registers but so many are in use.
func crowded(free int, taken bool) *ebpf.CollectionSpec {
	var code asm.Instructions
	for r := asm.R0; r <= asm.R9-asm.Register(free); r++ {
		code = append(code, asm.Mov.Imm(r, 1))
	}
	code[0] = code[0].WithSymbol("main")
	if !taken {
		code[0].Constant = 0
	}
	code = append(code, asm.JEq.Imm(asm.R0, 0, "end"), asm.Add.Reg(asm.R0, asm.R0), asm.Add.Reg(asm.R1, asm.R1).WithSymbol("end"))
	for r := asm.R1; r <= asm.R9-asm.Register(free); r++ {
		code = append(code, asm.Add.Reg(asm.R0, r))
	}
	return &ebpf.CollectionSpec{Maps: map[string]*ebpf.MapSpec{}, Programs: map[string]*ebpf.ProgramSpec{
		"main": {Name: "main", Type: ebpf.XDP, License: "GPL", Instructions: append(code, asm.Return())}}}
}

// TestCountingWithoutRoom has blocks without two registers for a counter.
func TestCountingWithoutRoom(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	for free := range 3 {
		for _, taken := range []bool{false, true} {
			spec := crowded(free, taken)
			want := len(spec.Programs["main"].Instructions)
			if !taken {
				want--
			}
			c := loadCounting(t, spec)
			if err := c.begin(0, 0); err != nil {
				t.Fatal(err)
			}
			if _, err := c.program.Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil {
				t.Fatal(err)
			}
			got, err := c.end()
			switch {
			case free == 0 && err == nil:
				t.Errorf("with no register free, %d instructions are counted, and nobody can know", got.instructions)
			case free > 0 && (err != nil || got.instructions != want):
				t.Errorf("with %d registers free, branch taken %t: counted %d instructions, %v, want %d", free, taken, got.instructions, err, want)
			}
		}
	}
}

// TestContradictionIsSeen sets a counter to an impossible value.
func TestContradictionIsSeen(t *testing.T) {
	g, err := newGraph(small().Programs["main"].Instructions)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.withCounters("counts"); err != nil {
		t.Fatal(err)
	}
	counters := make([]uint64, len(g.blocks))
	if _, err := g.solve(counters); err != nil {
		t.Errorf("nothing was run: %v", err)
	}
	counters[0] = 1
	if times, err := g.solve(counters); err == nil {
		t.Errorf("the program has begun and not ended, and that is %v", times)
	}
}

func TestUnknownInstructionIsRefused(t *testing.T) {
	for _, ins := range []asm.Instruction{asm.LoadAbs(0, asm.Word), {OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.JumpOp(0xe0))}} {
		if _, err := newGraph(asm.Instructions{ins.WithSymbol("main"), asm.Return()}); err == nil {
			t.Errorf("%v is taken for a known instruction", ins)
		}
	}
}
