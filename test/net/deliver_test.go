package net

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Gateways of the node's pods: at a bridge, as CNI's plugin bridge makes them, and at a routed veth, as ptp does.
var (
	bridged4 = netip.MustParsePrefix("10.88.0.1/24")
	bridged6 = netip.MustParsePrefix("2001:db8:88::1/64")
	routed4  = netip.MustParsePrefix("10.89.0.1/32")
	routed6  = netip.MustParsePrefix("2001:db8:89::1/128")
)

// after returns the n-th address after a gateway's.
func after(gateway netip.Prefix, n, bits int) netip.Prefix {
	a := gateway.Addr()
	for range n {
		a = a.Next()
	}
	return netip.PrefixFrom(a, bits)
}

// newNode is a bed whose balancer is a node with pods: two at the bridge cni0, one at the veth routed. The first
// backend is on another machine. No pod has NAPI at its eth0, which is a veth's default.
func newNode(t *testing.T) (b *bed, pods []*lab.Host) {
	t.Helper()
	b = newBed(t, lab.Options{Layout: lab.OneArm, Forwarding: true})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pods, err := b.AddPods(b.Balancer, "cni0", bridged4, bridged6, "p1", "p2")
	must(err)
	pods = append(pods, b.addRouted(t, "p3", "routed", 3))
	for _, pod := range pods {
		b.serve(pod)
	}
	must(b.Ready(within(t, 20*time.Second)))
	b.Backends = append(b.Backends[:1:1], pods...)
	return b, pods
}

// addRouted makes a pod with an interface of its own at the node. Its addresses are the n-th ones after the gateway's.
func (b *bed) addRouted(t *testing.T, name, iface string, n int) *lab.Host {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pod, err := b.AddHost(name)
	must(err)
	own4, own6 := after(routed4, n, 24), after(routed6, n, 64)
	must(b.Connect(lab.End{Host: pod, Interface: "eth0", IPv4: own4, IPv6: own6},
		lab.End{Host: b.Balancer, Interface: iface, IPv4: routed4, IPv6: routed6}, lab.Cable{}))
	must(b.Balancer.AddRoute(lab.Route{To: netip.PrefixFrom(own4.Addr(), 32), Interface: iface}))
	must(b.Balancer.AddRoute(lab.Route{To: netip.PrefixFrom(own6.Addr(), 128), Interface: iface}))
	must(pod.AddRoute(lab.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: routed4.Addr()}))
	must(pod.AddRoute(lab.Route{To: netip.MustParsePrefix("::/0"), Via: routed6.Addr()}))
	return pod
}

var interfacesOfFile = regexp.MustCompile(`(?s)interfaces:\n.*?services:\n`)

// nodeFile has XDP at the clients' interface, and tc towards the pods.
func (b *bed) nodeFile(forwarding, attach string) string {
	return interfacesOfFile.ReplaceAllString(b.file(settings{forwarding: forwarding}),
		fmt.Sprintf("interfaces: [{name: eth0, attach: %s}, {name: cni0, attach: tc}, {name: routed, attach: tc}]\nservices:\n", attach))
}

// podsAnswer sends requests until all backends have answered, and moves data.
func (b *bed) podsAnswer(t *testing.T, vip netip.Addr, forwarding string) {
	t.Helper()
	const requests = 80 // one of five backends gets none: once in 10^7 runs
	overTCP, overUDP := map[string]int{}, map[string]int{}
	client := b.Client.HTTPClient(false)
	for i := range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatalf("request %d: %v; %s", i, err, b.reasonsNow())
		}
		dns, err := b.askUDP(b.Client, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatalf("datagram %d: %v; %s", i, err, b.reasonsNow())
		}
		overTCP[web.Backend]++
		overUDP[dns.Backend]++
		for _, a := range []lab.Answer{web, dns} {
			saw := netip.MustParseAddrPort(a.Remote).Addr()
			fromClient := saw == b.Client.Addr4() || saw == b.Client.Addr6()
			if fromClient != (forwarding == "nat-destination" || a.Backend == b.Balancer.Name()) {
				t.Fatalf("with forwarding %s backend %s saw %s", forwarding, a.Backend, a.Remote)
			}
		}
	}
	if len(overTCP) < len(b.Backends) || len(overUDP) != len(overTCP) {
		t.Errorf("of %d requests and datagrams, TCP went to %v and UDP to %v; want some to each", requests, overTCP, overUDP)
	}
}

