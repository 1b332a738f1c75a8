package cost

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/test/space"
)

// TestLeasesCostOthersNothing sends packets that no lease of the UDP path has. A datagram costs the program one look-up
// in an array, and others none; leases on the interface add not one instruction and not one look-up. Only an address
// and port whose hash is a lease's, one in 65,536, costs more; and its packet passes, too.
func TestLeasesCostOthersNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes a network namespace")
	}
	space.Enter(t, fmt.Sprintf("shunt-cost-%d-lease", os.Getpid()))
	space.Stay(t)
	link := space.AddArm(t, "shunt-a", own, 0, "192.0.2.1/24", "2001:db8:1::1/64")
	h, err := hook.Attach(hook.Options{Interface: link.Attrs().Name, Mode: kernel.ModeAuto})
	must(t, err)
	t.Cleanup(func() { must(t, h.Close()) })
	w := &world{TB: t}
	w.link, err = netlink.LinkByName(link.Attrs().Name)
	must(t, err)
	w.running, err = ebpf.NewProgramFromID(ebpf.ProgramID(w.link.Attrs().Xdp.ProgId))
	must(t, err)
	t.Cleanup(func() { _ = w.running.Close() })
	c := w.countingLeases()

	const to4, to6 = "192.0.2.1:5000", "[2001:db8:1::1]:5000"
	packets := []struct {
		name   string
		in     packet.Packet
		leased bool
	}{
		{"UDP to another port, IPv4", datagram(client4, "192.0.2.1:4999"), false},
		{"UDP to another port, IPv6", datagram(client6, "[2001:db8:1::1]:4999"), false},
		{"UDP to a leased port at another address, IPv4", datagram(client4, "192.0.2.2:5000"), false},
		{"UDP to a leased port at another address, IPv6", datagram(client6, "[2001:db8:1::2]:5000"), false},
		{"TCP, IPv4", fromClient(client4, to4, "PA"), false},
		{"TCP, IPv6", fromClient(client6, to6, "PA"), false},
		{"ARP", packet.NewARPRequest(router, "192.0.2.254", "192.0.2.1"), false},
		{"UDP to a lease, IPv4", datagram(client4, to4), true},
		{"UDP to a lease, IPv6", datagram(client6, to6), true},
	}
	without := map[string]cost{}
	for leases := range hook.MaxLeases + 1 {
		if leases > 0 {
			lease, err := h.Begin()
			must(t, err)
			for _, address := range []string{"192.0.2.1", "2001:db8:1::1"} {
				must(t, h.Serve(lease, netip.AddrPortFrom(netip.MustParseAddr(address), uint16(4999+leases))))
			}
		}
		for _, p := range packets {
			must(t, c.begin(0, 0))
			verdict, err := c.program.Run(&ebpf.RunOptions{Data: packet.Must(p.in)})
			must(t, err)
			got, err := c.end()
			must(t, err)
			if verdict != passed {
				t.Errorf("%s, with %d leases: verdict %d", p.name, leases, verdict)
			}
			switch first := without[p.name]; {
			case leases == 0:
				without[p.name] = got
				most := map[string]int{}
				if p.in.UDP != nil {
					most["sh_ud_hints"] = 1
				}
				if !maps.Equal(got.lookups, most) {
					t.Errorf("%s: look-ups %v, want %v", p.name, got.lookups, most)
				}
				t.Logf("%-46s %3d instructions, look-ups %v", p.name, got.instructions, got.lookups)
			case p.leased && got.instructions <= first.instructions:
				t.Errorf("%s, with %d leases: %+v, and without any %+v", p.name, leases, got, first)
			case !p.leased && (got.instructions != first.instructions || !maps.Equal(got.lookups, first.lookups) || !maps.Equal(got.calls, first.calls)):
				t.Errorf("%s, with %d leases: %+v, and without any %+v", p.name, leases, got, first)
			case p.leased && leases == 1:
				t.Logf("%-46s %3d instructions, look-ups %v, with the lease", p.name, got.instructions, got.lookups)
			}
		}
	}
}

// countingLeases loads the UDP path's program of the interface once more, with its maps and counting.
func (w *world) countingLeases() *counted {
	const program = "sh_udp"
	spec, err := ebpf.LoadCollectionSpec("../../internal/udp/hook/udp_bpfel.o")
	must(w, err)
	constants := w.constants()
	for _, v := range spec.Variables {
		if v.SectionName == ".rodata" {
			copy(v.Value, constants[v.Offset:])
		}
	}
	info, err := w.running.Info()
	must(w, err)
	ids, _ := info.MapIDs()
	replacements := map[string]*ebpf.Map{}
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		must(w, err)
		w.Cleanup(func() { _ = m.Close() })
		if info, err := m.Info(); err == nil && strings.HasPrefix(info.Name, "sh_") {
			replacements[info.Name] = m
		}
	}
	c, err := count(spec, program)
	must(w, err)
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		w.Fatalf("loading %s once more: %+v", program, err)
	}
	w.Cleanup(coll.Close)
	c.take(coll, program)
	return c
}
