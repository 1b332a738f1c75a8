// Package macswap is a hop that only writes new MAC addresses (bench/bpf/macswap.bpf.c): the limit of every balancer that
// runs as an XDP program.
package macswap

import (
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/lab"
)

// Hop is the addresses of the frames to the next host.
type Hop struct{ Destination, Source net.HardwareAddr }

func (h Hop) bytes() [12]byte {
	return [12]byte(append(append([]byte{}, h.Destination...), h.Source...))
}

// Way has the interface of the program, and the target of its frames. Back is for one interface alone: the target of the
// frames that do not come from its destination.
type Way struct {
	In, Out   string
	Hop, Back Hop
}

// Attach loads the program for a way of a host and attaches it natively; stop undoes this.
func (way Way) Attach(host *lab.Host) (stop func() error, err error) {
	spec, err := loadMacswap()
	if err != nil {
		return nil, err
	}
	oneArm := way.In == way.Out
	if err := errors.Join(spec.Variables["hop_addresses"].Set(way.Hop.bytes()), way.setBack(spec.Variables["back_addresses"].Set)); err != nil {
		return nil, err
	}
	in, err := host.InterfaceIndex(way.In)
	if err != nil {
		return nil, err
	}
	out, err := host.InterfaceIndex(way.Out)
	if err != nil {
		return nil, err
	}
	var objects macswapObjects
	var attached link.Link
	err = host.Run(func() (err error) { // devmap and link look interfaces up in the thread's namespace
		if err := spec.LoadAndAssign(&objects, nil); err != nil {
			return err
		}
		if err := objects.MacswapOut.Put(uint32(0), uint32(out)); err != nil {
			return errors.Join(fmt.Errorf("name %s in the devmap: %w", way.Out, err), objects.Close())
		}
		program := objects.ShMacswap
		if oneArm {
			program = objects.ShMacswapOne
		}
		if attached, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: in, Flags: link.XDPDriverMode}); err != nil {
			return errors.Join(err, objects.Close())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("attach macswap to %s: %w", way.In, err)
	}
	return func() error { return errors.Join(attached.Close(), objects.Close()) }, nil
}

// setBack sets the addresses of the way back, if there is one.
func (way Way) setBack(set func(any) error) error {
	if way.In != way.Out {
		return nil
	}
	return set(way.Back.bytes())
}
