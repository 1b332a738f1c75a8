package cost

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// registers is a set of R0 to R9. R10, the stack, is never free.
type registers uint16

const (
	allRegisters registers = 1<<10 - 1
	arguments    registers = 0b111110 // R1 to R5
	clobbered    registers = 0b111111 // the registers that a call leaves nothing in: R0 has the result
)

// helperArguments has the number of arguments of helpers. Other helpers are taken to have five, which leaves less
// room and does no other harm.
var helperArguments = map[asm.BuiltinFunc]int{
	asm.FnJiffies64: 0, asm.FnGetPrandomU32: 0, asm.FnMapLookupElem: 2, asm.FnMapDeleteElem: 2, asm.FnXdpAdjustHead: 2,
	asm.FnXdpAdjustTail: 2, asm.FnXdpGetBuffLen: 1, asm.FnTailCall: 3, asm.FnRedirectMap: 3, asm.FnMapUpdateElem: 4,
	asm.FnXdpLoadBytes: 4, asm.FnXdpStoreBytes: 4, asm.FnFibLookup: 4, asm.FnLoop: 4,
}

func setOf(list ...asm.Register) (set registers) {
	for _, r := range list {
		set |= 1 << r & allRegisters
	}
	return set
}

// block is a part of a program that runs from its first instruction to its last, or not at all.
type block struct {
	first, end int    // of the program's instructions, end is behind the last
	function   string // that it is part of
	isEntry    bool   // of the function
	next, prev []int  // blocks
	live       registers
	free       int            // registers at the place of its counter; with two it counts, with one it only notes
	lookups    map[string]int // by map
	calls      map[string]int // of all other helpers, by name
}

// graph is a program, with all functions that it calls, cut into blocks.
type graph struct {
	code   asm.Instructions
	blocks []block
	at     map[int]int // a block's first instruction -> the block
	target map[int]int // a jump -> its target
}

// newGraph cuts a program into blocks, and finds the registers that are in use at each.
func newGraph(code asm.Instructions) (*graph, error) {
	g := &graph{code: slices.Clone(code), at: map[int]int{}, target: map[int]int{}}
	if err := g.findTargets(); err != nil {
		return nil, err
	}
	if err := g.cut(); err != nil {
		return nil, err
	}
	if err := g.findLive(); err != nil {
		return nil, err
	}
	for i := range g.blocks {
		g.countCalls(&g.blocks[i])
	}
	return g, nil
}

func isJump(ins asm.Instruction) bool {
	op := ins.OpCode.JumpOp()
	return ins.OpCode.Class().IsJump() && op != asm.Call && op != asm.Exit
}

// isEnd reports whether the instruction ends a block. A tail call may leave the program; no other call does.
func isEnd(ins asm.Instruction) bool {
	return isJump(ins) || ins.OpCode.JumpOp() == asm.Exit || ins.IsBuiltinCall() && asm.BuiltinFunc(ins.Constant) == asm.FnTailCall
}

// isAlways reports whether a jump has no condition, and isFar whether its distance is in the field where others
// have a constant.
func isAlways(ins asm.Instruction) bool { return ins.OpCode.JumpOp() == asm.Ja }
func isFar(ins asm.Instruction) bool {
	return isAlways(ins) && ins.OpCode.Class() == asm.Jump32Class
}

// findTargets finds the targets of jumps. The compiler's jumps have a distance in slots of eight bytes; the jumps
// of a hand-written program have a name.
func (g *graph) findTargets() error {
	bySlot, byName := map[asm.RawInstructionOffset]int{}, map[string]int{}
	iter := g.code.Iterate()
	for iter.Next() {
		bySlot[iter.Offset] = iter.Index
		if name := iter.Ins.Symbol(); name != "" {
			byName[name] = iter.Index
		}
	}
	iter = g.code.Iterate()
	for iter.Next() {
		ins := *iter.Ins
		if !isJump(ins) {
			continue
		}
		distance := int64(ins.Offset)
		if isFar(ins) {
			distance = ins.Constant
		}
		to, ok := bySlot[asm.RawInstructionOffset(int64(iter.Offset)+1+distance)]
		if name := ins.Reference(); name != "" {
			to, ok = byName[name]
		}
		if !ok {
			return fmt.Errorf("instruction %d, %v, jumps to nowhere", iter.Index, ins)
		}
		g.target[iter.Index] = to
	}
	return nil
}

