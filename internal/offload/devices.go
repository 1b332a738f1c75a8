package offload

import (
	"errors"
	"fmt"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// devices opens what has features in an interface's way. unreachable is an *Unreachable, or nil: the
// first of those that cannot be opened.
func (p Purpose) devices(iface string) (all []*device, unreachable, err error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return nil, nil, fmt.Errorf("read the interface: %w", err)
	}
	links, elsewhere, err := below(link)
	if err != nil {
		return nil, nil, err
	}
	if elsewhere != nil {
		elsewhere.what, elsewhere.command = p.what, p.command
		unreachable = elsewhere
	}
	for _, l := range links {
		own, err := openOwn(l)
		if err != nil {
			closeAll(all)
			return nil, nil, err
		}
		own.features = p.receiving
		all = append(all, own)
		peer, err := openPeer(l)
		if peer != nil {
			peer.features = p.sending
			all = append(all, peer)
		}
		if u := (*Unreachable)(nil); unreachable == nil && errors.As(err, &u) {
			u.what, u.command = p.whatPeer, p.there
			unreachable = u
		}
	}
	return all, unreachable, nil
}

// below lists a device and what its frames come in by: a VLAN's parent, the members of a bond or a
// team, and what is below those. A parent in another network namespace is elsewhere.
func below(link netlink.Link) (all []netlink.Link, elsewhere *Unreachable, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, nil, fmt.Errorf("list the interfaces: %w", err)
	}
	all = []netlink.Link{link}
	for i := 0; i < len(all); i++ {
		attrs := all[i].Attrs()
		switch all[i].Type() {
		case "vlan":
			if attrs.NetNsID >= 0 {
				elsewhere = &Unreachable{Where: "on the parent of " + attrs.Name, Index: attrs.ParentIndex,
					Err: errors.New("it is in another network namespace")}
				continue
			}
			for _, l := range links {
				if l.Attrs().Index == attrs.ParentIndex {
					all = append(all, l)
				}
			}
		case "bond", "team":
			for _, l := range links {
				if l.Attrs().MasterIndex == attrs.Index {
					all = append(all, l)
				}
			}
		}
	}
	return all, elsewhere, nil
}

func openOwn(link netlink.Link) (*device, error) {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("open an ethtool socket: %w", err)
	}
	name := link.Attrs().Name
	return &device{tool: tool, name: name, label: name, own: name, index: link.Attrs().Index}, nil
}
