package abi

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/shunt-lb/shunt/test/golden"
)

// TestABIGolden prints all types and maps that programs and user space share. A change to it
// must be intended: a different layout needs another SHUNT_ABI.
func TestABIGolden(t *testing.T) {
	spec, err := loadAbi()
	must(t, err)
	var types []btf.Type
	for typ, err := range spec.Types.All() {
		must(t, err)
		switch typ.(type) {
		case *btf.Struct, *btf.Union, *btf.Enum:
			if typ.TypeName() != "" {
				types = append(types, typ)
			}
		}
	}
	slices.SortFunc(types, func(a, b btf.Type) int { return strings.Compare(a.TypeName(), b.TypeName()) })
	var out strings.Builder
	out.WriteString("# What BPF programs and user space share, from the type information of abi.bpf.c.\n" +
		"# Written by `go test ./internal/lb/datapath/abi -update`.\n")
	for _, typ := range types {
		printType(t, &out, typ)
	}
	out.WriteString("\n# Maps: type, sizes of key and value, flags. Sizes in elements follow from limits.\n\n")
	names := make([]string, 0, len(spec.Maps))
	for name := range spec.Maps {
		if !strings.HasPrefix(name, ".") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		m := spec.Maps[name]
		fmt.Fprintf(&out, "%-14s %-14s key %2d, value %3d, flags %#x\n", name, m.Type, m.KeySize, m.ValueSize, m.Flags)
	}
	golden.Require(t, "../../../../test/abi.golden", out.String())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func printType(t *testing.T, out *strings.Builder, typ btf.Type) {
	t.Helper()
	size, err := btf.Sizeof(typ)
	must(t, err)
	switch typ := typ.(type) {
	case *btf.Struct:
		fmt.Fprintf(out, "\nstruct %s: %d bytes\n", typ.Name, size)
		for _, m := range typ.Members {
			size, err := btf.Sizeof(m.Type)
			must(t, err)
			fmt.Fprintf(out, "%5d %3d  %-20s %s\n", m.Offset.Bytes(), size, m.Name, typeName(m.Type))
		}
	case *btf.Enum:
		fmt.Fprintf(out, "\nenum %s: %d bytes\n", typ.Name, size)
		for _, v := range typ.Values {
			fmt.Fprintf(out, "%#10x  %s\n", v.Value, v.Name)
		}
	default:
		t.Errorf("%s is a %T: no unions cross between the programs and Go", typ.TypeName(), typ)
	}
}

// typeName returns a field's type as C writes it.
func typeName(typ btf.Type) string {
	switch typ := typ.(type) {
	case *btf.Array:
		return fmt.Sprintf("%s[%d]", typeName(typ.Type), typ.Nelems)
	case *btf.Struct:
		return "struct " + typ.Name
	}
	return typ.TypeName()
}

// TestNamesFitTheKernel: the kernel cuts the names of maps and programs.
func TestNamesFitTheKernel(t *testing.T) {
	for _, load := range []func() (*ebpf.CollectionSpec, error){loadAbi, loadXdp, loadTc, loadSweep, loadStopgap, loadDrops, loadGate, loadCheck} {
		spec, err := load()
		must(t, err)
		for name := range spec.Programs {
			if len(name) > 15 || !strings.HasPrefix(name, "sh_") {
				t.Errorf("program %s: names begin with sh_ and have at most 15 characters", name)
			}
		}
		for name := range spec.Maps {
			if !strings.HasPrefix(name, ".") && (len(name) > 15 || !strings.HasPrefix(name, "sh_")) {
				t.Errorf("map %s: names begin with sh_ and have at most 15 characters", name)
			}
		}
	}
}