func (g *graph) cut() error {
	begins := make([]bool, len(g.code)+1)
	begins[0], begins[len(g.code)] = true, true
	function := map[int]string{}
	for i, ins := range g.code {
		if btf.FuncMetadata(&g.code[i]) != nil || i == 0 || ins.Symbol() != "" && g.isFunction(ins.Symbol()) {
			function[i] = ins.Symbol()
			begins[i] = true
		}
		if isEnd(ins) {
			begins[i+1] = true
		}
		if to, ok := g.target[i]; ok {
			begins[to] = true
		}
	}
	name := ""
	for i := range g.code {
		named, isEntry := function[i]
		if isEntry {
			name = named
		}
		if begins[i] {
			g.at[i] = len(g.blocks)
			g.blocks = append(g.blocks, block{first: i, function: name, isEntry: isEntry})
		}
		g.blocks[len(g.blocks)-1].end = i + 1
	}
	for b := range g.blocks {
		last := g.blocks[b].end - 1
		ins := g.code[last]
		if to, ok := g.target[last]; ok {
			g.join(b, g.at[to])
		}
		if ins.OpCode.JumpOp() == asm.Exit || isAlways(ins) && isJump(ins) {
			continue
		}
		if b+1 == len(g.blocks) || g.blocks[b+1].isEntry {
			return fmt.Errorf("%s runs on behind its end", g.blocks[b].function)
		}
		g.join(b, b+1)
	}
	return nil
}

func (g *graph) join(from, to int) {
	if slices.Contains(g.blocks[from].next, to) { // a jump to the next instruction
		return
	}
	g.blocks[from].next = append(g.blocks[from].next, to)
	g.blocks[to].prev = append(g.blocks[to].prev, from)
}

// isFunction reports whether an instruction calls the name, or takes its address.
func (g *graph) isFunction(name string) bool {
	return slices.ContainsFunc(g.code, func(ins asm.Instruction) bool {
		return ins.IsFunctionReference() && ins.Reference() == name
	})
}

// argumentsOf returns the registers that a call reads; for a function in the program, the ones that the function
// reads.
func (g *graph) argumentsOf(call asm.Instruction) registers {
	if call.IsFunctionCall() {
		for _, b := range g.blocks {
			if b.isEntry && b.function == call.Reference() {
				return b.live & arguments
			}
		}
	}
	if n, ok := helperArguments[asm.BuiltinFunc(call.Constant)]; ok && call.IsBuiltinCall() {
		return arguments & (1<<(n+1) - 1)
	}
	return arguments
}

// effect returns the registers that an instruction reads, and the ones that it writes.
func (g *graph) effect(ins asm.Instruction) (reads, writes registers, err error) {
	op, dst, src := ins.OpCode, setOf(ins.Dst), setOf(ins.Src)
	switch class := op.Class(); {
	case ins.IsConstantLoad(asm.DWord) || op.IsDWordLoad():
		return 0, dst, nil
	case class == asm.LdXClass:
		return src, dst, nil
	case class == asm.StClass:
		return dst, 0, nil
	case class == asm.StXClass && op.Mode() == asm.MemMode:
		return dst | src, 0, nil
	case class == asm.StXClass && op.AtomicOp() == asm.CmpXchg:
		return dst | src | setOf(asm.R0), setOf(asm.R0), nil
	case class == asm.StXClass && slices.Contains([]asm.AtomicOp{asm.AddAtomic, asm.AndAtomic, asm.OrAtomic, asm.XorAtomic}, op.AtomicOp()):
		return dst | src, 0, nil
	case class == asm.StXClass && slices.Contains([]asm.AtomicOp{asm.FetchAdd, asm.FetchAnd, asm.FetchOr, asm.FetchXor, asm.Xchg}, op.AtomicOp()):
		return dst | src, src, nil
	case class.IsALU() && op.ALUOp() == asm.Swap:
		return dst, dst, nil
	case class.IsALU():
		if op.Source() != asm.RegSource {
			src = 0
		}
		if slices.Contains([]asm.ALUOp{asm.Mov, asm.MovSX8, asm.MovSX16, asm.MovSX32}, op.ALUOp()) {
			return src, dst, nil
		}
		return dst | src, dst, nil
	case op.JumpOp() == asm.Call:
		return g.argumentsOf(ins), clobbered, nil
	case op.JumpOp() == asm.Exit:
		return setOf(asm.R0), 0, nil
	case isJump(ins) && isAlways(ins):
		return 0, 0, nil
	case isJump(ins) && op.JumpOp() <= asm.JSLE && op.Source() == asm.RegSource:
		return dst | src, 0, nil
	case isJump(ins) && op.JumpOp() <= asm.JSLE:
		return dst, 0, nil
	}
	return 0, 0, fmt.Errorf("%v is an instruction that nobody has thought of here", ins)
}

