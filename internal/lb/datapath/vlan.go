package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
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
	key    abi.VlanKey
}

// VLANOf says what an interface is at its parent: at the one that is no VLAN itself. false: it is no
// VLAN, or one whose parent is in another network namespace.
func VLANOf(dev netlink.Link) (is VLAN, ok bool) {
	for {
		tagged, ok := dev.(*netlink.Vlan)
		if !ok {
			return is, len(is.Tags) > 0
		}
		is.Tags = slices.Insert(is.Tags, 0, Tag{Protocol: uint16(tagged.VlanProtocol), ID: uint16(tagged.VlanId)})
		if tagged.NetNsID >= 0 {
			return VLAN{}, false
		}
		var err error
		if dev, err = netlink.LinkByIndex(tagged.ParentIndex); err != nil {
			return VLAN{}, false
		}
		is.Parent = dev.Attrs().Name
	}
}

// vlanOf describes an interface at its parent, if it is to be attached there: in native mode, which
// the kernel has for the parent alone.
func (d *Datapath) vlanOf(dev netlink.Link, mode model.Attach) (VLAN, bool) {
	if mode != model.AttachNative {
		return VLAN{}, false
	}
	return d.vlans(dev)
}

// vlanAt describes an interface at its parent, as the maps have it.
func (d *Datapath) vlanAt(iface string, is VLAN) (*vlan, error) {
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

// moveToVLAN has the parent's program hand on what is the interface's, and then takes the program off
// the interface itself, in the order of moveToTC. Attaching again is a replacement in one step.
func (d *Datapath) moveToVLAN(a *attached) error {
	a.Mode, a.Reason = kernel.ModeNative, ""
	if err := d.loadVLAN(a); err != nil {
		return err
	}
	// A number that stood for another VLAN, which has gone, has that one's key still.
	if err := errors.Join(d.forgetKey(a.index, a.vlan.key), d.maps[abi.MapVlanTags].Put(a.index, a.vlan.key.Tags), d.maps[abi.MapVlans].Put(a.vlan.key, a.index)); err != nil {
		return errors.Join(fmt.Errorf("map frames of interface %s to the VLAN interface %s: %w", a.vlan.parent.Interface, a.Interface, err), a.closePrograms())
	}
	return errors.Join(d.leaveXDP(a.Interface), dropTC(d.root, d.instance, a.Interface, a.ifindex))
}

// loadVLAN loads the interface's own copy of the program, and makes it that which its frames meet once
// their tags are off.
func (d *Datapath) loadVLAN(a *attached) error {
	if err := d.loadProgram(a, nil); err != nil {
		return err
	}
	if a.vlan != nil {
		if err := d.loadDeliveries(a); err != nil {
			return errors.Join(err, a.closePrograms())
		}
	}
	if err := d.maps[abi.MapVlanProgs].Put(a.index, a.programs[0]); err != nil {
		return errors.Join(fmt.Errorf("put the program for interface %s into %s: %w", a.Interface, abi.MapVlanProgs, err), a.closePrograms())
	}
	return nil
}

// loadTagged loads what takes tags off an interface's frames, and makes it that which its program
// hands them to. For those without a VLAN there is one more copy of the program, which leaves the chain
// and the way back to the first one.
func (d *Datapath) loadTagged(a *attached) error {
	constants := d.constants(a)
	constants["parent"] = uint32(a.ifindex)
	coll, err := d.loadOnto(map[string]*ebpf.Map{chainMap: a.chain}, d.version.Loader(abi.ObjectVLAN), constants)
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
	if err := d.maps[abi.MapVlanProgs].Put(uint32(abi.INTERFACE_MAX)+a.index, coll.Programs["sh_vlan"]); err != nil {
		return fmt.Errorf("put the program for frames of interface %s with a VLAN tag into %s: %w", a.Interface, abi.MapVlanProgs, err)
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
	return errors.Join(d.forgetKey(index, abi.VlanKey{}), d.maps[abi.MapVlanTags].Put(index, abi.VlanTags{}))
}

// forgetKey removes the key of the interface at an index, unless that key shall stay.
func (d *Datapath) forgetKey(index uint32, stays abi.VlanKey) error {
	var key abi.VlanKey
	var at uint32
	all := d.maps[abi.MapVlans].Iterate()
	for all.Next(&key, &at) {
		if at == index && key != stays {
			return d.remove(abi.MapVlans, key, "a VLAN") // there is no other, and the iteration ends with its key
		}
	}
	return all.Err()
}

// clearVLAN is clearTags with the interface's programs.
func (d *Datapath) clearVLAN(index uint32) error {
	return errors.Join(d.clearTags(index),
		d.remove(abi.MapVlanProgs, index, "the program of an interface"),
		d.remove(abi.MapVlanProgs, uint32(abi.INTERFACE_MAX)+index, "the program of an interface"))
}

// taken is a VLAN whose frames are taken at its parent, as the maps have it. Both are an ifindex.
type taken struct {
	index           uint32
	ifindex, parent int
}

func (v *View) taken() ([]taken, error) {
	return takenIn(v.maps[abi.MapVlans], v.maps[abi.MapInterfaces])
}

// pinnedTaken is View.taken of an instance with maps of some ABI, one before VLANs included.
func pinnedTaken(opts Options, number uint32) ([]taken, error) {
	var maps [2]*ebpf.Map
	for i, name := range []string{abi.MapVlans, abi.MapInterfaces} {
		path := filepath.Join(kernel.MapDirectory(opts.PinRoot, opts.Instance, number), name)
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("open the map pinned at %s: %w", path, err)
		}
		defer m.Close()
		maps[i] = m
	}
	return takenIn(maps[0], maps[1])
}

// parentOf is the interface that the frames of one are taken at; empty if it has none, or another one.
func parentOf(opts Options, iface string) (string, error) {
	all, err := pinnedTaken(opts, opts.version.ABI)
	if err != nil {
		return "", err
	}
	ifindex := kernel.InterfaceIndex(iface)
	for _, t := range all {
		if t.ifindex == ifindex {
			return kernel.InterfaceName(t.parent), nil
		}
	}
	return "", nil
}

func takenIn(vlans, interfaces *ebpf.Map) (all []taken, err error) {
	var key abi.VlanKey
	var index uint32
	entries := vlans.Iterate()
	for entries.Next(&key, &index) {
		var record abi.Interface
		if err := interfaces.Lookup(index, &record); err != nil {
			return nil, fmt.Errorf("read element %d of %s: %w", index, abi.MapInterfaces, err)
		}
		all = append(all, taken{index, int(record.Ifindex), int(key.Parent)})
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", abi.MapVlans, err)
	}
	slices.SortFunc(all, func(a, b taken) int { return cmp.Compare(a.ifindex, b.ifindex) })
	return all, nil
}

// vlanAttachment reads a VLAN's attachment from the maps, as attachmentOf reads a link.
func vlanAttachment(t taken) kernel.Attachment {
	a := kernel.Attachment{Interface: kernel.InterfaceName(t.ifindex), Mode: kernel.ModeNative}
	if _, err := net.InterfaceByIndex(t.ifindex); err != nil {
		a.Mode, a.Reason = "", kernel.InterfaceGone
	}
	return a
}

// Parent is the interface whose frames those of another are on the wire; empty if it is no VLAN.
func (d *Datapath) Parent(iface string) string {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return ""
	}
	if is, ok := d.vlans(dev); ok {
		return is.Parent
	}
	return ""
}

// vlansAt are those of this process whose frames are taken at an interface, by name.
func (d *Datapath) vlansAt(parent string) (names []string) {
	for name, a := range d.attached {
		if a.vlan != nil && a.vlan.parent.Interface == parent {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// keepsVLANs says why an interface may not lose native mode.
func (d *Datapath) keepsVLANs(parent string) error {
	names := d.vlansAt(parent)
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("frames of %s are taken there in native mode; take %s off the list of interfaces, or have another `attach` for it, first", strings.Join(names, ", "), strings.Join(names, ", "))
}

// DropGoneVLANs takes away what parents do for VLANs that have gone. For an interface that frames come
// in by itself the kernel does it.
func (d *Datapath) DropGoneVLANs() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	all, err := d.taken()
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range all {
		if _, err := netlink.LinkByIndex(t.ifindex); !errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		errs = append(errs, d.clearInterface(t.index, t.ifindex))
		for name, a := range d.attached {
			if a.index == t.index && a.ifindex == t.ifindex {
				errs = append(errs, a.closePrograms())
				delete(d.attached, name)
			}
		}
	}
	return errors.Join(errs...)
}
