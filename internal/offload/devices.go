package offload

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// devices opens the devices with features in an interface's way. unreachable is an *Unreachable, or
// nil: the first of the devices that cannot be opened.
func (p Purpose) devices(iface string) (all []*device, unreachable, err error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return nil, nil, fmt.Errorf("read the interface: %w", err)
	}
	links, unreachable, err := p.below(link)
	if err != nil {
		return nil, nil, err
	}
	for _, l := range links {
		own, err := p.openOwn(l)
		if err != nil {
			closeAll(all)
			return nil, nil, err
		}
		all = append(all, own)
		peer, err := p.openPeer(l)
		if peer != nil {
			all = append(all, peer)
		}
		unreachable = cmp.Or(unreachable, err)
	}
	return all, unreachable, nil
}

// below lists a device and the devices by which its frames come in: a VLAN's parent, the members of
// a bond or a team, and the devices below those. unreachable: a parent is in another network
// namespace.
func (p Purpose) below(link netlink.Link) (all []netlink.Link, unreachable, err error) {
	all = []netlink.Link{link}
	for i := 0; i < len(all); i++ {
		attrs := all[i].Attrs()
		switch all[i].Type() {
		case "vlan":
			if attrs.NetNsID >= 0 {
				unreachable = &Unreachable{Where: "on the parent of " + attrs.Name, Index: attrs.ParentIndex,
					Err: errors.New("it is in another network namespace"), what: p.what, command: p.command}
				continue
			}
			parent, err := netlink.LinkByIndex(attrs.ParentIndex)
			if err != nil {
				return nil, nil, fmt.Errorf("read the parent of %s: %w", attrs.Name, err)
			}
			all = append(all, parent)
		case "bond", "team":
			links, err := netlink.LinkList()
			if err != nil {
				return nil, nil, fmt.Errorf("list the members of %s: %w", attrs.Name, err)
			}
			for _, l := range links {
				if l.Attrs().MasterIndex == attrs.Index {
					all = append(all, l)
				}
			}
		}
	}
	return all, unreachable, nil
}

func (p Purpose) openOwn(link netlink.Link) (*device, error) {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("open an ethtool socket: %w", err)
	}
	name := link.Attrs().Name
	return &device{tool: tool, name: name, label: name, own: name, index: link.Attrs().Index, features: p.receiving}, nil
}
