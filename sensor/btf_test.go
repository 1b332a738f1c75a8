package sensor

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// aKernelWithoutBTF has an os-release of its own and no BTF.
func aKernelWithoutBTF(t *testing.T) (s search, release string) {
	t.Helper()
	folder := t.TempDir()
	s = search{kernel: filepath.Join(folder, "vmlinux"), osRelease: filepath.Join(folder, "os-release")}
	write(t, s.osRelease, "PRETTY_NAME=\"An OS\"\nID=anos\nVERSION_ID=\"7\"\n")
	release, err := kernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	return s, release
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// types is a small and valid BTF.
func types(t *testing.T) string {
	t.Helper()
	b, err := btf.NewBuilder([]btf.Type{&btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := b.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestBTFIsFound(t *testing.T) {
	s, release := aKernelWithoutBTF(t)
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x86_64"
	}
	for _, place := range []string{filepath.Join("anos", "7", arch, release+".btf"), release + ".btf"} {
		folder := t.TempDir()
		path := filepath.Join(folder, place)
		write(t, path, types(t))
		got, err := s.find("", []string{t.TempDir(), folder})
		if err != nil || got.From != path || got.Spec == nil {
			t.Errorf("%s: got %v, %v", place, got, err)
		}
		if got, err := s.find(path, nil); err != nil || got.From != path {
			t.Errorf("named: got %v, %v", got, err)
		}
	}
	write(t, s.kernel, "")
	if got, err := s.find("", nil); err != nil || got.Spec != nil || !strings.Contains(got.From, s.kernel) {
		t.Errorf("the kernel's own: got %v, %v", got, err)
	}
}

func TestBTFThatIsMissing(t *testing.T) {
	s, release := aKernelWithoutBTF(t)
	folder := t.TempDir()
	if _, err := s.find("", []string{folder}); err == nil || !strings.Contains(err.Error(), folder) || !strings.Contains(err.Error(), "BTFHub") {
		t.Errorf("the refusal does not say where to get it: %v", err)
	}
	write(t, filepath.Join(folder, release+".btf.tar.xz"), "")
	if _, err := s.find("", []string{folder}); err == nil || !strings.Contains(err.Error(), "unpack") {
		t.Errorf("packed: %v", err)
	}
	broken := filepath.Join(folder, "broken.btf")
	write(t, broken, "not BTF")
	if _, err := s.find(broken, nil); err == nil || !strings.Contains(err.Error(), broken) {
		t.Errorf("broken: %v", err)
	}
}
