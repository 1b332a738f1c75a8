package machine

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// Archive writes the "newc" cpio format, as the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst describes it: a header of
// 110 ASCII characters, the name, the data, name and data padded to 4 bytes.
type Archive struct {
	w     io.Writer
	ino   uint32
	dirs  map[string]bool
	files map[string]bool // by the names given to Add
}

// The type bits of a cpio mode (inode(7)).
const (
	modeDir     = 0o040000
	modeRegular = 0o100000
)

// NewArchive writes to w, until Close.
func NewArchive(w io.Writer) *Archive {
	return &Archive{w: w, dirs: map[string]bool{".": true, "": true}, files: map[string]bool{}}
}

// AddFile packs a file of this machine.
func (a *Archive) AddFile(name, from string, perm uint32) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return a.Add(name, data, perm)
}

// Add packs data under an absolute name, and the directories above it.
func (a *Archive) Add(name string, data []byte, perm uint32) error {
	a.files[name] = true
	name = strings.TrimPrefix(name, "/")
	if err := a.addDir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, modeRegular|perm, data)
}

// addDir packs a directory and those above it, once.
func (a *Archive) addDir(name string) error {
	name = strings.TrimPrefix(name, "/")
	if a.dirs[name] {
		return nil
	}
	if err := a.addDir(path.Dir(name)); err != nil {
		return err
	}
	a.dirs[name] = true
	return a.entry(name, modeDir|0o755, nil)
}

// Close writes the entry that ends an archive.
func (a *Archive) Close() error { return a.entry("TRAILER!!!", 0, nil) }

func (a *Archive) entry(name string, mode uint32, data []byte) error {
	a.ino++
	var b bytes.Buffer
	b.WriteString("070701")
	for _, field := range []uint32{a.ino, mode, 0, 0, 1, 0, uint32(len(data)), 0, 0, 0, 0, uint32(len(name) + 1), 0} {
		fmt.Fprintf(&b, "%08X", field)
	}
	b.WriteString(name)
	b.WriteByte(0)
	for b.Len()%4 != 0 {
		b.WriteByte(0)
	}
	if _, err := a.w.Write(b.Bytes()); err != nil {
		return err
	}
	if _, err := a.w.Write(data); err != nil {
		return err
	}
	_, err := a.w.Write(make([]byte, (4-len(data)%4)%4))
	return err
}

// AddProgram packs a program of this machine, with its loader and its libraries, under the names by which the
// loader finds them here.
func (a *Archive) AddProgram(name, from string) error {
	loader, err := loaderOf(from)
	if err != nil {
		return err
	}
	if err := a.AddFile(name, from, 0o755); err != nil || loader == "" {
		return err
	}
	out, err := exec.Command(loader, "--list", from).Output()
	if err != nil {
		return fmt.Errorf("ask %s which libraries %s needs: %w", loader, from, err)
	}
	for _, file := range append(libraries(string(out)), loader) {
		if a.files[file] {
			continue
		}
		if err := a.AddFile(file, file, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// loaderOf is the path of the program that loads another one (PT_INTERP of elf(5)); empty: none is needed.
func loaderOf(program string) (string, error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("read the program %s: %w", program, err)
	}
	defer f.Close() //nolint:errcheck // only read
	for _, part := range f.Progs {
		if part.Type == elf.PT_INTERP {
			path, err := io.ReadAll(part.Open())
			return strings.TrimRight(string(path), "\x00"), err
		}
	}
	return "", nil
}

// libraries are the files that `ld.so --list` names: "name => /path (0x...)" or "/path (0x...)".
func libraries(list string) (files []string) {
	for line := range strings.Lines(list) {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "/") && !slices.Contains(files, word) {
				files = append(files, word)
			}
		}
	}
	return files
}
