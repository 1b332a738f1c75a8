package net

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// blamesNobody fails the test if the daemon has taken a backend down.
func (b *bed) blamesNobody(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(b.daemon.log()) {
		if strings.Contains(line, " is down: ") && strings.Contains(line, "backend ") || strings.Contains(line, "is kept down") {
			t.Errorf("a backend is blamed: %s", line)
		}
	}
}

// TestOwnLinkDown: while the balancer's own link is down, or has no carrier, checks say nothing about backends: none
// goes down, and none is kept down afterwards. The conditions of that time end by themselves.
func TestOwnLinkDown(t *testing.T) {
	for _, way := range []struct {
		name string
		cut  func(b *bed) (host *lab.Host, iface string)
	}{
		{"interface", func(b *bed) (*lab.Host, string) { return b.Balancer, "eth0" }},
		{"carrier", func(b *bed) (*lab.Host, string) { return b.Switch, "lb" }},
	} {
		t.Run(way.name, func(t *testing.T) {
			b, _ := healthBed(t)
			b.write(b.healthFile("", ""))
			b.start()
			b.isServed(t, "at start", b.Backends...)
			host, iface := way.cut(b)
			for range 4 {
				if err := host.SetUp(iface, false); err != nil {
					t.Fatal(err)
				}
				eventually(t, 20*time.Second, "each backend is said not to be judged", func() error {
					_, out := b.shunt("backend", "list", "--socket", b.socket)
					if n := strings.Count(out, "not judged: this machine's own network is down"); n < 2 {
						return errors.New(out)
					}
					return nil
				})
				<-time.After(3 * 400 * time.Millisecond * patience) // enough failures to take a backend down
				if err := host.SetUp(iface, true); err != nil {
					t.Fatal(err)
				}
				if way.name == "interface" { // the kernel removes the IPv6 addresses with it
					if err := b.Balancer.AddAddress("eth0", b.Balancer.Interfaces()[0].IPv6); err != nil {
						t.Fatal(err)
					}
				}
				b.isServed(t, "after the link's return", b.Backends...)
			}
			b.blamesNobody(t)
			eventually(t, 30*time.Second, "no condition remains of the outage", func() error {
				for _, code := range []string{"announce_failed", "checks_fail_here", "neighbour_unresolved"} {
					if c := b.status().condition(code); c != "" {
						return fmt.Errorf("%s: %s", code, c)
					}
				}
				return nil
			})
		})
	}
}

// TestOnlyServerRestarts: a backend that goes down again and again is not kept down while no other works.
func TestOnlyServerRestarts(t *testing.T) {
	b, w := healthBed(t)
	w.shut(t, b.Backends[1])
	only := b.Backends[0]
	b.write(b.healthFile("", ""))
	b.start()
	b.isServed(t, "at start", only)
	for i := range 5 {
		w.shut(t, only)
		for _, address := range both(only) {
			b.logged(t, "backend "+at(address, 8080)+" is down: ", i+1)
		}
		w.open(t, only)
		b.isServed(t, "after a restart", only) // also while it is down, because it is the last one
		for _, address := range both(only) {
			b.logged(t, "backend "+at(address, 8080)+" is up ", i+2)
		}
	}
	if strings.Contains(b.daemon.log(), "kept down") {
		t.Errorf("the only backend was kept down:\n%s", b.daemon.log())
	}
}
