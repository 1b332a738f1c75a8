package memleak

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// watchedProcess is the process whose memory is watched, in place of the kernel's.
type watchedProcess struct {
	pid       int
	comm      string
	symbols   *symbol.Process
	libraries []*symbol.File // that have the allocator
	above     []*symbol.File // with functions above the allocator, such as operator new, and without the allocator
	ended     int            // a descriptor that becomes readable when the process ends
	random    string         // see randomOf
}

// allocator has the functions that a library must have to be watched.
var allocator = []string{"malloc", "free"}

// openProcess finds the allocator of a process.
func openProcess(pid int) (_ *watchedProcess, err error) {
	if runtime.GOARCH != "amd64" {
		return nil, fmt.Errorf("watch the memory of process %d: shunt knows the registers of functions on amd64 only, and this is %s", pid, runtime.GOARCH)
	}
	p := &watchedProcess{pid: pid, ended: -1}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.ended, err = unix.PidfdOpen(pid, 0); err != nil {
		switch {
		case errors.Is(err, unix.ESRCH):
			return nil, fmt.Errorf("there is no process %d", pid)
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil, fmt.Errorf("%d is a thread, not a process: name its process", pid)
		}
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return nil, fmt.Errorf("read the name of process %d: %w", pid, err)
	}
	p.random = randomOf(pid)
	p.comm = event.Printable(strings.TrimSuffix(string(comm), "\n"))
	if p.symbols, err = symbol.ReadProcess(pid); err != nil {
		return nil, err
	}
	return p, p.findLibraries()
}

// findLibraries refuses processes without a known allocator, with the reason.
func (p *watchedProcess) findLibraries() error {
	refuse := func(why string) error {
		return fmt.Errorf("watch the memory of process %d (%s): %s", p.pid, p.comm, why)
	}
	files := p.symbols.Having(allocator[0])
	for _, f := range files {
		if _, has := f.Function(allocator[1]); has {
			p.libraries = append(p.libraries, f)
		}
	}
	for _, f := range p.symbols.Having(operatorNew) {
		if !slices.Contains(p.libraries, f) {
			p.above = append(p.above, f)
		}
	}
	switch {
	case p.symbols.Empty():
		return refuse("it has no program in memory: it is a thread of the kernel, or it is ending. Leave out --pid to watch the kernel's memory")
	case p.symbols.Is32():
		return refuse("it is a program of 32 bits, and shunt knows the registers of functions of 64 bits only")
	case len(p.libraries) == 0:
		return refuse("neither its program nor a library of it has the functions malloc and free among its symbols. It is linked statically and stripped, or it does not use " +
			"the C library's memory, as programs in Go; tools of its language know its memory (for Go, net/http/pprof)")
	}
	return nil
}

func (p *watchedProcess) close() {
	if p == nil {
		return
	}
	if p.ended >= 0 {
		_ = unix.Close(p.ended) // it was only waited for
	}
	if p.symbols != nil {
		p.symbols.Close()
	}
}

// hasEnded waits for the process's end, for a number of milliseconds at most.
func (p *watchedProcess) hasEnded(milliseconds int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.ended), Events: unix.POLLIN}}, milliseconds)
	return err == nil && n > 0
}

// refresh reads the present mappings, for names. A process that runs another program has other memory.
func (p *watchedProcess) refresh() error {
	err := p.symbols.Refresh()
	if p.hasEnded(0) {
		return nil // the mappings that were read before stay
	}
	random := randomOf(p.pid) // "": the process is about to end, and its memory has gone first
	if err == nil && (!p.symbols.Mapped(p.libraries[0]) || random != "" && random != p.random) {
		err = fmt.Errorf("process %d runs another program now, so the records of its memory are no longer true; start the command again", p.pid)
	}
	return err
}

// randomOf returns the address and the 16 bytes that the kernel gives each new program for its own use (AT_RANDOM of getauxval(3)).
// They tell a program from the next one of the same process even if both are at the same addresses. "": they cannot be read.
func randomOf(pid int) string {
	vector, err := os.ReadFile(fmt.Sprintf("/proc/%d/auxv", pid))
	if err != nil {
		return ""
	}
	const atRandom, pair = 25, 16 // linux/auxvec.h; a type and a value of 8 bytes each
	for ; len(vector) >= pair; vector = vector[pair:] {
		if binary.NativeEndian.Uint64(vector) != atRandom {
			continue
		}
		memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil {
			return ""
		}
		defer memory.Close()
		bytes := make([]byte, 16)
		address := binary.NativeEndian.Uint64(vector[8:])
		if _, err := memory.ReadAt(bytes, int64(address)); err != nil {
			return ""
		}
		return fmt.Sprintf("%x %x", address, bytes)
	}
	return ""
}

