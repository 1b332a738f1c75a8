package vdisk

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// File is a file that the process read or wrote, as of the end of the recording.
type File struct {
	Path        string `json:"path"`
	Descriptors []int  `json:"descriptors"`
	Device      uint32 `json:"device"` // the file system's, as the kernel has it: major << 20 | minor
	Inode       uint64 `json:"inode"`
	Generation  uint32 `json:"generation,omitempty"` // of a guest's file: tells files apart that had the same inode one after the other
	Size        uint64 `json:"size"`
	Block       uint32 `json:"block"`  // of a block device: its own number
	Direct      bool   `json:"direct"` // past the page cache
	// Format is the image's format, and "raw" if all its requests had the same offset in the file as in the virtual disk. "":
	// not known.
	Format  string    `json:"format"`
	Chain   []string  `json:"chain"`   // of an image in a format: its own path and those of its backing files
	Map     []Stretch `json:"map"`     // of an image in a format: the places of the virtual disk
	Extents []Extent  `json:"extents"` // the places of the file
}

// Stretch is a part of a virtual disk, as `qemu-img map` reports it.
type Stretch struct {
	Start      uint64  `json:"start"`
	Length     uint64  `json:"length"`
	Depth      int     `json:"depth"` // 0: the image itself, 1: its backing file, …
	Present    bool    `json:"present"`
	Zero       bool    `json:"zero"`
	Data       bool    `json:"data"`
	Compressed bool    `json:"compressed,omitempty"`
	Offset     *uint64 `json:"offset,omitempty"` // in the file; nil: nowhere
}

// Extent is a part of a file, in bytes.
type Extent struct {
	Logical  uint64 `json:"logical"`
	Physical uint64 `json:"physical"` // on the file system's device
	Length   uint64 `json:"length"`
	Unknown  bool   `json:"unknown,omitempty"` // the file system has not decided yet, or there is no such place
	Empty    bool   `json:"empty,omitempty"`   // it has a place, but nothing has been written there
}

// before orders extents that end by the offset before all others.
func before(end, offset uint64) int {
	if end > offset {
		return 1
	}
	return -1
}

// find returns the stretch that contains an offset of the virtual disk.
func find(m []Stretch, offset uint64) *Stretch {
	i, _ := slices.BinarySearchFunc(m, offset, func(s Stretch, o uint64) int { return before(s.Start+s.Length, o) })
	if i == len(m) || m[i].Start > offset {
		return nil
	}
	return &m[i]
}

// sector returns the 512-byte sector of the file system's device that has an offset of the file.
func (f *File) sector(offset uint64, start uint64) (uint64, bool) {
	if f.Block != 0 {
		return offset/512 + start, true
	}
	i, _ := slices.BinarySearchFunc(f.Extents, offset, func(e Extent, o uint64) int { return before(e.Logical+e.Length, o) })
	if i == len(f.Extents) || f.Extents[i].Logical > offset || f.Extents[i].Unknown {
		return 0, false
	}
	return (f.Extents[i].Physical+offset-f.Extents[i].Logical)/512 + start, true
}

// isHole reports whether a part of the file has no data: it is read without a disk.
func (f *File) isHole(offset, bytes uint64) bool {
	if f.Block != 0 || f.Extents == nil {
		return false
	}
	for _, e := range f.Extents {
		if !e.Empty && e.Logical < offset+bytes && offset < e.Logical+e.Length {
			return false
		}
	}
	return true
}

// From linux/fiemap.h and linux/fs.h.
const (
	fiemapIoctl       = 0xc020660b
	fiemapHeader      = 32
	fiemapExtentBytes = 56
	fiemapBatch       = 512
	fiemapLast        = 1
	fiemapUnwritten   = 0x800
	fiemapUnknown     = 2 | 4 | 8 | 0x80 | 0x100 | 0x200 // UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE
	extentsMax        = 1 << 20
)

// readExtents asks the file system where a file is. It flushes nothing.
func readExtents(path string) ([]Extent, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("ask where %s is: %w", path, err)
	}
	defer f.Close() //nolint:errcheck // only read
	var all []Extent
	buffer := make([]uint64, (fiemapHeader+fiemapBatch*fiemapExtentBytes)/8) // aligned
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&buffer[0])), len(buffer)*8)
	for from := uint64(0); len(all) < extentsMax; {
		clear(raw)
		binary.NativeEndian.PutUint64(raw, from)
		binary.NativeEndian.PutUint64(raw[8:], ^uint64(0)-from)
		binary.NativeEndian.PutUint32(raw[24:], fiemapBatch)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fiemapIoctl, uintptr(unsafe.Pointer(&raw[0]))); errno != 0 {
			return nil, fmt.Errorf("read the position of %s: its file system does not report it (FIEMAP): %w", path, errno)
		}
		count := int(binary.NativeEndian.Uint32(raw[20:]))
		if count == 0 {
			return all, nil
		}
		for i := range count {
			one := raw[fiemapHeader+i*fiemapExtentBytes:]
			flags := binary.NativeEndian.Uint32(one[40:])
			e := Extent{Logical: binary.NativeEndian.Uint64(one), Physical: binary.NativeEndian.Uint64(one[8:]), Length: binary.NativeEndian.Uint64(one[16:]), Unknown: flags&fiemapUnknown != 0, Empty: flags&fiemapUnwritten != 0}
			all = append(all, e)
			from = e.Logical + e.Length
			if flags&fiemapLast != 0 {
				return all, nil
			}
		}
	}
	return all, fmt.Errorf("%s has more than %d extents: those behind are not known", path, extentsMax)
}

// imageTool is qemu's program that reads images.
const imageTool = "qemu-img"

// describe asks qemu-img for an image's format and the places of the virtual disk in it. The machine may run meanwhile: the
// program takes no lock (-U), and data that qemu has not written back yet is missing in the answer.
func describe(ctx context.Context, f *File) error {
	var info []struct {
		Filename string `json:"filename"`
		Format   string `json:"format"`
	}
	if err := askImageTool(ctx, &info, "info", "-U", "--output=json", "--backing-chain", f.Path); err != nil {
		return err
	}
	if len(info) == 0 || info[0].Format == "" {
		return fmt.Errorf("%s reports no format of %s", imageTool, f.Path)
	}
	f.Format = info[0].Format
	for _, one := range info {
		path := one.Filename
		if absolute, err := filepath.EvalSymlinks(path); err == nil {
			path = absolute
		}
		f.Chain = append(f.Chain, path)
	}
	if f.Format == "raw" {
		return nil
	}
	return askImageTool(ctx, &f.Map, "map", "-U", "--output=json", "-f", f.Format, f.Path)
}

func askImageTool(ctx context.Context, answer any, arguments ...string) error {
	out, err := exec.CommandContext(ctx, imageTool, arguments...).Output()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%s is not installed, so shunt knows places in images only from requests; install the Debian package qemu-utils", imageTool)
	}
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return fmt.Errorf("read the disk's map of its image: %s %s: %w", imageTool, strings.Join(arguments, " "), err)
	}
	if err := json.Unmarshal(out, answer); err != nil {
		return fmt.Errorf("read the answer of %s %s: %w", imageTool, strings.Join(arguments, " "), err)
	}
	return nil
}
