package offload

import (
	"errors"
	"fmt"
	"os"

	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Unreachable is the error for a device that probably has the features on and cannot be changed
// from here: the other end of a veth, or a VLAN's parent.
type Unreachable struct {
	Where         string // it is, as seen from here: "at the other end of veth0"
	Index         int    // of it, in its namespace
	Err           error  // the obstacle
	what, command string // of the purpose
}

// Command is the command to run in the device's network namespace, in a POSIX shell.
func (e *Unreachable) Command() string {
	return fmt.Sprintf(`ethtool -K "$(basename "$(dirname "$(grep -lx %d /sys/class/net/*/ifindex)")")" %s`, e.Index, e.command)
}

// Error names the device and the cause; Command is the remedy.
func (e *Unreachable) Error() string {
	return fmt.Sprintf("cannot switch %s off %s (interface index %d in its network namespace): %v", e.what, e.Where, e.Index, e.Err)
}

// Unwrap is the cause.
func (e *Unreachable) Unwrap() error { return e.Err }

// openPeer opens the other end of a veth. Both results are nil when the interface is not a
// veth; the error is an *Unreachable.
func (p Purpose) openPeer(link netlink.Link) (*device, error) {
	attrs := link.Attrs()
	if link.Type() != "veth" || attrs.ParentIndex == 0 {
		return nil, nil
	}
	fail := func(err error) (*device, error) {
		return nil, &Unreachable{Where: "at the other end of " + attrs.Name, Index: attrs.ParentIndex, Err: err, what: p.whatPeer, command: p.there}
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
		tool: tool, name: peer.Attrs().Name, own: attrs.Name, index: attrs.Index, peerIndex: attrs.ParentIndex, features: p.sending,
		label: fmt.Sprintf("%s, the other end of %s", peer.Attrs().Name, attrs.Name),
	}, nil
}

// findNamespace looks for the namespace that ours knows by this id.
func findNamespace(id int) (netns.NsHandle, error) {
	if id < 0 {
		return netns.None(), errors.New("the kernel does not say in which network namespace it lies")
	}
	ns := namespace.Find(func(ns netns.NsHandle) bool {
		is, err := netlink.GetNetNsIdByFd(int(ns))
		return err == nil && is == id
	})
	if !ns.IsOpen() {
		return ns, fmt.Errorf("its network namespace (id %d) is neither under /run/netns nor that of a process seen from here", id)
	}
	return ns, nil
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
