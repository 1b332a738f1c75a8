package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// object is a compiled object's maps in miniature.
func object() *ebpf.CollectionSpec {
	array := func(name string, elements uint32) *ebpf.MapSpec {
		return &ebpf.MapSpec{Name: name, Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: elements}
	}
	return &ebpf.CollectionSpec{Maps: map[string]*ebpf.MapSpec{
		"a_fixed": array("a_fixed", 3), "b_sized": array("b_sized", 1), "c_sized": array("c_sized", 1), ".rodata": array(".rodata", 1),
	}}
}

// testRoot is a folder of bpffs that the test may fill.
func testRoot(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes BPF maps")
	}
	root := fmt.Sprintf("%s/shunt-kernel-test-%d", DefaultPinRoot, os.Getpid())
	must(t, os.Mkdir(root, 0o700))
	t.Cleanup(func() { must(t, os.RemoveAll(root)) })
	return root
}

func from(limit string, given uint32) Size {
	return Size{Count: 2*given + 1, Limit: limit, Given: given, Per: 2, More: 1}
}

func set(t *testing.T, dir string, sizes map[string]Size) *MapSet {
	t.Helper()
	s, err := NewMapSet(object(), dir, sizes, "take it away")
	must(t, err)
	return s
}

func requireError(t *testing.T, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("got %v, want an error with %q", err, words)
	}
}

func TestMapSetComesBack(t *testing.T) {
	root := testRoot(t)
	dir := MapDirectory(root, "_product", 7)
	sizes := map[string]Size{"b_sized": from("limits.b", 10), "c_sized": from("limits.c", 20)}
	_, err := set(t, dir, sizes).OpenPinned()
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("before anything is pinned: %v, want that it does not exist", err)
	}
	for _, again := range []bool{false, true} {
		opened, adopted, err := set(t, dir, sizes).Open()
		must(t, err)
		if adopted != again {
			t.Errorf("adopted is %v, want %v", adopted, again)
		}
		if names := slices.Sorted(maps.Keys(opened)); !slices.Equal(names, []string{"a_fixed", "b_sized", "c_sized"}) {
			t.Errorf("opened %q", names)
		}
		for name, want := range map[string]uint32{"a_fixed": 3, "b_sized": 21, "c_sized": 41} {
			if have := opened[name].MaxEntries(); have != want {
				t.Errorf("%s has %d elements, want %d", name, have, want)
			}
		}
		CloseMaps(opened)
	}
	abis, err := PinnedABIs(root, "_product")
	must(t, err)
	if !slices.Equal(abis, []uint32{7}) {
		t.Errorf("there are maps of the ABIs %d, want 7", abis)
	}
}

// Pinned maps that do not fit are refused, and stay as they were.
func TestMapSetRefusesWhatDoesNotFit(t *testing.T) {
	dir := MapDirectory(testRoot(t), "_product", 7)
	sizes := func(a, b, c uint32) map[string]Size {
		return map[string]Size{"a_fixed": {Count: a}, "b_sized": from("limits.b", b), "c_sized": from("limits.c", c)}
	}
	opened, _, err := set(t, dir, sizes(3, 10, 20)).Open()
	must(t, err)
	CloseMaps(opened)

	for words, other := range map[string]map[string]Size{
		"limits.c is 21, but the loaded data plane was made for 20: take it away or set it back": sizes(4, 10, 21),
		"map a_fixed would have 4 elements, but the loaded data plane's has 3: take it away":     sizes(4, 10, 20),
	} {
		_, _, err := set(t, dir, other).Open()
		requireError(t, err, words)
	}
	changed := object()
	changed.Maps["a_fixed"].ValueSize = 16
	s, err := NewMapSet(changed, dir, sizes(3, 10, 20), "take it away")
	must(t, err)
	_, _, err = s.Open()
	requireError(t, err, dir+"/a_fixed is not the one this version uses, though its ABI number is the same: take it away")

	_, err = NewMapSet(object(), dir, map[string]Size{"b_sized": {Limit: "limits.b"}}, "")
	requireError(t, err, "limits.b is 0, so map b_sized would be empty")

	opened, adopted, err := set(t, dir, sizes(3, 10, 20)).Open()
	must(t, err)
	CloseMaps(opened)
	if !adopted {
		t.Error("the maps have gone")
	}
}

// The kernel refuses the second map, so the first must go.
func TestMapSetThatCannotBeMadeLeavesNothing(t *testing.T) {
	root := testRoot(t)
	spec := object()
	spec.Maps["c_sized"].KeySize = 8 // an array's is 4
	s, err := NewMapSet(spec, MapDirectory(root, "_product", 1), nil, "take it away")
	must(t, err)
	_, _, err = s.Open()
	requireError(t, err, "make map c_sized of 1 elements")
	if _, err := os.Stat(Directory(root, "_product")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the product's directory is still there: %v", err)
	}
}
