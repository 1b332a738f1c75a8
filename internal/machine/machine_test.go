package machine

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestArchive reads an archive back by the format's own lengths.
func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := NewArchive(&b)
	for _, f := range []struct{ name, data string }{{"/init", "x"}, {"/a/b/c", "12345"}, {"/a/b/d", ""}} {
		if err := a.Add(f.name, []byte(f.data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if b.Len()%4 != 0 {
		t.Errorf("length %d is not a multiple of 4", b.Len())
	}
	var names []string
	for rest := b.String(); rest != ""; {
		if !strings.HasPrefix(rest, "070701") {
			t.Fatalf("no header at %q", rest)
		}
		size, nameSize := hex(t, rest[54:62]), hex(t, rest[94:102])
		end := (110 + nameSize + 3) &^ 3
		names = append(names, rest[110:110+nameSize-1]+"="+rest[end:end+size])
		rest = rest[end+(size+3)&^3:]
	}
	want := []string{"init=x", "a=", "a/b=", "a/b/c=12345", "a/b/d=", "TRAILER!!!="}
	if !slices.Equal(names, want) {
		t.Errorf("archive holds %q, want %q", names, want)
	}
}

func hex(t *testing.T, digits string) int {
	t.Helper()
	n := 0
	for _, c := range digits {
		i := strings.IndexRune("0123456789ABCDEF", c)
		if i < 0 {
			t.Fatalf("%q is no hexadecimal number", digits)
		}
		n = n*16 + i
	}
	return n
}

// TestAccelerator: a version that is not known to translate safely gets one thread.
func TestAccelerator(t *testing.T) {
	for version, want := range map[string]string{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\n": "tcg,thread=single",
		"QEMU emulator version 8.0.5\n":                                 "tcg,thread=single",
		"QEMU emulator version 8.1.0\n":                                 "tcg,thread=multi",
		"QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\n":         "tcg,thread=multi",
		"qemu\n": "tcg,thread=single",
	} {
		if got := Accelerator(version); got != want {
			t.Errorf("%q: %s, want %s", version, got, want)
		}
	}
}

// A program that is packed has its loader and its libraries with it, each once.
func TestLibraries(t *testing.T) {
	got := libraries("\tlinux-vdso.so.1 (0x00007ffe)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n")
	want := []string{"/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAddProgram(t *testing.T) {
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	loader, err := loaderOf(shell)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	a := NewArchive(&b)
	for _, name := range []string{"/bin/sh", "/bin/dash"} {
		if err := a.AddProgram(name, shell); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"bin/sh", "bin/dash", strings.TrimPrefix(loader, "/")} {
		if n := bytes.Count(b.Bytes(), []byte("\x00"+name+"\x00")) + bytes.Count(b.Bytes(), []byte("00000000"+name+"\x00")); name != "" && n != 1 {
			t.Errorf("%s is %d times in the archive", name, n)
		}
	}
}
