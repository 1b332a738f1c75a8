package attach

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// vlan is a VLAN whose frames are taken at its parent (bpf/lb/vlan.h).
type vlan struct {
	parent *attached
	key    abi.VlanKey
}

// port is the interface through which frames leave: nil stands for an interface that is no such VLAN.
func (v *vlan) port(dev netlink.Link) uint32 {
	if v == nil {
		return uint32(dev.Attrs().Index)
	}
	return v.key.Parent
}

// VLANOf describes an interface as a VLAN of its parent: of the lowest one, which is no VLAN itself. It returns
// false if the interface is no VLAN, or has a parent in another network namespace.
func VLANOf(dev netlink.Link) (is store.VLAN, ok bool) {
	for {
		tagged, ok := dev.(*netlink.Vlan)
		if !ok {
			return is, len(is.Tags) > 0
		}
		is.Tags = slices.Insert(is.Tags, 0, store.Tag{Protocol: uint16(tagged.VlanProtocol), ID: uint16(tagged.VlanId)})
		if tagged.NetNsID >= 0 {
			return store.VLAN{}, false
		}
		var err error
		if dev, err = netlink.LinkByIndex(tagged.ParentIndex); err != nil {
			return store.VLAN{}, false
		}
		is.Parent = dev.Attrs().Name
	}
}

// vlanOf describes an interface as a VLAN of its parent, if it has to be attached there: in native mode, which
// the kernel has for the parent alone.
func (d *Plane) vlanOf(dev netlink.Link, mode model.Attach) (store.VLAN, bool) {
	if mode != model.AttachNative {
		return store.VLAN{}, false
	}
	return d.vlans(dev)
}

// vlanAt describes an interface as a VLAN of its parent, from the maps.
func (d *Plane) vlanAt(iface string, is store.VLAN) (*vlan, error) {
	parent := d.attached[is.Parent]
	if parent == nil || parent.Mode != kernel.ModeNative || parent.vlan != nil {
		return nil, fmt.Errorf("attach to interface %s in native mode: its frames come in by %s, which has to be among the interfaces with `attach: native` as well",
			iface, is.Parent)
	}
	v := &vlan{parent: parent, key: abi.VlanKey{Parent: uint32(parent.ifindex)}}
	if len(is.Tags) > len(v.key.Tags.Tag) {
		return nil, fmt.Errorf("attach to interface %s in native mode: its frames have %d VLAN tags, and shunt takes off %d at most; use `attach: tc`",
			iface, len(is.Tags), len(v.key.Tags.Tag))
	}
	for i, tag := range is.Tags {
		if tag.ID == 0 {
			return nil, fmt.Errorf("attach to interface %s in native mode: a tag of its frames has the identifier 0, which is for priority alone; use `attach: tc`", iface)
		}
		v.key.Tags.Tag[i] = abi.VlanTag{Protocol: kernel.ToWire(tag.Protocol), Control: kernel.ToWire(tag.ID)}
	}
	return v, nil
}

// moveToVLAN makes the parent's program pass on the interface's frames, and then detaches the program from the
// interface itself, in the order of moveToTC. Attaching again is a replacement in one step.
func (d *Plane) moveToVLAN(a *attached) error {
	a.Mode, a.Reason = kernel.ModeNative, ""
	if err := d.loadVLAN(a); err != nil {
		return err
	}
	if err := d.PutVLAN(a.index, a.vlan.key); err != nil {
		return errors.Join(fmt.Errorf("map frames of interface %s to the VLAN interface %s: %w", a.vlan.parent.Interface, a.Interface, err), a.closePrograms())
	}
	return errors.Join(d.leaveXDP(a.Interface), dropTC(d.opts.PinRoot, d.opts.Instance, a.Interface, a.ifindex))
}

