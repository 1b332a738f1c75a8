package kernel

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tcBed is an interface, and a program for it.
func tcBed(t *testing.T) (a *lab.Host, ifindex int, p *ebpf.Program) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	l, err := lab.New("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	a, err = l.AddHost("a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.AddHost("b")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Connect(lab.End{Host: a, Interface: "eth0"}, lab.End{Host: b, Interface: "eth0"}, lab.Cable{}); err != nil {
		t.Fatal(err)
	}
	if ifindex, err = a.InterfaceIndex("eth0"); err != nil {
		t.Fatal(err)
	}
	p, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "sh_test", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return a, ifindex, p
}

// A program at tc, by tcx where the kernel has it and by clsact, is known as one's own, foreign to others, and
// leaves nothing behind.
func TestAttachTC(t *testing.T) {
	a, ifindex, p := tcBed(t)
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	own, _ := info.ID()
	for name, attach := range map[string]func(*ebpf.Program, string, int) (*TC, error){"as it can": AttachTC, "clsact": AttachClsact} {
		t.Run(name, func(t *testing.T) {
			err := a.Run(func() error {
				c, err := attach(p, "sh_test", ifindex)
				if err != nil {
					return err
				}
				if found, err := ForeignTC(ifindex, uint32(own)); err != nil || len(found) > 0 {
					t.Errorf("beside one's own: %v, %v", found, err)
				}
				if found, err := ForeignTC(ifindex); err != nil || len(found) != 1 {
					t.Errorf("for others: %v, %v; want one", found, err)
				}
				if err := c.Close(); err != nil {
					return err
				}
				qdiscs, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}})
				for _, q := range qdiscs {
					if strings.Contains(q.Type(), "clsact") {
						t.Errorf("left behind: %v", q)
					}
				}
				if found, err := ForeignTC(ifindex); err != nil || len(found) > 0 {
					t.Errorf("after Close: %v, %v", found, err)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A filter of clsact comes before others of its priority and replaces none of them, whichever handles they
// have. It takes the place of a filter that a killed process left.
func TestAttachClsactBesideOthers(t *testing.T) {
	a, ifindex, p := tcBed(t)
	names := func() (names []string) {
		filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, netlink.HANDLE_MIN_INGRESS)
		if err != nil {
			t.Error(err)
		}
		for _, f := range filters {
			names = append(names, f.(*netlink.BpfFilter).Name)
		}
		return names
	}
	err := a.Run(func() error {
		other := &netlink.BpfFilter{Fd: p.FD(), Name: "other", DirectAction: true,
			FilterAttrs: netlink.FilterAttrs{LinkIndex: ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1}}
		if err := errors.Join(netlink.QdiscAdd(clsact(ifindex)), netlink.FilterAdd(other)); err != nil {
			return err
		}
		var c *TC
		for range 2 { // the first is left behind
			var err error
			if c, err = AttachClsact(p, "sh_test", ifindex); err != nil {
				return err
			}
			if got := names(); !slices.Equal(got, []string{"sh_test", "other"}) {
				t.Errorf("the filters are %q, want sh_test before other", got)
			}
		}
		err := c.Close()
		if got := names(); !slices.Equal(got, []string{"other"}) {
			t.Errorf("after Close the filters are %q, want other alone", got)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// An interface that has gone is success.
func TestCloseTCOfAnInterfaceThatIsGone(t *testing.T) {
	for name, attach := range map[string]func(*ebpf.Program, string, int) (*TC, error){"as it can": AttachTC, "clsact": AttachClsact} {
		t.Run(name, func(t *testing.T) {
			a, ifindex, p := tcBed(t)
			err := a.Run(func() error {
				c, err := attach(p, "sh_test", ifindex)
				if err != nil {
					return err
				}
				if err := netlink.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}); err != nil {
					return err
				}
				return c.Close()
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// A refusal has the kernel's reason.
func TestAttachTCRefused(t *testing.T) {
	a, _, p := tcBed(t)
	err := a.Run(func() error {
		for _, attach := range []func(*ebpf.Program, string, int) (*TC, error){AttachTC, AttachClsact} {
			if _, err := attach(p, "sh_test", 1<<30); !errors.Is(err, unix.ENODEV) || !strings.HasPrefix(err.Error(), "attach sh_test to the tc ingress of interface number 1073741824, ") {
				t.Errorf("at an interface that does not exist: %v", err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
