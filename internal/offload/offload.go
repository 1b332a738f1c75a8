// Package offload switches off features that keep a program from seeing packets as they were on the wire.
//
// Merging is for generic mode: receive aggregation on the interface (GRO, LRO), and segmentation
// offload at the other end of a veth, which sends packets of up to 64 KB as they are. Tags is for a
// VLAN's parent: cards put a frame's tags beside it, and so does the other end of a veth.
//
//	sender's end of a veth ──(TSO, GSO, USO; tags)──► device ──(GRO, LRO; tags)──► XDP
//
// The device is the interface itself, and the devices by which its frames come in: a VLAN's parent, a bond's
// members.
//
// Invariant: features are written down by the caller's store before they are switched off, so that a later
// process, too, can switch them on again.
//
// It uses the ethtool ioctl and rtnetlink (CAP_NET_ADMIN), and enters the network namespace
// of a veth's other end (CAP_SYS_ADMIN). It works in the calling thread's namespace.
package offload

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// Purpose is a reason to switch features off, and their names: the kernel's (netdev_features_strings in
// net/ethtool/common.c).
type Purpose struct {
	receiving []string // on the interface
	sending   []string // at the other end of a veth
	what      string   // they do, on the interface
	whatPeer  string   // at the other end
	instead   string   // the remedy where a feature is fixed
	command   string   // ethtool's arguments
	there     string   // the same, for the other end
}

var (
	// Merging combines packets, before generic XDP sees them or by the other end of a veth.
	Merging = Purpose{
		receiving: []string{"rx-gro", "rx-lro", "rx-gro-hw", "rx-gro-list", "rx-udp-gro-forwarding"},
		sending: []string{
			"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-accecn-segmentation",
			"tx-tcp-mangleid-segmentation", "tx-udp-segmentation", "tx-gso-list", "tx-generic-segmentation",
		},
		what: "aggregation", whatPeer: "segmentation offload",
		instead: "use native mode, or another interface",
		command: "gro off lro off rx-gro-hw off rx-gro-list off rx-udp-gro-forwarding off",
		there:   "tso off gso off tx-udp-segmentation off tx-gso-list off",
	}
	// Tags are VLAN tags, which XDP does not see where they are beside the frame.
	Tags = Purpose{
		receiving: []string{"rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"},
		sending:   []string{"tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"},
		what:      "taking VLAN tags off", whatPeer: "VLAN tags beside frames",
		instead: "use `attach: tc` for its VLANs",
		command: "rx-vlan-hw-parse off rx-vlan-stag-hw-parse off",
		there:   "tx-vlan-hw-insert off tx-vlan-stag-hw-insert off",
	}
)

// State lists the features that were switched off. The caller stores it until they are restored. It holds
// any number of interfaces.
type State struct {
	Changes []Change `json:"changes"`
}

// Change lists the features that were switched off on one device.
type Change struct {
	// Interface is the interface to which shunt is attached.
	Interface string `json:"interface"`
	// Device is the device by which its frames come in, if that is another one; Index is that device's, or
	// otherwise the interface's own.
	Device string `json:"device,omitempty"`
	Index  int    `json:"index"`
	// PeerIndex, if not 0, says that the device changed is the other end of that veth,
	// which has this index in its own namespace.
	PeerIndex int `json:"peer_index,omitempty"`
	// Features that had been asked for, sorted.
	Features []string `json:"features"`
}

func (c Change) same(o Change) bool {
	return c.Interface == o.Interface && c.Index == o.Index && c.PeerIndex == o.PeerIndex && c.isOf(Tags) == o.isOf(Tags)
}

func (c Change) device() string { return cmp.Or(c.Device, c.Interface) }

// isOf reports whether the features are for a purpose; all are for one.
func (c Change) isOf(p Purpose) bool {
	return slices.ContainsFunc(c.Features, func(f string) bool { return slices.Contains(p.receiving, f) || slices.Contains(p.sending, f) })
}

// String is "eth0: rx-gro" or "the other end of veth0: tx-tcp-segmentation".
func (c Change) String() string {
	device := c.device()
	if c.PeerIndex != 0 {
		device = "the other end of " + device
	}
	return device + ": " + strings.Join(c.Features, ", ")
}

// Of is the part of the state that is about one interface, as text for a message.
func (s State) Of(iface string, p Purpose) []string {
	var list []string
	for _, c := range s.Changes {
		if c.Interface == iface && c.isOf(p) {
			list = append(list, c.String())
		}
	}
	return list
}

// Disable switches off the features in an interface's way, on it, on the devices by which its frames come in,
// and at the other ends of veths. It adds its changes to before, the state that an earlier process stored, and
// gives the result to store before it makes them; if store fails nothing is changed. It returns the state as
// stored. Doing it again changes nothing.
// nothing.
//
// An *Unreachable error means that all was done but on devices in other network namespaces.
func (p Purpose) Disable(iface string, before State, store func(State) error) (State, error) {
	doing := fmt.Sprintf("switch %s off on %s", p.what, iface)
	all, unreachable, err := p.devices(iface)
	if err != nil {
		return before, fmt.Errorf("%s: %w", doing, err)
	}
	defer closeAll(all)
	// A device made anew under the same name has lost the changes.
	state := State{Changes: slices.DeleteFunc(slices.Clone(before.Changes), func(c Change) bool {
		return c.Interface == iface && slices.ContainsFunc(all, func(d *device) bool { return d.own == c.device() && d.index != c.Index })
	})}
	plans := make([][]string, len(all))
	for i, d := range all {
		if plans[i], err = d.switchedOn(p.instead); err != nil {
			return before, err
		}
		if len(plans[i]) > 0 {
			state.add(d.changed(iface, plans[i]))
		}
	}
	if err := store(state); err != nil {
		return before, fmt.Errorf("%s: store the settings to restore: %w", doing, err)
	}
	for i, d := range all {
		if err := d.change(plans[i], false); err != nil {
			return state, err
		}
	}
	return state, unreachable
}

