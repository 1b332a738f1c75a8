package net

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestSilencePassesOnADroppedPath: a check that takes silence for a success cannot see one fault: a backend's answers
// are dropped silently. The same check with `silence: fail` finds it down, and at a port without a server both do, by
// the refusal.
func TestSilencePassesOnADroppedPath(t *testing.T) {
	b, _ := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	check := func(silence string, port int) string {
		return fmt.Sprintf("    health: {udp: {send: ping, port: %d, silence: %s}, %s}\n", port, silence, quickChecks())
	}
	file := func(port int) string {
		return strings.NewReplacer("  - name: web\n", "  - name: web\n"+check("pass", port), "  - name: dns\n", "  - name: dns\n"+check("fail", port)).Replace(b.file(settings{}))
	}
	is := func(port uint16, state string) {
		t.Helper()
		address := at(one.Addr4(), port)
		eventually(t, 20*time.Second, address+" is "+state, func() error {
			for _, backend := range b.status().Backends {
				if backend.Address == address && backend.State == state {
					return nil
				}
			}
			return fmt.Errorf("it is not: %+v", b.status().Backends)
		})
	}
	b.write(file(5353))
	b.start()
	b.isServed(t, "at start", one, two)
	is(5353, "active")
	dropped := blackhole(b.Balancer.Addr4())
	if err := one.Netlink().RouteAdd(dropped); err != nil {
		t.Fatal(err)
	}
	is(5353, "down") // by then the other check has been made as often
	is(8080, "active")
	if err := one.Netlink().RouteDel(dropped); err != nil {
		t.Fatal(err)
	}
	is(5353, "active")
	b.reload(file(1)) // refused by ICMP
	is(8080, "down")
	is(5353, "down")
}
