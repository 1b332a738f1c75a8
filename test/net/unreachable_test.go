package net

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestUnreachableBackendDelaysOneChange: the change that adds a backend waits for its next hop. Later
// changes do not, although the backend does not answer, and a change that adds another backend waits
// for that one alone.
func TestUnreachableBackendDelaysOneChange(t *testing.T) {
	b := newBed(t, lab.Options{Backends: 2})
	dead := func(hosts ...int) string {
		text := "  - name: dead\n    address: 192.0.2.99\n    port: 80\n    protocol: tcp\n    backends:\n"
		bytes := b.Backends[0].Addr4().As4()
		for _, host := range hosts {
			text += fmt.Sprintf("      - {address: %d.%d.%d.%d}\n", bytes[0], bytes[1], bytes[2], host)
		}
		return text
	}
	inVain := func() (lines []string) {
		for line := range strings.Lines(b.daemon.log()) {
			if strings.Contains(line, "cannot be reached yet") {
				lines = append(lines, line)
			}
		}
		return lines
	}
	waits := func(wanted ...string) {
		t.Helper()
		eventually(t, 10*time.Second, "the daemon says that it waited", func() error { // its log comes through a pipe
			if n := len(inVain()); n < len(wanted) {
				return fmt.Errorf("it waited %d times, want %d:\n%s", n, len(wanted), b.daemon.log())
			}
			return nil
		})
		lines := inVain()
		if len(lines) != len(wanted) {
			t.Fatalf("the daemon waited %d times in vain, want %d:\n%s", len(lines), len(wanted), b.daemon.log())
		}
		for i, address := range wanted {
			_, named, _ := strings.Cut(lines[i], " first=") // a time may have .25 in it
			if !strings.Contains(named, address) || strings.Count(named, ".25") != 1 {
				t.Errorf("it waited for others than %s: %s", address, lines[i])
			}
		}
	}
	b.write(b.file(settings{more: dead(250)}))
	b.start()
	waits(".250")
	for i := range 3 {
		if code, out := b.shunt("backend", "weight", b.Backends[0].Addr4().String(), fmt.Sprint(i+2), "--socket", b.socket); code != 0 {
			t.Fatalf("exit code %d: %s", code, out)
		}
	}
	b.reload(b.file(settings{backends: []int{1}, more: dead(250)}))
	waits(".250")
	b.reload(b.file(settings{backends: []int{1}, more: dead(250, 251)}))
	waits(".250", ".251")
	b.reload(b.file(settings{backends: []int{1}}))
	b.reload(b.file(settings{backends: []int{1}, more: dead(250)}))
	waits(".250", ".251", ".250") // removed meanwhile, so it is new again
}

// TestSilentBackendIsAvoided: a backend without health checks whose link goes down gets no new flows
// as long as there is another, is reported, and gets flows again once it is back. If none can be
// reached, all keep their slots.
func TestSilentBackendIsAvoided(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 2})
	one, two := b.Backends[0], b.Backends[1]
	for _, backend := range b.Backends {
		if err := backend.SetSysctl("net/ipv6/conf/eth0/keep_addr_on_down", "1"); err != nil {
			t.Fatal(err)
		}
	}
	link := func(backend *lab.Host, on bool) {
		t.Helper()
		if err := backend.SetUp("eth0", on); err != nil {
			t.Fatal(err)
		}
	}
	b.write(b.file(settings{}))
	b.start()
	b.isServed(t, "at start", one, two)

	began := time.Now()
	link(one, false)
	unreachable := func(backends ...*lab.Host) {
		t.Helper()
		eventually(t, 20*time.Second, fmt.Sprintf("%d backends that do not answer are named", len(backends)), func() error {
			var want, got []string
			for _, backend := range backends {
				for _, a := range both(backend) {
					want = append(want, fmt.Sprintf("%s: cannot send to backend %s: next hop %s does not answer", a, a, a))
				}
			}
			for _, c := range b.status().Daemon.Conditions {
				if c.Code == "neighbour_unresolved" {
					got = append(got, c.Subject+": "+c.Text)
				}
			}
			slices.Sort(want)
			slices.Sort(got)
			if !slices.Equal(got, want) {
				return fmt.Errorf("it is %q, want %q", got, want)
			}
			return nil
		})
	}
	unreachable(one)
	t.Logf("it was known %s after the link went down", time.Since(began).Round(time.Millisecond))
	b.isServed(t, "with one out of reach", two)
	_, list := b.shunt("backend", "list", "--instance", b.instance, "--socket", b.socket)
	for _, a := range both(one) {
		if !strings.Contains(list, fmt.Sprintf("%s: cannot send to backend %s: next hop %s does not answer.", a, a, a)) {
			t.Errorf("the list does not say why %s is down:\n%s", a, list)
		}
	}
	for _, backend := range b.status().Backends {
		if address := netip.MustParseAddrPort(backend.Address).Addr(); slices.Contains(both(one), address) && backend.State != "down" {
			t.Errorf("%s is %s, not down", backend.Address, backend.State)
		}
	}

	slots := func() map[string]uint64 {
		found := map[string]uint64{}
		for _, backend := range b.status().Backends {
			found[backend.Address] = uint64(backend.Slots)
		}
		return found
	}
	link(two, false)
	unreachable(one, two)
	eventually(t, 20*time.Second, "all have their slots where none can be reached", func() error {
		for backend, n := range slots() {
			if n == 0 {
				return fmt.Errorf("%s has none", backend)
			}
		}
		return nil
	})
	for _, c := range b.status().Daemon.Conditions {
		if c.Code == "no_backend" {
			t.Errorf("a service is said to have no backend: %s", c.Text)
		}
	}

	link(one, true)
	unreachable(two)
	b.isServed(t, "with the first one back", one)
	link(two, true)
	unreachable()
	b.isServed(t, "with both back", one, two)
}
