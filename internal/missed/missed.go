// Package missed counts frames that were dropped in front of an interface, before a program on it
// could see them: they found no room in its receive ring.
//
//	sender ──► receive ring ──► program
//	              └─ full: the frame is dropped
//
// A card counts such frames as rx_missed_errors (Documentation/networking/statistics.rst), where its
// driver does. A veth has a ring of 256 frames for each queue (VETH_RING_SIZE in
// drivers/net/veth.c), and the frame is counted as tx_dropped at the other end, which is another
// interface and mostly in another network namespace.
//
// It uses rtnetlink (CAP_NET_ADMIN, where the other end is in another namespace) and works in the
// calling thread's namespace.
package missed

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Frames is the number of frames that an interface has missed since it exists. An error is the
// reason why that cannot be known; a driver that does not count them has 0.
func Frames(iface string) (uint64, error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return 0, fmt.Errorf("read interface %s: %w", iface, err)
	}
	attrs := link.Attrs()
	if attrs.Statistics == nil {
		return 0, fmt.Errorf("read interface %s: the kernel gives no statistics", iface)
	}
	if link.Type() != "veth" {
		return attrs.Statistics.RxMissedErrors, nil
	}
	peer, err := otherEnd(attrs)
	if err != nil {
		return 0, fmt.Errorf("read the other end of %s: %w", iface, err)
	}
	return peer.Statistics.TxDropped, nil
}

// otherEnd reads the other end of a veth, which may be in another network namespace: one request to
// the kernel, however many namespaces there are.
func otherEnd(attrs *netlink.LinkAttrs) (*netlink.LinkAttrs, error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK)
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(attrs.ParentIndex)
	request.AddData(message)
	if attrs.NetNsID >= 0 { // IFLA_LINK_NETNSID, only there when it is another one
		request.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(attrs.NetNsID))))
	}
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	for _, answer := range answers {
		peer, err := netlink.LinkDeserialize(nil, answer)
		if err != nil {
			return nil, err
		}
		if a := peer.Attrs(); peer.Type() == "veth" && a.ParentIndex == attrs.Index && a.Statistics != nil {
			return a, nil
		}
	}
	return nil, fmt.Errorf("interface index %d there is another interface", attrs.ParentIndex)
}
