package kernel

import (
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// sockMapProgram is a program that is attached to a map of sockets. Before Linux 6.10 this works without a link only.
type sockMapProgram struct {
	sockets *ebpf.Map
	program *ebpf.Program
	at      ebpf.AttachType
}

// AttachSockMap attaches a program to a map of sockets (BPF_MAP_TYPE_SOCKMAP, SOCKHASH). The program then runs
// for each socket in the map: with AttachSkMsgVerdict for data that a socket sends, with
// AttachSkSKBStreamVerdict and the like for data that it receives. An attach point has one program, and another
// program there is not replaced. It is detached with the map, or by Close, which leaves map and program open.
func AttachSockMap(p *ebpf.Program, name string, sockets *ebpf.Map, at ebpf.AttachType) (io.Closer, error) {
	target := fmt.Sprintf("the map of sockets %s at %s", sockets, at)
	const remedy = "the map must be of the type sockmap or sockhash, and the program's type must be that of the attach point"
	there, err := link.QueryPrograms(link.QueryOptions{Target: sockets.FD(), Attach: at})
	if err == nil && len(there.Programs) > 0 { // the kernel would replace it without an error
		return nil, &RefusedError{name, target, fmt.Sprintf("program %d is attached there", there.Programs[0].ID), "detach that program first, or use another map", unix.EBUSY}
	}
	if err != nil && !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, unix.EINVAL) { // a sockmap can be queried since 5.18
		return nil, refused(name, target, remedy, err)
	}
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: sockets.FD(), Program: p, Attach: at}); err != nil {
		return nil, refused(name, target, remedy, err)
	}
	return sockMapProgram{sockets, p, at}, nil
}

// Close detaches the program. It succeeds if another program is attached there.
func (s sockMapProgram) Close() error {
	err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: s.sockets.FD(), Program: s.program, Attach: s.at})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach a program from the map of sockets %s: %w", s.sockets, err)
	}
	return nil
}
