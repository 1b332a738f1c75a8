package net

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// clientsOf gives the client's host more addresses, so that it acts as many clients.
func (b *bed) clientsOf(t *testing.T, count int) (clients []netip.Addr) {
	t.Helper()
	a4, a6 := b.Client.Addr4(), b.Client.Addr6()
	for range count {
		a4, a6 = a4.Next(), a6.Next()
		clients = append(clients, a4, a6)
		err := errors.Join(b.Client.AddAddress("eth0", netip.PrefixFrom(a4, 24)), b.Client.AddAddress("eth0", netip.PrefixFrom(a6, 64)))
		if err != nil {
			t.Fatal(err)
		}
	}
	return clients
}

// vipOf is the VIP of a client's family.
func vipOf(client netip.Addr, n int) netip.Addr {
	if client.Is4() {
		return directVIPs(n)[0]
	}
	return directVIPs(n)[1]
}

// sessionFrom opens a connection from a client's address.
func (b *bed) sessionFrom(client, vip netip.Addr) (*session, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	one, err := b.Client.OpenSession(ctx, "tcp", netip.AddrPortFrom(client, 0), at(vip, 80))
	if err != nil {
		return nil, err
	}
	s := &session{Session: one, address: at(vip, 80)}
	s.first, err = s.get()
	return s, err
}

// placeOf returns the one backend that answers all new connections and datagrams of a client.
func (b *bed) placeOf(t *testing.T, client netip.Addr) (backend string) {
	t.Helper()
	vip := vipOf(client, 0)
	for range 4 {
		s, err := b.sessionFrom(client, vip)
		if err != nil {
			t.Fatalf("%s: %v", client, err)
		}
		s.Close()
		answers := []lab.Answer{s.first, b.askFrom(t, client, vip)}
		for _, a := range answers {
			if backend != "" && a.Backend != backend {
				t.Fatalf("%s was answered by %s, then by %s", client, backend, a.Backend)
			}
			backend = a.Backend
		}
	}
	return backend
}

func (b *bed) askFrom(t *testing.T, client, vip netip.Addr) lab.Answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	conn, err := b.Client.DialFrom(ctx, "udp", netip.AddrPortFrom(client, 0), at(vip, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer, err := lab.AskUDPOn(ctx, conn, []byte("who?"))
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// placesOf is placeOf for each client.
func (b *bed) placesOf(t *testing.T, clients []netip.Addr) map[netip.Addr]string {
	t.Helper()
	places := map[netip.Addr]string{}
	for _, client := range clients {
		places[client] = b.placeOf(t, client)
	}
	return places
}

// TestAffinity: all flows of a client reach one backend, also across changes of the table.
// When that backend drains, new flows go to another and the old ones go on.
func TestAffinity(t *testing.T) {
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		t.Run(forwarding, func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 4}, 2)
			if forwarding == "nat" {
				for _, backend := range b.Backends {
					b.serveOwn(backend)
				}
			} else {
				b.decap(slices.Concat(directVIPs(0), directVIPs(1)), b.Backends...)
			}
			file := func(weights ...int) string {
				var lines []string
				for n, weight := range weights {
					for _, address := range both(b.Backends[n]) {
						lines = append(lines, line(address, fmt.Sprintf("weight: %d", weight)))
					}
				}
				text := b.one(forwarding, settle(), lines...)
				return strings.ReplaceAll(text, "    backends:\n", "    affinity: client-ip\n    affinity_timeout: 30m\n    backends:\n")
			}
			b.write(file(1, 1, 1))
			b.start()
			clients := b.clientsOf(t, 8)
			before := b.placesOf(t, clients)
			used := map[string]int{}
			for _, backend := range before {
				used[backend]++
			}
			if len(used) != 3 { // 16 clients: once in 200 layouts of addresses, and always the same
				t.Errorf("16 clients were placed on %v, want all three", used)
			}
			stay := func(when string) {
				t.Helper()
				for client, now := range b.placesOf(t, clients) {
					if now != before[client] {
						t.Errorf("%s: %s moved from %s to %s", when, client, before[client], now)
					}
				}
			}
			b.reload(file(1, 1, 1, 1))
			stay("with a backend added")
			b.reload(file(9, 1, 1, 1))
			stay("with other weights")
			b.kill()
			b.start()
			stay("after kill -9 and a start")

			var sessions []*session
			for _, client := range clients {
				s, err := b.sessionFrom(client, vipOf(client, 0))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close() })
				sessions = append(sessions, s)
			}
			b.drain(t, b.Backends[1])
			for range 2 { // at once, and after the new flows have been remembered
				for client, now := range b.placesAnew(t, clients) {
					if before[client] != "b2" && now != before[client] {
						t.Errorf("with b2 drained: %s moved from %s to %s", client, before[client], now)
					}
					if now == "b2" {
						t.Errorf("with b2 drained: new flows of %s go there", client)
					}
				}
				for _, s := range sessions {
					if err := b.alive(s); err != nil {
						t.Errorf("with b2 drained: %v", err)
					}
				}
			}
		})
	}
}

// placesAnew returns the backend that answers each client now; there may be more than one for
// a client.
func (b *bed) placesAnew(t *testing.T, clients []netip.Addr) map[netip.Addr]string {
	t.Helper()
	places := map[netip.Addr]string{}
	for _, client := range clients {
		s, err := b.sessionFrom(client, vipOf(client, 0))
		if err != nil {
			t.Errorf("a new connection of %s: %v", client, err)
			continue
		}
		if err := b.alive(s); err != nil { // its second request, too
			t.Error(err)
		}
		s.Close()
		places[client] = s.first.Backend
		if udp := b.askFrom(t, client, vipOf(client, 0)).Backend; udp != s.first.Backend {
			t.Logf("%s: TCP with %s, UDP with %s", client, s.first.Backend, udp)
			if udp == "b2" {
				places[client] = udp
			}
		}
	}
	return places
}

// serveOwn starts a UDP server at the backend's own addresses, for NAT.
func (b *bed) serveOwn(backend *lab.Host) {
	b.t.Helper()
	for _, address := range both(backend) {
		if _, err := backend.ServeUDP(at(address, 53), backend.Name()); err != nil {
			b.t.Fatal(err)
		}
	}
}
