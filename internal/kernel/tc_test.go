package kernel

import (
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
)

// A program at tc, by tcx where the kernel has it and by clsact, is known as one's own, foreign to others, and
// leaves nothing behind.
func TestAttachTC(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	l, err := lab.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	a, err := l.AddHost("a")
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
	ifindex, err := a.InterfaceIndex("eth0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "sh_test", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	own, _ := info.ID()
	byClsact := func() (*TC, error) {
		c := &TC{Mode: ModeClsact, ifindex: ifindex}
		return c, c.attachClsact(p, "sh_test")
	}
	for name, attach := range map[string]func() (*TC, error){"as it can": func() (*TC, error) { return AttachTC(p, "sh_test", ifindex) }, "clsact": byClsact} {
		t.Run(name, func(t *testing.T) {
			err := a.Run(func() error {
				c, err := attach()
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
