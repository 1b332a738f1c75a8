// Package udptest builds the network of tests of the UDP path: a client and a server, on one link.
package udptest

import (
	"net/netip"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Network is a client and a server, each with the interface eth0. It is removed at the end of the test.
type Network struct {
	Lab            *lab.Lab
	Client, Server *lab.Host
	Addresses      []netip.AddrPort // of the server: IPv4, IPv6
}

// New makes a network. It skips the test if the process may not. Packets pass once Lab.Ready returns nil.
func New(t testing.TB, cable lab.Cable) *Network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := lab.New("")
	must(err)
	t.Cleanup(func() { must(l.Close()) })
	n := &Network{Lab: l, Addresses: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.10:5000"), netip.MustParseAddrPort("[2001:db8::10]:5000")}}
	n.Client, err = l.AddHost("client")
	must(err)
	n.Server, err = l.AddHost("server")
	must(err)
	must(l.Connect(
		lab.End{Host: n.Client, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.1/24"), IPv6: netip.MustParsePrefix("2001:db8::1/64")},
		lab.End{Host: n.Server, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.10/24"), IPv6: netip.MustParsePrefix("2001:db8::10/64")},
		cable))
	// The kernel's own answers to the client must have complete checksums if XDP sees them as the kernel sends them.
	must(n.Client.SetOffload("eth0", map[string]bool{"tx": false}))
	return n
}
