package offload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// PeerUnreachable says that the other end of a veth sends merged packets, for all that is
// known here, and lies where it cannot be changed from here.
type PeerUnreachable struct {
	Interface string // our end
	PeerIndex int    // of the other end, in its namespace
	Err       error  // what stood in the way
}

// Command is what to run in the other end's network namespace, in a POSIX shell.
func (e *PeerUnreachable) Command() string {
	return fmt.Sprintf(`ethtool -K "$(basename "$(dirname "$(grep -lx %d /sys/class/net/*/ifindex)")")" tso off gso off tx-udp-segmentation off tx-gso-list off`, e.PeerIndex)
}

// Error names the interface and the cause; Command is the remedy.
func (e *PeerUnreachable) Error() string {
	return fmt.Sprintf("cannot switch segmentation offload off at the other end of %s (interface index %d in its network namespace): %v",
		e.Interface, e.PeerIndex, e.Err)
}

// Unwrap is the cause.
func (e *PeerUnreachable) Unwrap() error { return e.Err }

// openPeer opens the other end of a veth. Both results are nil when the interface is not a
// veth; the error is a *PeerUnreachable.
func openPeer(link netlink.Link) (*device, error) {
	attrs := link.Attrs()
	if link.Type() != "veth" || attrs.ParentIndex == 0 {
		return nil, nil
	}
	fail := func(err error) (*device, error) {
		return nil, &PeerUnreachable{Interface: attrs.Name, PeerIndex: attrs.ParentIndex, Err: err}
	}
	ns := netns.None()      // ours
	if attrs.NetNsID >= 0 { // IFLA_LINK_NETNSID, only there when it is another one
		var err error
		if ns, err = findNamespace(int(int32(attrs.NetNsID))); err != nil {
			return fail(err)
		}
		defer ns.Close()
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fail(fmt.Errorf("enter its network namespace: %w", err))
	}
	defer handle.Close()
	peer, err := handle.LinkByIndex(attrs.ParentIndex)
	if err != nil {
		return fail(fmt.Errorf("read it: %w", err))
	}
	if peer.Type() != "veth" || peer.Attrs().ParentIndex != attrs.Index {
		return fail(fmt.Errorf("%s there is not its other end", peer.Attrs().Name))
	}
	tool, err := toolIn(ns)
	if err != nil {
		return fail(err)
	}
	return &device{
		tool: tool, name: peer.Attrs().Name, peerIndex: attrs.ParentIndex,
		label: fmt.Sprintf("%s, the other end of %s", peer.Attrs().Name, attrs.Name),
	}, nil
}

// namespacePaths is where network namespaces can be seen: `ip netns` and Docker keep them as
// files, and every process is in one.
var namespacePaths = []string{"/run/netns/*", "/run/docker/netns/*", "/proc/[0-9]*/ns/net"}

// findNamespace looks for the namespace that ours knows by this id.
func findNamespace(id int) (netns.NsHandle, error) {
	if id < 0 {
		return netns.None(), errors.New("the kernel does not say in which network namespace it lies")
	}
	type inode struct{ device, number uint64 }
	seen := map[inode]bool{}
	for _, pattern := range namespacePaths {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return netns.None(), err
		}
		for _, path := range paths {
			var stat unix.Stat_t
			if unix.Stat(path, &stat) != nil || seen[inode{stat.Dev, stat.Ino}] {
				continue // gone, not ours to see, or looked at
			}
			seen[inode{stat.Dev, stat.Ino}] = true
			fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			if got, err := netlink.GetNetNsIdByFd(fd); err == nil && got == id {
				return netns.NsHandle(fd), nil
			}
			_ = unix.Close(fd)
		}
	}
	return netns.None(), fmt.Errorf("its network namespace (id %d) is neither under /run/netns nor that of a process seen from here", id)
}

// toolIn opens an ethtool socket in a namespace; None is the calling thread's. The socket
// belongs to it wherever it is used.
func toolIn(ns netns.NsHandle) (*ethtool.Ethtool, error) {
	var tool *ethtool.Ethtool
	err := namespace.Inside(ns, func() (err error) {
		tool, err = ethtool.NewEthtool()
		return os.NewSyscallError("socket", err)
	})
	return tool, err
}
