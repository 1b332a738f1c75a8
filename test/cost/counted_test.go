package cost

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// The cost of a packet is counted as follows. Before the program is loaded, each of its blocks gets a counter, four
// instructions at a place with two registers free (solve_test.go handles the few blocks that have no such place). So
// the kernel runs the program, with its own maps and helpers, and the counters count the compiler's instructions that
// ran, without their own. They do not count the kernel's own changes, which differ from kernel to kernel: it removes
// the jumps that constants decide, or their conditions (here each is an instruction like others), replaces calls that
// look up an element of an array by instructions, and puts a few instructions of its own around some helpers. A read
// of a constant is no look-up, but an instruction or two.
//
// An interpreter in Go would change nothing in the program, but would have to repeat all work of the kernel, maps and
// helpers too. TestCounting checks this method with programs whose counts are known, and for each packet the unchanged
// program must give the same result as the counting one, to the byte.
//
// The test sets the time and random numbers. At another time the same packet takes another path: a flow is looked
// after once a second.

// countsMap and a program's name are the name of a map with one element: two words in place of helpers, and the
// blocks' counters.
const (
	countsMap  = "counts of "
	wordSize   = 8
	wordNow    = 0 // for bpf_jiffies64
	wordRandom = 1 // for bpf_get_prandom_u32
	wordFirst  = 2 // the first block's counter
)

var fixed = map[asm.BuiltinFunc]uint32{asm.FnJiffies64: wordNow, asm.FnGetPrandomU32: wordRandom}

// cost is the cost of one run of a program.
type cost struct {
	instructions int
	lookups      map[string]int // by map
	calls        map[string]int // of other helpers
}

// counted is a program that counts.
type counted struct {
	*graph
	program *ebpf.Program
	counts  *ebpf.Map
	words   []uint64
	times   []int // runs of each block, after end
}

// count changes a program of a collection so that it counts.
func count(spec *ebpf.CollectionSpec, program string) (*counted, error) {
	p := spec.Programs[program]
	g, err := newGraph(p.Instructions)
	if err != nil {
		return nil, fmt.Errorf("cutting %s into blocks: %w", program, err)
	}
	code, err := g.withCounters(countsMap + program)
	if err != nil {
		return nil, fmt.Errorf("counting in %s: %w", program, err)
	}
	p.Instructions = code
	words := make([]uint64, wordFirst+len(g.blocks))
	spec.Maps[countsMap+program] = &ebpf.MapSpec{Name: "counts", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(wordSize * len(words)), MaxEntries: 1}
	return &counted{graph: g, words: words}, nil
}

// wordOf loads the address of a word of the counters' map into a register.
func wordOf(counts string, r asm.Register, word int) asm.Instruction {
	return asm.LoadMapValue(r, 0, uint32(wordSize*word)).WithReference(counts)
}

// counter adds one to a word, or, with a single register, only notes that the block ran.
func counter(counts string, free []asm.Register, word int) asm.Instructions {
	switch len(free) {
	case 0:
		return nil
	case 1:
		return asm.Instructions{wordOf(counts, free[0], word), asm.StoreImm(free[0], 0, 1, asm.Word)}
	}
	return asm.Instructions{wordOf(counts, free[0], word), asm.LoadMem(free[1], free[0], 0, asm.DWord), asm.Add.Imm(free[1], 1),
		asm.StoreMem(free[0], 0, free[1], asm.DWord)}
}

