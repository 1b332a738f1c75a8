package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// ends is an XDP program that ends with a verdict, after it has called element 0 of a map, if there is a map.
func ends(t *testing.T, name string, verdict int32, calls *ebpf.Map) *ebpf.Program {
	t.Helper()
	var code asm.Instructions
	if calls != nil {
		code = append(code, asm.LoadMapPtr(asm.R2, calls.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call())
	}
	code = append(code, asm.Mov.Imm(asm.R0, verdict), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.XDP, License: "GPL", Instructions: code, Flags: unix.BPF_F_XDP_HAS_FRAGS, AttachType: ebpf.AttachXDP})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// guestBed is an interface, and a host's chain.
type guestBed struct {
	*testing.T
	ifindex int
	after   *ebpf.Map
	refuse  error // the error with which the guest's second program cannot be loaded
	loaded  int
	guest   *Guest
	kept    string // folder that the next guest takes over
}

func (b *guestBed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// runs requires that this program is on the interface, and that a packet gets this verdict there.
func (b *guestBed) runs(when, name string, verdict uint32) {
	b.Helper()
	dev, err := netlink.LinkByIndex(b.ifindex)
	b.must(err)
	if dev.Attrs().Xdp == nil || !dev.Attrs().Xdp.Attached {
		if name != "" {
			b.Errorf("%s: nothing is on the interface, want %s", when, name)
		}
		return
	}
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(dev.Attrs().Xdp.ProgId))
	b.must(err)
	defer p.Close()
	info, err := p.Info()
	b.must(err)
	got, _, err := RunXDP(p, "eth0", b.ifindex, make([]byte, 64))
	b.must(err)
	if info.Name != name || got != verdict {
		b.Errorf("%s: %s is on the interface and says %d, want %q and %d", when, info.Name, got, name, verdict)
	}
}

func (b *guestBed) enter() error {
	own := ends(b.T, "guest", XDPDrop, nil)
	g, err := EnterXDP(own, func(after *ebpf.Map) (*ebpf.Program, error) {
		if after == nil {
			b.Error("the guest is to go on by no chain")
		}
		b.loaded++
		if b.refuse != nil {
			return nil, b.refuse
		}
		return own.Clone()
	}, "eth0", b.ifindex, ModeAuto, b.kept)
	b.guest = g
	return err
}

// host attaches a host's program.
func (b *guestBed) host() (hook *GuestHook, l link.Link) {
	b.Helper()
	hook, err := HostGuests(b.ifindex)
	b.must(err)
	b.must(hook.Change(b.after, func() (err error) {
		l, err = AttachXDP(ends(b.T, "host", XDPTx, hook.Array()), "eth0", b.ifindex, ModeNative, "")
		return err
	}))
	return hook, l
}

// Guests and hosts of an interface come and go in any order.
func TestGuest(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	l, err := lab.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the test is over
	a, err := l.AddHost("a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.AddHost("b")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Connect(lab.End{Host: a, Interface: "eth0"}, lab.End{Host: other, Interface: "eth0"}, lab.Cable{}); err != nil {
		t.Fatal(err)
	}
	ifindex, err := a.InterfaceIndex("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]func(*guestBed){"guest first": guestFirst, "host first": hostFirst, "host refused": hostRefused, "guest refused": guestRefused, "guest kept": guestKept} {
		t.Run(name, func(t *testing.T) {
			if err := a.Run(func() error {
				after, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 3})
				if err != nil {
					return err
				}
				defer after.Close()
				test(&guestBed{T: t, ifindex: ifindex, after: after})
				return nil
			}); err != nil {
				t.Error(err)
			}
			if len(hooks.all) != 0 {
				t.Errorf("%d hooks are left", len(hooks.all))
			}
		})
	}
}

func guestFirst(b *guestBed) {
	b.must(b.enter())
	b.runs("alone", "guest", XDPDrop)
	hook, l := b.host()
	b.runs("a host has come", "host", XDPDrop)
	if !b.guest.Hosted() || b.guest.Attachment().Mode != ModeNative {
		b.Errorf("behind a host it says %v", b.guest.Attachment())
	}
	if err := b.enter2(); err == nil || !strings.Contains(err.Error(), "already") {
		b.Errorf("a second guest: %v", err)
	}
	b.must(DropLink(l))
	b.runs("the host's program was taken off by another process", "", 0)
	b.must(b.guest.Settle())
	b.runs("settled", "guest", XDPDrop)
	hook.Release()
	b.runs("the host has gone", "guest", XDPDrop)
	b.must(b.guest.Close())
	b.runs("all have gone", "", 0)
}

