package net

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// checkedDirectFile is directFile with health checks, at the VIPs: by turns over HTTP, with a request of several
// segments, UDP, HTTPS and gRPC.
func (b *bed) checkedDirectFile(attach string) string {
	text := b.directFile(attach, len(directServices))
	checks := []string{
		fmt.Sprintf("http: {port: 80, path: /%s, host: %s}", strings.Repeat("a", 1000), strings.Repeat("a", 250)),
		`udp: {send: "well?", expect: "well?", port: 53}`,
		fmt.Sprintf("https: {port: %d, verify: false}", httpsPort),
		fmt.Sprintf("grpc: {port: %d}", grpcPort),
	}
	for n, s := range directServices {
		check := checks[n%len(checks)]
		text = strings.Replace(text, fmt.Sprintf("- name: %s\n", s.name), fmt.Sprintf("- name: %s\n    health: {%s, %s}\n", s.name, check, quickChecks()), 1)
	}
	return text
}

const httpsPort, grpcPort = 443, 50051

// serveChecks starts a server for HTTPS, and one for gRPC that reports SERVING.
func serveChecks(t *testing.T, backends ...*lab.Host) {
	t.Helper()
	serving := connect.NewUnaryHandler("/grpc.health.v1.Health/Check",
		func(context.Context, *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.Int32Value], error) {
			return connect.NewResponse(wrapperspb.Int32(1)), nil // both messages have one field, the first
		})
	for _, backend := range backends {
		for port, handler := range map[int]http.Handler{httpsPort: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), grpcPort: serving} {
			listener, err := backend.Listen("tcp", fmt.Sprintf(":%d", port))
			if err != nil {
				t.Fatal(err)
			}
			server := httptest.NewUnstartedServer(handler)
			_ = server.Listener.Close() // the listener of the test's own namespace
			server.Listener = listener
			if port == httpsPort {
				server.StartTLS()
			} else {
				server.Config.Protocols = new(http.Protocols)
				server.Config.Protocols.SetUnencryptedHTTP2(true)
				server.Start()
			}
			t.Cleanup(server.Close)
		}
	}
}

// found waits until the checks of each service have found its backends on a host in a state.
func (b *bed) found(t *testing.T, when string, host *lab.Host, state string, services ...string) {
	t.Helper()
	eventually(t, 20*time.Second, fmt.Sprintf("%s: %s is %s in %s", when, host.Name(), state, strings.Join(services, ", ")), func() error {
		seen := 0
		for address, backend := range b.list(t) {
			if !slices.Contains(both(host), netip.MustParseAddr(address)) {
				continue
			}
			for _, found := range backend.Health {
				if !slices.Contains(services, found.Service) {
					continue
				}
				seen++
				if found.State != state {
					_, table := b.backend("list")
					return fmt.Errorf("in %s %s is %s\n%s", found.Service, address, found.State, table)
				}
			}
		}
		if seen < len(services) {
			return fmt.Errorf("%d backends are seen in %d services", seen, len(services))
		}
		return nil
	})
}

// tunnelled are the services whose packets a backend has to unwrap, and plain the others.
func tunnelled() (tunnelled []string, plain []string) {
	for _, s := range directServices {
		if s.forwarding == "dsr-l2" {
			plain = append(plain, s.name)
		} else {
			tunnelled = append(tunnelled, s.name)
		}
	}
	return tunnelled, plain
}

