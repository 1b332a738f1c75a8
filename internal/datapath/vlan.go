package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/vishvananda/netlink"
)

// VLAN is whose frames an interface's are on the wire.
type VLAN struct {
	Parent string // the interface that has them with their tags
	Tags   []Tag  // one or two, the outer first
}

// Tag tells a VLAN from others (IEEE 802.1Q).
type Tag struct {
	Protocol uint16 // unix.ETH_P_8021Q or ETH_P_8021AD
	ID       uint16 // 1 to 4094
}

// vlan is a VLAN whose frames are taken at its parent (bpf/lb/vlan.h).
type vlan struct {
	parent *attached
	key    abiVlanKey
}

// vlanOf is what an interface is at its parent, if it is to be attached there: in native mode, which
// the kernel has for the parent alone.
func (d *Datapath) vlanOf(dev netlink.Link, mode model.Attach) (VLAN, bool) {
	if d.vlans == nil || mode != model.AttachNative {
		return VLAN{}, false
	}
	return d.vlans(dev)
}

// vlanAt is what an interface is at its parent, as the maps have it.
func (d *Datapath) vlanAt(iface string, is VLAN) (*vlan, error) {
	parent := d.attached[is.Parent]
	if parent == nil || parent.Mode != kernel.ModeNative || parent.vlan != nil {
		return nil, fmt.Errorf("attach to interface %s in native mode: its frames come in by %s, which has to be among the interfaces with `attach: native` as well",
			iface, is.Parent)
	}
	v := &vlan{parent: parent, key: abiVlanKey{Parent: uint32(parent.ifindex)}}
	if len(is.Tags) > len(v.key.Tags.Tag) {
		return nil, fmt.Errorf("attach to interface %s in native mode: its frames have %d VLAN tags, and shunt takes off %d at most; use `attach: tc`",
			iface, len(is.Tags), len(v.key.Tags.Tag))
	}
	for i, tag := range is.Tags {
		v.key.Tags.Tag[i] = abiVlanTag{Protocol: kernel.ToWire(tag.Protocol), Control: kernel.ToWire(tag.ID)}
	}
	return v, nil
}

// moveToVLAN has the parent's program hand on what is the interface's, and then takes the program off
// the interface itself, in the order of moveToTC. Attaching again is a replacement in one step.
func (d *Datapath) moveToVLAN(a *attached) error {
	a.Mode, a.Reason = kernel.ModeNative, ""
	if err := d.loadVLAN(a); err != nil {
		return err
	}
	if err := errors.Join(d.maps[abiMapShVlanTags].Put(a.index, a.vlan.key.Tags), d.maps[abiMapShVlans].Put(a.vlan.key, a.index)); err != nil {
		return errors.Join(fmt.Errorf("write which frames of interface %s are those of %s: %w", a.vlan.parent.Interface, a.Interface, err), a.closePrograms())
	}
	return errors.Join(d.leaveXDP(a.Interface), dropTC(d.root, d.instance, a.Interface, a.ifindex))
}

// loadVLAN loads the interface's own copy of the program, and makes it that which its frames meet once
// their tags are off.
func (d *Datapath) loadVLAN(a *attached) error {
	if err := d.loadProgram(a, nil); err != nil {
		return err
	}
	if err := d.maps[abiMapShVlanProgs].Put(a.index, a.programs[0]); err != nil {
		return errors.Join(fmt.Errorf("put the program for interface %s into %s: %w", a.Interface, abiMapShVlanProgs, err), a.closePrograms())
	}
	return nil
}

// loadTagged loads what takes tags off an interface's frames, and makes it that which its program
// hands them to. For those without a VLAN there is one more copy of the program, which leaves the chain
// and the way back to the first one.
func (d *Datapath) loadTagged(a *attached) error {
	constants := d.constants(a)
	constants["parent"] = uint32(a.ifindex)
	coll, err := d.loadOnto(map[string]*ebpf.Map{chainMap: a.chain}, d.version.loader(objectVLAN), constants)
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
	if err := d.maps[abiMapShVlanProgs].Put(uint32(abiConstantINTERFACE_MAX)+a.index, coll.Programs["sh_vlan"]); err != nil {
		return fmt.Errorf("put the program for frames of interface %s with a VLAN tag into %s: %w", a.Interface, abiMapShVlanProgs, err)
	}
	return nil
}

// leaveVLAN takes away what is of no use to an interface that frames come in by itself. In native mode
// it may be a parent, and has programs as such.
func (d *Datapath) leaveVLAN(a *attached) error {
	if a.Mode == kernel.ModeNative {
		return d.clearTags(a.index)
	}
	return d.clearVLAN(a.index)
}

// clearTags takes away what the maps say of tags of the interface at an index: first that frames of its
// parent are its own.
func (d *Datapath) clearTags(index uint32) error {
	var key abiVlanKey
	var at uint32
	var errs []error
	all := d.maps[abiMapShVlans].Iterate()
	for all.Next(&key, &at) {
		if at == index {
			errs = append(errs, d.remove(abiMapShVlans, key, "a VLAN"))
			break // the iteration ends with its key
		}
	}
	return errors.Join(append(errs, all.Err(), d.maps[abiMapShVlanTags].Put(index, abiVlanTags{}))...)
}

// clearVLAN is clearTags with the interface's programs.
func (d *Datapath) clearVLAN(index uint32) error {
	return errors.Join(d.clearTags(index),
		d.remove(abiMapShVlanProgs, index, "the program of an interface"),
		d.remove(abiMapShVlanProgs, uint32(abiConstantINTERFACE_MAX)+index, "the program of an interface"))
}
