// Package bed is the common ground of the tests of the packages below datapath: names of instances, a network namespace,
// and contents of every kind. Only tests import it.
package bed

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/value"
)

// Limits are small ones.
var Limits = model.Limits{Flows: 5000, Services: 100, Backends: 200, Slots: 10000, Remembered: 5000, Filters: 100}

var count atomic.Uint32

// Quiet logs nothing.
func Quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// NeedRoot skips a test without root.
func NeedRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
}

// Instance returns the name of an instance of the test's own. remove removes the instance after the test, and
// must leave nothing pinned.
func Instance(t *testing.T, remove func(instance string) error) string {
	t.Helper()
	NeedRoot(t)
	instance := fmt.Sprintf("test-%d-%d", os.Getpid(), count.Add(1))
	t.Cleanup(func() {
		if err := remove(instance); err != nil {
			t.Errorf("removing the instance: %v", err)
		}
		if _, err := os.Stat(kernel.Directory(kernel.DefaultPinRoot, instance)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the instance's directory is still there: %v", err)
		}
	})
	return instance
}

// Must ends a test at an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Namespace moves the test into a network namespace of its own with a veth pair:
//
//	shunt-a (here) ── shunt-b (here)
func Namespace(t *testing.T) {
	t.Helper()
	NeedRoot(t)
	runtime.LockOSThread()
	before, err := netns.Get()
	Must(t, err)
	name := fmt.Sprintf("shunt-dp-%d-%d", os.Getpid(), count.Add(1))
	space, err := namespace.NewNamed(name)
	Must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(netns.Set(before), space.Close(), before.Close(), netns.DeleteNamed(name)); err != nil {
			t.Errorf("leaving the network namespace: %v", err)
		}
		runtime.UnlockOSThread()
	})
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: "shunt-a"})
	veth.PeerName = "shunt-b"
	Must(t, netlink.LinkAdd(veth))
	for _, end := range []string{"shunt-a", "shunt-b"} {
		Must(t, netlink.LinkSetUp(Device(t, end)))
	}
	address, err := netlink.ParseAddr("192.0.2.1/24")
	Must(t, err)
	Must(t, netlink.AddrAdd(Device(t, "shunt-a"), address))
}

// Device is an interface of the namespace.
func Device(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	Must(t, err)
	return l
}

