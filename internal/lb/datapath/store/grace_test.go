package store

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// TestGraceWaitsForRunningPrograms runs an XDP program that says when it begins and when
// it ends, some hundred milliseconds later.
func TestGraceWaitsForRunningPrograms(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	words, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	defer words.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "slow", Type: ebpf.XDP, License: "GPL", Instructions: slow(words.FD())})
	must(t, err)
	defer program.Close()
	done := make(chan error, 1)
	state := func() (word uint64) {
		must(t, words.Lookup(uint32(0), &word))
		return word
	}
	for tries := 0; state() != 1; tries++ {
		if tries == 20 {
			t.Skip("each time the program had ended before it could be waited for: nothing else ran meanwhile, as with one CPU")
		}
		if tries > 0 { // on a busy machine the program had ended before the test looked
			must(t, <-done)
		}
		must(t, words.Put(uint32(0), uint64(0)))
		go func() {
			_, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			done <- err
		}()
		for state() == 0 { // it has not begun
		}
	}
	must(t, d.Grace())
	if state() != 2 {
		t.Error("Grace returned while a program that had begun before was running")
	}
	must(t, <-done)
}

// slow stores 1 in the map's word, spends some time in bpf_loop, and stores 2.
func slow(fd int) asm.Instructions {
	const rounds = 8 << 20 // BPF_MAX_LOOPS
	number, pointer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}, &btf.Pointer{Target: &btf.Void{}}
	main := &btf.Func{Name: "slow", Linkage: btf.GlobalFunc, Type: &btf.FuncProto{
		Return: number, Params: []btf.FuncParam{{Name: "ctx", Type: pointer}}}}
	round := &btf.Func{Name: "round", Linkage: btf.StaticFunc, Type: &btf.FuncProto{
		Return: number, Params: []btf.FuncParam{{Name: "index", Type: number}, {Name: "ctx", Type: pointer}}}}
	ins := asm.Instructions{
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0), main).WithSymbol("slow"),
		asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, fd),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreMem(asm.R6, 0, asm.R1, asm.DWord),
	}
	for range 10 {
		ins = append(ins,
			asm.Mov.Imm(asm.R1, rounds),
			asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}.WithReference("round"),
			asm.Mov.Imm(asm.R3, 0),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnLoop.Call())
	}
	return append(ins,
		asm.Mov.Imm(asm.R1, 2),
		asm.StoreMem(asm.R6, 0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, kernel.XDPPass).WithSymbol("out"),
		asm.Return(),
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0), round).WithSymbol("round"),
		asm.Return())
}
