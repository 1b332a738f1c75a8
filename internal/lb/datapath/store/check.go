package store

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

const checkProgram = "sh_check"

// CheckMark returns the mark (SO_MARK) of the sockets of an instance's checks with direct return. Instances of
// one network namespace have different numbers. Packets with any of these marks are not balanced at tc.
func CheckMark(number uint8) uint32 {
	return uint32(abi.CHECK_MARK)<<uint32(abi.CHECK_MARK_SHIFT) | uint32(number)
}

// Checks is the program that sends health checks with direct return to their backends. Its methods may be
// called from any goroutine.
type Checks struct {
	writer  *Writer
	program *ebpf.Program
	sockets *ebpf.Map
}

// LoadChecks loads the program. The caller closes it.
func (w *Writer) LoadChecks() (*Checks, error) {
	coll, err := w.Load(w.opts.Version.Loader(abi.ObjectCheck), nil)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", checkProgram, err)
	}
	defer coll.Close()
	program, err := kernel.TakeProgram(coll, checkProgram)
	if err != nil {
		return nil, err
	}
	return &Checks{writer: w, program: program, sockets: coll.DetachMap("sh_checks")}, nil
}

// Attach makes every packet that leaves through an interface pass the program. The interface is a new one of
// shunt's own, in the calling thread's network namespace; the program is removed with it.
func (c *Checks) Attach(ifindex int) error {
	return kernel.AttachClsactOut(c.program, checkProgram, ifindex)
}

// Name sets the backend that a socket checks, and the next hop. The setting lasts while the socket is open.
func (c *Checks) Name(socket uintptr, backend netip.Addr, forwarding model.Forwarding, hop Hop) error {
	number, known := abi.ToNumber(abi.Forwardings, forwarding)
	if !known {
		return fmt.Errorf("note the backend of a health check: forwarding %q is unknown", forwarding)
	}
	index, ok := c.writer.IndexOf(hop.Interface)
	if !ok {
		return fmt.Errorf("the next hop is behind interface %s, which shunt is not attached to", kernel.InterfaceName(hop.Interface))
	}
	note := abi.Check{Backend: abi.ToAddr(backend), Hop: abi.ToHop(hop.MAC, index), Forwarding: uint32(number)}
	if err := c.sockets.Put(uint32(socket), note); err != nil {
		return fmt.Errorf("note the backend of a health check: %w", err)
	}
	return nil
}

// Taken reports whether the program has seen a packet of a socket.
func (c *Checks) Taken(socket uintptr) (bool, error) {
	var check abi.Check
	if err := c.sockets.Lookup(uint32(socket), &check); err != nil {
		return false, fmt.Errorf("read the path that a health check took: %w", err)
	}
	return check.Taken != 0, nil
}

// Close closes the program. Where it is attached it continues to run.
func (c *Checks) Close() error { return errors.Join(c.program.Close(), c.sockets.Close()) }
