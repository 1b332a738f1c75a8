package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

func decapOptions(t *testing.T, mode model.Attach) DecapOptions {
	t.Helper()
	opts := DecapOptions{
		Name: fmt.Sprintf("test-%d-%d", os.Getpid(), testCount.Add(1)), Interface: "shunt-a", Mode: mode,
		VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")}, Senders: []netip.Prefix{netip.MustParsePrefix("192.0.2.128/25")}, Log: quiet(),
	}
	t.Cleanup(func() {
		must(t, RemoveDecap("", opts.Name))
		if _, err := os.Stat(decapPath(kernel.DefaultPinRoot, opts.Name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the pin is still there: %v", err)
		}
	})
	return opts
}

func mustDecap(t *testing.T, opts DecapOptions) *Decap {
	t.Helper()
	d, err := AttachDecap(opts)
	must(t, err)
	return d
}

// reasonOf runs IPIP from one address to another through the program.
func reasonOf(t *testing.T, d *Decap, from, to string) string {
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

// The name of a program that is attached is what `shunt doctor` goes by.
func TestDecapNames(t *testing.T) {
	spec, err := loadDecap()
	must(t, err)
	for name := range spec.Programs {
		if name != decapProgShDecap || len(name) > 15 {
			t.Errorf("program %s: sh_decap is the only one", name)
		}
	}
	for name := range spec.Maps {
		if !strings.HasPrefix(name, ".") && (len(name) > 15 || !strings.HasPrefix(name, "sh_dc_")) {
			t.Errorf("map %s: names begin with sh_dc_ and have at most 15 characters", name)
		}
	}
}

// A process that ends without detaching leaves the program; the next one replaces it in its
// link, or attaches anew where the mode is another.
func TestDecapTakesOver(t *testing.T) {
	inNamespace(t)
	opts := decapOptions(t, model.AttachAuto)
	first := mustDecap(t, opts)
	if first.Mode != kernel.ModeNative {
		t.Errorf("auto chose %s on veth: %s", first.Mode, first.Reason)
	}
	must(t, first.Close())
	before := programID(t, "shunt-a")
	if on, err := DecapOn("shunt-a"); err != nil || !on {
		t.Fatalf("after the process: %v, %v", on, err)
	}
	second := mustDecap(t, opts)
	if programID(t, "shunt-a") == before {
		t.Error("the second start left the first one's program")
	}
	must(t, second.Close())
	opts.Mode = model.AttachGeneric
	third := mustDecap(t, opts)
	if third.Mode != kernel.ModeGeneric || kernel.ModeOf(device(t, "shunt-a")) != kernel.ModeGeneric {
		t.Errorf("it is attached in %s mode", third.Mode)
	}
	must(t, third.Detach())
	if on, err := DecapOn("shunt-a"); err != nil || on {
		t.Errorf("after Detach: %v, %v", on, err)
	}
}

// On another interface than before, the program leaves the old one.
func TestDecapMoves(t *testing.T) {
	inNamespace(t)
	opts := decapOptions(t, model.AttachAuto)
	must(t, mustDecap(t, opts).Close())
	opts.Interface = "shunt-b"
	d := mustDecap(t, opts)
	on, err := DecapOn("shunt-a")
	must(t, err)
	if on {
		t.Error("it is still on the interface before")
	}
	must(t, d.Detach())
}

func TestDecapRefusals(t *testing.T) {
	inNamespace(t)
	opts := decapOptions(t, model.AttachNative)
	first := mustDecap(t, opts)
	other := decapOptions(t, model.AttachAuto)
	if _, err := AttachDecap(other); err == nil || !strings.Contains(err.Error(), `"sh_decap"`) {
		t.Errorf("beside another: %v", err)
	}
	must(t, first.Detach())
	for change, want := range map[string]func(*DecapOptions){
		"shunt-z":       func(o *DecapOptions) { o.Interface = "shunt-z" },
		"not an Ethern": func(o *DecapOptions) { o.Interface = "lo" },
		`"tc"`:          func(o *DecapOptions) { o.Mode = "tc" },
		"room for 1024": func(o *DecapOptions) {
			for i := range 1025 {
				o.VIPs = append(o.VIPs, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
			}
		},
	} {
		bad := opts
		want(&bad)
		if _, err := AttachDecap(bad); err == nil || !strings.Contains(err.Error(), change) {
			t.Errorf("want an error that says %s, got %v", change, err)
		}
	}
	if on, err := DecapOn("shunt-a"); err != nil || on {
		t.Errorf("after refusals: %v, %v", on, err)
	}
}

// Tunnels end at the addresses that the interface has now, and come from permitted ones.
func TestDecapFollowsAddresses(t *testing.T) {
	inNamespace(t)
	d := mustDecap(t, decapOptions(t, model.AttachNative))
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
