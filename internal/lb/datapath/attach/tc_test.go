package attach

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// tcMode is a mode that attach: tc may become, by the features that the kernel is allowed to have.
type tcMode struct {
	name       string
	withoutTCX bool
}

// tcModes returns the modes of this kernel. Before Linux 6.6 there is one.
func tcModes() []tcMode {
	modes := []tcMode{{"as the kernel has it", false}}
	if wantedTC(false) != wantedTC(true) {
		modes = append(modes, tcMode{"as before Linux 6.6", true})
	}
	return modes
}

// wantedTC returns the mode that this kernel has.
func wantedTC(withoutTCX bool) kernel.Mode {
	const loopback = 1
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
	if withoutTCX || err != nil {
		return kernel.ModeClsact
	}
	return kernel.ModeTCX
}

// atTC asks the kernel which programs an interface has at tc, by name.
func atTC(t *testing.T, iface string) map[string]ebpf.ProgramID {
	t.Helper()
	dev := device(t, iface)
	found := map[string]ebpf.ProgramID{}
	add := func(id ebpf.ProgramID) {
		p, err := ebpf.NewProgramFromID(id)
		must(t, err)
		defer p.Close()
		info, err := p.Info()
		must(t, err)
		found[info.Name] = id
	}
	for _, d := range directions {
		if result, err := link.QueryPrograms(link.QueryOptions{Target: dev.Attrs().Index, Attach: d.side("", "", "", 0).AttachType()}); err == nil {
			for _, p := range result.Programs {
				add(p.ID)
			}
		}
		filters, err := netlink.FilterList(dev, d.side("", "", "", 0).Parent())
		must(t, err)
		for _, f := range filters {
			if bpf, ok := f.(*netlink.BpfFilter); ok {
				add(ebpf.ProgramID(bpf.Id))
			}
		}
	}
	return found
}

func hasClsact(t *testing.T, iface string) bool {
	t.Helper()
	all, err := netlink.QdiscList(device(t, iface))
	must(t, err)
	return slices.ContainsFunc(all, func(q netlink.Qdisc) bool { return q.Type() == "clsact" })
}

func requireAtTC(t *testing.T, iface string, wanted bool) map[string]ebpf.ProgramID {
	t.Helper()
	found := atTC(t, iface)
	want := 0
	if wanted {
		want = 2
	}
	if len(found) != want || (wanted && (found["sh_tc_in"] == 0 || found["sh_tc_out"] == 0)) {
		t.Fatalf("%s has %v at tc, want both of shunt's: %v", iface, found, wanted)
	}
	return found
}

// requireNothingAtTC requires that neither programs nor the qdisc is left.
func requireNothingAtTC(t *testing.T, iface string) {
	t.Helper()
	requireAtTC(t, iface, false)
	if hasClsact(t, iface) {
		t.Error("the qdisc that shunt made is still there")
	}
}

// TestAttachAtTC: attached, replaced, adopted by the next process, and taken off, with and without
// links.
func TestAttachAtTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			opts := testOptions(t)
			d := mustOpen(t, opts)
			d.withoutTCX = c.withoutTCX
			want := wantedTC(c.withoutTCX)
			var before map[string]ebpf.ProgramID
			for range 2 {
				a, err := d.Attach("shunt-a", model.AttachTC)
				must(t, err)
				if a != (kernel.Attachment{Interface: "shunt-a", Mode: want}) {
					t.Fatalf("attaching gave %+v, want %s", a, want)
				}
				now := requireAtTC(t, "shunt-a", true)
				if before["sh_tc_in"] == now["sh_tc_in"] || before["sh_tc_out"] == now["sh_tc_out"] {
					t.Errorf("attaching again left a program: %v, then %v", before, now)
				}
				before = now
				for name, run := range map[string]func(string, []byte) (uint32, []byte, error){"in": d.RunPacket, "out": d.RunPacketOut} {
					verdict, out, err := run("shunt-a", frame(t, "shunt-a"))
					if err != nil || verdict != kernel.XDPPass || string(out) != string(frame(t, "shunt-a")) {
						t.Fatalf("%s, a frame that is not ours: verdict %d, %x: %v", name, verdict, out, err)
					}
				}
			}
			must(t, d.Close())
			requireAtTC(t, "shunt-a", true) // it forwards without a process
			requireAttachments(t, opts, kernel.Attachment{Interface: "shunt-a", Mode: want})
			d = mustOpen(t, opts)
			if all := d.Attached(); !slices.Equal(all, []string{"shunt-a"}) {
				t.Errorf("attached to %v", all)
			}
			a, err := d.Attach("shunt-a", model.AttachTC) // on any kernel: the present way to attach stays
			must(t, err)
			if now := requireAtTC(t, "shunt-a", true); a.Mode != want || now["sh_tc_in"] == before["sh_tc_in"] {
				t.Errorf("the next process got %+v, and programs %v after %v", a, now, before)
			}
			must(t, d.Detach("shunt-a"))
			must(t, d.Detach("shunt-a"))
			requireNothingAtTC(t, "shunt-a")
		})
	}
}

// TestRemoveFromTC: without a process, and whether or not one had it open.
func TestRemoveFromTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			opts := testOptions(t)
			d := mustOpen(t, opts)
			d.withoutTCX = c.withoutTCX
			_, err := d.Attach("shunt-a", model.AttachTC)
			must(t, err)
			must(t, d.Close())
			must(t, RemoveFrom(opts))
			requireNothingAtTC(t, "shunt-a")
		})
	}
}

