package net

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// hostRoutes are the balancer's own ways to the VIPs: they are none of its addresses, as for any
// client.
var hostRoutes = []struct {
	name   string
	router bool
}{{"on the link", false}, {"through a router", true}}

// leadTo gives the balancer itself a way to the VIPs.
func (b *bed) leadTo(t *testing.T, router bool, addresses ...netip.Addr) {
	t.Helper()
	for _, vip := range addresses {
		route := lab.Route{To: netip.PrefixFrom(vip, vip.BitLen()), Interface: "eth0"}
		if router {
			route.Via = b.Router.Interfaces()[1].IPv4.Addr()
			if vip.Is6() {
				route.Via = b.Router.Interfaces()[1].IPv6.Addr()
			}
		}
		if err := b.Balancer.AddRoute(route); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHostIsClient: with attach: tc the balancer's own connections to its VIPs are balanced as all
// others, and survive the daemon.
func TestHostIsClient(t *testing.T) {
	for _, layout := range []lab.Layout{lab.OneArm, lab.TwoArm} {
		for _, way := range hostRoutes {
			t.Run(fmt.Sprintf("%s/nat/%s", layout, way.name), func(t *testing.T) {
				b := newBed(t, lab.Options{Layout: layout, Router: way.router, VIPOnLink: !way.router})
				b.leadTo(t, way.router, vips...)
				b.write(b.file(settings{attach: "tc"}))
				b.start()
				eventually(t, 10*time.Second, "announcement", b.announced)
				for _, vip := range vips {
					b.hostIsServed(t, vip)
				}
				b.kill()
				for _, vip := range vips {
					b.hostIsServed(t, vip)
				}
				b.start()
			})
		}
	}
}

// TestHostIsClientDirectly is the same with direct return, where answers do not pass shunt.
func TestHostIsClientDirectly(t *testing.T) {
	const services = 3 // one of each forwarding
	b := newDirectBed(t, lab.Options{MTU: roomy}, services)
	b.ownByHand(directVIPs(0), b.Backends...)
	var tunnelled []netip.Addr
	for n := 1; n < services; n++ {
		tunnelled = append(tunnelled, directVIPs(n)...)
	}
	b.decap(tunnelled, b.Backends...)
	for n := range services {
		b.leadTo(t, false, directVIPs(n)...)
	}
	b.write(b.directFile("tc", services))
	b.start()
	eventually(t, 10*time.Second, "announcement", b.announced)
	for n, s := range directServices[:services] {
		for _, vip := range directVIPs(n) {
			t.Run(s.name+"/"+family(vip), func(t *testing.T) { b.hostIsServed(t, vip) })
		}
	}
}

// hostIsServed sends requests from the balancer until every backend has answered, and moves some
// data.
func (b *bed) hostIsServed(t *testing.T, vip netip.Addr) {
	t.Helper()
	const requests = 20 // all to one of two backends: once in 2^19 runs
	client := b.Balancer.HTTPClient(false)
	seen := map[string]bool{}
	for i := range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatalf("request %d from the balancer to %s: %v; reasons: %v", i, vip, err, b.reasonsNow())
		}
		dns, err := b.askUDP(b.Balancer, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatalf("datagram %d from the balancer to %s: %v", i, vip, err)
		}
		seen["tcp "+web.Backend], seen["udp "+dns.Backend] = true, true
	}
	if len(seen) != 2*len(b.Backends) {
		t.Errorf("%d requests and datagrams were answered by %v; want some by each backend", requests, seen)
	}
	if _, err := lab.Upload(within(t, time.Minute), client, at(vip, 80), size(10, 1)); err != nil {
		t.Errorf("upload: %v", err)
	}
	if _, err := lab.Download(within(t, time.Minute), client, at(vip, 80), size(10, 1)); err != nil {
		t.Errorf("download: %v", err)
	}
}

// reasonsNow returns the status, for messages.
func (b *bed) reasonsNow() string {
	code, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
	return fmt.Sprintf("exit code %d\n%s", code, out)
}