// nothingIsLost checks that no packet has a reason that nothing here causes.
func (b *bed) nothingIsLost(t *testing.T) {
	t.Helper()
	reasons := b.status().Reasons
	for _, reason := range []string{"redirect_refused", "tx_refused", "egress_unlisted", "internal", "unresolved", "host_backend", "mark_forged", "too_big", "flow_moved"} {
		if n := reasons[reason].Packets; n != 0 {
			t.Errorf("%d packets with reason %s", n, reason)
		}
	}
}

// TestPodsBehindXDP: with XDP at the clients' interface, pods of the same machine are served: behind a bridge, which
// takes no frames from XDP, and behind a veth without NAPI, which the file names or has a pattern for. So is a server
// of the machine itself.
func TestPodsBehindXDP(t *testing.T) {
	for _, way := range []struct{ forwarding, attach, veth string }{
		{"nat", "native", "routed"}, {"nat", "native", `"route?"`}, {"nat-destination", "native", `"route?"`}, {"nat", "generic", "routed"}, {"nat", "generic", `"route?"`},
	} {
		t.Run(way.forwarding+"/"+way.attach+"/"+way.veth, func(t *testing.T) {
			b, _ := newNode(t)
			b.serve(b.Balancer)
			text := strings.Replace(b.nodeFile(way.forwarding, way.attach), "{name: routed,", "{name: "+way.veth+",", 1)
			if way.forwarding == "nat-destination" { // its answers have to come back through the balancer
				text = withoutLine(withoutLine(text, b.Backends[0].Addr4().String()), b.Backends[0].Addr6().String())
				b.Backends = b.Backends[1:]
			}
			if way.attach == "native" { // in generic mode this host itself cannot be a backend
				text = b.withHost(text)
			}
			b.write(text)
			b.start()
			for _, vip := range vips {
				t.Run(family(vip), func(t *testing.T) {
					b.podsAnswer(t, vip, way.forwarding)
					b.datagramsOfEverySize(t, at(vip, 53))
					b.transfer(t, at(vip, 80))
				})
			}
			if way.attach == "native" && b.status().Reasons["checksum_completed"].Packets == 0 {
				t.Error("no checksum was completed: the lab does not leave them to hardware, so the test proves less than it says")
			}
			b.nothingIsLost(t)
			b.kill()
			b.podsAnswer(t, lab.VIP4, way.forwarding)
			b.start()
			b.podsAnswer(t, lab.VIP6, way.forwarding)
			b.nothingIsLost(t)
		})
	}
}

// TestOpenChecksumsLeaveXDPOpen: a checksum that a client leaves to hardware is right if the kernel completes it behind
// the balancer, and a pod that gets the frame unchanged accepts it.
func TestOpenChecksumsLeaveXDPOpen(t *testing.T) {
	b, pods := newNode(t)
	for _, port := range append([]string{"cni0", "routed"}, pods[0].Name(), pods[1].Name()) {
		if err := b.Balancer.SetOffload(port, map[string]bool{"tx": false, "tso": false}); err != nil {
			t.Fatal(err)
		}
	}
	b.write(b.nodeFile("nat", "native"))
	b.start()
	for _, vip := range vips {
		b.podsAnswer(t, vip, "nat")
		b.datagramsOfEverySize(t, at(vip, 53))
	}
	b.nothingIsLost(t)
}

