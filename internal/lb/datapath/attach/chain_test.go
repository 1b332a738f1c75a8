package attach

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/test/stranger"
)

// pinned pins a program in a folder of the test's own and returns the path.
func pinned(t *testing.T, opts store.Options, p *ebpf.Program, name string) string {
	t.Helper()
	folder := filepath.Join(kernel.DefaultPinRoot, opts.Instance+"-pins")
	must(t, os.MkdirAll(folder, 0o700))
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	path := filepath.Join(folder, name)
	must(t, p.Pin(path))
	return path
}

// chainOf opens the map as another program would: by its file.
func chainOf(t *testing.T, opts store.Options, iface string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(chainPath(opts.PinRoot, opts.Instance, iface), nil)
	must(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// requireChain expects programs with these names, where an empty name is no program, and that the interface
// runs the first.
func requireChain(t *testing.T, opts store.Options, iface, before, after string) Chain {
	t.Helper()
	all, err := Chains(opts)
	must(t, err)
	name := func(c *Chained) string {
		if c == nil {
			return ""
		}
		return c.Name
	}
	for _, c := range all {
		if c.Interface != iface {
			continue
		}
		if name(c.Before) != before || name(c.Shunt) != "sh_xdp" || name(c.After) != after {
			t.Fatalf("the chain is %v, %v, %v; want %q before and %q after", c.Before, c.Shunt, c.After, before, after)
		}
		first := c.Shunt
		if c.Before != nil {
			first = c.Before
		}
		if c.Attached != first.ID || programID(t, iface) != first.ID {
			t.Fatalf("the interface runs program %d, the link %d, want %v", programID(t, iface), c.Attached, first)
		}
		return c
	}
	t.Fatalf("no chain of %s in %+v", iface, all)
	return Chain{}
}

func TestChainOutlivesAllButDetach(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireChain(t, opts, "shunt-a", "", "")
	filter := pinned(t, opts, stranger.Filter(t, "filter", chainOf(t, opts, "shunt-a")), "filter")
	counting, _ := stranger.Count(t, "count")
	count := pinned(t, opts, counting, "count")
	must(t, SetChain(opts, "shunt-a", PositionBefore, filter))
	requireChain(t, opts, "shunt-a", "filter", "")
	must(t, SetChain(opts, "shunt-a", PositionAfter, count))
	was := requireChain(t, opts, "shunt-a", "filter", "count").Shunt.ID
	must(t, os.RemoveAll(filepath.Dir(filter))) // the pins are not needed any more
	must(t, d.Close())
	requireChain(t, opts, "shunt-a", "filter", "count")

	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	if now := requireChain(t, opts, "shunt-a", "filter", "count").Shunt.ID; now == was {
		t.Error("shunt's program was not replaced behind the filter")
	}
	_, err = d.Attach("shunt-a", model.AttachGeneric)
	must(t, err)
	requireChain(t, opts, "shunt-a", "filter", "count")
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_SKB)

	// An interface that was removed and made anew has the same chain.
	must(t, netlink.LinkDel(device(t, "shunt-a")))
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: "shunt-a"})
	veth.PeerName = "shunt-b"
	must(t, netlink.LinkAdd(veth))
	must(t, netlink.LinkSetUp(device(t, "shunt-a")))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireChain(t, opts, "shunt-a", "filter", "count")
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_DRV)

	gone, err := ClearChain(opts, "shunt-a", PositionBefore)
	must(t, err)
	if gone == nil || gone.Name != "filter" {
		t.Errorf("cleared %v, want filter", gone)
	}
	requireChain(t, opts, "shunt-a", "", "count")
	if gone, err = ClearChain(opts, "shunt-a", PositionBefore); gone != nil || err != nil {
		t.Errorf("cleared %v once more: %v", gone, err)
	}
	must(t, d.Detach("shunt-a"))
	if _, err := os.Stat(chainPath(opts.PinRoot, opts.Instance, "shunt-a")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after detaching, the chain's file: %v", err)
	}
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireChain(t, opts, "shunt-a", "", "")
}