// before returns the registers in use before an instruction, from the ones in use behind it.
func (g *graph) before(ins asm.Instruction, behind registers) (registers, error) {
	reads, writes, err := g.effect(ins)
	return behind&^writes | reads, err
}

// behind returns the registers in use at a block's end. A function that returns leaves R0 alone; its caller's
// values in R6 to R9 are out of its reach.
func (g *graph) behind(b *block) (live registers) {
	for _, next := range b.next {
		live |= g.blocks[next].live
	}
	return live
}

// findLive repeats until nothing changes any more, because code has loops.
func (g *graph) findLive() error {
	for changed := true; changed; {
		changed = false
		for i := len(g.blocks) - 1; i >= 0; i-- {
			b := &g.blocks[i]
			live, err := g.behind(b), error(nil)
			for j := b.end - 1; j >= b.first; j-- {
				if live, err = g.before(g.code[j], live); err != nil {
					return fmt.Errorf("%s, instruction %d: %w", b.function, j, err)
				}
			}
			changed = changed || live != b.live
			b.live = live
		}
	}
	return nil
}

// room finds the place for a counter in a block: before an instruction with two registers free, or if there is
// none, with one. It returns these registers. A function's first instruction stays first, because the kernel wants
// the function's name and line there.
func (g *graph) room(b *block) (at int, free []asm.Register) {
	live := g.behind(b)
	for i := b.end - 1; i >= b.first && len(free) < 2; i-- {
		live, _ = g.before(g.code[i], live)
		if b.isEntry && i == b.first {
			break
		}
		var here []asm.Register
		for r := asm.R0; r <= asm.R9 && len(here) < 2; r++ {
			if live&setOf(r) == 0 {
				here = append(here, r)
			}
		}
		if len(here) > len(free) {
			at, free = i, here
		}
	}
	return at, free
}

// isRepeated reports whether a block may run more than once in one call of its function.
func (g *graph) isRepeated(b int) bool {
	seen := map[int]bool{}
	var reach func(from int) bool
	reach = func(from int) bool {
		for _, next := range g.blocks[from].next {
			if next == b {
				return true
			}
			if !seen[next] {
				seen[next] = true
				if reach(next) {
					return true
				}
			}
		}
		return false
	}
	return reach(b)
}

func (g *graph) countCalls(b *block) {
	b.lookups, b.calls = map[string]int{}, map[string]int{}
	for i := b.first; i < b.end; i++ {
		ins := g.code[i]
		switch {
		case ins.IsKfuncCall():
			b.calls[ins.Reference()]++
		case ins.IsBuiltinCall():
			name := helperName(asm.BuiltinFunc(ins.Constant))
			if !strings.HasPrefix(name, "map_") && name != "redirect_map" {
				b.calls[name]++
				continue
			}
			maps := map[string]bool{}
			g.mapsIn(asm.R1, b, i, map[int]bool{}, maps)
			which := "?"
			if len(maps) == 1 {
				for which = range maps {
				}
			}
			if name == "map_lookup_elem" {
				b.lookups[which]++
			} else {
				b.calls[name+"("+which+")"]++
			}
		}
	}
}

var wordBoundary = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// helperName is "get_prandom_u32" of FnGetPrandomU32.
func helperName(f asm.BuiltinFunc) string {
	return strings.ToLower(wordBoundary.ReplaceAllString(strings.TrimPrefix(f.String(), "Fn"), "${1}_$2"))
}

// mapsIn finds the maps that a register may point to before an instruction of a block, going back to the
// instruction that wrote it.
func (g *graph) mapsIn(r asm.Register, b *block, at int, seen map[int]bool, found map[string]bool) {
	for i := at - 1; i >= b.first; i-- {
		ins := g.code[i]
		_, writes, _ := g.effect(ins)
		switch {
		case writes&setOf(r) == 0:
			continue
		case ins.IsLoadFromMap():
			found[ins.Reference()] = true
		case ins.OpCode.ALUOp() == asm.Mov && ins.OpCode.Source() == asm.RegSource:
			g.mapsIn(ins.Src, b, i, seen, found)
		default:
			found["?"] = true
		}
		return
	}
	if b.isEntry {
		found["?"] = true
	}
	for _, prev := range b.prev {
		if key := prev<<4 | int(r); !seen[key] {
			seen[key] = true
			g.mapsIn(r, &g.blocks[prev], g.blocks[prev].end, seen, found)
		}
	}
}
