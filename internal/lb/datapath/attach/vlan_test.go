package attach

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/test/stranger"
)

// The kernel here has no VLANs of its own, so an end of a veth stands for one, whose frames come in
// with tags by shunt-a.
var testTags = map[string][]store.Tag{
	"shunt-v": {{Protocol: unix.ETH_P_8021Q, ID: 7}},
	"shunt-q": {{Protocol: unix.ETH_P_8021AD, ID: 7}, {Protocol: unix.ETH_P_8021Q, ID: 7}},
	"shunt-x": {{Protocol: unix.ETH_P_8021AD, ID: 7}, {Protocol: unix.ETH_P_8021Q, ID: 7}, {Protocol: unix.ETH_P_8021Q, ID: 8}},
}

// withTestVLANs makes these VLANs, and tells the data plane about them.
func withTestVLANs(t *testing.T) store.Options {
	opts := testOptions(t)
	opts.VLANs = func(dev netlink.Link) (store.VLAN, bool) {
		tags, ok := testTags[dev.Attrs().Name]
		return store.VLAN{Parent: "shunt-a", Tags: tags}, ok
	}
	for name := range testTags {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: name})
		veth.PeerName = name + "-peer"
		must(t, netlink.LinkAdd(veth))
		must(t, netlink.LinkSetUp(veth))
	}
	return opts
}

// withVLANsAttached has two of them, and their parent, in native mode.
func withVLANsAttached(t *testing.T) (store.Options, *Plane) {
	t.Helper()
	opts := withTestVLANs(t)
	d := mustOpen(t, opts)
	for _, name := range []string{"shunt-a", "shunt-v", "shunt-q"} {
		_, err := d.Attach(name, model.AttachNative)
		must(t, err)
	}
	return opts, d
}

// handed returns the VLANs whose frames are looked at, and the number of programs for that.
func handed(t *testing.T, d *Plane) string {
	t.Helper()
	var all []string
	programs := 0
	for name := range testTags {
		index, ok := d.IndexOf(kernel.InterfaceIndex(name))
		if !ok {
			continue
		}
		var key abi.VlanKey
		var at uint32
		for i := mapOf(t, d, abi.MapVlans).Iterate(); i.Next(&key, &at); {
			if at == index {
				for _, tag := range key.Tags.Tag {
					name += fmt.Sprintf(" %x:%d", kernel.ToWire(tag.Protocol), kernel.ToWire(tag.Control))
				}
				all = append(all, name)
			}
		}
	}
	var index, id uint32
	for i := mapOf(t, d, abi.MapVlanProgs).Iterate(); i.Next(&index, &id); {
		programs++
	}
	slices.Sort(all)
	return fmt.Sprint(all, programs)
}

// tagsWritten counts the entries of sh_vlan_tags of all interfaces: none must be left behind.
func tagsWritten(t *testing.T, d *Plane) (n int) {
	t.Helper()
	var index uint32
	var tags abi.VlanTags
	for i := mapOf(t, d, abi.MapVlanTags).Iterate(); i.Next(&index, &tags); {
		if tags != (abi.VlanTags{}) {
			n++
		}
	}
	return n
}

