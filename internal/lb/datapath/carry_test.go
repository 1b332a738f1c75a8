package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/maphash"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

func TestWays(t *testing.T) {
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

// widened is a next version whose maps have longer values, all zero at the end.
func widened(names ...string) *abi.Version {
	v := *abi.Built()
	v.ABI++
	v.Objects = maps.Clone(v.Objects)
	for object, load := range abi.Built().Objects {
		v.Objects[object] = func() (*ebpf.CollectionSpec, error) {
			spec, err := load()
			for _, name := range names {
				if m, ok := spec.Maps[name]; ok {
					m.ValueSize += 8
					m.Value = nil
				}
			}
			return spec, err
		}
	}
	step := abi.Step{From: v.ABI - 1, To: v.ABI, Maps: map[string]abi.Convert{}}
	for _, name := range names {
		step.Maps[name] = func(key, value []byte) ([]byte, []byte, error) {
			return key, append(bytes.Clone(value), make([]byte, 8)...), nil
		}
	}
	v.Steps = []abi.Step{step}
	return &v
}

func pinnedMap(t *testing.T, opts Options, number uint32, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(opts.mapDir(number), name), nil)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// TestCarryMaps: what the daemon writes is copied, what programs count is copied and counts on,
// and all the rest is the same map.
func TestCarryMaps(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	want := fill(t, d)
	cpus, err := ebpf.PossibleCPU()
	must(t, err)
	counted := func(m *ebpf.Map, index uint32, words int, first uint64) {
		t.Helper()
		values := make([][]byte, cpus)
		for cpu := range values {
			values[cpu] = make([]byte, 8*words)
			binary.NativeEndian.PutUint64(values[cpu], first)
			binary.NativeEndian.PutUint64(values[cpu][8:], uint64(cpu))
		}
		must(t, m.Put(index, values))
	}
	counted(d.maps[abi.MapSvcTraffic], 3, 5, 100)
	counted(d.maps[abi.MapSvcTraffic], 5, 5, 7)
	flow := bytes.Repeat([]byte{1}, 40)
	must(t, d.maps[abi.MapFlows].Put(flow, make([]byte, 72)))
	must(t, d.Close())

	opts.Version = widened(abi.MapNames, abi.MapSvcTraffic)
	must(t, opts.complete())
	opts.Version.At = func(p abi.Point) error {
		switch p {
		case abi.PointCopied: // an old program counts on
			counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 3, 5, 110)
			counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 4, 5, 3)
		case abi.PointSwitched: // and a new one
			counted(pinnedMap(t, opts, 2, abi.MapSvcTraffic), 3, 6, 101)
		}
		return nil
	}
	next := mustOpen(t, opts)
	for index, first := range map[uint32]uint64{3: 111, 4: 3, 5: 7, 6: 0} {
		var values [][]byte
		must(t, next.maps[abi.MapSvcTraffic].Lookup(index, &values))
		for cpu, v := range values {
			second := uint64(cpu)
			if first == 0 {
				second = 0
			}
			if len(v) != 48 || binary.NativeEndian.Uint64(v) != first || binary.NativeEndian.Uint64(v[8:]) != second {
				t.Errorf("counter %d of CPU %d is %v, want %d and %d", index, cpu, v, first, second)
			}
		}
	}
	names := 0
	must(t, eachOne(next.maps[abi.MapNames], func(key, value []byte) error {
		names++
		index := binary.NativeEndian.Uint32(key[4:])
		if name := want.Services[index].Name; len(value) != 72 || string(bytes.TrimRight(value, "\x00")) != name {
			t.Errorf("service %d is called %q, want %q", index, value, name)
		}
		return nil
	}))
	if names != len(want.Services) {
		t.Errorf("%d services have names, want %d", names, len(want.Services))
	}
	if value, err := next.maps[abi.MapFlows].LookupBytes(flow); err != nil || value == nil {
		t.Errorf("the flow table, whose layout is the same, is not the same: %v, %v", value, err)
	}
	if _, err := os.Stat(opts.mapDir(1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old maps are still there: %v", err)
	}
}

// TestStepsThatAreRefused: what cannot be carried while packets come is refused before anything
// is changed.
func TestStepsThatAreRefused(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	want := fill(t, d)
	must(t, d.Close())
	undeclared := widened(abi.MapNames)
	undeclared.Steps[0].Maps = nil
	distant := widened()
	distant.ABI++
	limits := opts
	limits.Limits.Flows++
	limits.Version = widened(abi.MapNames)
	for name, c := range map[string]struct {
		opts Options
		v    *abi.Version
		says string
	}{
		"remembered flows":      {opts, widened(abi.MapRemembered), "carry sh_remembered over"},
		"a map not in the step": {opts, undeclared, "sh_names"},
		"a step missing":        {opts, distant, "cannot upgrade from there; nothing was changed"},
		"other limits":          {limits, widened(abi.MapNames), "limits.flows is 5001"},
	} {
		c.opts.Version = c.v
		if _, err := Open(c.opts); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want the words %q", name, err, c.says)
		}
		if _, err := os.Stat(opts.mapDir(2)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: something was left: %v", name, err)
		}
	}
	requireContents(t, &mustOpen(t, opts).View, want)
}

// TestFlowsWithoutRoom: a table that is too small is an error, not a loss.
func TestFlowsWithoutRoom(t *testing.T) {
	needRoot(t)
	table := func(size uint32) *ebpf.Map {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 40, ValueSize: 72, MaxEntries: size})
		must(t, err)
		t.Cleanup(func() { m.Close() })
		return m
	}
	old, own := table(10_000), table(9_999)
	for i := range uint32(10_000) {
		must(t, old.Put(binary.NativeEndian.AppendUint32(make([]byte, 36), i), make([]byte, 72)))
	}
	f := flowCarry{conversions: conversions{}, old: old, own: own, hash: maphash.MakeSeed(), carried: map[uint64]uint64{}}
	if err := f.copy(); err == nil || !strings.Contains(err.Error(), "it has no room") {
		t.Errorf("10,000 entries went into a table of 9,999: %v", err)
	}
	f.own, f.carried = table(10_000), map[uint64]uint64{}
	must(t, f.copy())
	n := 0
	must(t, each(f.own, func(_, _ []byte) error { n++; return nil }))
	if n != 10_000 {
		t.Errorf("%d of 10,000 entries were copied", n)
	}
}
