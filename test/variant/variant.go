// Package variant makes programs that differ from the product's in a few lines of bpf/: the next
// version's, for tests of upgrades, and broken ones, for tests of tests (test/broken).
package variant

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// Change is a text that has to be in a file of bpf/ once, and its replacement.
type Change struct{ File, From, To string }

// Sources copies the sources in from to the new directory to, with the changes.
func Sources(from, to string, changes ...Change) error {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	for _, c := range changes {
		path := filepath.Join(to, c.File)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(text), c.From); n != 1 {
			return fmt.Errorf("%s has %d times, not once:\n%s\nmake the change anew", path, n, c.From)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(text), c.From, c.To, 1)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// compiler is the one of bpf/toolchain.
const compiler = "clang-19"

// Compile makes the object of one source, as it is made for the product but with warnings, because a
// change may leave code unused.
func Compile(t testing.TB, source, object string) {
	t.Helper()
	if _, err := exec.LookPath(compiler); err != nil {
		t.Skipf("needs %s and libbpf's headers: compiles programs (.ci/packages clang-19 libbpf-dev linux-libc-dev)", compiler)
	}
	out, err := exec.Command(compiler, "-target", "bpf", "-O2", "-g", "-mcpu=v3", "-I/usr/include/x86_64-linux-gnu", "-c", source, "-o", object).CombinedOutput()
	if err != nil {
		t.Fatalf("compiling %s: %v\n%s", source, err, out)
	}
}

// xdpObject is the environment variable that names the XDP object which tests load.
const xdpObject = "SHUNT_TEST_XDP"

// Environment makes a command's tests load an XDP object instead of the product's.
func Environment(object string) string { return xdpObject + "=" + object }

// FromEnvironment is the version of the product whose XDP object the environment names; nil if it
// names none.
func FromEnvironment() *abi.Version {
	object := os.Getenv(xdpObject)
	if object == "" {
		return nil
	}
	v := *abi.Built()
	v.Objects = maps.Clone(v.Objects)
	v.Objects["xdp"] = func() (*ebpf.CollectionSpec, error) { return ebpf.LoadCollectionSpec(object) }
	return &v
}
