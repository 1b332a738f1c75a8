package net

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// kernelServices are direct return over each family of outer header. The VIPs of service n
// are directVIPs(n), of both families, so each of them is two combinations.
var kernelServices = []struct {
	forwarding string
	outer      string // "4" or "6"
	of         func(*lab.Host) []netip.Addr
}{
	{"dsr-ipip", "4", only4},
	{"dsr-ipip", "6", only6},
	{"dsr-gue", "4", only4},
	{"dsr-gue", "6", only6},
}

// takers are the kernel's devices that take a packet off, by "inner-in-outer". With GUE they
// get the packet after the UDP port has removed its own header.
var takers = map[string]string{"4-in-4": "ipip", "6-in-4": "sit", "4-in-6": "ip6tnl", "6-in-6": "ip6tnl"}

// TestDirectToKernelTunnels: the kernel's own tunnel devices decapsulate shunt's packets,
// without a program of shunt's on the backends. The test runs on kernels that have such
// devices, as Debian's do in a virtual machine; TestDecapFromKernelTunnels is the other
// direction.
func TestDirectToKernelTunnels(t *testing.T) {
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy}, len(kernelServices))
	for n := range kernelServices {
		b.ownByHand(directVIPs(n), b.Backends...)
	}
	for _, backend := range b.Backends {
		b.takeOffByKernel(t, backend)
	}
	arrived := b.watchOuter(t)
	b.write(b.kernelFile())
	b.start()
	backwards := b.watchBackwards(t)
	for n, s := range kernelServices {
		for _, vip := range directVIPs(n) {
			kind := strings.TrimPrefix(family(vip), "ipv") + "-in-" + s.outer
			t.Run(fmt.Sprintf("%s/%s/%s", s.forwarding, kind, takers[kind]), func(t *testing.T) {
				before := b.received(t, takers[kind])
				b.answersDirectly(t, vip)
				if t.Failed() {
					return // the other checks would only take their time to fail as well
				}
				b.datagramsOfEverySize(t, at(vip, 53))
				for _, size := range []int64{4 << 10, 1 << 20} {
					if _, err := lab.Upload(within(t, time.Minute), b.Client.HTTPClient(false), at(vip, 80), size); err != nil {
						t.Error(err)
					}
				}
				for i, after := range b.received(t, takers[kind]) {
					if after <= before[i] {
						t.Errorf("%s of %s received nothing", takers[kind], b.Backends[i].Name())
					}
				}
				eventually(t, answerTimeout, "packets wrapped as "+s.forwarding+" "+kind, func() error {
					return arrived.require(s.forwarding + " " + kind)
				})
			})
		}
	}
	backwards()
	b.nothingWentWrongDirectly(t, true)
}

// kernelFile is a configuration with all kernelServices, on TCP and UDP, ports 80 and 53.
func (b *bed) kernelFile() string {
	var text strings.Builder
	text.WriteString("limits: {flows: 10000}\ninterfaces:\n")
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s, attach: native}\n", i.Name)
	}
	text.WriteString("services:\n")
	for n, s := range kernelServices {
		vips := directVIPs(n)
		fmt.Fprintf(&text, "  - name: %s-over-%s\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: %[1]s\n    backends:\n",
			s.forwarding, s.outer, vips[0], vips[1])
		for _, backend := range b.Backends {
			for _, address := range s.of(backend) {
				fmt.Fprintf(&text, "      - {address: %q}\n", address)
			}
		}
	}
	return text.String()
}

