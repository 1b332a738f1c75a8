package decap

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/space"
	"github.com/vishvananda/netlink"
)

var testCount atomic.Int64

// inSpace moves the test into a network namespace of its own with two interfaces: shunt-a, which has
// 192.0.2.1/24, and shunt-b.
func inSpace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	space.Enter(t, fmt.Sprintf("shunt-dc-%d-%d", os.Getpid(), testCount.Add(1)))
	space.AddArm(t, "shunt-a", nil, 0, "192.0.2.1/24")
	space.AddArm(t, "shunt-b", nil, 0)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func device(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must(t, err)
	return l
}

func programID(t *testing.T, iface string) uint32 {
	t.Helper()
	return device(t, iface).Attrs().Xdp.ProgId
}

func testOptions(t *testing.T, mode model.Attach) Options {
	t.Helper()
	opts := Options{
		Name: fmt.Sprintf("test-%d-%d", os.Getpid(), testCount.Add(1)), Interface: "shunt-a", Mode: mode,
		VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")}, Senders: []netip.Prefix{netip.MustParsePrefix("192.0.2.128/25")}, Log: slog.New(slog.DiscardHandler),
	}
	t.Cleanup(func() {
		must(t, Remove("", opts.Name))
		if _, err := os.Stat(pinPath(kernel.DefaultPinRoot, opts.Name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the pin is still there: %v", err)
		}
	})
	return opts
}

func mustAttach(t *testing.T, opts Options) *Program {
	t.Helper()
	d, err := Attach(opts)
	must(t, err)
	return d
}

// reasonOf runs IPIP from one address to another through the program.
func reasonOf(t *testing.T, d *Program, from, to string) string {
	t.Helper()
	outer := packet.NewUDP(netip.AddrPortFrom(netip.MustParseAddr(from), 1), netip.AddrPortFrom(netip.MustParseAddr(to), 1))
	outer.UDP, outer.IPv4.Protocol = nil, 4
	outer.Payload = packet.Quote(packet.NewTCP("198.51.100.7:40000", "203.0.113.1:80", "S"), 0)
	before, err := d.Counters()
	must(t, err)
	_, _, err = d.RunPacket(packet.Must(outer))
	must(t, err)
	after, err := d.Counters()
	must(t, err)
	for name, c := range after {
		if c.Packets != before[name].Packets {
			return name
		}
	}
	return ""
}

// `shunt doctor` knows an attached program by its name.
func TestNames(t *testing.T) {
	spec, err := loadDecap()
	must(t, err)
	for name := range spec.Programs {
		if name != decapProgShDecap || len(name) > 15 {
			t.Errorf("program %s: sh_decap is the only one", name)
		}
	}
	for name := range spec.Maps {
		shared := name == "sh_chain" || name == kernel.GuestMap || name == decapMapShTunnelProgs // with the balancer
		if !strings.HasPrefix(name, ".") && !shared && (len(name) > 15 || !strings.HasPrefix(name, "sh_dc_")) {
			t.Errorf("map %s: names begin with sh_dc_ and have at most 15 characters", name)
		}
	}
}

// A process that ends without detaching leaves the program; the next one replaces it in its
// link, or attaches anew if the mode is another.
func TestTakesOver(t *testing.T) {
	inSpace(t)
	opts := testOptions(t, model.AttachAuto)
	first := mustAttach(t, opts)
	if first.Mode != kernel.ModeNative {
		t.Errorf("auto chose %s on veth: %s", first.Mode, first.Reason)
	}
	must(t, first.Close())
	before := programID(t, "shunt-a")
	if on, err := On("shunt-a"); err != nil || !on {
		t.Fatalf("after the process: %v, %v", on, err)
	}
	second := mustAttach(t, opts)
	if programID(t, "shunt-a") == before {
		t.Error("the second start left the first one's program")
	}
	must(t, second.Close())
	opts.Mode = model.AttachGeneric
	third := mustAttach(t, opts)
	if third.Mode != kernel.ModeGeneric || kernel.ModeOf(device(t, "shunt-a")) != kernel.ModeGeneric {
		t.Errorf("it is attached in %s mode", third.Mode)
	}
	must(t, third.Detach())
	if on, err := On("shunt-a"); err != nil || on {
		t.Errorf("after Detach: %v, %v", on, err)
	}
}

// On another interface than before, the program leaves the old one.
func TestMoves(t *testing.T) {
	inSpace(t)
	opts := testOptions(t, model.AttachAuto)
	must(t, mustAttach(t, opts).Close())
	opts.Interface = "shunt-b"
	d := mustAttach(t, opts)
	on, err := On("shunt-a")
	must(t, err)
	if on {
		t.Error("it is still on the interface before")
	}
	must(t, d.Detach())
}

func TestRefusals(t *testing.T) {
	inSpace(t)
	opts := testOptions(t, model.AttachNative)
	first := mustAttach(t, opts)
	other := testOptions(t, model.AttachAuto)
	if _, err := Attach(other); err == nil || !strings.Contains(err.Error(), `"sh_decap"`) {
		t.Errorf("beside another: %v", err)
	}
	must(t, first.Detach())
	for change, want := range map[string]func(*Options){
		"shunt-z":       func(o *Options) { o.Interface = "shunt-z" },
		"not an Ethern": func(o *Options) { o.Interface = "lo" },
		`"tc"`:          func(o *Options) { o.Mode = "tc" },
		"room for 1024": func(o *Options) {
			for i := range 1025 {
				o.VIPs = append(o.VIPs, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
			}
		},
	} {
		bad := opts
		want(&bad)
		if _, err := Attach(bad); err == nil || !strings.Contains(err.Error(), change) {
			t.Errorf("want an error that says %s, got %v", change, err)
		}
	}
	if on, err := On("shunt-a"); err != nil || on {
		t.Errorf("after refusals: %v, %v", on, err)
	}
}

// Tunnels end at the addresses that the interface has now, and come from permitted ones.
func TestFollowsAddresses(t *testing.T) {
	inSpace(t)
	d := mustAttach(t, testOptions(t, model.AttachNative))
	if got := reasonOf(t, d, "192.0.2.200", "192.0.2.1"); got != "decap_ipip" {
		t.Errorf("to the interface's address: %s", got)
	}
	if got := reasonOf(t, d, "192.0.2.127", "192.0.2.1"); got != "decap_sender" {
		t.Errorf("from beyond the prefix: %s", got)
	}
	second, err := netlink.ParseAddr("192.0.2.2/24")
	must(t, err)
	must(t, netlink.AddrAdd(device(t, "shunt-a"), second))
	must(t, d.Refresh())
	if got := reasonOf(t, d, "192.0.2.200", "192.0.2.2"); got != "decap_ipip" {
		t.Errorf("to an address that was added: %s", got)
	}
	must(t, netlink.AddrDel(device(t, "shunt-a"), second))
	must(t, d.Refresh())
	if got := reasonOf(t, d, "192.0.2.200", "192.0.2.2"); got != "decap_not_local" {
		t.Errorf("to an address that was taken away: %s", got)
	}
	must(t, d.Detach())
}
