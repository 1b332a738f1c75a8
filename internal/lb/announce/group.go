package announce

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// groupFlags: the kernel joins the group for as long as the address is on the interface,
// whether or not a process lives (IFA_F_MCAUTOJOIN, Linux 4.1), and reports it with MLD.
// Nothing uses the address itself: it has no duplicate detection and no route.
//
// Setting the interface down removes the address but not the membership: the group is
// received again when it is up, adding the address is refused with EADDRINUSE, and only the
// end of the interface ends that membership (seen on 6.18, 2026-11-21). It costs
// a frame now and then.
const groupFlags = unix.IFA_F_MCAUTOJOIN | unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE

func groupAddress(group netip.Addr) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: group.AsSlice(), Mask: net.CIDRMask(128, 128)}, Flags: groupFlags}
}

// join makes the interface receive the solicited-node group of an IPv6 address, so that questions for the
// address reach the data plane. It succeeds if the interface is a member already.
func (a *Announcer) join(j *job, link netlink.Link) error {
	if j.addr.Is4() {
		return nil
	}
	a.groups.Lock()
	defer a.groups.Unlock()
	group := wire.SolicitedNode(j.addr)
	refused := a.handle.AddrAdd(link, groupAddress(group))
	subject := j.subjectIn(a)
	if refused == nil || errors.Is(refused, unix.EEXIST) || errors.Is(refused, unix.EADDRINUSE) {
		a.opts.Conditions.Clear(condition.MulticastLinkOnly, subject)
		return nil
	}
	err := a.linkMembership(unix.SIOCADDMULTI, link.Attrs().Name, wire.GroupMAC(group))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("join %s on %s: %w; and its Ethernet address %s: %w", group, link.Attrs().Name, refused, wire.GroupMAC(group), err)
	}
	a.opts.Conditions.Raise(condition.Condition{
		Code: condition.MulticastLinkOnly, Subject: subject,
		Text: fmt.Sprintf("cannot join %s for %s (%v): %s receives the group's Ethernet address %s instead, without MLD reports",
			group, subject, refused, link.Attrs().Name, wire.GroupMAC(group)),
	})
	return nil
}

// leave ends the membership unless another announced address has the same group, as addresses with the same
// last 24 bits do.
func (a *Announcer) leave(p location) error {
	if p.addr.Is4() {
		return nil
	}
	a.groups.Lock()
	defer a.groups.Unlock()
	group := wire.SolicitedNode(p.addr)
	a.mu.Lock()
	shared := false
	for other := range a.work {
		shared = shared || other != p && other.iface == p.iface && other.addr.Is6() && wire.SolicitedNode(other.addr) == group
	}
	a.mu.Unlock()
	if shared {
		return nil
	}
	link, err := a.handle.LinkByIndex(p.iface)
	if err != nil {
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil // the membership has gone with it
		}
		return fmt.Errorf("leave %s: read interface %d: %w", group, p.iface, err)
	}
	err = a.handle.AddrDel(link, groupAddress(group))
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("leave %s on %s: %w", group, link.Attrs().Name, err)
	}
	// The interface is not a member: perhaps it receives the group's Ethernet address, or nothing.
	err = a.linkMembership(unix.SIOCDELMULTI, link.Attrs().Name, wire.GroupMAC(group))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("stop receiving %s on %s: %w", wire.GroupMAC(group), link.Attrs().Name, err)
	}
	return nil
}

// linkMembership adds or removes a static link-layer membership (netdevice(7)). It outlives the process, too.
func (a *Announcer) linkMembership(request uintptr, iface string, mac net.HardwareAddr) error {
	var ifreq struct {
		name   [unix.IFNAMSIZ]byte
		family uint16 // AF_UNSPEC
		mac    [14]byte
		_      [8]byte // struct ifreq is 40 bytes
	}
	copy(ifreq.name[:unix.IFNAMSIZ-1], iface)
	copy(ifreq.mac[:], mac)
	return namespace.Inside(a.ns, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&ifreq))); errno != 0 {
			return errno
		}
		return nil
	})
}

// Joined reports whether an interface of the calling thread's namespace is a permanent member of the
// solicited-node group of an address, and returns the group.
func Joined(addr netip.Addr, iface int) (group netip.Addr, joined bool) {
	if addr.Is4() {
		return group, false
	}
	group = wire.SolicitedNode(addr)
	link, err := netlink.LinkByIndex(iface)
	if err != nil {
		return group, false
	}
	list, err := netlink.AddrList(link, netlink.FAMILY_V6)
	return group, err == nil && slices.ContainsFunc(list, func(a netlink.Addr) bool {
		return a.Flags&unix.IFA_F_MCAUTOJOIN != 0 && a.IP.Equal(group.AsSlice())
	})
}