// TestHostIsBackend: with attach: tc the balancer is one of its own backends, as in a pair of
// machines that do all; its server sees the clients' own addresses.
func TestHostIsBackend(t *testing.T) {
	for _, layout := range []lab.Layout{lab.OneArm, lab.TwoArm} {
		for _, others := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/others=%v", layout, others), func(t *testing.T) {
				b := newBed(t, lab.Options{Layout: layout})
				b.serve(b.Balancer)
				text := b.file(settings{attach: "tc"})
				if !others {
					for _, backend := range b.Backends {
						for _, a := range []netip.Addr{backend.Addr4(), backend.Addr6()} {
							text = withoutLine(text, a.String())
						}
					}
				}
				b.write(b.withHost(text))
				b.start()
				for _, vip := range vips {
					b.hostAnswers(t, vip, others)
				}
			})
		}
	}
}

// TestHostBecomesBackend: with XDP the balancer cannot be its own backend, and a reload to attach: tc
// makes it one at once. The kernel sends no notice; shunt would only find out half a minute later.
func TestHostBecomesBackend(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	b.serve(b.Balancer)
	b.write(b.withHost(b.file(settings{attach: "native"})))
	b.start()
	conditions := func() string {
		_, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
		return out
	}
	own := "cannot send to backend " + b.Balancer.Addr4().String()
	eventually(t, 10*time.Second, "the condition that it cannot be", func() error {
		if out := conditions(); !strings.Contains(out, own) {
			return errors.New(out)
		}
		return nil
	})
	b.reload(b.withHost(b.file(settings{attach: "tc"})))
	eventually(t, 15*time.Second, "the end of the condition", func() error {
		if out := conditions(); strings.Contains(out, own) {
			return errors.New(out)
		}
		return nil
	})
	for _, vip := range vips {
		b.hostAnswers(t, vip, true)
	}
}

// withHost makes the balancer a backend of web and dns.
func (b *bed) withHost(text string) string {
	for name, port := range map[string]int{"protocol: tcp": 8080, "protocol: udp": 5353} {
		lines := fmt.Sprintf("      - {address: %s, port: %d}\n      - {address: %q, port: %d}\n", b.Balancer.Addr4(), port, b.Balancer.Addr6(), port)
		text = strings.Replace(text, name+"\n    backends:\n", name+"\n    backends:\n"+lines, 1)
	}
	return text
}

func withoutLine(text, word string) string {
	var kept []string
	for _, line := range strings.SplitAfter(text, "\n") {
		if !strings.Contains(line, word+",") && !strings.Contains(line, word+`"`) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// hostAnswers sends requests until the balancer itself has answered; its server has to see the
// client's address.
func (b *bed) hostAnswers(t *testing.T, vip netip.Addr, others bool) {
	t.Helper()
	const requests = 60 // none of three to one backend: once in 10^10 runs
	client := b.Client.HTTPClient(false)
	byHost := map[string]int{}
	for i := range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatalf("request %d to %s: %v; %s", i, vip, err, b.reasonsNow())
		}
		dns, err := b.askUDP(b.Client, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatalf("datagram %d to %s: %v; %s", i, vip, err, b.reasonsNow())
		}
		for protocol, a := range map[string]lab.Answer{"tcp": web, "udp": dns} {
			if a.Backend != b.Balancer.Name() {
				continue
			}
			byHost[protocol]++
			if saw := netip.MustParseAddrPort(a.Remote).Addr(); saw != b.Client.Addr4() && saw != b.Client.Addr6() {
				t.Fatalf("over %s the balancer's own server saw %s, not the client", protocol, a.Remote)
			}
		}
	}
	if byHost["tcp"] == 0 || byHost["udp"] == 0 || others && byHost["tcp"] == requests {
		t.Errorf("of %d requests and datagrams the balancer itself answered %v", requests, byHost)
	}
	if _, err := lab.Upload(within(t, time.Minute), client, at(vip, 80), size(10, 1)); err != nil {
		t.Errorf("upload: %v", err)
	}
	if _, err := lab.Download(within(t, time.Minute), client, at(vip, 80), size(10, 1)); err != nil {
		t.Errorf("download: %v", err)
	}
}
