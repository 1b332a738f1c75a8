package net

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestHealthWhileAChangeWaits: a backend that fails goes out of service although a reload waits, for a
// name that no resolver knows or for a next hop that no host has.
func TestHealthWhileAChangeWaits(t *testing.T) {
	b, w := healthBed(t)
	one := b.Backends[0]
	z := &zone{}
	resolvers := serveZone(t, b.Client, z)
	z.silence()
	file := strings.Replace(b.file(settings{backends: []int{1}}), "defaults: {",
		fmt.Sprintf("defaults: {health: {http: {port: %d}, %s}, ", healthPort, "interval: 400ms, timeout: 400ms, fall: 1, rise: 1"), 1) // quicker than the reload's wait
	b.write(file)
	b.startWith(t, resolvers)
	b.isServed(t, "at start", one)
	for _, waits := range []struct{ name, backend, ends string }{
		{"for a name", "dns: nowhere.example.org", "condition=name_not_resolved"},
		{"for a next hop", "address: 10.0.0.77", "cannot be reached yet"},
	} {
		t.Run(waits.name, func(t *testing.T) {
			// A slow machine may find the failure only when the reload has waited long enough.
			const attempts = 5
			for attempt := 1; ; attempt++ {
				more := fmt.Sprintf("\n  - {name: more, address: 192.0.2.10, protocol: udp, port: %d, backends: [{%s, port: 9}]}\n", 5000+attempt, waits.backend)
				b.write(strings.TrimRight(file, "\n") + more)
				said := len(b.daemon.log())
				reload := b.spawn(b.Balancer, "reload", "--socket", b.socket)
				w.shut(t, one)
				eventually(t, 30*time.Second, "reload and failure are carried out", func() error {
					log := b.daemon.log()[said:]
					if !strings.Contains(log, waits.ends) || !strings.Contains(log, "msg=reloaded") || !strings.Contains(log, "condition=no_backend") {
						return fmt.Errorf("%s", log)
					}
					return nil
				})
				<-reload.ended
				log := b.daemon.log()[said:]
				found, out, ended := strings.Index(log, "to=down"), strings.Index(log, "condition=no_backend"), strings.Index(log, waits.ends)
				w.open(t, one)
				b.isServed(t, "well again", one)
				b.reload(file)
				if found < ended {
					if out > ended {
						t.Errorf("the failure was found while the reload waited, and carried out after that:\n%s", log)
					}
					return
				}
				if attempt == attempts {
					t.Fatalf("in %d attempts the failure was never found while a reload waited:\n%s", attempts, log)
				}
			}
		})
	}
}