// loadVLAN loads the interface's own copy of the program, which its frames meet after their tags are removed.
func (d *Plane) loadVLAN(a *attached) error {
	if err := d.loadProgram(a, nil); err != nil {
		return err
	}
	if a.vlan != nil {
		if err := d.loadDeliveries(a); err != nil {
			return errors.Join(err, a.closePrograms())
		}
	}
	if err := d.PutVLANProgram(a.index, a.programs[0]); err != nil {
		return errors.Join(fmt.Errorf("put the program for interface %s into %s: %w", a.Interface, abi.MapVlanProgs, err), a.closePrograms())
	}
	return nil
}

// loadTagged loads the program that removes tags from an interface's frames, and makes the interface's program
// pass tagged frames to it. For frames of no known VLAN there is one more copy of the program, without the
// chain and without a call back into the first one.
func (d *Plane) loadTagged(a *attached) error {
	constants := d.constants(a)
	constants["parent"] = uint32(a.ifindex)
	coll, err := d.LoadOnto(map[string]*ebpf.Map{chainMap: a.chain}, d.opts.Version.Loader(abi.ObjectVLAN), constants)
	if err != nil {
		return fmt.Errorf("load the program for frames of interface %s with a VLAN tag: %w", a.Interface, err)
	}
	defer coll.Close()
	untagged := &attached{Attachment: a.Attachment, ifindex: a.ifindex, index: a.index}
	if err := d.loadVLAN(untagged); err != nil {
		return err
	}
	if err := untagged.closePrograms(); err != nil {
		return err
	}
	if err := d.PutTagProgram(a.index, coll.Programs["sh_vlan"]); err != nil {
		return fmt.Errorf("put the program for frames of interface %s with a VLAN tag into %s: %w", a.Interface, abi.MapVlanProgs, err)
	}
	return nil
}

// leaveVLAN removes the objects that an interface does not need if frames come in through it. In native mode it
// may be a parent, and has programs as such.
func (d *Plane) leaveVLAN(a *attached) error {
	if a.Mode == kernel.ModeNative {
		return d.ClearTags(a.index)
	}
	return d.ClearVLAN(a.index)
}

// vlanAttachment reads a VLAN's attachment from the maps, as attachmentOf reads a link.
func vlanAttachment(t store.TakenVLAN) kernel.Attachment {
	a := kernel.Attachment{Interface: kernel.InterfaceName(t.Ifindex), Mode: kernel.ModeNative}
	if _, err := net.InterfaceByIndex(t.Ifindex); err != nil {
		a.Mode, a.Reason = "", kernel.InterfaceGone
	}
	return a
}

// Parent returns the interface on whose wire the frames of an interface are; empty if the interface is no VLAN.
func (d *Plane) Parent(iface string) string {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return ""
	}
	if is, ok := d.vlans(dev); ok {
		return is.Parent
	}
	return ""
}

// vlansAt returns the VLANs of this process whose frames are taken at an interface, by name.
func (d *Plane) vlansAt(parent string) (names []string) {
	for name, a := range d.attached {
		if a.vlan != nil && a.vlan.parent.Interface == parent {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// keepsVLANs returns the reason why an interface may not leave native mode.
func (d *Plane) keepsVLANs(parent string) error {
	names := d.vlansAt(parent)
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("frames of %s are taken there in native mode; first remove %s from the list of interfaces, or give it another `attach`", strings.Join(names, ", "), strings.Join(names, ", "))
}

// DropGoneVLANs removes the entries that parents have for VLANs that have gone. For an interface through which
// frames come in, the kernel does it.
func (d *Plane) DropGoneVLANs() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	all, err := d.TakenVLANs()
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range all {
		if _, err := netlink.LinkByIndex(t.Ifindex); !errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		errs = append(errs, d.ClearInterface(t.Index, t.Ifindex))
		for name, a := range d.attached {
			if a.index == t.Index && a.ifindex == t.Ifindex {
				errs = append(errs, a.closePrograms())
				delete(d.attached, name)
			}
		}
	}
	return errors.Join(errs...)
}
