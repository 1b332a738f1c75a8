package watch

import (
	"errors"
	"fmt"

	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// judgePeer leaves a pod alone because of programs at its own end of the veth. redirect_peer hands packets over behind an XDP program there. And
// it leaves their Ethernet addresses as they are, so a bridge in the pod, or a virtual machine, would not accept them.
func (w *Watch) judgePeer(s state, veth *netlink.LinkAttrs) state {
	leave := func(left shortcut.Left, format string, args ...any) state {
		s.left, s.why = left, fmt.Sprintf(format, args...)
		return s
	}
	links, known := w.behind[veth.NetNsID]
	if !known {
		var err error
		if links, err = linksBehind(veth); err != nil {
			return leave(shortcut.NotVeth, "%v", err)
		}
		w.behind[veth.NetNsID] = links
	}
	var peer *netlink.LinkAttrs
	for _, l := range links {
		if l.Attrs().Index == veth.ParentIndex { // IFLA_LINK, which of a veth is its peer
			peer = l.Attrs()
		}
		if isTap(l) {
			return leave(shortcut.Bridged, "the pod behind %s has the tap %s, as a virtual machine has", veth.Name, l.Attrs().Name)
		}
	}
	switch {
	case peer == nil:
		return leave(shortcut.NotVeth, "the pod's end of %s does not exist", veth.Name)
	case peer.MasterIndex != 0:
		return leave(shortcut.Bridged, "the pod's end of %s is a port of an interface in the pod", veth.Name)
	case peer.Xdp != nil && peer.Xdp.Attached:
		return leave(shortcut.TC, "the pod's end of %s has an XDP program", veth.Name)
	}
	return s
}

// isTap reports whether a link carries frames to a program, such as a monitor of virtual machines. A tun carries packets, whose routing decides.
func isTap(l netlink.Link) bool {
	if tun, is := l.(*netlink.Tuntap); is {
		return tun.Mode == netlink.TUNTAP_MODE_TAP
	}
	return l.Type() == "macvtap"
}

// linksBehind returns the links of the network namespace that a veth leads into.
func linksBehind(veth *netlink.LinkAttrs) (links []netlink.Link, err error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(veth.NetNsID))))
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // it is looked at again soon
		return nil, fmt.Errorf("look at the pod's end of %s: %w", veth.Name, err)
	}
	for _, answer := range answers {
		link, err := netlink.LinkDeserialize(nil, answer)
		if err != nil {
			return nil, fmt.Errorf("read about the pod's end of %s: %w", veth.Name, err)
		}
		links = append(links, link)
	}
	return links, nil
}
