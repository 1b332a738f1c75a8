package sensor

import (
	"errors"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Process is the process that sensors of the kind Uprobe observe, and nothing of others.
type Process struct {
	PID int
	// Executable is the file with the symbols, for example /proc/PID/exe.
	Executable string
}

// attachUprobe runs the program in all threads of the process: perf compares the memory that they share.
func attachUprobe(p *ebpf.Program, way Way, of Process) (io.Closer, error) {
	if of.PID <= 0 || of.Executable == "" {
		return nil, errors.New("no process is named")
	}
	file, err := link.OpenExecutable(of.Executable)
	if err != nil {
		return nil, err
	}
	return file.Uprobe(way.Target, p, &link.UprobeOptions{PID: of.PID})
}
