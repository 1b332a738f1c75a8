package tidy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// TestObjectsHaveOneOrderOfTypes: the same sources make the same object on every machine, which
// `make verify-generated` relies on.
func TestObjectsHaveOneOrderOfTypes(t *testing.T) {
	var found []violation
	seen := 0
	for _, pattern := range []string{"*/*_bpfel.o", "*/*/*_bpfel.o", "*/*/*/*_bpfel.o", "*/*/*/*/*_bpfel.o"} {
		objects, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range objects {
			object, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			seen++
			found = append(found, typeOrder(source{strings.TrimPrefix(path, root+"/"), string(object)})...)
		}
	}
	if seen == 0 {
		t.Fatal("there are no BPF objects, so the rule checks nothing")
	}
	report(t, found)

	finds(t, typeOrder, source{"bpf/a_bpfel.o", forwards(t, "one")})
	finds(t, typeOrder, source{"bpf/a_bpfel.o", forwards(t, "one", "two")}, 1)
	finds(t, typeOrder, source{"bpf/a_bpfel.o", "no BTF"}, 1)
}

// typeOrder finds objects of which clang knew two or more structs by name only: it writes them in
// the order of their addresses in its memory.
func typeOrder(s source) []violation {
	spec, err := btf.LoadSpecFromReader(strings.NewReader(s.text))
	if err != nil {
		return []violation{s.at(1, "read the BTF: %v", err)}
	}
	var names []string
	for kind, err := range spec.All() {
		if err != nil {
			return []violation{s.at(1, "read the BTF: %v", err)}
		}
		if forward, ok := kind.(*btf.Fwd); ok {
			names = append(names, forward.Name)
		}
	}
	if len(names) < 2 {
		return nil
	}
	return []violation{s.at(1, "clang has only the names of the structs %s, and their order varies: "+
		"have all but one of them written in full, as in bpf/ctx/sk_buff.h", strings.Join(names, ", "))}
}

// forwards makes BTF with structs that have only a name.
func forwards(t *testing.T, names ...string) string {
	t.Helper()
	builder, err := btf.NewBuilder(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if _, err := builder.Add(&btf.Fwd{Name: name, Kind: btf.FwdStruct}); err != nil {
			t.Fatal(err)
		}
	}
	blob, err := builder.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return string(blob)
}