// TestRemoveFromTCElsewhere: from another network namespace than that of the interface, and after
// the interface has gone.
func TestRemoveFromTCElsewhere(t *testing.T) {
	for _, c := range tcModes() {
		for _, gone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, gone %v", c.name, gone), func(t *testing.T) {
				home, err := netns.Get()
				must(t, err)
				defer home.Close()
				inNamespace(t)
				opts := testOptions(t)
				d := mustOpen(t, opts)
				d.withoutTCX = c.withoutTCX
				_, err = d.Attach("shunt-a", model.AttachTC)
				must(t, err)
				must(t, d.Close())
				if gone {
					must(t, netlink.LinkDel(device(t, "shunt-a")))
				}
				there, err := netns.Get()
				must(t, err)
				defer there.Close()
				must(t, netns.Set(home))
				failed := RemoveFrom(opts)
				must(t, netns.Set(there))
				must(t, failed)
				if !gone {
					requireNothingAtTC(t, "shunt-a")
				}
				if _, err := os.Stat(kernel.Directory(opts.PinRoot, opts.Instance)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("of the instance there is still something: %v", err)
				}
			})
		}
	}
}

// TestBetweenXDPAndTC: the program is at the new hook before it leaves the old one, and nothing stays at the
// old one.
func TestBetweenXDPAndTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			d := mustOpen(t, testOptions(t))
			d.withoutTCX = c.withoutTCX
			for range 2 {
				_, err := d.Attach("shunt-a", model.AttachTC)
				must(t, err)
				requireAtTC(t, "shunt-a", true)
				requireMode(t, "shunt-a", nl.XDP_ATTACHED_NONE)
				_, err = d.Attach("shunt-a", model.AttachNative)
				must(t, err)
				requireAtTC(t, "shunt-a", false)
				requireMode(t, "shunt-a", nl.XDP_ATTACHED_DRV)
			}
			if all := d.Attached(); !slices.Equal(all, []string{"shunt-a"}) {
				t.Errorf("attached to %v", all)
			}
		})
	}
}

// TestClsactOfOthers: another program's qdisc and filters stay, and a place that is taken is refused.
func TestClsactOfOthers(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	d.withoutTCX = true
	ifindex := device(t, "shunt-a").Attrs().Index
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	filter := &netlink.BpfFilter{DirectAction: true,
		FilterAttrs: netlink.FilterAttrs{LinkIndex: ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Protocol: unix.ETH_P_ALL}}
	put := func(handle uint32) {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "foreign", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		must(t, err)
		defer p.Close()
		filter.Handle, filter.Fd, filter.Name = handle, p.FD(), "foreign"
		must(t, netlink.FilterAdd(filter))
	}
	must(t, netlink.QdiscAdd(qdisc))
	put(1)
	_, err := d.Attach("shunt-a", model.AttachTC)
	must(t, err)
	must(t, d.Detach("shunt-a"))
	if found := atTC(t, "shunt-a"); len(found) != 1 || found["foreign"] == 0 || !hasClsact(t, "shunt-a") {
		t.Errorf("after detaching there is %v, and a qdisc: %v", found, hasClsact(t, "shunt-a"))
	}
	put(filterHandle)
	if _, err := d.Attach("shunt-a", model.AttachTC); err == nil || !strings.Contains(err.Error(), `"foreign"`) {
		t.Errorf("attaching where the place is taken: %v", err)
	}
	if found := atTC(t, "shunt-a"); len(found) != 1 {
		t.Errorf("after the refusal there is %v", found)
	}
	// The qdisc that we made stays as long as another program uses it.
	_, err = d.Attach("shunt-b", model.AttachTC)
	must(t, err)
	filter.LinkIndex = device(t, "shunt-b").Attrs().Index
	put(1)
	must(t, d.Detach("shunt-b"))
	if found := atTC(t, "shunt-b"); len(found) != 1 || found["foreign"] == 0 {
		t.Errorf("after detaching there is %v", found)
	}
	must(t, netlink.QdiscDel(qdisc))
}

// TestFeaturesAtTC: both programs of an interface are loaded anew for a service that needs a feature.
func TestFeaturesAtTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			d := mustOpen(t, testOptions(t))
			d.withoutTCX = c.withoutTCX
			_, err := d.Attach("shunt-a", model.AttachTC)
			must(t, err)
			before := requireAtTC(t, "shunt-a", true)
			must(t, d.PutService(reconcile.ServiceRecord{Index: 0, Generation: 1, Name: "web", Forwarding: model.ForwardingDSRL2, Size: 4}))
			if now := requireAtTC(t, "shunt-a", true); now["sh_tc_in"] == before["sh_tc_in"] || now["sh_tc_out"] == before["sh_tc_out"] {
				t.Errorf("programs were %v and are %v", before, now)
			}
		})
	}
}

// TestUpgradeIsRefusedAtTC as long as there are programs at tc.
func TestUpgradeIsRefusedAtTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			opts := testOptions(t)
			d := mustOpen(t, opts)
			d.withoutTCX = c.withoutTCX
			_, err := d.Attach("shunt-a", model.AttachTC)
			must(t, err)
			must(t, d.Close())
			if err := RequireGates(d.opts, d.opts.Version.ABI); err == nil || !strings.Contains(err.Error(), "its programs on shunt-a are at tc, where an upgrade is not supported yet; nothing was changed") {
				t.Fatalf("with a program at tc: %v", err)
			}
			d = mustOpen(t, opts)
			_, err = d.Attach("shunt-a", model.AttachGeneric)
			must(t, err)
			must(t, RequireGates(d.opts, d.opts.Version.ABI))
		})
	}
}