// Fill puts one element of every kind into maps and returns the contents.
func Fill(t *testing.T, to reconcile.Maps) reconcile.Contents {
	t.Helper()
	c := reconcile.Contents{
		Backends: map[uint32]reconcile.BackendRecord{
			1:   {BackendRef: reconcile.BackendRef{Index: 1, Generation: 1}, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 8080}},
			2:   {BackendRef: reconcile.BackendRef{Index: 2, Generation: 255}, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("2001:db8::1")}, Draining: true},
			200: {BackendRef: reconcile.BackendRef{Index: 200}, BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.2"), Port: 1}},
		},
		Services: map[uint32]reconcile.ServiceRecord{
			0:  {Index: 0, Generation: 3, Name: "web", Forwarding: model.ForwardingNAT, Seed: 0xdeadbeef, Offset: 10, Size: 4, BeforeOffset: 20, BeforeSize: 2, Tracking: model.TrackingAlways, AffinityTimeout: time.Hour, Policy: model.Policy{Rejects: true, Filters: true, FlowsMax: 7, SourceRate: 9, TCPMSS: 1400}},
			99: {Index: 99, Generation: 0, Name: strings.Repeat("n", 63), Forwarding: model.ForwardingDSRGUE, Tracking: model.TrackingAuto, Offset: 0, Size: 0, Policy: model.Policy{Tunnelled: true}},
		},
		Frontends: map[model.Frontend]uint32{
			{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP}:         0,
			{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 53, Last: 53}, Protocol: model.UDP}:       99,
			{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.PortRange{First: 1, Last: 65534}, Protocol: model.TCP}:       99,
			{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.AnyPort, Protocol: model.TCP}:                                0,
			{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 8000, Last: 8099}, Protocol: model.UDP}:   0,
			{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 0, Last: 1023}, Protocol: model.TCP}:      0,
			{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 1024, Last: 2000}, Protocol: model.TCP}:   99,
			{Address: netip.MustParseAddr("2001:db8::10"), Ports: value.PortRange{First: 65000, Last: 65535}, Protocol: model.TCP}: 99,

			{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP | model.Tunnelled}: 99,
			{Address: netip.IPv4Unspecified(), Ports: value.PortRange{First: 30080, Last: 30080}, Protocol: model.TCP | model.Tunnelled}:     0,
			{Address: netip.IPv6Unspecified(), Ports: value.PortRange{First: 30080, Last: 30080}, Protocol: model.UDP | model.Tunnelled}:     99,
		},
		Addresses: map[netip.Addr]reconcile.AddressRecord{},
		Slots: map[uint32]reconcile.Table{99: {}, 0: reconcile.NewTable([]reconcile.Slot{
			{Current: reconcile.BackendRef{Index: 1, Generation: 1}},
			{Current: reconcile.BackendRef{Index: 2, Generation: 255}, State: reconcile.Transition, Previous: reconcile.BackendRef{Index: 1, Generation: 1}, PreviousDrains: true},
			{State: reconcile.Closing, PreviousBefore: true},
			{Current: reconcile.BackendRef{Index: 200}, State: reconcile.Marked},
		})},
		Filters: map[reconcile.Filter]bool{
			{Service: 0, Generation: 3, Prefix: netip.MustParsePrefix("0.0.0.0/0")}:                false,
			{Service: 0, Generation: 3, Prefix: netip.MustParsePrefix("198.51.100.0/25")}:          true,
			{Service: 0, Generation: 255, Prefix: netip.MustParsePrefix("198.51.100.7/32")}:        false,
			{Service: 98, Generation: 0, Prefix: netip.MustParsePrefix("::/0")}:                    true,
			{Service: 99, Generation: 0, Prefix: netip.MustParsePrefix("2001:db8::8000:0:0:0/65")}: true,
			{Service: 99, Generation: 0, Prefix: netip.MustParsePrefix("2001:db8::1/128")}:         false,
		},
		BeforeSlots: map[uint32]reconcile.Table{0: reconcile.NewTable([]reconcile.Slot{{Current: reconcile.BackendRef{Index: 2, Generation: 255}}, {Previous: reconcile.BackendRef{Index: 200}}})},
	}
	for _, r := range []reconcile.AddressRecord{
		{Address: netip.MustParseAddr("192.0.2.10"), VIP: true, Announce: true, Direct: true},
		{Address: netip.MustParseAddr("2001:db8::10"), VIP: true, HostOwn: true},
		{Address: netip.MustParseAddr("10.0.0.9"), Source: true, Announce: true},
	} {
		c.Addresses[r.Address] = r
		Must(t, to.PutAddress(r))
	}
	for _, r := range c.Backends {
		Must(t, to.PutBackend(r))
	}
	for i, r := range c.Services {
		Must(t, to.WriteSlots(r.Offset, c.Slots[i]))
		Must(t, to.WriteSlots(r.BeforeOffset, c.BeforeSlots[i]))
		Must(t, to.PutService(r))
	}
	for f, s := range c.Frontends {
		Must(t, to.PutFrontend(f, s))
	}
	for f, allow := range c.Filters {
		Must(t, to.PutFilter(f, allow))
	}
	return c
}

// RequireContents compares the contents of maps.
func RequireContents(t *testing.T, v interface {
	Contents() (reconcile.Contents, error)
}, want reconcile.Contents) {
	t.Helper()
	have, err := v.Contents()
	Must(t, err)
	if diff := cmp.Diff(want, have, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Fatalf("the maps hold something else (-want +have):\n%s", diff)
	}
}
