package kernel

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// TestParseOnce: an object is parsed at the first call, and a caller's changes stay in its own
// copy.
func TestParseOnce(t *testing.T) {
	parsed := 0
	load := ParseOnce(func() (*ebpf.CollectionSpec, error) {
		parsed++
		return &ebpf.CollectionSpec{
			Maps:     map[string]*ebpf.MapSpec{"m": {MaxEntries: 1}},
			Programs: map[string]*ebpf.ProgramSpec{"p": {Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}}},
		}, nil
	})
	if parsed != 0 {
		t.Error("it is parsed before it is asked for")
	}
	mine, err := load()
	if err != nil {
		t.Fatal(err)
	}
	mine.Maps["m"].MaxEntries = 7
	mine.Programs["p"].Instructions[0].Constant = 7
	delete(mine.Programs, "p")
	other, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if p := other.Programs["p"]; parsed != 1 || other.Maps["m"].MaxEntries != 1 || p == nil || p.Instructions[0].Constant != 0 {
		t.Errorf("parsed %d times; another caller has %+v with the changes of the first", parsed, other)
	}

	fault := errors.New("no object")
	if spec, err := ParseOnce(func() (*ebpf.CollectionSpec, error) { return nil, fault })(); spec != nil || !errors.Is(err, fault) {
		t.Errorf("an object that cannot be parsed: %v, %v", spec, err)
	}
}
