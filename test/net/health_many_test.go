package net

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// manyRange has the addresses of many backends, which one host has.
var manyRange = netip.MustParsePrefix("10.32.0.0/24")

// manyAddresses returns the backends' addresses.
func manyAddresses() (all []netip.Addr) {
	for a := manyRange.Addr(); len(all) < 100; all = append(all, a) {
		a = a.Next()
	}
	return all
}

// manyFile has services of 100 backends each, checked over TCP every two seconds.
func (b *bed) manyFile(services int, forwarding string) string {
	var text strings.Builder
	text.WriteString("limits: {flows: 10000}\nmetrics: {listen: \"127.0.0.1:9470\"}\ninterfaces:\n  - {name: eth0}\n")
	text.WriteString("defaults: {health: {tcp: {}, interval: 2s, timeout: 2s, rise: 1, fall: 3}}\nservices:\n")
	for n := range services {
		fmt.Fprintf(&text, "  - {name: s%d, address: %s, port: 80, protocol: tcp, forwarding: %s, backends: [", n, directVIPs(n)[0], forwarding)
		for _, address := range manyAddresses() {
			fmt.Fprintf(&text, "{address: %s}, ", address)
		}
		text.WriteString("]}\n")
	}
	return text.String()
}

// TestManyChecks: all checks are made, with NAT and with direct return, and their cost is reported. 5,000 of them take
// two minutes, with SHUNT_SOAK.
func TestManyChecks(t *testing.T) {
	services, duration := 3, 3*time.Second
	if soak {
		services, duration = 50, time.Minute
	}
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 1}, 1)
	host := b.Backends[0]
	for _, address := range manyAddresses() {
		if err := host.AddAddress("eth0", netip.PrefixFrom(address, address.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Balancer.AddRoute(lab.Route{To: manyRange, Via: host.Addr4()}); err != nil {
		t.Fatal(err)
	}
	var own []netip.Addr
	for n := range services {
		own = append(own, directVIPs(n)[0])
	}
	b.decap(own, host)
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		b.write(b.manyFile(services, forwarding))
		b.start()
		text := b.checksMany(t, 100*services, duration)
		t.Logf("%s: %s", forwarding, text)
		if err := b.daemon.end(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		b.daemon = nil
	}
}

// checksMany makes the daemon check so many backends for a while, and reports the cost.
func (b *bed) checksMany(t *testing.T, backends int, duration time.Duration) string {
	t.Helper()
	eventually(t, time.Minute, "all backends are up", func() error {
		s, err := b.scrape("127.0.0.1:9470")
		if err != nil {
			return err
		}
		up := 0
		for _, m := range s["shunt_service_backend_health"].GetMetric() {
			up += int(m.GetGauge().GetValue())
		}
		if up < backends {
			return fmt.Errorf("%d of %d", up, backends)
		}
		return nil
	})
	counted := func() (of map[string]float64) {
		s, err := b.scrape("127.0.0.1:9470")
		if err != nil {
			t.Fatal(err)
		}
		of = map[string]float64{}
		for _, m := range s["shunt_health_checks_total"].GetMetric() {
			of[m.Label[0].GetValue()] = m.GetCounter().GetValue()
		}
		of["late"], _ = s.value("shunt_health_checks_late_total")
		return of
	}
	before := counted()
	cpu, err := b.daemon.CPUTime()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	<-time.After(duration) // scrapes meanwhile would cost more than the checks
	took := time.Since(began)
	used, err := b.daemon.CPUTime()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "as many checks have ended as there are backends", func() error {
		of := counted()
		if ended := of["passed"] + of["failed"] + of["not_made"] - before["passed"] - before["failed"] - before["not_made"]; ended < float64(backends) {
			return fmt.Errorf("%.0f of %d", ended, backends)
		}
		return nil
	})
	of := counted()
	if len(of) != 4 {
		t.Fatalf("the daemon counts results %v, want passed, failed and not_made beside late", of)
	}
	for result := range of {
		of[result] -= before[result]
	}
	text := fmt.Sprintf("%.0f checks of %d backends in %s passed, %.0f failed, %.0f were not made, %.0f were late; the daemon took %.2f CPUs", of["passed"], backends,
		took.Round(time.Second), of["failed"], of["not_made"], of["late"], (used-cpu).Seconds()/took.Seconds())
	// A backend that fails now and then is not down, and not in the log.
	if of["failed"]+of["not_made"] > 0 || strings.Contains(b.daemon.log(), "is down") {
		t.Errorf("backends that serve have failed their checks, or these were not made: %s\n%s", text, b.daemon.log())
	}
	return text
}
