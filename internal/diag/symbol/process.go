package symbol

import (
	"bufio"
	"bytes"
	"cmp"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/event"
)

// Process names the functions of one process: of its program and its libraries. It keeps their files open, so that it knows names
// after the process has ended. It is for one goroutine.
type Process struct {
	pid    int
	mapped []mapping // as last read, even if the process has ended
	files  map[fileID]*File
}

// fileID identifies a file as a line of /proc/PID/maps does.
type fileID struct{ device, inode string }

// mapping is a part of a file that the process may run.
type mapping struct {
	start, end, offset uint64
	of                 fileID
	path               string
}

// File is a program or a library that the process has mapped.
type File struct {
	Name   string // the last part of its path
	Path   string // as the process has it
	Attach string // path by which this process opens it, even if the original path has changed
	Start  uint64 // lowest address of the process's code from it

	f         *os.File
	parsed    bool
	class     elf.Class
	loads     []elf.ProgHeader
	functions []function // by address
}

// function is a symbol of a file. Its address is the file's own.
type function struct {
	address, size uint64
	name          string
}

// ReadProcess reads the mappings of a process.
func ReadProcess(pid int) (*Process, error) {
	p := &Process{pid: pid, files: map[fileID]*File{}}
	return p, p.Refresh()
}

// Close closes the files.
func (p *Process) Close() {
	for _, f := range p.files {
		_ = f.f.Close() // it was only read
	}
}

// Refresh reads the mappings of the process again, because libraries can be loaded later. If the process has ended, the earlier ones
// stay.
func (p *Process) Refresh() error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.pid))
	if err != nil {
		return fmt.Errorf("read what process %d has mapped: %w", p.pid, err)
	}
	mapped := parseMaps(text)
	if len(mapped) == 0 {
		return nil
	}
	p.mapped = mapped
	for _, m := range mapped {
		if p.files[m.of] == nil {
			p.open(m)
		}
	}
	return nil
}

// open keeps the file of a mapping open. A file that cannot be opened has no names.
func (p *Process) open(m mapping) {
	for _, path := range []string{fmt.Sprintf("/proc/%d/map_files/%x-%x", p.pid, m.start, m.end), fmt.Sprintf("/proc/%d/root%s", p.pid, m.path)} {
		if f, err := os.Open(path); err == nil {
			p.files[m.of] = &File{Name: event.Printable(filepath.Base(m.path)), Path: m.path, Attach: path, Start: m.start, f: f}
			return
		}
	}
}

// parseMaps returns the lines of files with code (proc_pid_maps(5)).
func parseMaps(text []byte) (mapped []mapping) {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		fields := strings.SplitN(lines.Text(), " ", 6)
		if len(fields) < 6 || !strings.Contains(fields[1], "x") || fields[4] == "0" {
			continue
		}
		from, to, _ := strings.Cut(fields[0], "-")
		start, err1 := strconv.ParseUint(from, 16, 64)
		end, err2 := strconv.ParseUint(to, 16, 64)
		offset, err3 := strconv.ParseUint(fields[2], 16, 64)
		if err1 != nil || err2 != nil || err3 != nil {
			continue
		}
		mapped = append(mapped, mapping{start, end, offset, fileID{fields[3], fields[4]}, strings.TrimLeft(fields[5], " ")})
	}
	return mapped
}

// Having returns the files of the process that have a function, the program first, then in the order of their addresses.
func (p *Process) Having(function string) (files []*File) {
	for _, m := range p.mapped {
		f := p.files[m.of]
		if _, has := f.Function(function); has && !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// Empty reports whether the process has mapped no program.
func (p *Process) Empty() bool { return len(p.mapped) == 0 }

// Is32 reports whether the program is one of 32 bits.
func (p *Process) Is32() bool {
	return slices.ContainsFunc(p.mapped, func(m mapping) bool {
		f := p.files[m.of]
		f.parse()
		return f != nil && f.class == elf.ELFCLASS32
	})
}

// Mapped reports whether the process still has the file at its address.
func (p *Process) Mapped(f *File) bool {
	return slices.ContainsFunc(p.mapped, func(m mapping) bool { return m.start == f.Start && p.files[m.of] == f })
}

// Name returns the function of a return address, and the distance from its beginning, with the file; without a symbol, the address in
// the file, as addr2line takes it.
func (p *Process) Name(address uint64) string {
	for _, m := range p.mapped {
		if address < m.start || address >= m.end {
			continue
		}
		f := p.files[m.of]
		if f == nil {
			return fmt.Sprintf("%#x (%s)", address-m.start+m.offset, event.Printable(filepath.Base(m.path)))
		}
		return f.name(address - m.start + m.offset)
	}
	return fmt.Sprintf("%#x", address)
}

// name returns the name for an offset in the file.
func (f *File) name(offset uint64) string {
	f.parse()
	own := offset
	for _, load := range f.loads {
		if offset >= load.Off && offset < load.Off+load.Filesz {
			own = offset - load.Off + load.Vaddr
		}
	}
	// A call may be a function's last instruction: the address before belongs to the function in any case.
	i, found := slices.BinarySearchFunc(f.functions, own-1, func(one function, address uint64) int { return cmp.Compare(one.address, address) })
	if !found {
		i--
	}
	if i < 0 || f.functions[i].size > 0 && own > f.functions[i].address+f.functions[i].size {
		return fmt.Sprintf("%#x (%s)", own, f.Name)
	}
	return fmt.Sprintf("%s+%#x (%s)", event.Printable(f.functions[i].name), own-f.functions[i].address, f.Name)
}

// Function returns the address of a function in the file.
func (f *File) Function(name string) (address uint64, has bool) {
	f.parse()
	if f == nil {
		return 0, false
	}
	i := slices.IndexFunc(f.functions, func(one function) bool { return one.name == name })
	if i < 0 {
		return 0, false
	}
	return f.functions[i].address, true
}

// parse reads the symbols. A file that is no program has no symbols.
func (f *File) parse() {
	if f == nil || f.parsed {
		return
	}
	f.parsed = true
	file, err := elf.NewFile(f.f)
	if err != nil {
		return
	}
	f.class = file.Class
	for _, one := range file.Progs {
		if one.Type == elf.PT_LOAD {
			f.loads = append(f.loads, one.ProgHeader)
		}
	}
	// A stripped file has only those of the second kind.
	all, _ := file.Symbols()
	more, _ := file.DynamicSymbols()
	for _, s := range append(all, more...) {
		kind := elf.ST_TYPE(s.Info)
		if (kind == elf.STT_FUNC || kind == elf.STT_GNU_IFUNC) && s.Section != elf.SHN_UNDEF && s.Value != 0 {
			f.functions = append(f.functions, function{s.Value, s.Size, s.Name})
		}
	}
	slices.SortStableFunc(f.functions, func(a, b function) int { return cmp.Compare(a.address, b.address) })
}
