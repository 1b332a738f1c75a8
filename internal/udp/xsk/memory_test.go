package xsk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMemoryIsSealedAndShared(t *testing.T) {
	m, err := NewMemory(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, size := range []int64{1 << 15, 1 << 17} {
		if err := unix.Ftruncate(m.FD, size); !errors.Is(err, unix.EPERM) {
			t.Errorf("resizing to %d bytes: %v", size, err)
		}
	}
	fd, err := unix.FcntlInt(uintptr(m.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	other, err := AdoptMemory(fd)
	if err != nil {
		t.Fatal(err)
	}
	m.bytes[4711] = 42
	if other.bytes[4711] != 42 {
		t.Error("the memory is not shared")
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
}

func TestMemoryThatCouldShrinkIsRefused(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := AdoptMemory(fd); err == nil || !strings.Contains(err.Error(), "so that its size cannot change") {
		t.Errorf("a memfd without seals: %v", err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := AdoptMemory(int(file.Fd())); err == nil {
		t.Error("a file that is no memfd was accepted")
	}
}