func TestVLANComesAndGoes(t *testing.T) {
	inNamespace(t)
	opts := withTestVLANs(t)
	d := mustOpen(t, opts)
	attach := func(iface string, mode model.Attach) {
		t.Helper()
		_, err := d.Attach(iface, mode)
		must(t, err)
	}
	requireHanded := func(when, want string, written int) {
		t.Helper()
		if got := handed(t, d); got != want {
			t.Errorf("%s: handed on are %s, want %s", when, got, want)
		}
		if n := tagsWritten(t, d); n != written {
			t.Errorf("%s: %d interfaces have tags, want %d", when, n, written)
		}
	}
	const one, both = "[shunt-v 8100:7 0:0]", "[shunt-q 88a8:7 8100:7 shunt-v 8100:7 0:0]"
	attach("shunt-a", model.AttachNative)
	requireHanded("without VLANs", "[] 0", 0)
	attach("shunt-v", model.AttachNative)
	requireMode(t, "shunt-v", nl.XDP_ATTACHED_NONE)
	requireHanded("with one", one+" 3", 1)
	if verdict, out, err := d.RunPacket("shunt-v", frame(t, "shunt-v")); err == nil || !strings.Contains(err.Error(), "shunt-a") {
		t.Errorf("a frame without tags at the VLAN itself: verdict %d, % x, %v", verdict, out, err)
	}
	attach("shunt-q", model.AttachNative)
	requireHanded("with two", both+" 4", 2)
	attach("shunt-q", model.AttachNative)
	requireHanded("after attaching again", both+" 4", 2)
	must(t, d.RefreshInterface("shunt-q"))
	var port uint32
	index, _ := d.IndexOf(device(t, "shunt-q").Attrs().Index)
	must(t, mapOf(t, d, abi.MapTxPorts).Lookup(index, &port))
	if parent := device(t, "shunt-a").Attrs().Index; int(port) != parent {
		t.Errorf("frames leave by the interface %d, want the parent, %d", port, parent)
	}
	for _, c := range []struct {
		mode model.Attach
		xdp  uint32
	}{{model.AttachGeneric, nl.XDP_ATTACHED_SKB}, {model.AttachTC, nl.XDP_ATTACHED_NONE}} {
		attach("shunt-q", c.mode)
		requireMode(t, "shunt-q", c.xdp)
		requireHanded("with "+string(c.mode), one+" 3", 1)
		must(t, mapOf(t, d, abi.MapTxPorts).Lookup(index, &port))
		if own := device(t, "shunt-q").Attrs().Index; int(port) != own {
			t.Errorf("with %s frames leave by the interface %d, want it itself, %d", c.mode, port, own)
		}
		attach("shunt-q", model.AttachNative)
		requireMode(t, "shunt-q", nl.XDP_ATTACHED_NONE)
		requireHanded("back from "+string(c.mode), both+" 4", 2)
	}
	must(t, d.Close())
	d = mustOpen(t, opts)
	requireHanded("after a restart", both+" 4", 2)
	if all := d.Attached(); !slices.Equal(all, []string{"shunt-a", "shunt-q", "shunt-v"}) {
		t.Errorf("after a restart attached are %q", all)
	}
	attach("shunt-a", model.AttachNative)
	before := programID(t, "shunt-a")
	attach("shunt-v", model.AttachNative)
	attach("shunt-q", model.AttachNative)
	if after := programID(t, "shunt-a"); after != before {
		t.Error("the parent's program was replaced after a restart, though it was known to have VLANs")
	}
	must(t, d.Detach("shunt-v"))
	must(t, d.Detach("shunt-q"))
	requireHanded("at the end", "[] 2", 0)
	must(t, d.Detach("shunt-a"))
	requireHanded("without the parent", "[] 0", 0)
}

// requireError expects a refusal, whose error has all parts.
func requireError(t *testing.T, what string, err error, parts ...string) {
	t.Helper()
	if err == nil || slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(err.Error(), p) }) {
		t.Errorf("%s: %v, want an error with %q", what, err, parts)
	}
}

func TestVLANThatCannotBe(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, withTestVLANs(t))
	refused := func(iface string, parts ...string) {
		t.Helper()
		_, err := d.Attach(iface, model.AttachNative)
		requireError(t, "attaching to "+iface, err, parts...)
		if got := handed(t, d); !strings.HasPrefix(got, "[] ") {
			t.Errorf("what was refused is handed on all the same: %s", got)
		}
		if names := slices.Sorted(maps.Keys(d.attached)); slices.Contains(names, iface) {
			t.Errorf("what was refused is attached: %q", names)
		}
	}
	refused("shunt-v", "interface shunt-v in native mode", "come in by shunt-a", "`attach: native`")
	for _, mode := range []model.Attach{model.AttachGeneric, model.AttachTC} {
		_, err := d.Attach("shunt-a", mode)
		must(t, err)
		refused("shunt-v", "interface shunt-v in native mode", "come in by shunt-a", "`attach: native`")
	}
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	refused("shunt-x", "interface shunt-x in native mode", "3 VLAN tags", "2 at most", "`attach: tc`")
	if a := d.attached["shunt-a"]; a.Mode != kernel.ModeNative {
		t.Errorf("the parent is in mode %s", a.Mode)
	}
}

// TestVLANsKeepTheirParent: a parent may neither leave native mode nor be detached as long as it has VLANs.
func TestVLANsKeepTheirParent(t *testing.T) {
	inNamespace(t)
	_, d := withVLANsAttached(t)
	refused := func(what string, err error, parts ...string) {
		t.Helper()
		requireError(t, what, err, parts...)
		if got := handed(t, d); got != "[shunt-q 88a8:7 8100:7 shunt-v 8100:7 0:0] 4" {
			t.Errorf("%s: handed on are %s", what, got)
		}
		requireMode(t, "shunt-a", nl.XDP_ATTACHED_DRV)
	}
	for _, mode := range []model.Attach{model.AttachGeneric, model.AttachTC} {
		_, err := d.Attach("shunt-a", mode)
		refused("another mode for the parent", err, "interface shunt-a with `attach: "+string(mode)+"`", "shunt-q, shunt-v")
	}
	refused("detaching from the parent", d.Detach("shunt-a"), "detach from interface shunt-a", "shunt-q, shunt-v")
	a, err := d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	if a.Mode != kernel.ModeNative {
		t.Errorf("`attach: auto` for the parent made it %s", a.Mode)
	}
	must(t, d.Detach("shunt-q"))
	must(t, d.Detach("shunt-v"))
	_, err = d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
}

