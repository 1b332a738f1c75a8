package watch

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// judgePeer leaves a pod alone because of what stands at its own end of the veth. redirect_peer hands packets over behind an XDP program there. And
// it leaves their Ethernet addresses as they are, so that a bridge in the pod, with a virtual machine behind it, would not know whom they are for.
func judgePeer(s state, veth *netlink.LinkAttrs) state {
	peer, err := peerOf(veth)
	switch {
	case err != nil:
		s.left, s.why = shortcut.NotVeth, err.Error()
	case peer.MasterIndex != 0:
		s.left, s.why = shortcut.Bridged, fmt.Sprintf("the pod's end of %s is a port of an interface in the pod", veth.Name)
	case peer.Xdp != nil && peer.Xdp.Attached:
		s.left, s.why = shortcut.TC, fmt.Sprintf("the pod's end of %s has an XDP program", veth.Name)
	}
	return s
}

// peerOf is the other end of a veth, in whatever network namespace it is.
func peerOf(veth *netlink.LinkAttrs) (*netlink.LinkAttrs, error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK)
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(veth.ParentIndex) // IFLA_LINK, which of a veth is its peer
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(veth.NetNsID))))
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err == nil && len(answers) != 1 {
		err = fmt.Errorf("%d answers", len(answers))
	}
	if err != nil {
		return nil, fmt.Errorf("look at the pod's end of %s: %w", veth.Name, err)
	}
	link, err := netlink.LinkDeserialize(nil, answers[0])
	if err != nil {
		return nil, fmt.Errorf("read about the pod's end of %s: %w", veth.Name, err)
	}
	return link.Attrs(), nil
}