// On lists the features that are on and that Disable would switch off, in words, for a message.
//
// An *Unreachable error means that devices in other network namespaces were not looked at.
func (p Purpose) On(iface string) ([]string, error) {
	all, unreachable, err := p.devices(iface)
	if err != nil {
		return nil, fmt.Errorf("look for %s on %s: %w", p.what, iface, err)
	}
	defer closeAll(all)
	var list []string
	for _, d := range all {
		states, err := d.tool.Features(d.name)
		if err != nil {
			return nil, fmt.Errorf("read the offload features of %s: %w", d.label, err)
		}
		if on := slices.DeleteFunc(slices.Clone(d.features), func(f string) bool { return !states[f] }); len(on) > 0 {
			list = append(list, d.changed(iface, on).String())
		}
	}
	return list, unreachable
}

func (s *State) add(c Change) {
	i := slices.IndexFunc(s.Changes, c.same)
	if i < 0 {
		s.Changes = append(s.Changes, c)
		return
	}
	all := append(slices.Clone(s.Changes[i].Features), c.Features...)
	slices.Sort(all)
	c.Features = slices.Compact(all)
	s.Changes[i] = c
}

// Restore switches the features on again that were switched off for an interface and a purpose, and returns the
// state that is left: all other changes, and the failed ones. Devices that are gone need no restoring.
func (s State) Restore(iface string, p Purpose) (State, error) {
	return s.restore(func(c Change) bool { return c.Interface == iface && c.isOf(p) })
}

// RestoreAll is Restore for all changes.
func (s State) RestoreAll() (State, error) { return s.restore(func(Change) bool { return true }) }

func (s State) restore(is func(Change) bool) (State, error) {
	var left State
	var errs []error
	for _, c := range s.Changes {
		if !is(c) {
			left.Changes = append(left.Changes, c)
			continue
		}
		if err := c.restore(); err != nil {
			left.Changes = append(left.Changes, c)
			errs = append(errs, err)
		}
	}
	return left, errors.Join(errs...)
}

func (c Change) restore() error {
	link, err := netlink.LinkByIndex(c.Index)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore %s: read interface %d: %w", c, c.Index, err)
	}
	p := Merging
	if c.isOf(Tags) {
		p = Tags
	}
	var d *device
	if c.PeerIndex == 0 {
		d, err = p.openOwn(link)
	} else {
		d, err = p.openPeer(link)
		if d != nil && d.peerIndex != c.PeerIndex {
			d.close()
			return nil // another device by now
		}
	}
	if err != nil {
		return fmt.Errorf("restore %s: %w", c, err)
	}
	if d == nil {
		return nil // no longer one end of a pair
	}
	defer d.close()
	return d.change(c.Features, true)
}

// device is a network device in some namespace, with the features that are in the way.
type device struct {
	tool      *ethtool.Ethtool
	name      string // in its own namespace
	label     string // for messages
	own       string // the device here: it, or that whose other end it is
	index     int    // of own
	peerIndex int    // 0 unless it is the other end of a veth
	features  []string
}

func (d *device) close() { d.tool.Close() }

func closeAll(all []*device) {
	for _, d := range all {
		d.close()
	}
}

func (d *device) changed(iface string, features []string) Change {
	c := Change{Interface: iface, Index: d.index, PeerIndex: d.peerIndex, Features: features}
	if d.own != iface {
		c.Device = d.own
	}
	return c
}

// switchedOn lists the features that are asked for and on. One that is on without having been asked for cannot
// be switched off, which is an error.
func (d *device) switchedOn(instead string) ([]string, error) {
	states, err := d.tool.FeaturesWithState(d.name)
	if err != nil {
		return nil, fmt.Errorf("read the offload features of %s: %w", d.label, err)
	}
	list := []string{}
	for _, f := range d.features {
		state, known := states[f] // kernels differ in the features that they know
		switch {
		case !known || !state.Active && !state.Requested:
		case !state.Available || !state.Requested:
			return nil, fmt.Errorf("feature %s of %s is on and cannot be switched off: %s", f, d.label, instead)
		default:
			list = append(list, f)
		}
	}
	slices.Sort(list)
	return list, nil
}

// change switches features and checks that it happened: the kernel accepts more than it does.
func (d *device) change(features []string, on bool) error {
	if len(features) == 0 {
		return nil
	}
	word := map[bool]string{false: "off", true: "on"}[on]
	want := make(map[string]bool, len(features))
	for _, f := range features {
		want[f] = on
	}
	if err := d.tool.Change(d.name, want); err != nil {
		return fmt.Errorf("switch %s %s on %s: %w", strings.Join(features, ", "), word, d.label, err)
	}
	states, err := d.tool.FeaturesWithState(d.name)
	if err != nil {
		return fmt.Errorf("read the offload features of %s: %w", d.label, err)
	}
	for _, f := range features {
		if s := states[f]; s.Requested != on || !on && s.Active {
			return fmt.Errorf("the kernel did not switch %s %s on %s", f, word, d.label)
		}
	}
	return nil
}
