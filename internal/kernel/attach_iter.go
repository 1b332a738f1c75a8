package kernel

import (
	"errors"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachIter makes an iterator of a program, which runs when it is read. The program names the type of the
// objects over which it iterates.
func AttachIter(p *ebpf.Program, name string) (*link.Iter, error) {
	l, err := link.AttachIter(link.IterOptions{Program: p})
	if err != nil {
		return nil, refused(name, "an iterator", "", err)
	}
	return l, nil
}

// RunIter runs the program of an iterator once over all objects, and drops the program's output.
func RunIter(l interface{ Open() (io.ReadCloser, error) }) error {
	r, err := l.Open()
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return errors.Join(err, r.Close())
}