// TestVLANsAreSeen: any process sees VLANs as attached to, although nothing is pinned for them.
func TestVLANsAreSeen(t *testing.T) {
	inNamespace(t)
	opts, d := withVLANsAttached(t)
	if parents := fmt.Sprint(d.Parent("shunt-q"), d.Parent("shunt-a"), d.Parent("shunt-none")); parents != "shunt-a" {
		t.Errorf("parents are %q, want the first one's alone", parents)
	}
	must(t, d.Close())
	native := func(name string) kernel.Attachment {
		return kernel.Attachment{Interface: name, Mode: kernel.ModeNative}
	}
	requireAttachments(t, opts, native("shunt-a"), native("shunt-q"), native("shunt-v"))

	drops := stranger.Drop(t, "drops")
	err := SetChain(opts, "shunt-v", PositionAfter, pinned(t, opts, drops, "drop"))
	if err == nil || !strings.Contains(err.Error(), "its frames are taken in native mode at shunt-a") {
		t.Errorf("the chain of a VLAN: %v", err)
	}
	if err := RequireGates(d.opts, d.opts.Version.ABI); err == nil || !strings.Contains(err.Error(), "its programs on shunt-q, shunt-v are in native mode at their parents, where an upgrade is not supported yet; nothing was changed") {
		t.Errorf("an upgrade with VLANs: %v", err)
	}

	gone := device(t, "shunt-v")
	must(t, netlink.LinkDel(gone))
	requireAttachments(t, opts, kernel.Attachment{Interface: fmt.Sprint("number ", gone.Attrs().Index), Reason: kernel.InterfaceGone}, native("shunt-a"), native("shunt-q"))
	d = mustOpen(t, opts)
	if all := d.Attached(); !slices.Equal(all, []string{"shunt-a", "shunt-q"}) {
		t.Errorf("without shunt-v attached are %q", all)
	}
	must(t, d.DropGoneVLANs())
	if got := handed(t, d); got != "[shunt-q 88a8:7 8100:7] 3" {
		t.Errorf("without shunt-v handed on are %s", got)
	}
	requireAttachments(t, opts, native("shunt-a"), native("shunt-q"))

	// By a process that knows the VLAN, and with its parent.
	for _, name := range []string{"shunt-a", "shunt-q"} {
		_, err := d.Attach(name, model.AttachNative)
		must(t, err)
	}
	must(t, netlink.LinkDel(device(t, "shunt-q")))
	must(t, netlink.LinkDel(device(t, "shunt-a")))
	must(t, d.DropGoneVLANs())
	if got := handed(t, d); !strings.HasPrefix(got, "[] ") || tagsWritten(t, d) != 0 || d.attached["shunt-q"] != nil {
		t.Errorf("without shunt-q handed on are %s, and %d interfaces have tags", got, tagsWritten(t, d))
	}
}

// TestVLANUnderAnotherOnesNumber: the kernel may give a new VLAN the index of one that has gone.
func TestVLANUnderAnotherOnesNumber(t *testing.T) {
	inNamespace(t)
	opts := withTestVLANs(t)
	id := uint16(7)
	opts.VLANs = func(dev netlink.Link) (store.VLAN, bool) {
		return store.VLAN{Parent: "shunt-a", Tags: []store.Tag{{Protocol: unix.ETH_P_8021Q, ID: id}}}, dev.Attrs().Name == "shunt-v"
	}
	d := mustOpen(t, opts)
	for _, name := range []string{"shunt-a", "shunt-v"} {
		_, err := d.Attach(name, model.AttachNative)
		must(t, err)
	}
	id = 8
	_, err := d.Attach("shunt-v", model.AttachNative)
	must(t, err)
	if got := handed(t, d); got != "[shunt-v 8100:8 0:0] 3" {
		t.Errorf("handed on are %s", got)
	}
}

// TestVLANOf: VLANs by netlink's answers about interfaces; a parent that cannot be seen does not count.
func TestVLANOf(t *testing.T) {
	inNamespace(t)
	parent := device(t, "shunt-a").Attrs().Index
	for name, c := range map[string]struct {
		dev  netlink.Link
		want string
	}{
		"no VLAN":                      {device(t, "shunt-a"), "{ []} false"},
		"a VLAN":                       {&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: parent, NetNsID: -1}, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021AD}, "{shunt-a [{34984 7}]} true"},
		"a parent somewhere else":      {&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: parent, NetNsID: 0}, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}, "{ []} false"},
		"a parent that has gone since": {&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 4711, NetNsID: -1}, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}, "{ []} false"},
	} {
		if is, ok := VLANOf(c.dev); fmt.Sprint(is, ok) != c.want {
			t.Errorf("%s: %v %v, want %s", name, is, ok, c.want)
		}
	}
}
