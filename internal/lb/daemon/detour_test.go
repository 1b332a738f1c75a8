package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/detour"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/record"
)

// dials records the requested connections, and makes none.
type dials struct {
	vips    []netip.Addr
	targets []detour.Target
	closed  bool
}

var errNotDialled = errors.New("this test makes no connection")

func (d *dials) Prepare(vips []netip.Addr) { d.vips = vips }
func (d *dials) Dial(_ context.Context, _ string, t detour.Target) (net.Conn, error) {
	d.targets = append(d.targets, t)
	return nil, errNotDialled
}
func (d *dials) Close() error { d.closed = true; return nil }

func never() bool { return false }

// TestWayIsPreparedForCheckedDirectServices: other services need no device and no rules.
func TestWayIsPreparedForCheckedDirectServices(t *testing.T) {
	at := func(address string) []model.Frontend {
		return []model.Frontend{{Address: netip.MustParseAddr(address)}}
	}
	made := &dials{}
	directPath{marked: made}.prepare([]*model.Service{
		{Frontends: at("192.0.2.1"), Forwarding: model.ForwardingDSRL2, Health: model.Health{Check: model.CheckTCP}},
		{Frontends: at("192.0.2.2"), Forwarding: model.ForwardingDSRL2},
		{Frontends: at("192.0.2.3"), Forwarding: model.ForwardingNAT, Health: model.Health{Check: model.CheckTCP}},
		{Frontends: at("2001:db8::4"), Forwarding: model.ForwardingDSRGUE, Health: model.Health{Check: model.CheckTCP}},
	})
	if want := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::4")}; !slices.Equal(made.vips, want) {
		t.Errorf("the way is prepared for %v, want %v", made.vips, want)
	}
}

// TestCheckTakesTheNextHop: a check waits for the next hop of a backend, and takes it.
func TestCheckTakesTheNextHop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made := &dials{}
		vip, backend := netip.MustParseAddrPort("192.0.2.1:80"), netip.MustParseAddr("10.0.0.2")
		hop := store.Hop{Interface: 7, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}
		begin := time.Now()
		w := directPath{marked: made, hasVIPs: never, hop: func(b netip.Addr) (store.Hop, bool) {
			return hop, b == backend && time.Since(begin) >= time.Second
		}}
		if _, err := w.dial(t.Context(), "tcp", vip, backend, model.ForwardingDSRIPIP); !errors.Is(err, errNotDialled) {
			t.Fatalf("the check gave %v", err)
		}
		if len(made.targets) != 1 {
			t.Fatalf("%d connections were asked for, want 1", len(made.targets))
		}
		got := made.targets[0]
		if got.VIP != vip || got.Backend != backend || got.Forwarding != model.ForwardingDSRIPIP || got.Interface != hop.Interface || !slices.Equal(got.MAC, hop.MAC) {
			t.Errorf("the check goes to %+v", got)
		}
		limited, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := w.dial(limited, "tcp", vip, backend.Next(), model.ForwardingDSRIPIP)
		if err == nil || !strings.Contains(err.Error(), "the next hop does not answer") {
			t.Errorf("a backend without a next hop gave %v", err)
		}
		if len(made.targets) != 1 {
			t.Errorf("a backend without a next hop was asked: %+v", made.targets[1:])
		}
	})
}

// TestCheckBesideServer: if this host has the VIP, its kernel would answer for every backend.
func TestCheckBesideServer(t *testing.T) {
	vip, own, other := netip.MustParseAddrPort("192.0.2.1:80"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	have := func(all ...netip.Addr) func() (map[netip.Addr]bool, error) {
		return func() (map[netip.Addr]bool, error) {
			has := map[netip.Addr]bool{}
			for _, a := range all {
				has[a] = true
			}
			return has, nil
		}
	}
	unknown := func() (map[netip.Addr]bool, error) { return nil, errors.New("not to be read") }
	for _, c := range []struct {
		name    string
		list    func() (map[netip.Addr]bool, error)
		backend netip.Addr
		at      netip.AddrPort
		ok      bool
	}{
		{"its own server", have(vip.Addr(), own), own, vip, true},
		{"another server", have(vip.Addr(), own), other, netip.AddrPortFrom(other, 80), true},
		{"without the VIP", have(own), own, vip, false},
		{"addresses that cannot be read", unknown, own, vip, false},
	} {
		if at, ok := besideServer(c.list, vip, c.backend); at != c.at || ok != c.ok {
			t.Errorf("%s: at %v, %v; want %v, %v", c.name, at, ok, c.at, c.ok)
		}
	}
}

// TestCheckOfTheOwnServer: a check of a server on this host is a plain connection, without the way.
func TestCheckOfTheOwnServer(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // the test is over
	vip := listener.Addr().(*net.TCPAddr).AddrPort()
	made := &dials{}
	w := directPath{marked: made, hasVIPs: func() bool { return true }, own: func() (map[netip.Addr]bool, error) {
		return map[netip.Addr]bool{vip.Addr(): true}, nil
	}}
	c, err := w.dial(t.Context(), "tcp", vip, vip.Addr(), model.ForwardingDSRL2)
	if err != nil {
		t.Fatal(err)
	}
	if c.RemoteAddr().String() != vip.String() || len(made.targets) != 0 {
		t.Errorf("the check went to %v, and %d took the way", c.RemoteAddr(), len(made.targets))
	}
	_ = c.Close()
}

// TestRecordOfTheWay: an instance without a record has nothing to remove. An instance whose record cannot be read
// keeps it, and names the file to delete.
func TestRecordOfTheWay(t *testing.T) {
	if err := os.MkdirAll(node.RunDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	instance := filepath.Base(t.TempDir()) + "-detour-test"
	path := detourPath(instance)
	t.Cleanup(func() {
		_ = os.Remove(path)
		_ = os.Remove(node.RunDirectory) // unless others have files there
	})
	log := slog.New(slog.DiscardHandler)
	if err := releaseDetour(instance, log); err != nil {
		t.Errorf("without a record: %v", err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := releaseDetour(instance, log); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "ip rule") {
		t.Errorf("a record that cannot be read: %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a record that cannot be read is gone: %v", err)
	}
	// The namespace of the record is gone, and its device with it.
	if err := record.Write(path, detourRecord{Space: "ns-gone", Number: 3}); err != nil {
		t.Fatal(err)
	}
	if r, err := readDetour(instance); err != nil || r.Number != 3 {
		t.Errorf("the record reads %+v, %v", r, err)
	}
	var said strings.Builder
	if err := releaseDetour(instance, slog.New(slog.NewTextHandler(&said, nil))); err != nil {
		t.Errorf("a namespace that is gone: %v", err)
	}
	if !strings.Contains(said.String(), "another network namespace") || !strings.Contains(said.String(), detour.Device(3)) {
		t.Errorf("the log says %q", said.String())
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the record of a namespace that is gone stays")
	}
	if here, err := host.Space(); err != nil || here == "ns-gone" {
		t.Errorf("this namespace is called %q, %v", here, err)
	}
}