// takeOffByKernel makes one device for each tunnel from the balancer, and opens the port of
// GUE over both families.
func (b *bed) takeOffByKernel(t *testing.T, backend *lab.Host) {
	t.Helper()
	// A client's packet comes out of the tunnel's device and is answered over eth0: a reverse
	// path filter, of which the stricter of the device's and all's counts, drops it.
	err := errors.Join(backend.SetSysctl("net.ipv4.conf.all.rp_filter", "0"), backend.SetSysctl("net.ipv4.conf.default.rp_filter", "0"))
	if err != nil {
		t.Fatal(err)
	}
	own4, own6, lb4, lb6 := backend.Addr4().AsSlice(), backend.Addr6().AsSlice(), b.Balancer.Addr4().AsSlice(), b.Balancer.Addr6().AsSlice()
	named := func(name string) netlink.LinkAttrs {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return attrs
	}
	for _, link := range []netlink.Link{
		&netlink.Iptun{LinkAttrs: named("ipip"), Local: own4, Remote: lb4, Proto: unix.IPPROTO_IPIP, PMtuDisc: 1},
		&netlink.Sittun{LinkAttrs: named("sit"), Local: own4, Remote: lb4, Proto: unix.IPPROTO_IPV6, PMtuDisc: 1},
		&netlink.Ip6tnl{LinkAttrs: named("ip6tnl"), Local: own6, Remote: lb6, Ttl: 64},
	} {
		if err := backend.Netlink().LinkAdd(link); err != nil {
			lacks(t, err, unix.EOPNOTSUPP, link.Type())
			t.Fatalf("making a device of type %s: %v", link.Type(), err)
		}
		if err := backend.SetUp(link.Attrs().Name, true); err != nil {
			t.Fatal(err)
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		port := netlink.Fou{Family: family, Port: tunnelPort, EncapType: netlink.FOU_ENCAP_GUE}
		if err := backend.Run(func() error { return receiveUDP(port) }); err != nil {
			lacks(t, err, unix.ENOENT, "fou")
			t.Fatalf("receiving GUE on UDP port %d of family %d: %v", tunnelPort, family, err)
		}
	}
}

// received is the number of packets that came out of a device, by backend.
func (b *bed) received(t *testing.T, device string) []uint64 {
	t.Helper()
	var counts []uint64
	for _, backend := range b.Backends {
		link, err := backend.Netlink().LinkByName(device)
		if err != nil {
			t.Fatal(err)
		}
		counts = append(counts, link.Attrs().Statistics.RxPackets)
	}
	return counts
}

// outerSeen counts packets by their outer headers: "dsr-gue 4-in-6".
type outerSeen struct {
	mu     sync.Mutex
	counts map[string]int
}

// watchOuter counts the packets that reach the backends, until the bed is closed.
func (b *bed) watchOuter(t *testing.T) *outerSeen {
	t.Helper()
	seen := &outerSeen{counts: map[string]int{}}
	for _, backend := range b.Backends {
		capture, err := backend.Capture("eth0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for f := range capture.Frames() {
				if kind := wrapping(f.Data); kind != "" && !f.Outgoing {
					seen.mu.Lock()
					seen.counts[kind]++
					seen.mu.Unlock()
				}
			}
		}()
	}
	return seen
}

func (s *outerSeen) require(kind string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.counts[kind] == 0 {
		return fmt.Errorf("none arrived at the backends; of others: %v", s.counts)
	}
	return nil
}

// wrapping names the outer headers of an untagged frame, or "". It takes IP headers without
// options.
func wrapping(frame []byte) string {
	const ethernet, ip4, ip6, udp = 14, 20, 40, 8
	var outer string
	var protocol byte
	var payload []byte
	switch {
	case len(frame) >= ethernet+ip4 && frame[12] == 0x08 && frame[13] == 0x00:
		outer, protocol, payload = "4", frame[ethernet+9], frame[ethernet+ip4:]
	case len(frame) >= ethernet+ip6 && frame[12] == 0x86 && frame[13] == 0xdd:
		outer, protocol, payload = "6", frame[ethernet+6], frame[ethernet+ip6:]
	}
	forwarding := "dsr-ipip"
	if protocol == unix.IPPROTO_UDP && len(payload) > udp+1 && int(payload[2])<<8|int(payload[3]) == tunnelPort {
		forwarding, protocol = "dsr-gue", payload[udp+1]
	}
	switch protocol {
	case unix.IPPROTO_IPIP:
		return forwarding + " 4-in-" + outer
	case unix.IPPROTO_IPV6:
		return forwarding + " 6-in-" + outer
	}
	return ""
}
