package net

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// ways are the combinations of the balancer's place, the program's attachment and the rewriting.
var ways = []struct {
	layout             lab.Layout
	attach, forwarding string
}{
	{lab.TwoArm, "native", "nat"},
	{lab.TwoArm, "generic", "nat"},
	{lab.OneArm, "native", "nat"},
	{lab.OneArm, "generic", "nat"},
	{lab.TwoArm, "native", "nat-destination"},
	{lab.TwoArm, "generic", "nat-destination"},
	{lab.Direct, "native", "nat"},
	{lab.TwoArm, "tc", "nat"},
	{lab.OneArm, "tc", "nat"},
	{lab.TwoArm, "tc", "nat-destination"},
}

// transferSize is the number of bytes that have to arrive unharmed in each direction, family and
// way.
func transferSize() int64 {
	if soak {
		return 100 << 20
	}
	return size(4, 2)
}

// TestForward: TCP and UDP over both families reach every backend in every way, with checksum
// offload on at clients and backends, and so do ranges of ports and `any`.
func TestForward(t *testing.T) {
	for _, way := range ways {
		t.Run(fmt.Sprintf("%s/%s/%s", way.layout, way.attach, way.forwarding), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout})
			if way.attach == "tc" {
				b.completesInSoftware(t)
			}
			b.write(b.file(settings{attach: way.attach, forwarding: way.forwarding, more: b.wide()}))
			b.start()
			for _, a := range b.status().Attached {
				if !isMode(a.Mode, way.attach) {
					t.Fatalf("%s is attached in %s mode, want %s", a.Interface, a.Mode, way.attach)
				}
			}
			for _, vip := range vips {
				t.Run(family(vip), func(t *testing.T) {
					b.everyBackendAnswers(t, vip, way.forwarding)
					b.portsArrive(t, vip.Next(), 8050)
					b.portsArrive(t, vip.Next().Next(), 8050)
					b.datagramsOfEverySize(t, at(vip, 53))
					b.transfer(t, at(vip, 80))
				})
			}
			b.nothingWentWrong(t, way.attach)
		})
	}
}

// completesInSoftware makes the balancer's kernel complete open checksums and cut segments itself,
// before they leave. A veth would hand both on undone, and its receiver would accept them.
func (b *bed) completesInSoftware(t *testing.T) {
	t.Helper()
	for _, i := range b.Balancer.Interfaces() {
		if err := b.Balancer.SetOffload(i.Name, map[string]bool{"tx": false, "tso": false}); err != nil {
			t.Fatal(err)
		}
	}
}

// isMode reports whether an attach setting may become this mode.
func isMode(mode, attach string) bool {
	if attach == "tc" {
		return mode == "tcx" || mode == "clsact" // Linux 6.6, and before
	}
	return mode == attach
}

// wide are services with a range and with `any`, on the two addresses after the VIPs.
func (b *bed) wide() string {
	service := "  - name: %s\n    address: [%s, %q]\n    port: %s\n    protocol: [tcp, udp]\n    backends:\n%s"
	after4, after6 := lab.VIP4.Next(), lab.VIP6.Next()
	return fmt.Sprintf(service, "range", after4, after6, `["8000-8099"]`, b.backends(nil, 0)) +
		fmt.Sprintf(service, "any", after4.Next(), after6.Next(), "any", b.backends(nil, 0))
}

// everyBackendAnswers sends requests until all have answered, and checks the client address that
// the backend saw.
func (b *bed) everyBackendAnswers(t *testing.T, vip netip.Addr, forwarding string) {
	t.Helper()
	const requests = 40 // all to one of two backends: once in 2^39 runs
	overTCP, overUDP := map[string]int{}, map[string]int{}
	client := b.Client.HTTPClient(false)
	for i := range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		dns, err := b.askUDP(b.Client, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatalf("datagram %d: %v", i, err)
		}
		overTCP[web.Backend]++
		overUDP[dns.Backend]++
		for _, a := range []lab.Answer{web, dns} {
			saw := netip.MustParseAddrPort(a.Remote).Addr()
			fromClient := saw == b.Client.Addr4() || saw == b.Client.Addr6()
			if fromClient != (forwarding == "nat-destination") {
				t.Fatalf("with forwarding %s the backend saw %s", forwarding, a.Remote)
			}
		}
	}
	if len(overTCP) != len(b.Backends) || len(overUDP) != len(b.Backends) {
		t.Errorf("of %d requests and datagrams, TCP went to %v and UDP to %v; want some to each", requests, overTCP, overUDP)
	}
}

