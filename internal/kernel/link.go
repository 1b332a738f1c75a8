// Package kernel has the access to the kernel that every product of shunt needs:
// bpffs, pinned maps and links, locks, loading with constants, messages of the verifier and of drivers,
// attaching, and the programs of others. It works with maps of any product and of any ABI, and knows none of them.
package kernel

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Mode is the way in which the program runs on an interface.
type Mode string

// The modes. Native runs in the driver, generic in the kernel after it has made an sk_buff, which is slower.
// The others are modes of tc: links of Linux 6.6, or filters before.
const (
	ModeNative  Mode = "native"
	ModeGeneric Mode = "generic"
	ModeTCX     Mode = "tcx"
	ModeClsact  Mode = "clsact"
)

// ModeAuto is an input of InMode only: native, or generic if the driver refuses native mode.
const ModeAuto Mode = "auto"

// AtTC reports whether the program gets the sk_buff, and sees both directions.
func (m Mode) AtTC() bool { return m == ModeTCX || m == ModeClsact }

// Attachment is a program on an interface.
type Attachment struct {
	Interface string `json:"interface"`
	Mode      Mode   `json:"mode"`
	Reason    string `json:"reason,omitempty"` // why not native, when auto chose generic
}

// ModeOf returns the mode of any program on an interface; empty if there is none.
func ModeOf(dev netlink.Link) Mode {
	xdp := dev.Attrs().Xdp
	switch {
	case xdp == nil || !xdp.Attached:
		return ""
	case xdp.AttachMode == nl.XDP_ATTACHED_SKB:
		return ModeGeneric
	}
	return ModeNative
}

// DropLink ends a link at once, and removes its pin.
func DropLink(l link.Link) error {
	errs := []error{l.Unpin()}
	if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, unix.ENOLINK) && !errors.Is(err, unix.EOPNOTSUPP) {
		errs = append(errs, err)
	}
	errs = append(errs, l.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("end a link: %w", err)
	}
	return nil
}

// RemoveLink ends the link pinned at path at once; if it cannot be opened, its pin.
func RemoveLink(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return os.Remove(path)
	}
	return DropLink(l)
}

// PinLink pins a new link, or ends it.
func PinLink(l link.Link, path string) error {
	if err := l.Pin(path); err != nil {
		return errors.Join(fmt.Errorf("pin the link at %s: %w", path, err), l.Close())
	}
	return nil
}

// InterfaceIndex returns the index of an interface of the calling thread's network namespace; 0 if there is
// none.
func InterfaceIndex(name string) int {
	l, err := netlink.LinkByName(name) // net.InterfaceByName lists them all, and each pod of a node may have one
	if err != nil {
		return 0
	}
	return l.Attrs().Index
}

// InterfaceName returns the name of an interface of the calling thread's network namespace; if there is none,
// it returns the number as text.
func InterfaceName(ifindex int) string {
	if i, err := net.InterfaceByIndex(ifindex); err == nil {
		return i.Name
	}
	return fmt.Sprintf("number %d", ifindex)
}
