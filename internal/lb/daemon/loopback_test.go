package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	lo4 = "ipv4/conf/lo/forwarding"
	lo6 = "ipv6/conf/lo/forwarding"
)

// loopbackBed is a namespace in which instances come and go, each as if in a process of its own.
type loopbackBed struct {
	*nstest.Namespace
	t *testing.T
}

func newLoopbackBed(t *testing.T) loopbackBed {
	n := nstest.New(t)
	if err := os.MkdirAll(node.RunDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	return loopbackBed{n, t}
}

func (b loopbackBed) instance(name string) string {
	instance := fmt.Sprintf("test-lo-%d-%s", os.Getpid(), name)
	b.t.Cleanup(func() { _ = os.Remove(loopbackPath(instance)) })
	return instance
}

func (b loopbackBed) begin(instance string) {
	b.t.Helper()
	var err error
	b.Do(b.t, func() { err = forwardOnLoopback(instance) })
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b loopbackBed) end(instance string) {
	b.t.Helper()
	b.Do(b.t, func() { endLoopback(b.t, instance) })
}

func endLoopback(t *testing.T, instance string) {
	t.Helper()
	if err := releaseLoopback(instance, slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(loopbackPath(instance)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record of %s: %v", instance, err)
	}
}

func (b loopbackBed) requires(when, want4, want6 string) {
	b.t.Helper()
	for name, want := range map[string]string{lo4: want4, lo6: want6} {
		if is := strings.TrimSpace(b.Read(b.t, "/proc/sys/net/"+name)); is != want {
			b.t.Errorf("%s: %s is %s, want %s", when, name, is, want)
		}
	}
}

func TestLoopbackIsPutBack(t *testing.T) {
	b := newLoopbackBed(t)
	b.Sysctl(t, lo4, "0")
	first, second := b.instance("first"), b.instance("second")
	b.begin(first)
	b.requires("while one is there", "1", "1")
	b.begin(second)
	b.begin(first) // its successor, maybe of another version
	b.end(first)
	b.requires("while another is left", "1", "1")
	b.end(second)
	b.requires("after the last", "0", "0")

	b.Sysctl(t, lo6, "1")
	b.begin(first)
	b.end(first)
	b.requires("after one that found one of them on", "0", "1")
}

// A value that another program sets meanwhile stays.
func TestLoopbackOfOthersIsLeftAlone(t *testing.T) {
	b := newLoopbackBed(t)
	b.Sysctl(t, lo4, "0")
	first, second := b.instance("first"), b.instance("second")
	b.begin(first)
	b.Sysctl(t, lo4, "0")
	b.Sysctl(t, lo6, "2") // any number but 0 switches it on
	b.end(first)
	b.requires("after one whose settings were changed", "0", "2")
	b.Sysctl(t, lo6, "0")
	b.begin(first)
	b.Sysctl(t, lo4, "0")
	b.begin(second) // needs it, and knows its old value from the first
	b.requires("after another has begun", "1", "1")
	b.end(second)
	b.end(first)
	b.requires("after the last", "0", "0")
}

// A killed daemon's setting is restored by a detach in any namespace, as long as the daemon's namespace can be
// found.
func TestLoopbackIsPutBackFromElsewhere(t *testing.T) {
	b, another := newLoopbackBed(t), nstest.New(t)
	name := fmt.Sprintf("shunt-lo-%d", os.Getpid())
	b.Namespace = nstest.NewNamed(t, name)
	b.Sysctl(t, lo4, "0")
	another.Sysctl(t, lo4, "1")
	first, second := b.instance("first"), b.instance("second")
	b.begin(first)
	b.begin(second)
	another.Do(t, func() { endLoopback(t, first) })
	b.requires("while another is left", "1", "1")
	another.Do(t, func() { endLoopback(t, second) })
	b.requires("after the last", "0", "0")
	if is := strings.TrimSpace(another.Read(t, "/proc/sys/net/"+lo4)); is != "1" {
		t.Errorf("where it was detached from, %s is %s", lo4, is)
	}

	b.Namespace = nstest.New(t) // without a name, and without a process
	b.begin(first)
	another.Do(t, func() { endLoopback(t, first) })
}

// The kernel forgets the advertised routes when any interface begins to forward, even lo. A host
// with an advertised default route would be cut off until the next advertisement.
func TestLoopbackLeavesAdvertisedRoutes(t *testing.T) {
	b, router := newLoopbackBed(t), nstest.New(t)
	nstest.Veth(t, b.Namespace, "host", router, "router")
	b.Up(t, "host")
	router.Up(t, "router")
	frame, err := advertisement(router.MAC(t, "router"), netip.MustParseAddr("fe80::1"))
	if err != nil {
		t.Fatal(err)
	}
	var sender *wire.Sender
	router.Do(t, func() { sender, err = wire.OpenSender(netns.None()) })
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	advertised := func() (n int) {
		b.Do(t, func() {
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
			if err != nil {
				t.Error(err)
			}
			n = len(routes)
		})
		return n
	}
	nstest.Eventually(t, "the advertised route", func() bool {
		if err := sender.Send(router.Index(t, "router"), frame); err != nil {
			t.Error(err)
		}
		return advertised() > 0
	})
	instance := b.instance("only")
	b.begin(instance)
	b.requires("while it is there", "1", "1")
	if n := advertised(); n != 1 {
		t.Errorf("after a start %d advertised routes are there, and 1 was", n)
	}
	if is := strings.TrimSpace(b.Read(t, "/proc/sys/net/ipv6/conf/host/accept_ra")); is != "1" {
		t.Errorf("accept_ra of the interface is %s, and it was 1", is)
	}
	b.end(instance)
	if n := advertised(); n != 1 {
		t.Errorf("after the end %d advertised routes are there, and 1 was", n)
	}
}

// advertisement is a router advertisement with a lifetime of an hour (RFC 4861, 4.2).
func advertisement(mac net.HardwareAddr, source netip.Addr) ([]byte, error) {
	allNodes := netip.MustParseAddr("ff02::1")
	const hopLimit, lifetime = 64, 3600
	return packet.Build(packet.Packet{
		Ethernet: packet.Ethernet{Source: mac, Destination: wire.GroupMAC(allNodes)},
		IPv6:     &packet.IPv6{Source: source, Destination: allNodes, HopLimit: 255},
		ICMPv6:   &packet.ICMPv6{Type: 134, Rest: hopLimit<<24 | lifetime},
		Payload:  make([]byte, 8), // reachable time and retransmission timer: unspecified
	})
}

// A start that is refused before there is a data plane changes nothing.
func TestRefusedStartLeavesLoopbackAlone(t *testing.T) {
	b := newLoopbackBed(t)
	b.Sysctl(t, lo4, "0")
	instance := b.instance("refused")
	t.Setenv("STATE_DIRECTORY", t.TempDir())
	config := filepath.Join(t.TempDir(), "shunt.yaml")
	text := "interfaces: [{name: lo}]\nservices:\n  - {name: a, address: 192.0.2.80, port: 80, announce: none, backends: [{address: 192.0.2.1}]}\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// A layout that only a later version knows. A machine that has pinned nothing since boot may have no bpffs yet.
	if err := kernel.Mount(kernel.DefaultPinRoot, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	newer := filepath.Join(kernel.DefaultPinRoot, "shunt", instance, "abi-999999", "maps")
	if err := os.MkdirAll(newer, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for path := newer; path != kernel.DefaultPinRoot; path = filepath.Dir(path) {
			_ = os.Remove(path) // the last one unless others have anything there
		}
	})
	var err error
	b.Do(t, func() {
		err = node.Run(context.Background(), node.Options{Products: []node.Product{Product(Options{})}, Instance: instance, ConfigPath: config, Log: slog.New(slog.DiscardHandler)})
	})
	if err == nil || !strings.Contains(err.Error(), "ABI 999999") {
		t.Fatalf("the start gave %v", err)
	}
	b.requires("after a refused start", "0", "0")
	if _, err := os.Stat(loopbackPath(instance)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record: %v", err)
	}
}
