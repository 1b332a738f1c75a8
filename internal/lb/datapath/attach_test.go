package datapath

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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

// requireAttachments compares what a process that only reads sees attached.
func requireAttachments(t *testing.T, opts Options, want ...kernel.Attachment) {
	t.Helper()
	v, err := OpenReadOnly(opts)
	must(t, err)
	all, err := v.Attachments()
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

// TestAutoKeepsGeneric: what a process before has in generic mode stays so, and is said to be untried.
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
	if _, ok := d.indexOf(device(t, "shunt-br").Attrs().Index); ok {
		t.Error("the refused interface keeps its slot")
	}
}

// TestRefusedInterfaceOfANameThatWasAttached: an interface that takes the place of one that has gone
// and refuses is not attached to, whatever its name was attached to before.
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
	slot, _ := d.indexOf(device(t, "shunt-a").Attrs().Index)
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
	if now, _ := d.indexOf(device(t, "shunt-a").Attrs().Index); now != slot {
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

func TestInterfaceRecordsAndHops(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-b", model.AttachAuto)
	must(t, err)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	dev := device(t, "shunt-a")
	slot, ok := d.indexOf(dev.Attrs().Index)
	if !ok || slot != 1 {
		t.Fatalf("shunt-a has slot %d, %v", slot, ok)
	}
	var record abi.Interface
	must(t, d.maps[abi.MapInterfaces].Lookup(slot, &record))
	if net.HardwareAddr(record.Mac[:]).String() != dev.Attrs().HardwareAddr.String() || abi.FromAddr(record.Address4) != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("the record is %+v", record)
	}
	mac := net.HardwareAddr{2, 3, 4, 5, 6, 7}
	must(t, netlink.LinkSetHardwareAddr(dev, mac))
	must(t, d.RefreshInterface("shunt-a"))
	must(t, d.maps[abi.MapInterfaces].Lookup(slot, &record))
	if net.HardwareAddr(record.Mac[:]).String() != mac.String() {
		t.Errorf("after a refresh the record is %+v", record)
	}
	ref := reconcile.BackendRef{Index: 1, Generation: 1}
	must(t, d.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("192.0.2.2")}}))
	must(t, d.SetHop(ref, Hop{dev.Attrs().Index, mac}))
	if d.backends[1].Hop != 1<<48|0x070605040302 {
		t.Errorf("the hop is %#x", d.backends[1].Hop)
	}
	if err := d.SetHop(ref, Hop{1, mac}); err == nil || !strings.Contains(err.Error(), "not attached") {
		t.Errorf("a hop through lo: %v", err)
	}
	ref.Generation++
	if err := d.SetHop(ref, Hop{dev.Attrs().Index, mac}); !errors.Is(err, ErrGone) {
		t.Errorf("another tenant's hop: %v", err)
	}
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

// TestGraceWaitsForRunningPrograms runs an XDP program that says when it begins and when
// it ends, some hundred milliseconds later.
func TestGraceWaitsForRunningPrograms(t *testing.T) {
	d := mustOpen(t, testOptions(t))
	words, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	defer words.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "slow", Type: ebpf.XDP, License: "GPL", Instructions: slow(words.FD())})
	must(t, err)
	defer program.Close()
	done := make(chan error, 1)
	state := func() (word uint64) {
		must(t, words.Lookup(uint32(0), &word))
		return word
	}
	for tries := 0; state() != 1; tries++ {
		if tries == 20 {
			t.Skip("each time the program had ended before it could be waited for: nothing else ran meanwhile, as with one CPU")
		}
		if tries > 0 { // a busy machine looked away until it had ended
			must(t, <-done)
		}
		must(t, words.Put(uint32(0), uint64(0)))
		go func() {
			_, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			done <- err
		}()
		for state() == 0 { // it has not begun
		}
	}
	must(t, d.Grace())
	if state() != 2 {
		t.Error("Grace returned while a program that had begun before was running")
	}
	must(t, <-done)
}

// slow stores 1 in the map's word, spends some time in bpf_loop, and stores 2.
func slow(fd int) asm.Instructions {
	const rounds = 8 << 20 // BPF_MAX_LOOPS
	number, pointer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}, &btf.Pointer{Target: &btf.Void{}}
	main := &btf.Func{Name: "slow", Linkage: btf.GlobalFunc, Type: &btf.FuncProto{
		Return: number, Params: []btf.FuncParam{{Name: "ctx", Type: pointer}}}}
	round := &btf.Func{Name: "round", Linkage: btf.StaticFunc, Type: &btf.FuncProto{
		Return: number, Params: []btf.FuncParam{{Name: "index", Type: number}, {Name: "ctx", Type: pointer}}}}
	ins := asm.Instructions{
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0), main).WithSymbol("slow"),
		asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, fd),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreMem(asm.R6, 0, asm.R1, asm.DWord),
	}
	for range 10 {
		ins = append(ins,
			asm.Mov.Imm(asm.R1, rounds),
			asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}.WithReference("round"),
			asm.Mov.Imm(asm.R3, 0),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnLoop.Call())
	}
	return append(ins,
		asm.Mov.Imm(asm.R1, 2),
		asm.StoreMem(asm.R6, 0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, kernel.XDPPass).WithSymbol("out"),
		asm.Return(),
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0), round).WithSymbol("round"),
		asm.Return())
}
