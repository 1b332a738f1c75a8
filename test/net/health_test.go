package net

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// healthPort is the port for health checks of the backends, apart from their services.
const healthPort = 9000

// wells are the servers at healthPort, by backend. When one is closed, its backend fails its checks but goes
// on serving.
type wells map[*lab.Host]*lab.HTTPServer

func (w wells) open(t *testing.T, backends ...*lab.Host) {
	t.Helper()
	for _, backend := range backends {
		server, err := backend.ServeHTTP(fmt.Sprintf(":%d", healthPort), backend.Name())
		if err != nil {
			t.Fatal(err)
		}
		w[backend] = server
	}
}

func (w wells) shut(t *testing.T, backend *lab.Host) {
	t.Helper()
	if err := w[backend].Close(); err != nil {
		t.Fatal(err)
	}
}

// healthBed has two healthy backends.
func healthBed(t *testing.T) (*bed, wells) {
	t.Helper()
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 2})
	w := wells{}
	w.open(t, b.Backends...)
	return b, w
}

// quickChecks is the interval of the tests' checks, and the number of results that change a state.
func quickChecks() string {
	every := 400 * time.Millisecond * patience // much less, and a busy machine alone makes checks fail
	return fmt.Sprintf("interval: %s, timeout: %s, fall: 2, rise: 2", every, every)
}

// healthFile is web and dns over both families, with quickChecks; more is added to health, and
// extra to the backends of the second host.
func (b *bed) healthFile(more, extra string) string {
	file := strings.Replace(b.file(settings{}), "defaults: {",
		fmt.Sprintf("defaults: {health: {http: {port: %d}, %s%s}, ", healthPort, quickChecks(), more), 1)
	if extra != "" {
		for _, a := range both(b.Backends[1]) {
			file = strings.ReplaceAll(file, fmt.Sprintf("{address: %s,", a), fmt.Sprintf("{address: %s, %s,", a, extra))
			file = strings.ReplaceAll(file, fmt.Sprintf("{address: %q,", a), fmt.Sprintf("{address: %q, %s,", a, extra))
		}
	}
	return file
}

// isServed waits until new connections to each VIP reach these backends and no others.
func (b *bed) isServed(t *testing.T, when string, by ...*lab.Host) {
	t.Helper()
	b.isServedAt(t, 80, when, by...)
}

// isServedAt is isServed at another port.
func (b *bed) isServedAt(t *testing.T, port uint16, when string, by ...*lab.Host) {
	t.Helper()
	want := map[string]bool{}
	for _, backend := range by {
		want[backend.Name()] = true
	}
	for _, vip := range vips {
		eventually(t, 20*time.Second, fmt.Sprintf("%s, port %d of %s is served by %d", when, port, family(vip), len(by)), func() error {
			got := map[string]bool{}
			client := b.Client.HTTPClient(false)
			for range 60 {
				a, err := b.get(client, at(vip, port))
				if err != nil {
					return err
				}
				got[a.Backend] = true
			}
			if len(got) != len(want) {
				return fmt.Errorf("it is served by %v, not by %v", got, want)
			}
			for name := range got {
				if !want[name] {
					return fmt.Errorf("it is served by %v, not by %v", got, want)
				}
			}
			return nil
		})
	}
}

// logged waits until the daemon has logged a text so many times.
func (b *bed) logged(t *testing.T, text string, times int) {
	t.Helper()
	eventually(t, 20*time.Second, fmt.Sprintf("%q in the log", text), func() error {
		if n := strings.Count(b.daemon.log(), text); n < times {
			return fmt.Errorf("%d times:\n%s", n, b.daemon.log())
		}
		return nil
	})
}

// TestHealth: a backend that fails its checks gets no new flows, keeps its connections, and gives
// its UDP flows to another; it comes back by itself; log, status and list say so.
func TestHealth(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	b.write(b.healthFile("", ""))
	b.start()
	b.isServed(t, "at start", one, two)
	if c := b.daemon.log(); strings.Contains(c, "no_backend") {
		t.Errorf("while the first checks ran, somebody was alarmed:\n%s", c)
	}
	var sessions []*session
	for _, vip := range vips {
		for range 20 {
			s, err := b.session(t, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			sessions = append(sessions, s)
		}
	}
	sockets := map[*socket]bool{}
	for _, vip := range vips {
		for range 20 {
			conn, err := b.Client.Dial(within(t, answerTimeout), "udp", at(vip, 53))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			s := &socket{Conn: conn}
			if s.backend, err = s.who(); err != nil {
				t.Fatal(err)
			}
			sockets[s] = true
		}
	}

	began := time.Now()
	w.shut(t, one)
	for _, a := range both(one) {
		b.logged(t, fmt.Sprintf("web: backend %s is down: tcp connect: connection refused (2 checks in a row failed)", at(a, 8080)), 1)
		b.logged(t, fmt.Sprintf("dns: backend %s is down: tcp connect: connection refused (2 checks in a row failed)", at(a, 5353)), 1)
	}
	b.isServed(t, "with one down", two)
	t.Logf("%s after the backend began to fail, it had no new flows", time.Since(began).Round(time.Millisecond))
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Errorf("an established connection: %v", err)
		}
	}
	moved := 0
	for s := range sockets {
		who, err := s.who()
		if err != nil || who != two.Name() {
			t.Errorf("a UDP flow that was with %s: %q, %v", s.backend, who, err)
		}
		if s.backend == one.Name() {
			moved++
		}
	}
	if moved == 0 {
		t.Error("no UDP flow was with the backend that went down")
	}
	b.healthShown(t, one, "down", "tcp connect: connection refused")

	w.open(t, one)
	b.isServed(t, "with both up", one, two)
	for _, a := range both(one) {
		b.logged(t, fmt.Sprintf("web: backend %s is up again after ", at(a, 8080)), 1)
	}
	b.healthShown(t, one, "active", "")

	b.isTheLastResort(t, w)
}

