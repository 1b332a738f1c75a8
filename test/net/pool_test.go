package net

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// poolFile has two services at ports 80 and 81 with the backends of one pool; the second one has others if they
// are given.
func (b *bed) poolFile(shop string) string {
	var text strings.Builder
	text.WriteString("interfaces:\n")
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s}\n", i.Name)
	}
	fmt.Fprintf(&text, "pools:\n  - name: servers\n    health: {http: {port: %d}, %s}\n    backends:\n%sservices:\n",
		healthPort, quickChecks(), b.backends(nil, 8080))
	for _, s := range []struct{ name, port, from string }{{"web", "80", "pool: servers"}, {"shop", "81", shop}} {
		fmt.Fprintf(&text, "  - {name: %s, address: [%s, %q], port: %s, %s}\n", s.name, lab.VIP4, lab.VIP6, s.port, s.from)
	}
	return text.String()
}

// TestPool: services share the backends of a pool and the results of its checks, and one that leaves the pool
// keeps its connections.
func TestPool(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	b.write(b.poolFile("pool: servers"))
	b.start()
	b.isServed(t, "at start", one, two)
	b.isServedAt(t, 81, "at start", one, two)
	w.shut(t, one)
	b.isServed(t, "with one down", two)
	b.isServedAt(t, 81, "with one down", two)
	for _, a := range both(one) {
		said := fmt.Sprintf("pool servers: backend %s is down: tcp connect: connection refused (2 checks in a row failed)", at(a, 8080))
		if n := strings.Count(b.daemon.log(), said); n != 1 {
			t.Errorf("the log says %d times that %s", n, said)
		}
	}
	if code, out := b.backend("list"); code != 0 || !strings.Contains(out, "is down in web") || !strings.Contains(out, "is down in shop") {
		t.Errorf("shunt backend list: exit code %d:\n%s", code, out)
	}

	sessions := []*session{}
	for _, vip := range vips {
		s, err := b.session(t, at(vip, 81))
		if err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, s)
	}
	out := b.reload(b.poolFile(fmt.Sprintf("backends: [{address: %s, port: 8080}, {address: %q, port: 8080}]", two.Addr4(), two.Addr6())))
	for _, line := range []string{"pool from servers to none", "health from http to none", "backend " + at(one.Addr4(), 8080) + " removed"} {
		if !strings.Contains(out, line) {
			t.Errorf("the reload does not say %q:\n%s", line, out)
		}
	}
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Error(err)
		}
	}
	b.reload(b.poolFile("pool: servers"))
	b.isServedAt(t, 81, "in the pool again", two)
	w.open(t, one)
	b.isServed(t, "with both up", one, two)
	b.isServedAt(t, 81, "with both up", one, two)
}