// TestHealthWithDirectReturn: a check takes the path of clients' packets, with every forwarding, in both families and
// between them. A backend that does not unwrap is down, though it answers at its own address; so is one without the
// VIP. The devices and rules of the checks are gone with the daemon.
func TestHealthWithDirectReturn(t *testing.T) {
	for _, way := range []struct {
		layout    lab.Layout
		attach    string
		noOffload bool
	}{
		{lab.OneArm, "native", false},
		{lab.OneArm, "tc", false},
		{lab.TwoArm, "generic", true},
	} {
		t.Run(fmt.Sprintf("%s/%s", way.layout, way.attach), func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: way.layout, MTU: roomy, NoOffload: way.noOffload}, len(directServices))
			before := b.traces(t)
			one, two := b.Backends[0], b.Backends[1]
			b.ownByHand(directVIPs(0), b.Backends...)
			serveChecks(t, b.Backends...)
			var vips []netip.Addr
			for n := 1; n < len(directServices); n++ {
				vips = append(vips, directVIPs(n)...)
			}
			b.decap(vips, b.Backends...)
			b.write(b.checkedDirectFile(way.attach))
			b.start()
			wrapped, plain := tunnelled()
			all := append(slices.Clone(wrapped), plain...)
			b.found(t, "at first", one, "up", all...)
			b.found(t, "at first", two, "up", all...)
			if now := b.traces(t); now["devices"] == before["devices"] || now["rules"] == before["rules"] {
				t.Errorf("no device or no rule is seen while shunt checks, so the test would not notice if they stayed: %s, %s", now["devices"], now["rules"])
			}

			unwraps := b.others[len(b.others)-1] // two's
			if err := unwraps.end(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			b.found(t, "without decapsulation", two, "down", wrapped...)
			b.found(t, "without decapsulation", two, "up", plain...)
			b.found(t, "without decapsulation of the other", one, "up", all...)
			b.decap(vips, two)
			b.found(t, "with decapsulation again", two, "up", all...)

			for _, vip := range directVIPs(0) {
				if err := two.DeleteAddress("lo", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
					t.Fatal(err)
				}
			}
			b.found(t, "without its VIPs", two, "down", plain...)
			b.found(t, "without the VIPs of others", two, "up", wrapped...)
			if text := b.status().condition("checks_fail_here"); strings.Contains(text, "did not take the path") {
				t.Errorf("there is a condition: %s", text)
			}

			if err := b.daemon.end(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			b.nothingLeft(t, before)
		})
	}
}

// TestHealthWithDirectReturnGoesAstray: a check that does not reach the program says nothing about the backend.
// Deleted devices and rules are made again; after a kill none is made twice, and detach finds them.
func TestHealthWithDirectReturnGoesAstray(t *testing.T) {
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy}, len(directServices))
	before := b.traces(t)
	one, two := b.Backends[0], b.Backends[1]
	b.ownByHand(directVIPs(0), b.Backends...)
	serveChecks(t, b.Backends...)
	b.write(strings.ReplaceAll(b.checkedDirectFile("auto"), "fall: 2", "fall: 5"))
	_, plain := tunnelled()
	b.start()
	b.found(t, "at first", one, "up", plain...)
	running := b.traces(t)

	deleteDevice := func() error {
		link, err := b.Balancer.Netlink().LinkByName("shunt-check1")
		if err != nil {
			return err
		}
		return b.Balancer.Netlink().LinkDel(link)
	}
	deleteRules := func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := b.Balancer.Netlink().RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Mark == 0 {
					continue
				}
				if err := b.Balancer.Netlink().RuleDel(&r); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for what, destroy := range map[string]func() error{"device": deleteDevice, "rules": deleteRules} {
		if err := destroy(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 20*time.Second, "the "+what+" that was deleted is there again", func() error {
			if now := b.traces(t); now["devices"] != running["devices"] || now["rules"] != running["rules"] {
				return fmt.Errorf("%s\n%s", now["devices"], now["rules"])
			}
			return nil
		})
		b.found(t, "after that", two, "up", plain...)
	}
	for line := range strings.Lines(b.daemon.log()) {
		if strings.Contains(line, `msg="l2: backend`) && strings.Contains(line, "is down") {
			t.Errorf("a backend was down meanwhile: %s", line)
		}
	}

	b.kill()
	b.start()
	b.found(t, "after a kill", one, "up", plain...)
	eventually(t, 20*time.Second, "after a kill there are the same device and rules", func() error {
		if now := b.traces(t); now["devices"] != running["devices"] || now["rules"] != running["rules"] {
			return fmt.Errorf("%s\n%s", now["devices"], now["rules"])
		}
		return nil
	})

	// The kernel of a host with the VIP answers by itself.
	for _, vip := range directVIPs(0) {
		if err := b.Balancer.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 20*time.Second, "a condition says that this host has the VIP", func() error {
		if text := b.status().condition("checks_fail_here"); !strings.Contains(text, "this host has the address") {
			return fmt.Errorf("it is %q", text)
		}
		return nil
	})
	for _, vip := range directVIPs(0) {
		if err := b.Balancer.DeleteAddress("lo", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	b.found(t, "meanwhile", one, "up", plain...)

	b.kill()
	if code, out := b.shunt("detach", "--instance", b.instance, "--socket", b.socket); code != 0 {
		t.Fatalf("shunt detach: exit code %d:\n%s", code, out)
	}
	b.daemon = nil
	b.nothingLeft(t, before)
}
