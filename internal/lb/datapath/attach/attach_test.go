package attach

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

func requireMode(t *testing.T, iface string, want uint32) {
	t.Helper()
	xdp := device(t, iface).Attrs().Xdp
	have := uint32(nl.XDP_ATTACHED_NONE)
	if xdp != nil && xdp.Attached {
		have = xdp.AttachMode
	}
	if have != want {
		t.Fatalf("the kernel says XDP mode %d on %s, want %d", have, iface, want)
	}
}

// requireAttachments compares the attachments that a process without write access sees.
func requireAttachments(t *testing.T, opts store.Options, want ...kernel.Attachment) {
	t.Helper()
	must(t, opts.Complete())
	v, err := store.OpenView(opts)
	must(t, err)
	all, err := Attachments(v)
	must(t, err)
	must(t, v.Close())
	if !slices.Equal(all, want) {
		t.Errorf("attachments are %+v, want %+v", all, want)
	}
}

func programID(t *testing.T, iface string) uint32 {
	t.Helper()
	return device(t, iface).Attrs().Xdp.ProgId
}

// running opens the program that an interface runs.
func running(t *testing.T, iface string) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(programID(t, iface)))
	must(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// frame is an Ethernet frame that is neither IP nor ARP, for the interface itself.
func frame(t *testing.T, iface string) []byte {
	t.Helper()
	f := make([]byte, 60)
	copy(f, device(t, iface).Attrs().HardwareAddr)
	copy(f[6:], device(t, "shunt-b").Attrs().HardwareAddr)
	f[12], f[13] = 0x88, 0xb5 // IEEE 802 local experimental
	return f
}

func TestAttachInEveryMode(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	for _, c := range []struct {
		mode model.Attach
		want kernel.Mode
		nl   uint32
	}{
		{model.AttachAuto, kernel.ModeNative, nl.XDP_ATTACHED_DRV},
		{model.AttachNative, kernel.ModeNative, nl.XDP_ATTACHED_DRV},
		{model.AttachGeneric, kernel.ModeGeneric, nl.XDP_ATTACHED_SKB},
		{model.AttachNative, kernel.ModeNative, nl.XDP_ATTACHED_DRV},
		{model.AttachGeneric, kernel.ModeGeneric, nl.XDP_ATTACHED_SKB},
		{model.AttachAuto, kernel.ModeNative, nl.XDP_ATTACHED_DRV},
	} {
		a, err := d.Attach("shunt-a", c.mode)
		must(t, err)
		if a.Mode != c.want {
			t.Errorf("attach %s gave %s", c.mode, a.Mode)
		}
		requireMode(t, "shunt-a", c.nl)
		verdict, out, err := d.RunPacket("shunt-a", frame(t, "shunt-a"))
		if err != nil || verdict != kernel.XDPPass || string(out) != string(frame(t, "shunt-a")) {
			t.Fatalf("a frame that is not ours: verdict %d, %x: %v", verdict, out, err)
		}
	}
	counters, err := d.Counters()
	must(t, err)
	if counters.Reasons["not_ip"].Packets < 6 {
		t.Errorf("not_ip counted %+v, want at least 6 packets", counters.Reasons)
	}
	must(t, d.Detach("shunt-a"))
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_NONE)
	must(t, d.Detach("shunt-a"))
	if all := d.Attached(); len(all) != 0 {
		t.Errorf("after detaching, attached to %v", all)
	}
}

// TestAutoKeepsGeneric: an earlier process's program in generic mode stays so, and the reason says that native mode
// was not tried.
func TestAutoKeepsGeneric(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	before := mustOpen(t, opts)
	_, err := before.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	must(t, before.Close())
	d := mustOpen(t, opts)
	for range 2 {
		a, err := d.Attach("shunt-a", model.AttachAuto)
		must(t, err)
		if a.Mode != kernel.ModeGeneric || a.Reason != ReasonNotTried {
			t.Errorf("got %+v, want generic and that native was not tried", a)
		}
	}
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_SKB)
}

func TestAutoSaysWhyNotNative(t *testing.T) {
	inNamespace(t)
	// veth refuses native mode when its peer may send more than a page holds, unless the
	// program takes fragments, which ours does; a bridge has no native mode at all.
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "shunt-br"}}))
	d := mustOpen(t, testOptions(t))
	a, err := d.Attach("shunt-br", model.AttachAuto)
	must(t, err)
	if a.Mode != kernel.ModeGeneric || !strings.Contains(a.Reason, "driver") {
		t.Errorf("got %+v, want generic and the driver's reason", a)
	}
	requireMode(t, "shunt-br", nl.XDP_ATTACHED_SKB)
	again, err := d.Attach("shunt-br", model.AttachAuto)
	must(t, err)
	if again != a {
		t.Errorf("attached once more it is %+v, want %+v", again, a)
	}
	_, err = d.Attach("shunt-br", model.AttachGeneric)
	must(t, err)
	if again, err = d.Attach("shunt-br", model.AttachAuto); err != nil || again != a {
		t.Errorf("after generic mode was asked for, it is %+v, %v; want %+v, because native mode was tried", again, err, a)
	}
	must(t, d.Detach("shunt-br"))
	_, err = d.Attach("shunt-br", model.AttachNative)
	if err == nil || !strings.Contains(err.Error(), "native mode") {
		t.Errorf("got %v, want native refused", err)
	}
	requireMode(t, "shunt-br", nl.XDP_ATTACHED_NONE)
	if _, ok := d.IndexOf(device(t, "shunt-br").Attrs().Index); ok {
		t.Error("the refused interface keeps its slot")
	}
}

