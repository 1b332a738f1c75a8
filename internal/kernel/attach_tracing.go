package kernel

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// The remedy for a refused program that observes.
const (
	tracepointRemedy = "`ls /sys/kernel/tracing/events/*` lists the tracepoints, where tracefs is mounted; a kernel may have dropped or renamed one"
	functionRemedy   = "the function must be in /proc/kallsyms, and the kernel be built with CONFIG_KPROBES"
)

// AttachTracing attaches a program of the type tracing to the target that the program names: to a tracepoint
// with typed arguments (tp_btf), or to the entry or end of a function (fentry, fexit). A RefusedError has the
// reason.
func AttachTracing(p *ebpf.Program, name string) (link.Link, error) {
	l, err := link.AttachTracing(link.TracingOptions{Program: p})
	if err != nil {
		return nil, refused(name, "the hook that it was loaded for", "a kernel may refuse BPF trampolines, or others may have taken the function", err)
	}
	return l, nil
}

// PinTracing does the same as AttachTracing by a link that is pinned at path and outlives the process. A link
// that is pinned there is ended first, so that no event is seen twice: the kernel cannot replace the program of
// a tracing link.
func PinTracing(p *ebpf.Program, name, path string) (link.Link, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old link's pin %s: %w", path, err)
	}
	l, err := AttachTracing(p, name)
	if err != nil {
		return nil, err
	}
	if err := PinLink(l, path); err != nil {
		return nil, err
	}
	return l, nil
}

// AttachRawTracepoint attaches a program to a tracepoint. The program gets the arguments untyped.
func AttachRawTracepoint(p *ebpf.Program, tracepoint string) (link.Link, error) {
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: tracepoint, Program: p})
	if err != nil {
		return nil, refused("", "the raw tracepoint "+tracepoint, tracepointRemedy, err)
	}
	return l, nil
}

// AttachTracepoint attaches a program to the record of a tracepoint, written as group/name, by a perf event.
func AttachTracepoint(p *ebpf.Program, tracepoint string) (link.Link, error) {
	group, name, ok := strings.Cut(tracepoint, "/")
	if !ok {
		return nil, fmt.Errorf("the tracepoint %q is not written as group/name", tracepoint)
	}
	l, err := link.Tracepoint(group, name, p, nil)
	if err != nil {
		return nil, refused("", "the tracepoint "+tracepoint, tracepointRemedy, err)
	}
	return l, nil
}

// AttachKprobe attaches a program to the entry of a function of the kernel. The program reads the cookie with
// bpf_get_attach_cookie; 0: none.
func AttachKprobe(p *ebpf.Program, function string, cookie uint64) (link.Link, error) {
	l, err := link.Kprobe(function, p, &link.KprobeOptions{Cookie: cookie})
	if err != nil {
		return nil, refused("", "the kernel's function "+function+" by a kprobe", functionRemedy, err)
	}
	return l, nil
}
