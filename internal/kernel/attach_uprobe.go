package kernel

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Executables are the files of programs and libraries with functions to attach to. A file's symbols are read
// when its first function is looked up, and not again, since a large program has hundreds of thousands. The
// zero value is ready. It is not safe for concurrent use.
type Executables struct{ opened map[string]*link.Executable }

// AttachUprobe attaches a program to the entry of a function in the file of a program or library, for all
// processes that run it, or only for pid, if it is not 0. The program reads the cookie with
// bpf_get_attach_cookie; 0: none.
func (e *Executables) AttachUprobe(p *ebpf.Program, file, function string, pid int, cookie uint64) (link.Link, error) {
	return e.attach(p, file, function, &link.UprobeOptions{PID: pid, Cookie: cookie}, (*link.Executable).Uprobe)
}

// AttachUretprobe does the same as AttachUprobe at the function's end: the program runs when a call returns
// that began after the attachment.
func (e *Executables) AttachUretprobe(p *ebpf.Program, file, function string, pid int) (link.Link, error) {
	return e.attach(p, file, function, &link.UprobeOptions{PID: pid}, (*link.Executable).Uretprobe)
}

func (e *Executables) attach(p *ebpf.Program, file, function string, options *link.UprobeOptions,
	attach func(*link.Executable, string, *ebpf.Program, *link.UprobeOptions) (link.Link, error)) (link.Link, error) {
	target := fmt.Sprintf("the function %s of %s by a uprobe", function, file)
	const remedy = "the file must be an ELF file with the function in its symbols: `nm FILE` or `nm -D FILE` lists them"
	executable, err := e.open(file)
	if err != nil {
		return nil, refused("", target, remedy, err)
	}
	l, err := attach(executable, function, p, options)
	if err != nil {
		return nil, refused("", target, remedy, err)
	}
	return l, nil
}

func (e *Executables) open(file string) (*link.Executable, error) {
	if known := e.opened[file]; known != nil {
		return known, nil
	}
	executable, err := link.OpenExecutable(file)
	if err != nil {
		return nil, err
	}
	if e.opened == nil {
		e.opened = map[string]*link.Executable{}
	}
	e.opened[file] = executable
	return executable, nil
}
