package upgrade

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/bed"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

func TestFindConversions(t *testing.T) {
	var called []string
	step := func(from, to uint32, names ...string) abi.Step {
		s := abi.Step{From: from, To: to, Maps: map[string]abi.Convert{}}
		for _, name := range names {
			s.Maps[name] = func(key, value []byte) ([]byte, []byte, error) {
				called = append(called, name)
				return key, append(bytes.Clone(value), byte(to)), nil
			}
		}
		return s
	}
	steps := []abi.Step{step(2, 3, "a"), step(1, 2, "a", "b"), step(3, 2, "b"), step(5, 6)}
	for _, c := range []struct {
		from, to uint32
		ok       bool
		maps     []string
	}{
		{1, 3, true, []string{"a", "b"}}, {2, 3, true, []string{"a"}}, {3, 2, true, []string{"b"}}, {2, 2, true, nil},
		{3, 1, false, nil}, {3, 6, false, nil}, {1, 4, false, nil}, {0, 1, false, nil},
	} {
		w, ok := findConversions(steps, c.from, c.to)
		if ok != c.ok || ok && !slices.Equal(slices.Sorted(maps.Keys(w)), c.maps) {
			t.Errorf("from %d to %d: %v, for %v; want %v, for %v", c.from, c.to, ok, w, c.ok, c.maps)
		}
	}
	w, _ := findConversions(steps, 1, 3)
	if _, value, err := w.convert("a", nil, []byte{0}); value != nil || err != nil || len(called) != 1 {
		t.Errorf("an element without a key was converted to %v, %v, by %v: it is to be left out", value, err, called)
	}
	if _, value, err := w.convert("a", []byte{9}, []byte{0}); !bytes.Equal(value, []byte{0, 2, 3}) || err != nil {
		t.Errorf("two steps made %v, %v", value, err)
	}
	w["a"] = append(w["a"], func([]byte, []byte) ([]byte, []byte, error) { panic("of the test") })
	if _, _, err := w.convert("a", []byte{9}, []byte{0}); err == nil || !strings.Contains(err.Error(), "of the test") {
		t.Errorf("a panic became %v", err)
	}
}

// TestFlowsWithoutRoom: a table that is too small is an error, not a loss.
func TestFlowsWithoutRoom(t *testing.T) {
	bed.NeedRoot(t)
	table := func(size uint32) *ebpf.Map {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 40, ValueSize: 72, MaxEntries: size})
		bed.Must(t, err)
		t.Cleanup(func() { m.Close() })
		return m
	}
	old, own := table(10_000), table(9_999)
	for i := range uint32(10_000) {
		bed.Must(t, old.Put(binary.NativeEndian.AppendUint32(make([]byte, 36), i), make([]byte, 72)))
	}
	f := flowCarry{conversions: conversions{}, old: old, own: own, hash: maphash.MakeSeed(), carried: map[uint64]uint64{}}
	if err := f.copy(); err == nil || !strings.Contains(err.Error(), "it has no room") {
		t.Errorf("10,000 entries went into a table of 9,999: %v", err)
	}
	f.own, f.carried = table(10_000), map[uint64]uint64{}
	bed.Must(t, f.copy())
	n := 0
	bed.Must(t, store.Each(f.own, func(_, _ []byte) error { n++; return nil }))
	if n != 10_000 {
		t.Errorf("%d of 10,000 entries were copied", n)
	}
}
