package kernel

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachIter makes an iterator of a program, which runs when it is read. The program says over which objects it
// iterates.
func AttachIter(p *ebpf.Program, name string) (*link.Iter, error) {
	l, err := link.AttachIter(link.IterOptions{Program: p})
	if err != nil {
		return nil, refused(name, "an iterator", "", err)
	}
	return l, nil
}