// TestForgedMarksGoNowhere: a frame from outside with the mark of frames that XDP hands to tc is dropped.
func TestForgedMarksGoNowhere(t *testing.T) {
	b, pods := newNode(t)
	b.write(b.nodeFile("nat", "native"))
	b.start()
	b.podsAnswer(t, lab.VIP4, "nat")
	capture, err := pods[0].Capture("eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer capture.Close()
	eth0 := b.Balancer.Interfaces()[0].MAC
	const each = 64
	for i, to := range [][]byte{pods[0].Interfaces()[0].MAC, eth0} {
		for index := range byte(each) {
			frame := slices.Concat(to, []byte{0x06, 0x73, 0x68, 0x70 | byte(i)<<3 | index&7, index, 0}, []byte{0x88, 0xb5}, make([]byte, 46))
			if err := b.Client.Send("eth0", frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The switch learns the port of eth0, and floods frames for a pod.
	eventually(t, 10*time.Second, "the count of forged marks", func() error {
		if n := b.status().Reasons["mark_forged"].Packets; n != 2*each {
			return fmt.Errorf("%d are counted, want %d", n, 2*each)
		}
		return nil
	})
	for {
		select {
		case f := <-capture.Frames():
			if strings.HasPrefix(string(f.Data[12:]), "\x88\xb5") {
				t.Fatalf("the pod was sent % x", f.Data[:14])
			}
			continue
		default:
		}
		break
	}
}

// delivers requires that there are, or are not, programs at tc beside the one at XDP of eth0.
func (b *bed) delivers(t *testing.T, when string, want bool) {
	t.Helper()
	pins, err := filepath.Glob("/sys/fs/bpf/shunt/" + b.instance + "/deliver-*")
	if err != nil {
		t.Fatal(err)
	}
	if want && len(pins) != 2 || !want && len(pins) != 0 {
		t.Errorf("%s: of deliveries there are %q", when, pins)
	}
}

// TestNodeChangesItsMode: connections to pods go on when the clients' interface changes between XDP and tc, by a reload
// and by a successor; the programs at tc beside the program at XDP exist only as long as it needs them.
func TestNodeChangesItsMode(t *testing.T) {
	b, _ := newNode(t)
	native, tc := b.nodeFile("nat", "native"), b.nodeFile("nat", "tc")
	b.write(native)
	b.start()
	b.delivers(t, "at the start", true)
	sessions := b.open(t, 8)
	for range 2 {
		b.reload(tc)
		b.delivers(t, "at tc", false)
		b.goOn(t, "at tc", sessions)
		b.reload(native)
		b.delivers(t, "at XDP again", true)
		b.goOn(t, "at XDP again", sessions)
	}
	b.kill()
	b.write(tc)
	b.start()
	b.delivers(t, "under a successor at tc", false)
	b.goOn(t, "under a successor at tc", sessions)
	b.kill()
	b.write(native)
	b.start()
	b.goOn(t, "under a successor at XDP", sessions)
	b.delivers(t, "under a successor at XDP", true)
	b.reload(strings.ReplaceAll(native, ", {name: cni0, attach: tc}, {name: routed, attach: tc}", ""))
	b.delivers(t, "with no interface at tc", false)
	b.reload(native)
	b.delivers(t, "with interfaces at tc again", true)
	b.goOn(t, "with interfaces at tc again", sessions)
	b.kill()
	b.detachesAll(t)
}

// TestPodsWithASmallerMTU: a packet that is too long for the bridge is answered on its way in, and not marked.
func TestPodsWithASmallerMTU(t *testing.T) {
	b, pods := newNode(t)
	if err := b.Balancer.SetMTU("cni0", 1300); err != nil {
		t.Fatal(err)
	}
	text := b.nodeFile("nat", "native")
	for _, backend := range []*lab.Host{b.Backends[0], pods[2]} {
		text = withoutLine(withoutLine(text, backend.Addr4().String()), backend.Addr6().String())
	}
	b.Backends = pods[:2]
	b.write(text)
	b.start()
	for _, vip := range vips {
		b.podsAnswer(t, vip, "nat")
		before := b.status().Reasons["too_big_answered"].Packets
		b.transfer(t, at(vip, 80))
		if after := b.status().Reasons["too_big_answered"].Packets; after == before {
			t.Errorf("over %s no packet was too big, so the test proves nothing", family(vip))
		}
	}
}
