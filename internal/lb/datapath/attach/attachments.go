package attach

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// Attachments reads the attachments of an instance from the pinned links, by interface name.
func Attachments(v *store.View) ([]kernel.Attachment, error) {
	opts := v.Options()
	found, err := pinnedLinks(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	var all []kernel.Attachment
	for _, name := range slices.Sorted(maps.Keys(found)) {
		l, err := link.LoadPinnedLink(found[name], nil)
		if err != nil {
			return nil, fmt.Errorf("open the link pinned at %s: %w", found[name], err)
		}
		a, err := attachmentOf(name, l)
		_ = l.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	sides, err := pinnedSides(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	for _, name := range sides {
		a, err := directions[0].side(opts.PinRoot, opts.Instance, name, 0).Attachment()
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	vlans, err := v.TakenVLANs()
	if err != nil {
		return nil, err
	}
	for _, t := range vlans {
		all = append(all, vlanAttachment(t))
	}
	slices.SortStableFunc(all, func(a, b kernel.Attachment) int { return strings.Compare(a.Interface, b.Interface) })
	return all, nil
}

// Attachments reads the attachments, as the function of that name.
func (d *Plane) Attachments() ([]kernel.Attachment, error) { return Attachments(&d.View) }

// attachmentOf reads a pinned link, and completes it from its present interface. The name is that of the pin,
// unless the interface is visible here and has been renamed.
func attachmentOf(name string, l link.Link) (kernel.Attachment, error) {
	a := kernel.Attachment{Interface: name}
	for last := ebpf.ProgramID(0); ; {
		info, err := l.Info()
		if err != nil {
			return kernel.Attachment{}, fmt.Errorf("look at the link of interface %s: %w", name, err)
		}
		if info.XDP() == nil || info.XDP().Ifindex == 0 {
			a.Reason = kernel.InterfaceGone
			return a, nil
		}
		dev, err := netlink.LinkByIndex(int(info.XDP().Ifindex))
		if err == nil && runs(dev, info.Program) {
			a.Interface, a.Mode = dev.Attrs().Name, kernel.ModeOf(dev)
			return a, nil
		}
		if err != nil || info.Program == last {
			a.Reason = kernel.InterfaceElsewhere
			return a, nil
		}
		last = info.Program // it may have been replaced between the two looks
	}
}

// runs reports whether an interface has the program at XDP.
func runs(dev netlink.Link, program ebpf.ProgramID) bool {
	xdp := dev.Attrs().Xdp
	return xdp != nil && xdp.Attached && ebpf.ProgramID(xdp.ProgId) == program
}
