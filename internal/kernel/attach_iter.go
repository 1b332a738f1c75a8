package kernel

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachIter makes an iterator of a program, which runs when somebody reads it. The program says over which kind of thing; of entries of a
// map, over says which map, and is nil otherwise.
func AttachIter(p *ebpf.Program, name string, over *ebpf.Map) (*link.Iter, error) {
	l, err := link.AttachIter(link.IterOptions{Program: p, Map: over})
	if err != nil {
		return nil, refused(name, "an iterator", "", err)
	}
	return l, nil
}
