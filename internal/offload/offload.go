// Package offload switches off what would hand merged packets to a program in generic mode:
// receive aggregation on the interface (GRO, LRO), and segmentation offload at the other end
// of a veth, which sends packets of up to 64 KB as they are.
//
//	sender's end of a veth ──(TSO, GSO, USO)──► interface ──(GRO, LRO)──► generic XDP
//
// Invariant: what is switched off was written down first, by the caller's store, so that it
// can be switched on again by a later process too.
//
// It uses the ethtool ioctl and rtnetlink (CAP_NET_ADMIN), and enters the network namespace
// of a veth's other end (CAP_SYS_ADMIN). It works in the calling thread's namespace.
package offload

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// Feature names are the kernel's (netdev_features_strings in net/ethtool/common.c).
var (
	// receiving merges packets before generic XDP sees them.
	receiving = []string{"rx-gro", "rx-lro", "rx-gro-hw", "rx-gro-list", "rx-udp-gro-forwarding"}
	// sending lets the other end of a veth hand over packets that nobody has cut yet.
	sending = []string{
		"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-accecn-segmentation",
		"tx-tcp-mangleid-segmentation", "tx-udp-segmentation", "tx-gso-list", "tx-generic-segmentation",
	}
)

// State is what was switched off, to be stored by the caller until it is restored. It holds
// any number of interfaces.
type State struct {
	Changes []Change `json:"changes"`
}

// Change is what was switched off on one device.
type Change struct {
	// Interface and Index are the interface shunt is attached to.
	Interface string `json:"interface"`
	Index     int    `json:"index"`
	// PeerIndex, if not 0, says that the device changed is the other end of that veth,
	// which has this index in its own namespace.
	PeerIndex int `json:"peer_index,omitempty"`
	// Features that had been asked for, sorted.
	Features []string `json:"features"`
}

func (c Change) same(o Change) bool { return c.Index == o.Index && c.PeerIndex == o.PeerIndex }

// String is "eth0: rx-gro" or "the other end of veth0: tx-tcp-segmentation".
func (c Change) String() string {
	device := c.Interface
	if c.PeerIndex != 0 {
		device = "the other end of " + c.Interface
	}
	return device + ": " + strings.Join(c.Features, ", ")
}

// Of is the part of the state that is about one interface, in words, for a message.
func (s State) Of(iface string) []string {
	var list []string
	for _, c := range s.Changes {
		if c.Interface == iface {
			list = append(list, c.String())
		}
	}
	return list
}

// Disable switches aggregation off for an interface. What it is about to change is added to
// before, what an earlier process stored, and given to store; if that fails nothing is
// changed. It returns the state as stored. Doing it again changes nothing.
//
// A *PeerUnreachable error means that all was done but at the other end of the veth.
func Disable(iface string, before State, store func(State) error) (State, error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return before, fmt.Errorf("switch aggregation off on %s: read the interface: %w", iface, err)
	}
	own, err := openOwn(link)
	if err != nil {
		return before, fmt.Errorf("switch aggregation off on %s: %w", iface, err)
	}
	defer own.close()
	devices, wanted := []*device{own}, [][]string{receiving}
	peer, unreachable := openPeer(link)
	if peer != nil {
		defer peer.close()
		devices, wanted = append(devices, peer), append(wanted, sending)
	}

	// An interface made anew under the same name has lost what was changed.
	state := State{Changes: slices.DeleteFunc(slices.Clone(before.Changes), func(c Change) bool {
		return c.Interface == iface && c.Index != link.Attrs().Index
	})}
	plans := make([][]string, len(devices))
	for i, d := range devices {
		if plans[i], err = d.switchedOn(wanted[i]); err != nil {
			return before, err
		}
		if len(plans[i]) > 0 {
			state.add(Change{Interface: iface, Index: link.Attrs().Index, PeerIndex: d.peerIndex, Features: plans[i]})
		}
	}
	if err := store(state); err != nil {
		return before, fmt.Errorf("switch aggregation off on %s: store what has to be restored: %w", iface, err)
	}
	for i, d := range devices {
		if err := d.change(plans[i], false); err != nil {
			return state, err
		}
	}
	return state, unreachable
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

// Restore switches on again what was switched off for an interface, "" for all, and returns
// what is left to do: nothing, or what failed. Devices that are gone need no restoring.
func (s State) Restore(iface string) (State, error) {
	var left State
	var errs []error
	for _, c := range s.Changes {
		if iface != "" && c.Interface != iface {
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
	var d *device
	if c.PeerIndex == 0 {
		d, err = openOwn(link)
	} else {
		d, err = openPeer(link)
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

// device is a network device in some namespace.
type device struct {
	tool      *ethtool.Ethtool
	name      string // in its own namespace
	label     string // for messages
	peerIndex int    // 0 unless it is the other end of a veth
}

func openOwn(link netlink.Link) (*device, error) {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("open an ethtool socket: %w", err)
	}
	return &device{tool: tool, name: link.Attrs().Name, label: link.Attrs().Name}, nil
}

func (d *device) close() { d.tool.Close() }

// switchedOn lists those features that are asked for. One that is on without having been
// asked for cannot be switched off, which is an error.
func (d *device) switchedOn(features []string) ([]string, error) {
	states, err := d.tool.FeaturesWithState(d.name)
	if err != nil {
		return nil, fmt.Errorf("read the offload features of %s: %w", d.label, err)
	}
	list := []string{}
	for _, f := range features {
		state, known := states[f] // kernels differ in what they know
		switch {
		case !known || !state.Active && !state.Requested:
		case !state.Available || !state.Requested:
			return nil, fmt.Errorf("feature %s of %s is on and cannot be switched off: use native mode, or another interface", f, d.label)
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