// String names the process and its allocator.
func (p *watchedProcess) String() string {
	var paths []string
	for _, f := range p.libraries {
		paths = append(paths, event.Printable(f.Path))
	}
	return fmt.Sprintf("process %d (%s): malloc and free of %s", p.pid, p.comm, strings.Join(paths, ", "))
}

// inLibrary describes a function of the allocator.
type inLibrary struct {
	function, program string
	kind              Kind
	frees             bool // it allocates nothing
	watches           string
}

// libraryFunctions are in the order in which they are attached. Frees are before allocations, so that no allocation is seen whose free could be
// missed, and functions that move memory before functions that only allocate, for the same reason.
var libraryFunctions = []inLibrary{
	{"free", "sh_user_free", Malloc, true, "memory that is given back"},
	{"munmap", "sh_user_unmap", Mmap, true, "mappings that are given back"},
	{"realloc", "sh_user_move", Malloc, false, "memory that is made larger or smaller"},
	{"mremap", "sh_user_remap", Mmap, false, "mappings that are made larger or smaller"},
	{"malloc", "sh_user_malloc", Malloc, false, "memory"},
	{"calloc", "sh_user_calloc", Malloc, false, "memory that is zero"},
	{"posix_memalign", "sh_user_store", Malloc, false, "memory at certain addresses"},
	{"aligned_alloc", "sh_user_align", Malloc, false, "memory at certain addresses"},
	{"memalign", "sh_user_align", Malloc, false, "memory at certain addresses"},
	{"valloc", "sh_user_malloc", Malloc, false, "memory in pages of its own"},
	{"pvalloc", "sh_user_malloc", Malloc, false, "memory in pages of its own"},
	{"mmap", "sh_user_map", Mmap, false, "mappings"},
	// A C++ library with these functions calls malloc, and is built without frame pointers: the caller would be lost behind it.
	{operatorNew, "sh_user_malloc", Malloc, false, "objects of C++"},
	{"_Znam", "sh_user_malloc", Malloc, false, "arrays of C++"},
	{"_ZnwmRKSt9nothrow_t", "sh_user_malloc", Malloc, false, "objects of C++, without exceptions"},
	{"_ZnamRKSt9nothrow_t", "sh_user_malloc", Malloc, false, "arrays of C++, without exceptions"},
	{"_ZnwmSt11align_val_t", "sh_user_malloc", Malloc, false, "objects of C++ at certain addresses"},
	{"_ZnamSt11align_val_t", "sh_user_malloc", Malloc, false, "arrays of C++ at certain addresses"},
}

// operatorNew is operator new(unsigned long), as the C++ ABI for Itanium writes it, which Linux uses.
const operatorNew = "_Znwm"

const ends = ", ends"

// sensors returns the sensors of the process's libraries, and the names of the sensors for each kind.
func (p *watchedProcess) sensors() (all []sensor.Sensor, by seen) {
	by = seen{}
	for i, file := range slices.Concat(p.libraries, p.above) {
		has := map[uint64]bool{} // a function with two names counts once
		for _, f := range libraryFunctions {
			address, is := file.Function(f.function)
			if !is || has[address] {
				continue
			}
			has[address] = true
			name, without := f.function, ""
			if i > 0 {
				name += " of " + file.Name
			}
			if i > 0 || f.function != allocator[0] && f.function != allocator[1] {
				without = "its allocations and frees are not reported, or its own function is at the top of the stack"
			}
			way := sensor.Way{Kind: sensor.Uprobe, Target: f.function, Program: f.program, File: file.Attach}
			if f.frees {
				by.frees(f.kind, name)
			} else {
				// Its end is attached first: a call whose beginning is seen and whose end is not would hide later calls.
				end := sensor.Way{Kind: sensor.Uretprobe, Target: f.function, Program: "sh_user_end", File: file.Attach}
				all = append(all, sensor.Sensor{Name: name + ends, Watches: "the end of the same", Ways: []sensor.Way{end}, Without: without})
				by.allocs(f.kind, name)
				by.allocs(f.kind, name+ends)
			}
			all = append(all, sensor.Sensor{Name: name, Watches: f.watches, Ways: []sensor.Way{way}, Without: without})
		}
	}
	return all, by
}