// portsArrive checks that a port without translation reaches the same one of a backend.
func (b *bed) portsArrive(t *testing.T, vip netip.Addr, port uint16) {
	t.Helper()
	answer, err := b.get(b.Client.HTTPClient(false), at(vip, port))
	if err != nil {
		t.Fatal(err)
	}
	if local := netip.MustParseAddrPort(answer.Local); local.Port() != port {
		t.Errorf("asked port %d, the backend was asked at %s", port, answer.Local)
	}
	if _, err := b.askUDP(b.Client, at(vip, port), []byte("who?")); err != nil {
		t.Fatal(err)
	}
}

// datagramsOfEverySize sends payloads of odd and even sizes, with sums of all kinds, up to the size
// at which the longer answer fits a frame.
func (b *bed) datagramsOfEverySize(t *testing.T, address string) {
	t.Helper()
	conn, err := b.Client.Dial(within(t, answerTimeout), "udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx := within(t, 20*time.Second)
	for size := 0; size <= 1300; size += 7 {
		payload := bytes.Repeat([]byte{byte(size), byte(size >> 8), 0xff, 0}, size/4+1)[:size]
		if _, err := lab.AskUDPOn(ctx, conn, payload); err != nil {
			t.Fatalf("a datagram of %d bytes: %v", size, err)
		}
	}
}

// transfer moves checksummed bytes both ways.
func (b *bed) transfer(t *testing.T, address string) {
	t.Helper()
	client := b.Client.HTTPClient(false)
	begin := time.Now()
	if _, err := lab.Download(within(t, time.Minute), client, address, transferSize()); err != nil {
		t.Fatal(err)
	}
	half := time.Now()
	if _, err := lab.Upload(within(t, time.Minute), client, address, transferSize()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MB down in %s, up in %s", transferSize()>>20, half.Sub(begin).Round(time.Millisecond), time.Since(half).Round(time.Millisecond))
}

// nothingWentWrong checks for drops that an undisturbed network has no reason for.
func (b *bed) nothingWentWrong(t *testing.T, attach string) {
	t.Helper()
	s := b.status()
	for _, reason := range []string{"malformed_transport", "no_backend", "backend_gone", "no_source", "ports_exhausted",
		"table_full", "unresolved", "egress_unlisted", "claim_race", "internal", "fib_fallback", "flow_moved"} {
		if c := s.Reasons[reason]; c.Packets != 0 {
			t.Errorf("%d packets with reason %s", c.Packets, reason)
		}
	}
	// At tc the kernel knows which checksums are still open, and our program completes none.
	if completed := s.Reasons["checksum_completed"].Packets; attach == "tc" && completed != 0 {
		t.Errorf("%d checksums were completed at tc", completed)
	} else if attach != "tc" && completed == 0 {
		t.Error("no checksum was completed: the lab does not leave them to hardware, so the test proves less than it says")
	}
	names := []string{}
	for _, service := range s.Services {
		names = append(names, service.Name)
		if service.PacketsIn == 0 || service.PacketsOut == 0 || service.FlowsCreated == 0 {
			t.Errorf("service %s counted %d packets in, %d out, %d flows", service.Name, service.PacketsIn, service.PacketsOut, service.FlowsCreated)
		}
	}
	if !slices.Equal(names, []string{"any", "dns", "range", "web"}) {
		t.Errorf("shunt status shows services %v", names)
	}
}