// isTheLastResort takes all backends down: clients are refused, and with panic all serve.
func (b *bed) isTheLastResort(t *testing.T, w wells) {
	t.Helper()
	one, two := b.Backends[0], b.Backends[1]
	w.shut(t, one)
	w.shut(t, two)
	eventually(t, 20*time.Second, "the condition no_backend of both services", func() error {
		deserted := map[string]bool{}
		conditions := b.status().Daemon.Conditions
		for _, c := range conditions {
			if c.Code == "no_backend" && strings.Contains(c.Text, "no backend is up: clients are refused") {
				deserted[c.Subject] = true
			}
		}
		if !deserted["web"] || !deserted["dns"] {
			return fmt.Errorf("%v", conditions)
		}
		return nil
	})
	for _, vip := range vips {
		b.refuses(t, "with none up", vip)
	}
	b.reload(b.healthFile(", panic: 50%", ""))
	b.isServed(t, "with panic", one, two)
	if c := b.status().condition("health_not_believed"); !strings.Contains(c, "web: fewer than 50 %") && !strings.Contains(c, "dns: fewer than 50 %") {
		t.Errorf("the condition is %q", c)
	}
	w.open(t, one, two)
	eventually(t, 20*time.Second, "the end of panic", func() error {
		if c := b.status().condition("health_not_believed"); c != "" {
			return errors.New(c)
		}
		return nil
	})
	b.isServed(t, "with both up again", one, two)
}

// who asks the server at the other end of the socket for its name.
func (s *socket) who() (string, error) {
	if err := s.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return "", err
	}
	if _, err := s.Write([]byte("who?")); err != nil {
		return "", err
	}
	answer := make([]byte, 1500)
	n, err := s.Read(answer)
	name, _, _ := strings.Cut(string(answer[:n]), "\n")
	return name, err
}

// healthShown compares a backend's state in `backend list` and `status`.
func (b *bed) healthShown(t *testing.T, backend *lab.Host, state, cause string) {
	t.Helper()
	where := at(backend.Addr4(), 8080)
	eventually(t, 20*time.Second, where+" is shown as "+state, func() error {
		_, table := b.shunt("backend", "list", "--instance", b.instance, "--socket", b.socket)
		var line string
		for l := range strings.Lines(table) {
			if strings.HasPrefix(l, where+" ") {
				line += l
			}
		}
		_, status := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
		fields := strings.Fields(line)
		shown := strings.Contains(line, cause) && strings.Contains(status, cause)
		if len(fields) < 2 || fields[1] != state || cause != "" && !shown || cause == "" && strings.Contains(line, "down") {
			return fmt.Errorf("%s\n%s", table, status)
		}
		return nil
	})
}

// downEverywhere waits until all services have found a host's backends down, in the maps too: each
// checks for itself.
func (b *bed) downEverywhere(t *testing.T, host *lab.Host) {
	t.Helper()
	eventually(t, 20*time.Second, host.Name()+" is down in every service", func() error {
		for _, backend := range b.status().Backends {
			address := netip.MustParseAddrPort(backend.Address).Addr()
			if slices.Contains(both(host), address) && (backend.State != "down" || backend.Slots > 0) {
				return fmt.Errorf("%s is %s, and has %d slots", backend.Address, backend.State, backend.Slots)
			}
		}
		return nil
	})
}