// A change that was cut short between the note and the interface is repaired by the process that attaches next.
func TestChainCutShortIsRepaired(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	chain := chainOf(t, opts, "shunt-a")
	must(t, chain.Put(PositionBefore.index(), stranger.Filter(t, "filter", chain)))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireChain(t, opts, "shunt-a", "filter", "")
	must(t, chain.Delete(PositionBefore.index()))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	requireChain(t, opts, "shunt-a", "", "")
}

func TestChainRefusals(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	drops := stranger.Drop(t, "drops")
	drop := pinned(t, opts, drops, "drop")
	refuse := func(iface string, position Position, pin string, words ...string) {
		t.Helper()
		err := SetChain(opts, iface, position, pin)
		for _, word := range append(words, pin, string(position), iface) {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("%s %s: got %v, want %q", position, pin, err, word)
			}
		}
	}
	refuse("shunt-a", PositionAfter, drop, "attached to no interface")
	if _, err := Chains(opts); !errors.Is(err, store.ErrNotLoaded) {
		t.Errorf("listing where nothing is loaded: %v", err)
	}
	d := mustOpen(t, opts)
	for _, iface := range []string{"shunt-a", "shunt-b"} {
		_, err := d.Attach(iface, model.AttachAuto)
		must(t, err)
	}
	chain := chainOf(t, opts, "shunt-a")
	filtering := stranger.Filter(t, "filter", chain)
	filter := pinned(t, opts, filtering, "filter")
	refuse("shunt-c", PositionAfter, drop, "but to shunt-a, shunt-b")
	refuse("shunt-a", PositionAfter, "/sys/fs/bpf/nothere", "no such file")
	refuse("shunt-a", PositionAfter, chainPath(opts.PinRoot, opts.Instance, "shunt-a"), "not a Program")
	refuse("shunt-a", PositionBefore, drop, "does not refer to this interface's chain")
	refuse("shunt-b", PositionBefore, filter, "does not refer to this interface's chain")
	refuse("shunt-a", PositionAfter, filter, "packets would loop")
	refuse("shunt-a", PositionAfter, pinned(t, opts, stranger.Pass(t, "old"), "old"), "xdp.frags", "BPF_F_XDP_HAS_FRAGS")
	refuse("shunt-a", PositionBefore, pinned(t, opts, d.attached["shunt-a"].programs[0], "own"), "shunt's own program already")
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	must(t, err)
	defer other.Close()
	refuse("shunt-a", PositionAfter, pinned(t, opts, other, "socket"), "only XDP programs")
	requireChain(t, opts, "shunt-a", "", "")
	requireChain(t, opts, "shunt-b", "", "")

	// Calling into the chain asks for frames in several buffers when the program is loaded.
	_, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, AttachType: ebpf.AttachXDP, License: "MIT", Instructions: asm.Instructions{
		asm.LoadMapPtr(asm.R2, chain.FD()), asm.Mov.Imm(asm.R3, 1), asm.FnTailCall.Call(), asm.Mov.Imm(asm.R0, kernel.XDPPass), asm.Return()}})
	if err == nil || !strings.Contains(err.Error(), "invalid argument") {
		t.Errorf("a program for single buffers that calls into the chain: %v, want EINVAL", err)
	}
}

func TestChainGoesWhenAttachingFails(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	must(t, netlink.LinkSetXdpFdWithFlags(device(t, "shunt-a"), stranger.Pass(t, "other").FD(), nl.XDP_FLAGS_DRV_MODE))
	_, err := d.Attach("shunt-a", model.AttachAuto)
	requireOccupied(t, err)
	if _, err := os.Stat(chainPath(opts.PinRoot, opts.Instance, "shunt-a")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the chain's file: %v", err)
	}
}
