package demo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Of kernels that can decide it is the newest, wherever distributions keep it.
func TestFindKernel(t *testing.T) {
	root := t.TempDir()
	add := func(image, config, text string, age time.Duration) {
		for name, contents := range map[string]string{image: "image", config: text} {
			name = filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, []byte(contents), 0o600); err != nil {
				t.Fatal(err)
			}
			at := time.Now().Add(-age)
			if err := os.Chtimes(name, at, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	expect := func(want string) {
		t.Helper()
		if want != "" {
			want = filepath.Join(root, want)
		}
		if got := findKernel(root); got != want {
			t.Errorf("found %q, want %q", got, want)
		}
	}
	add("boot/vmlinuz-7.0", "boot/config-7.0", "CONFIG_BPF=y\n# CONFIG_BPF_LSM is not set\n", 0)
	expect("")
	add("boot/vmlinuz-6.1", "boot/config-6.1", "CONFIG_BPF=y\nCONFIG_BPF_LSM=y\n", 3*time.Hour)
	expect("boot/vmlinuz-6.1")
	add("lib/modules/6.9/vmlinuz", "lib/modules/6.9/config", "CONFIG_BPF_LSM=y\n", time.Hour)
	expect("lib/modules/6.9/vmlinuz")
	add("boot/vmlinuz-6.8", "boot/config-6.8", "CONFIG_BPF_LSM=y\n", 2*time.Hour)
	expect("lib/modules/6.9/vmlinuz")
}

// Missing programs are named by their packages.
func TestAbsent(t *testing.T) {
	if got := absent([]string{"a", "b"}).Error(); !strings.Contains(got, "\n  apt-get install --no-install-recommends a b\n") {
		t.Error(got)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := newGuest("any"); err == nil || !strings.Contains(err.Error(), " qemu-system-x86\n") {
		t.Errorf("without an emulator: %v", err)
	}
}