// TestRefusedInterfaceOfANameThatWasAttached: an interface that has taken the name of a gone one, and that
// refuses, is not attached to, although an interface of this name was before.
func TestRefusedInterfaceOfANameThatWasAttached(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	add := func(link netlink.Link) {
		must(t, netlink.LinkAdd(link))
		must(t, netlink.LinkSetUp(device(t, "shunt-x")))
	}
	add(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "shunt-x"}, PeerName: "shunt-y"})
	_, err := d.Attach("shunt-x", model.AttachNative)
	must(t, err)
	must(t, d.RefreshInterface("shunt-x"))
	must(t, netlink.LinkDel(device(t, "shunt-x")))
	add(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "shunt-x"}})
	for range 2 {
		if err := d.RefreshInterface("shunt-x"); err == nil {
			t.Error("it counts as attached to")
		}
		if _, err := d.Attach("shunt-x", model.AttachNative); err == nil || !strings.Contains(err.Error(), "native mode") {
			t.Errorf("got %v, want native refused", err)
		}
	}
	must(t, netlink.LinkDel(device(t, "shunt-x")))
	add(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "shunt-x"}, PeerName: "shunt-y"})
	_, err = d.Attach("shunt-x", model.AttachNative)
	must(t, err)
	must(t, d.RefreshInterface("shunt-x"))
	must(t, d.Detach("shunt-x"))
}

func TestRestartReplacesTheProgramInItsLink(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	linkID := func() link.ID {
		l, err := link.LoadPinnedLink(linkPath(opts.PinRoot, opts.Instance, "shunt-a"), nil)
		must(t, err)
		defer l.Close()
		info, err := l.Info()
		must(t, err)
		return info.ID
	}
	before, program := linkID(), programID(t, "shunt-a")
	slot, _ := d.IndexOf(device(t, "shunt-a").Attrs().Index)
	must(t, d.Close())
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_DRV) // it forwards without a process

	requireAttachments(t, opts, kernel.Attachment{Interface: "shunt-a", Mode: kernel.ModeNative})

	d = mustOpen(t, opts)
	if all := d.Attached(); len(all) != 1 || all[0] != "shunt-a" {
		t.Errorf("the next process sees %v attached", all)
	}
	_, err = d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	if linkID() != before || programID(t, "shunt-a") == program {
		t.Error("the program was not replaced in its link")
	}
	if now, _ := d.IndexOf(device(t, "shunt-a").Attrs().Index); now != slot {
		t.Errorf("the interface moved from slot %d to %d", slot, now)
	}
}

func TestInterfaceNamesThatBPFFSRefuses(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	const name = "shunt.1"
	must(t, netlink.LinkSetDown(device(t, "shunt-a")))
	must(t, netlink.LinkSetName(device(t, "shunt-a"), name))
	_, err := d.Attach(name, model.AttachGeneric)
	must(t, err)
	all, err := d.Attachments()
	must(t, err)
	if want := (kernel.Attachment{Interface: name, Mode: kernel.ModeGeneric}); len(all) != 1 || all[0] != want || d.Attached()[0] != name {
		t.Errorf("attachments are %+v and %v, want %+v", all, d.Attached(), want)
	}
	must(t, d.Detach(name))
	requireMode(t, name, nl.XDP_ATTACHED_NONE)
}

func TestAnInterfaceThatCameBackIsAttachedAnew(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	must(t, netlink.LinkDel(device(t, "shunt-a")))
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: "shunt-a"})
	veth.PeerName = "shunt-b"
	must(t, netlink.LinkAdd(veth))
	must(t, netlink.LinkSetUp(device(t, "shunt-a")))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_DRV)
}

func TestRemoveWorksWithoutAProcessAndTwice(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	for _, name := range refusalCounters {
		if _, err := os.Stat(kernel.Directory(opts.PinRoot, opts.Instance) + "/" + dropsPrefix + name); err != nil {
			t.Error(err)
		}
	}
	must(t, d.Close())
	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	must(t, d.Close())
	must(t, RemoveFrom(opts))
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_NONE)
	if _, err := os.Stat(kernel.Directory(opts.PinRoot, opts.Instance)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	must(t, RemoveFrom(opts))
}