// TestHealthSurvivesTheDaemon: the results of checks hold while the daemon is dead and until the next one has
// its own; meanwhile no new connection fails.
func TestHealthSurvivesTheDaemon(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	b.write(b.healthFile("", ""))
	b.start()
	b.isServed(t, "at start", one, two)
	w.shut(t, one)
	b.isServed(t, "with one down", two)
	b.downEverywhere(t, one)
	ctx, stop := context.WithCancel(context.Background())
	failed := make(chan error, len(vips))
	ask := func(vip netip.Addr) {
		client := b.Client.HTTPClient(false)
		for ctx.Err() == nil {
			if a, err := b.get(client, at(vip, 80)); err != nil || a.Backend != two.Name() {
				failed <- fmt.Errorf("a new connection to %s: %q, %v", vip, a.Backend, err)
				return
			}
		}
		failed <- nil
	}
	for _, vip := range vips {
		go ask(vip)
	}
	for range 3 {
		b.kill()
		b.start()
	}
	// Its own checks have to find that backend one is still down, and two up, before this counts.
	b.healthShown(t, one, "down", "tcp connect: connection refused")
	if strings.Contains(b.daemon.log(), " is down: ") {
		t.Errorf("the last daemon took a backend for up that was down:\n%s", b.daemon.log())
	}
	stop()
	for range vips {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	b.kill()
	w.open(t, one)
	b.start()
	b.isServed(t, "after it came back without a daemon", one, two)
}

// TestBackups: a backup serves only while no other backend does.
func TestBackups(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	b.write(b.healthFile("", "backup: true"))
	b.start()
	b.isServed(t, "at start", one)
	b.healthShown(t, two, "standby", "")
	w.shut(t, one)
	b.isServed(t, "with the other down", two)
	w.open(t, one)
	b.isServed(t, "with the other up", one)
	b.drain(t, one)
	b.isServed(t, "with the other drained", two)
	b.undrain(t, one)
	b.isServed(t, "with it undrained", one)
}

// TestSlowStart reads a backend's slots as it comes up: they grow, in steps.
func TestSlowStart(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	b.write(b.healthFile(fmt.Sprintf(", slow_start: %s", 5*time.Second*patience), ""))
	b.start()
	b.isServed(t, "at start", one, two)
	slots := func(backend *lab.Host) int {
		for _, s := range b.status().Services {
			for _, x := range s.Backends {
				if s.Name == "web" && x.Address == at(backend.Addr4(), 8080) {
					return x.Slots
				}
			}
		}
		return 0
	}
	equal := func() error {
		if n, m := slots(one), slots(two); n == 0 || n < m-1 || m < n-1 {
			return fmt.Errorf("%d and %d slots", n, m)
		}
		return nil
	}
	eventually(t, 30*time.Second, "both have their slots", equal)
	w.shut(t, one)
	b.isServed(t, "with one down", two)
	w.open(t, one)
	last, steps := 0, map[int]bool{}
	eventually(t, 60*time.Second, "it has its slots back", func() error {
		n := slots(one)
		if n < last {
			t.Fatalf("it had %d slots, and has %d", last, n)
		}
		last, steps[n] = n, true
		return equal()
	})
	if len(steps) < 4 {
		t.Errorf("it went through %v slots, want more than a jump", steps)
	}
}

// TestHealthOfTheServer: the check asks the server itself, which goes and comes back; no program of shunt
// stands between the two.
func TestHealthOfTheServer(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 2})
	servers := map[*lab.Host]net.Listener{}
	accept := func(backend *lab.Host) {
		l, err := backend.Listen("tcp", ":7000")
		if err != nil {
			t.Fatal(err)
		}
		servers[backend] = l
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprintln(conn, backend.Name())
				conn.Close()
			}
		}()
	}
	one, two := b.Backends[0], b.Backends[1]
	accept(one)
	accept(two)
	file := b.file(settings{more: fmt.Sprintf(`  - name: raw
    address: %s
    port: 70
    health: {tcp: {}, interval: 100ms, fall: 1, rise: 1}
    backends:
      - {address: %s, port: 7000}
      - {address: %s, port: 7000}
`, lab.VIP4, one.Addr4(), two.Addr4())})
	b.write(file)
	b.start()
	ask := func() (string, error) {
		conn, err := b.Client.Dial(within(t, answerTimeout), "tcp", at(lab.VIP4, 70))
		if err != nil {
			return "", err
		}
		defer conn.Close()
		text := make([]byte, 100)
		n, err := conn.Read(text)
		return strings.TrimSpace(string(text[:n])), err
	}
	served := func(when string, want ...*lab.Host) {
		t.Helper()
		eventually(t, 20*time.Second, when, func() error {
			got := map[string]bool{}
			for range 40 {
				who, err := ask()
				if err != nil {
					return err
				}
				got[who] = true
			}
			if len(got) != len(want) || !got[want[0].Name()] {
				return fmt.Errorf("served by %v", got)
			}
			return nil
		})
	}
	served("at start", one, two)
	servers[one].Close()
	served("with one server gone", two)
	accept(one)
	served("with it back", one, two)
}

// TestCheckedElsewhere: a backend that names a port for its checks is up while that port answers, independent
// of the port of the service's health.
func TestCheckedElsewhere(t *testing.T) {
	b, w := healthBed(t)
	one, two := b.Backends[0], b.Backends[1]
	const elsewhere = healthPort + 1
	b.write(b.healthFile("", fmt.Sprintf("health: {port: %d}", elsewhere)))
	b.start()
	b.isServed(t, "while nobody answers elsewhere", one)
	server, err := two.ServeHTTP(fmt.Sprintf(":%d", elsewhere), two.Name())
	if err != nil {
		t.Fatal(err)
	}
	b.isServed(t, "while somebody answers elsewhere", one, two)
	w.shut(t, two)
	w.shut(t, one)
	b.isServed(t, "while nobody answers at the port of the service's health", two)
	if err := server.Close(); err != nil {
		t.Error(err)
	}
}
