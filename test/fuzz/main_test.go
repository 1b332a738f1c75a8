package main

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/test/unchanged"
)

// TestFiles: a target depends on its own package, on the packages that it imports, on its corpus, and on a
// nested module's files as on the main module's.
func TestFiles(t *testing.T) {
	t.Chdir("../..")
	targets, err := find(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		target target
		files  []string
	}{
		{target{"internal/packet", "FuzzParse"}, []string{"go.sum", "internal/packet/packet_test.go"}},
		{target{"internal/guard/policy", "FuzzLoad"}, []string{"internal/guard/policy/policy.go", "internal/config/decode.go", "internal/value/value.go"}},
		{target{"kube/translate", "FuzzService"}, []string{"kube/translate/fuzz_test.go", "kube/translate/translate.go", "internal/value/value.go"}},
		{target{"test/packet", "FuzzPacket"}, []string{"internal/lb/datapath/abi/xdp_bpfel.o", "test/packet/testdata"}},
	} {
		if !slices.Contains(targets, want.target) {
			t.Errorf("%s is not found among %v", want.target, targets)
			continue
		}
		files, err := want.target.files()
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range want.files {
			if !slices.Contains(files, filepath.FromSlash(file)) {
				t.Errorf("%s does not depend on %s", want.target, file)
			}
		}
		if i := slices.IndexFunc(files, func(f string) bool { return !filepath.IsLocal(f) || f == unchanged.Record }); i >= 0 {
			t.Errorf("%s depends on %s, which is not the repository's, or the record itself", want.target, files[i])
		}
	}
}