// withCounters is the program with a counter in each block, in a map. Jumps get names for distances.
func (g *graph) withCounters(counts string) (out asm.Instructions, err error) {
	code := slices.Clone(g.code)
	for from, to := range g.target {
		name := code[to].Symbol()
		if name == "" {
			name = fmt.Sprintf("to %d", to)
			code[to] = code[to].WithSymbol(name)
		}
		jump := code[from].WithReference(name)
		if isFar(jump) {
			jump.Constant = -1
		} else {
			jump.Offset = -1
		}
		code[from] = jump
	}
	for i := range g.blocks {
		b := &g.blocks[i]
		at, free := g.room(b)
		b.free = len(free)
		for j := b.first; j < b.end; j++ {
			begin := len(out)
			if j == at {
				out = append(out, counter(counts, free, wordFirst+i)...)
			}
			ins := code[j]
			name := ins.Symbol()
			if word, ok := fixed[asm.BuiltinFunc(ins.Constant)]; ok && ins.IsBuiltinCall() {
				out = append(out, wordOf(counts, asm.R0, int(word)).WithSource(ins.Source()), asm.LoadMem(asm.R0, asm.R0, 0, asm.DWord))
				if btf.FuncMetadata(&ins) != nil {
					return nil, errors.New("a function begins with a helper that is replaced")
				}
			} else {
				// A call that the kernel lacks is replaced at load, and the name with it.
				if name != "" && begin == len(out) && btf.CORERelocationMetadata(&ins) != nil && btf.FuncMetadata(&ins) == nil {
					out = append(out, asm.Instruction{OpCode: asm.Ja.Op(asm.ImmSource)}.WithSource(ins.Source())) // jumps to the next one
				}
				if name != "" && begin != len(out) { // jumps lead to the counter
					ins = ins.WithSymbol("")
				}
				out = append(out, ins)
			}
			if name != "" {
				out[begin] = out[begin].WithSymbol(name)
			}
		}
	}
	return out, nil
}

// take finds the program and the map that count has prepared in the loaded collection.
func (c *counted) take(coll *ebpf.Collection, program string) {
	c.program, c.counts = coll.Programs[program], coll.Maps[countsMap+program]
}

// begin sets all counters to zero, and the time and the random number that the program gets.
func (c *counted) begin(now, random uint64) error {
	clear(c.words)
	c.words[wordNow], c.words[wordRandom] = now, random
	return c.counts.Put(uint32(0), c.words)
}

// end returns the cost since begin.
func (c *counted) end() (cost, error) {
	got := cost{lookups: map[string]int{}, calls: map[string]int{}}
	if err := c.counts.Lookup(uint32(0), &c.words); err != nil {
		return got, err
	}
	var err error
	if c.times, err = c.solve(c.words[wordFirst:]); err != nil {
		return got, err
	}
	for i, b := range c.blocks {
		n := c.times[i]
		got.instructions += n * (b.end - b.first)
		add(got.lookups, b.lookups, n)
		add(got.calls, b.calls, n)
	}
	return got, nil
}

func add(to, each map[string]int, n int) {
	for name, k := range each {
		if n > 0 {
			to[name] += n * k
		}
	}
}

// portion is a part of the source, with the number of instructions that ran there.
type portion struct {
	name         string
	instructions int
}

// portions returns the places of the last run's instructions, most first: by function as the compiler has left them,
// by file, and by line.
func (c *counted) portions() [3][]portion {
	perLine, perFile, perFunction := map[string]int{}, map[string]int{}, map[string]int{}
	for i, b := range c.blocks {
		line := "?"
		for j := b.first; j >= 0; j-- { // the line of the block's begin
			if at := lineOf(c.code[j]); at != "" {
				line = at
				break
			}
		}
		for j := b.first; j < b.end; j++ {
			if at := lineOf(c.code[j]); at != "" {
				line = at
			}
			if n := c.times[i]; n > 0 {
				file, _, _ := strings.Cut(line, ":")
				perLine[line] += n
				perFile[file] += n
				perFunction[b.function] += n
			}
		}
	}
	return [3][]portion{sorted(perFunction), sorted(perFile), sorted(perLine)}
}

func lineOf(ins asm.Instruction) string {
	line, ok := ins.Source().(*btf.Line)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s:%d", filepath.Base(line.FileName()), line.LineNumber())
}

func sorted(m map[string]int) (list []portion) {
	for name, n := range m {
		list = append(list, portion{name, n})
	}
	slices.SortFunc(list, func(a, b portion) int {
		return cmp.Or(cmp.Compare(b.instructions, a.instructions), cmp.Compare(a.name, b.name))
	})
	return list
}