// A guest that is kept goes on without a process, on the interface and behind a host, and the next one takes it over.
func guestKept(b *guestBed) {
	b.must(Mount(DefaultPinRoot, slog.New(slog.DiscardHandler)))
	folder := filepath.Join(DefaultPinRoot, fmt.Sprintf("shunt-test-%d", os.Getpid()))
	b.must(os.Mkdir(folder, 0o700))
	defer func() { b.must(os.Remove(folder)) }() // nothing is in it
	pinned := func(when, want string) {
		b.Helper()
		entries, err := os.ReadDir(folder)
		b.must(err)
		have := ""
		for _, e := range entries {
			have += e.Name()
		}
		if have != want {
			b.Errorf("%s: pinned is %q, want %q", when, have, want)
		}
	}
	b.must(b.enter())
	b.must(b.guest.Keep(folder))
	b.must(b.guest.Forget())
	pinned("forgotten", "")
	b.must(b.guest.Keep(folder))
	pinned("kept", guestLinkPin)
	before, err := OccupantOf("eth0")
	b.must(err)
	b.must(b.guest.Leave())
	b.runs("left", "guest", XDPDrop)

	b.kept = folder
	b.must(b.enter())
	after, err := OccupantOf("eth0")
	b.must(err)
	if before.Link != after.Link || before.ID == after.ID || b.guest.Attachment().Mode != ModeNative {
		b.Errorf("it was %s, and is %s, %v", before, after, b.guest.Attachment())
	}
	hook, l := b.host()
	pinned("a host has come", guestHookPin)
	b.must(b.guest.Leave())
	hook.Release()
	b.runs("both have left", "host", XDPDrop)

	hook, err = HostGuests(b.ifindex)
	b.must(err)
	b.must(hook.Change(b.after, func() error { return l.Update(ends(b.T, "host", XDPTx, hook.Array())) }))
	b.runs("the next host has come", "host", XDPTx)
	b.must(b.enter())
	b.runs("and the next guest", "host", XDPDrop)
	pinned("and the next guest", guestHookPin)
	b.must(DropLink(l))
	hook.Release()
	b.runs("the host has gone", "guest", XDPDrop)
	pinned("the host has gone", guestLinkPin)
	b.must(b.guest.Close())
	b.runs("all have gone", "", 0)
	pinned("all have gone", "")

	// A guest that the next process does not fit, and one that nobody takes over.
	b.must(b.enter())
	b.must(b.guest.Keep(folder))
	b.must(b.guest.Leave())
	own := ends(b.T, "guest", XDPDrop, nil)
	other, err := EnterXDP(own, nil, "eth0", b.ifindex, ModeGeneric, folder)
	b.must(err)
	if mode := other.Attachment().Mode; mode != ModeGeneric {
		b.Errorf("it is in the mode %s", mode)
	}
	pinned("in another mode", guestLinkPin)
	b.must(other.Leave())
	b.must(RemoveKept(folder))
	b.must(RemoveKept(folder))
	b.runs("removed", "", 0)
	hook, l = b.host()
	b.kept = ""
	b.must(b.enter())
	b.must(b.guest.Keep(folder))
	b.must(b.guest.Leave())
	b.must(RemoveKept(folder))
	b.runs("removed behind a host", "host", XDPTx)
	pinned("removed behind a host", "")
	b.must(DropLink(l))
	hook.Release()
}

// enter2 is another guest beside the first.
func (b *guestBed) enter2() error {
	first := b.guest
	err := b.enter()
	b.guest = first
	return err
}

func hostFirst(b *guestBed) {
	hook, l := b.host()
	b.runs("no guest", "host", XDPTx)
	b.must(b.enter())
	b.runs("a guest has come", "host", XDPDrop)
	b.must(b.guest.Close())
	b.runs("it has gone", "host", XDPTx)
	b.must(b.enter())
	hook.Release() // as a daemon that ends and leaves its program
	b.must(b.guest.Settle())
	b.runs("the host's program outlives it", "host", XDPDrop)
	b.must(DropLink(l))
	b.must(b.guest.Settle())
	b.runs("and goes", "guest", XDPDrop)
	b.must(b.guest.Close())
}

func hostRefused(b *guestBed) {
	b.must(b.enter())
	hook, err := HostGuests(b.ifindex)
	b.must(err)
	no := errors.New("no")
	if err := hook.Change(b.after, func() error {
		b.runs("while the host changes", "", 0)
		return no
	}); !errors.Is(err, no) {
		b.Errorf("the host's error is %v", err)
	}
	b.runs("the host was refused", "guest", XDPDrop)
	hook.Release()
	b.must(b.guest.Close())
}

func guestRefused(b *guestBed) {
	b.must(b.enter())
	b.refuse = errors.New("no memory")
	hook, l := b.host()
	b.runs("the guest cannot go behind", "host", XDPTx)
	if err := b.guest.Settle(); !errors.Is(err, b.refuse) {
		b.Errorf("the guest says %v", err)
	}
	b.refuse = nil
	b.must(b.guest.Settle())
	b.runs("it can", "host", XDPDrop)
	b.must(b.guest.Close())
	b.must(DropLink(l))
	hook.Release()
}
