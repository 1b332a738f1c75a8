// Package stranger has XDP programs that are not shunt's, for tests about living beside them.
package stranger

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Verdicts, of enum xdp_action in linux/bpf.h.
const (
	drop = 1
	pass = 2
)

// The element of sh_chain that a foreign program calls to hand a packet to shunt. Foreign
// programs are built with this number, so it stands here once more.
const chainNext = 1

// Discard is the UDP port whose packets Filter drops (RFC 863).
const Discard = 9

// hasFrags is BPF_F_XDP_HAS_FRAGS of linux/bpf.h.
const hasFrags = 1 << 5

func load(t testing.TB, spec ebpf.ProgramSpec) *ebpf.Program {
	t.Helper()
	spec.Type, spec.License = ebpf.XDP, "MIT"
	p, err := ebpf.NewProgram(&spec)
	if err != nil {
		t.Fatalf("load %s: %v", spec.Name, err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Pass passes every packet. It takes frames in one buffer only, as programs did before Linux
// 5.18.
func Pass(t testing.TB, name string) *ebpf.Program {
	return load(t, ebpf.ProgramSpec{Name: name, AttachType: ebpf.AttachXDP,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, pass), asm.Return()}})
}

// Drop drops every packet.
func Drop(t testing.TB, name string) *ebpf.Program {
	return load(t, ebpf.ProgramSpec{Name: name, AttachType: ebpf.AttachXDP, Flags: hasFrags,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, drop), asm.Return()}})
}

// Filter drops UDP over IPv4 to the port Discard, and hands all other packets to shunt by its
// chain.
func Filter(t testing.TB, name string, chain *ebpf.Map) *ebpf.Program {
	const port = Discard << 8 // as a little-endian machine reads it
	return load(t, ebpf.ProgramSpec{Name: name, AttachType: ebpf.AttachXDP, Flags: hasFrags, Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 38), // Ethernet 14, IPv4 20, both UDP ports 4
		asm.JGT.Reg(asm.R4, asm.R3, "next"),
		asm.LoadMem(asm.R5, asm.R2, 12, asm.Half),
		asm.JNE.Imm(asm.R5, 0x0008, "next"),
		asm.LoadMem(asm.R5, asm.R2, 23, asm.Byte),
		asm.JNE.Imm(asm.R5, 17, "next"),
		asm.LoadMem(asm.R5, asm.R2, 36, asm.Half),
		asm.JNE.Imm(asm.R5, port, "next"),
		asm.Mov.Imm(asm.R0, drop),
		asm.Return(),
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("next"),
		asm.LoadMapPtr(asm.R2, chain.FD()),
		asm.Mov.Imm(asm.R3, chainNext),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, pass),
		asm.Return(),
	}})
}

// Count passes every packet and counts it. packets reads the count.
func Count(t testing.TB, name string) (p *ebpf.Program, packets func() uint64) {
	t.Helper()
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Name: "counter", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = counter.Close() })
	p = load(t, ebpf.ProgramSpec{Name: name, AttachType: ebpf.AttachXDP, Flags: hasFrags, Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R0, 0),
		asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, counter.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("out"),
		asm.Return(),
	}})
	return p, func() (n uint64) {
		t.Helper()
		if err := counter.Lookup(uint32(0), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
}
