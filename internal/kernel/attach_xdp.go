package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachXDP attaches a program to an interface of the calling thread's network namespace, by a link. An
// OccupiedError says that another program is there; a RefusedError has the driver's reason. beside is
// OccupiedError.Chain.
func AttachXDP(p *ebpf.Program, iface string, ifindex int, mode Mode, beside string) (link.Link, error) {
	flags := link.XDPDriverMode
	if mode == ModeGeneric {
		flags = link.XDPGenericMode
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: ifindex, Flags: flags})
	if err == nil {
		return l, nil
	}
	if refusedAsTaken(err) { // another process was faster
		if other := Occupied(iface, beside); other != nil {
			return nil, other
		}
	}
	reason := attachMessage(ifindex, p, flags)
	if reason == "" {
		reason = err.Error()
	}
	remedy := "use `attach: auto` to fall back to generic mode"
	if mode == ModeGeneric {
		remedy = "use `attach: tc`, which needs no XDP"
	}
	return nil, &RefusedError{"", fmt.Sprintf("interface %s in %s mode", iface, mode), reason, remedy, err}
}

// InMode attaches as the configuration says: ModeAuto tries native, and generic if native is refused, and then
// reason has the cause. words are the modes that the product supports.
func InMode(iface string, mode Mode, words string, attach func(Mode) error) (reason string, err error) {
	switch mode {
	case ModeNative, ModeGeneric:
		return "", attach(mode)
	case ModeAuto:
		err = attach(ModeNative)
		var no *RefusedError
		if errors.As(err, &no) {
			return no.Reason, attach(ModeGeneric)
		}
		return "", err
	}
	return "", fmt.Errorf("attach to interface %s: the mode %q is not supported; use %s", iface, mode, words)
}

// attachMessage returns the driver's message: a link is refused with a number alone, while rtnetlink
// (NETLINK_EXT_ACK) may give a reason. It is empty if there is no message.
func attachMessage(ifindex int, program *ebpf.Program, flags link.XDPAttachFlags) string {
	fd, err := openRoute()
	if err != nil {
		return ""
	}
	defer fd.close()
	err = fd.attachXDP(ifindex, program.FD(), uint32(flags))
	if err == nil {
		// It works after all; detach it again, because the caller reports its own error.
		_ = fd.attachXDP(ifindex, -1, uint32(flags))
		return ""
	}
	var said *routeError
	if !errors.As(err, &said) || said.message == "" {
		return ""
	}
	return fmt.Sprintf("%s (%s)", said.message, said.errno)
}
