package net

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
)

// Next hops towards clients: the kernel has an entry for them once the host itself has sent them a
// packet, and no packet of the data plane makes it check whether the entry is still true.

// meets makes the balancer's kernel resolve an address, as a ping would: no server is needed there.
func (b *bed) meets(t *testing.T, at netip.Addr) {
	t.Helper()
	eventually(t, 10*time.Second, "the kernel has a neighbour entry for "+at.String(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		conn, err := b.Balancer.Dial(ctx, "tcp", netip.AddrPortFrom(at, 9).String())
		switch {
		case err == nil:
			return conn.Close()
		case errors.Is(err, syscall.ECONNREFUSED):
			return nil
		}
		return err
	})
}

// entryOf returns the entry of the balancer's kernel for an address.
func (b *bed) entryOf(t *testing.T, at netip.Addr) (netlink.Neigh, bool) {
	t.Helper()
	entries, err := b.Balancer.Netlink().NeighList(0, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range entries {
		if a, _ := netip.AddrFromSlice(n.IP); a.Unmap() == at {
			return n, true
		}
	}
	return netlink.Neigh{}, false
}

// reaches waits until a new connection to each VIP works, and logs the time. The first one's is the
// time until the change was noticed.
func (b *bed) reaches(t *testing.T, vips []netip.Addr, timeout time.Duration, what string) {
	t.Helper()
	for _, vip := range vips {
		began := time.Now()
		eventually(t, timeout, what+", over "+family(vip), func() error {
			ctx, cancel := context.WithTimeout(context.Background(), patience*time.Second)
			defer cancel()
			_, err := lab.Get(ctx, b.Client.HTTPClient(false), at(vip, 80))
			return err
		})
		t.Logf("%s, over %s: after %s", what, family(vip), time.Since(began).Round(10*time.Millisecond))
	}
}

// hopsConfirmed bounds the time for which a next hop with another hardware address may cut clients
// off; the kernel alone needs 90 s, or for ever.
const hopsConfirmed = 20 * time.Second

var sixFirst = []netip.Addr{lab.VIP6, lab.VIP4}

func TestClientsGatewayWithAnotherMAC(t *testing.T) {
	for _, way := range []struct {
		layout     lab.Layout
		attach     string
		forwarding string
		vips       []netip.Addr
	}{
		{lab.OneArm, "native", "nat", sixFirst}, {lab.TwoArm, "native", "nat", vips}, {lab.TwoArm, "generic", "nat", sixFirst},
		{lab.OneArm, "tc", "nat", vips}, {lab.TwoArm, "tc", "nat", sixFirst}, {lab.TwoArm, "native", "nat-destination", vips},
	} {
		t.Run(fmt.Sprintf("%s/%s/%s", way.layout, way.attach, way.forwarding), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout, Router: true, VIPOnLink: true})
			b.write(b.file(settings{attach: way.attach, forwarding: way.forwarding}))
			b.start()
			b.meets(t, b.Client.Addr4())
			b.meets(t, b.Client.Addr6())
			b.reaches(t, way.vips, hopsConfirmed, "a connection by way of the gateway")
			if err := b.Router.SetMAC("eth1", net.HardwareAddr{2, 0, 0, 0, 0x77, 1}); err != nil {
				t.Fatal(err)
			}
			b.reaches(t, way.vips, hopsConfirmed, "a connection by way of the gateway with another hardware address")
		})
	}
}

func TestClientOnTheLinkWithAnotherMAC(t *testing.T) {
	for _, way := range []struct {
		attach string
		vips   []netip.Addr
	}{{"native", vips}, {"tc", sixFirst}} {
		t.Run(way.attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true})
			b.write(b.file(settings{attach: way.attach}))
			b.start()
			b.meets(t, b.Client.Addr4())
			b.meets(t, b.Client.Addr6())
			b.reaches(t, way.vips, hopsConfirmed, "a connection from the link")
			if err := b.Client.SetMAC("eth0", net.HardwareAddr{2, 0, 0, 0, 0x77, 2}); err != nil {
				t.Fatal(err)
			}
			b.reaches(t, way.vips, hopsConfirmed, "a connection from the link with another hardware address")
		})
	}
}

// TestSilentGateway: a gateway that stops answering is a condition, which ends when it answers.
func TestSilentGateway(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Router: true, VIPOnLink: true})
	b.write(b.file(settings{}))
	b.start()
	b.reaches(t, vips, hopsConfirmed, "a connection by way of the gateway")
	gateway := b.Router.Interfaces()[1]
	both := []netip.Addr{gateway.IPv4.Addr(), gateway.IPv6.Addr()}
	named := func() (n int) {
		for _, c := range b.status().Daemon.Conditions {
			for _, a := range both {
				if c.Code == "gateway_silent" && strings.HasPrefix(c.Subject, a.String()) {
					n++
				}
			}
		}
		return n
	}
	if n := named(); n != 0 {
		t.Fatalf("%d gateways are said to be silent while they answer: %+v", n, b.status().Daemon.Conditions)
	}
	if err := b.Router.SetUp("eth1", false); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "a condition for each gateway", func() error {
		if n := named(); n != 2 {
			return fmt.Errorf("%d are named: %+v", n, b.status().Daemon.Conditions)
		}
		return nil
	})
	if err := b.Router.SetUp("eth1", true); err != nil {
		t.Fatal(err)
	}
	if err := b.Router.AddAddress("eth1", gateway.IPv6); err != nil { // it went with the link
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the end of the conditions", func() error {
		if n := named(); n != 0 {
			return fmt.Errorf("%d are named: %+v", n, b.status().Daemon.Conditions)
		}
		return nil
	})
}

// TestGatewayOutlivesTheDaemon: the kernel keeps a gateway fresh after the daemon was killed, and
// nothing of that is left after the end of a successor.
func TestGatewayOutlivesTheDaemon(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Router: true, VIPOnLink: true})
	b.write(b.file(settings{}))
	b.start()
	gateway := b.Router.Interfaces()[1]
	managed := func(want bool) {
		t.Helper()
		for _, a := range []netip.Addr{gateway.IPv4.Addr(), gateway.IPv6.Addr()} {
			eventually(t, 10*time.Second, fmt.Sprintf("the gateway's entry is managed: %t", want), func() error {
				if n, _ := b.entryOf(t, a); (n.FlagsExt&netlink.NTF_EXT_MANAGED != 0) != want {
					return fmt.Errorf("%s: %+v", a, n)
				}
				return nil
			})
		}
	}
	managed(true)
	b.kill()
	managed(true)
	b.start()
	managed(true)
	if err := b.daemon.end(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	b.daemon = nil
	managed(false)
}
