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

// CheckMark is the mark (SO_MARK) of the sockets of an instance's checks with direct return. Instances of one
// network namespace have different numbers. At tc, what has any of these marks is not balanced.
func CheckMark(number uint8) uint32 {
	return uint32(abi.CHECK_MARK)<<uint32(abi.CHECK_MARK_SHIFT) | uint32(number)
}

// Checks is the program that takes health checks with direct return to their backends. Its methods may be
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

// Attach has everything that leaves by an interface go through the program. The interface is a new one of
// shunt's own, in the calling thread's network namespace; the program goes with it.
func (c *Checks) Attach(ifindex int) error {
	return kernel.AttachClsactOut(c.program, checkProgram, ifindex)
}

// Name says which backend a socket asks, and by which next hop. It holds for as long as the socket is open.
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
		return false, fmt.Errorf("look at a health check's way: %w", err)
	}
	return check.Taken != 0, nil
}

// Close gives the program up. Where it is attached it goes on.
func (c *Checks) Close() error { return errors.Join(c.program.Close(), c.sockets.Close()) }
