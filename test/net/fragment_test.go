package net

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// fragmented sends datagrams that take several packets, each way, from sockets that go to all
// backends, and checks that the balancer has seen fragments.
func (b *bed) fragmented(t *testing.T, vip netip.Addr) {
	t.Helper()
	followed := func() uint64 { return b.status().Reasons["fragment_followed"].Packets }
	before, datagrams, backends := followed(), uint64(0), map[string]int{}
	ctx := within(t, 20*time.Second)
	for range 16 {
		conn, err := b.Client.Dial(ctx, "udp", at(vip, 53))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, size := range []int{4000, 1500, 2961, 9001} {
			payload := bytes.Repeat([]byte{byte(size), 0xff, byte(size >> 8), 7, 0}, size/5+1)[:size]
			answer, err := lab.AskUDPOn(ctx, conn, payload)
			if err != nil {
				t.Fatalf("a datagram of %d bytes to %s: %v", size, vip, err)
			}
			datagrams++
			backends[answer.Backend]++
		}
	}
	if n := followed() - before; n < datagrams {
		t.Errorf("%d datagrams had %d fragments behind the first", datagrams, n)
	}
	if len(backends) != len(b.Backends) {
		t.Errorf("all datagrams went to %v; want some to each backend", backends)
	}
	for _, reason := range []string{"fragment_early", "fragment_tiny", "fragment", "too_big", "malformed_transport", "flow_recycled"} {
		if n := b.status().Reasons[reason].Packets; n != 0 {
			t.Errorf("%d packets with reason %s", n, reason)
		}
	}
}

// TestFragments: datagrams longer than the MTU arrive, and so do their answers, through NAT.
func TestFragments(t *testing.T) {
	for _, way := range ways {
		t.Run(fmt.Sprintf("%s/%s/%s", way.layout, way.attach, way.forwarding), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout})
			b.write(b.file(settings{attach: way.attach, forwarding: way.forwarding}))
			b.start()
			for _, vip := range vips {
				b.fragmented(t, vip)
			}
		})
	}
}

// TestFragmentsDirectly: the same with direct return, where the answers do not pass the
// balancer.
func TestFragmentsDirectly(t *testing.T) {
	const services = 3 // one of each forwarding
	for _, attach := range []string{"native", "generic", "tc"} {
		t.Run(attach, func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: lab.TwoArm, MTU: roomy}, services)
			b.ownByHand(directVIPs(0), b.Backends...)
			var tunnelled []netip.Addr
			for n := 1; n < services; n++ {
				tunnelled = append(tunnelled, directVIPs(n)...)
			}
			b.decap(tunnelled, b.Backends...)
			b.write(b.directFile(attach, services))
			b.start()
			for n, s := range directServices[:services] {
				for _, vip := range directVIPs(n) {
					t.Run(s.name+"/"+family(vip), func(t *testing.T) { b.fragmented(t, vip) })
				}
			}
		})
	}
}
