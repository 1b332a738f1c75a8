package net

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestPathMTUOfBackends: backends answer clients directly over a router with a narrow link behind
// it. Its "too big" goes to the sender of the packet, the VIP, and so to the balancer; the backend
// has to get it, or the transfer stops.
//
//	client ── narrow ── router ─┬─ switch ─┬─ b1
//	                            │          └─ b2
//	                            └── VIP ──── lb
func TestPathMTUOfBackends(t *testing.T) {
	const services = 3 // dsr-l2, dsr-ipip and dsr-gue
	for _, attach := range []string{"native", "generic", "tc"} {
		for n, service := range directServices[:services] {
			// A backend that has once learned the path's MTU knows it for all services.
			t.Run(attach+"/"+service.name, func(t *testing.T) {
				b := narrowDirectBed(t, services)
				b.ownByHand(directVIPs(0), b.Backends...)
				b.decap(slices.Concat(directVIPs(1), directVIPs(2)), b.Backends...)
				b.write(b.directFile(attach, services))
				b.start()
				b.hearsOfMTU(t, directVIPs(n))
			})
		}
	}
}

// TestPathMTUToKernelTunnels is the same with the kernel's own tunnels, which take the errors off
// like other packets.
func TestPathMTUToKernelTunnels(t *testing.T) {
	for n, service := range kernelServices {
		t.Run(service.forwarding+" over "+service.outer, func(t *testing.T) {
			b := narrowDirectBed(t, len(kernelServices))
			b.ownByHand(directVIPs(n), b.Backends...)
			for _, backend := range b.Backends {
				b.takeOffByKernel(t, backend)
			}
			b.write(b.kernelFile())
			b.start()
			b.hearsOfMTU(t, directVIPs(n))
		})
	}
}

// hearsOfMTU requires that transfers in either direction complete, because the backend learns the
// path's MTU through the balancer.
func (b *bed) hearsOfMTU(t *testing.T, vips []netip.Addr) {
	t.Helper()
	client := b.Client.HTTPClient(false)
	for _, vip := range vips {
		before := b.status().Reasons["icmp_to_backend"].Packets
		if _, err := lab.Download(within(t, 20*time.Second), client, at(vip, 80), size(10, 1)); err != nil {
			t.Errorf("to the client over %s: %v", family(vip), err)
		}
		if after := b.status().Reasons["icmp_to_backend"].Packets; after == before {
			t.Errorf("no ICMP error was sent on to a backend over %s: the path is not narrow, and the test proves nothing", family(vip))
		}
		if _, err := lab.Upload(within(t, 20*time.Second), client, at(vip, 80), size(4, 1)); err != nil {
			t.Errorf("to the service over %s: %v", family(vip), err)
		}
	}
}

// narrowDirectBed is the network drawn above.
func narrowDirectBed(t *testing.T, services int) *bed {
	t.Helper()
	const narrow = 1300
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, Router: true, MTU: roomy}, services)
	for _, backend := range b.Backends {
		err := errors.Join(
			backend.AddRoute(lab.Route{To: netip.MustParsePrefix("198.51.100.0/24"), Via: netip.MustParseAddr("10.0.0.254")}),
			backend.AddRoute(lab.Route{To: netip.MustParsePrefix("2001:db8:c::/64"), Via: netip.MustParseAddr("2001:db8:1::254")}))
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := b.NarrowToClient(narrow); err != nil {
		t.Fatal(err)
	}
	return b
}
