package net

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestTakeOver: a start that fails does not change the state that a killed daemon has left; one that succeeds may bring
// another file, and another attach mode.
func TestTakeOver(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{attach: "native"}))
	b.start()
	sessions := b.open(t, 6)
	b.kill()
	for name, wrong := range map[string]struct{ file, says string }{
		"a fault":           {"services: 5\n", "services"},
		"missing interface": {strings.Replace(b.file(settings{attach: "native"}), "name: eth1", "name: eth7", 1), "eth7"},
		"other limits":      {b.file(settings{attach: "native", limits: "flows: 20000"}), "limits.flows"},
	} {
		b.write(wrong.file)
		p := b.launch()
		select {
		case <-p.ended:
		case <-time.After(patience * 10 * time.Second):
			_ = p.end(syscall.SIGKILL)
			t.Fatalf("%s: the start did not fail", name)
		}
		if code := p.command.ProcessState.ExitCode(); code != 1 || !strings.Contains(p.log(), wrong.says) {
			t.Errorf("%s: exit code %d, want 1 and the words %q:\n%s", name, code, wrong.says, p.log())
		}
		b.goOn(t, "after a start that failed for "+name, sessions)
	}
	b.write(b.file(settings{attach: "native", backends: []int{1}}))
	b.start()
	var left []*session
	for _, s := range sessions {
		if s.first.Backend == "b1" {
			left = append(left, s)
		} else if err := b.alive(s); err == nil {
			t.Error("a connection to the removed backend goes on")
		}
	}
	b.goOn(t, "under a successor with another file", left)
	b.kill()
	b.write(b.file(settings{attach: "generic", backends: []int{1}}))
	b.start()
	b.goOn(t, "under a successor in generic mode", left)
	b.reload(b.file(settings{attach: "native"}))
	b.goOn(t, "back in native mode", left)
	for _, a := range b.status().Attached {
		if a.Mode != "native" {
			t.Errorf("%s is attached in %s mode", a.Interface, a.Mode)
		}
	}
}

// load is requests, one after the other, from before a change until after it.
type load struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	count  atomic.Int64
	mu     sync.Mutex
	failed []error
}

// begin makes new connections, requests on connections that stay and, with udp, datagrams from new sockets, all of
// which must be answered. A pause after each leaves CPU time to other tests, except in the long versions.
func (b *bed) begin(t *testing.T, udp bool) *load {
	t.Helper()
	if soak {
		return b.beginWith(t, udp, 0)
	}
	return b.beginWith(t, udp, 2*time.Millisecond)
}

// beginWith is begin with a pause after each request.
func (b *bed) beginWith(t *testing.T, udp bool, pause time.Duration) *load {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop}
	t.Cleanup(func() { stop(); l.done.Wait() })
	worker := func(do func() error) {
		l.done.Add(1)
		go func() {
			defer l.done.Done()
			for ctx.Err() == nil {
				err := do()
				l.count.Add(1)
				if pause > 0 {
					<-time.After(pause)
				}
				if err != nil {
					l.mu.Lock()
					l.failed = append(l.failed, fmt.Errorf("at %s: %w", time.Now().Format("05.000"), err))
					l.mu.Unlock()
				}
			}
		}()
	}
	for _, vip := range vips {
		fresh := b.Client.HTTPClient(false)
		worker(func() error { _, err := b.get(fresh, at(vip, 80)); return err })
		if udp {
			worker(func() error { _, err := b.askUDP(b.Client, at(vip, 53), []byte("who?")); return err })
		}
		for _, s := range b.open(t, 1) {
			worker(func() error { return b.alive(s) })
		}
	}
	return l
}

// end stops the load, and fails the test for every request that failed.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop()
	l.done.Wait()
	for i, err := range l.failed {
		if i == 5 {
			t.Errorf("and %d more", len(l.failed)-i)
			break
		}
		t.Error(err)
	}
	t.Logf("%d requests and datagrams", l.count.Load())
}

// TestNothingFailsMeanwhile: no request fails while the daemon is killed, comes back and reloads.
func TestNothingFailsMeanwhile(t *testing.T) {
	for _, way := range []struct {
		layout lab.Layout
		attach string
	}{{lab.TwoArm, "native"}, {lab.OneArm, "generic"}} {
		t.Run(fmt.Sprintf("%s/%s", way.layout, way.attach), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout, Backends: 3})
			// b3 comes and goes only in another service: removing it from web ends flows.
			changing := func(backends ...int) string {
				return b.file(settings{attach: way.attach, limits: "flows: 100000", more: "  - name: other\n    address: 192.0.2.77\n    port: 80\n    backends:\n" + b.backends(backends, 8080)})
			}
			b.write(changing(3))
			b.start()
			l := b.begin(t, true)
			for range 3 {
				b.kill()
				b.start()
				b.reload(changing(2, 3))
				b.reload(changing(1))
				b.reload(strings.ReplaceAll(changing(3), "port: 8080}", "port: 8080, weight: 5}"))
				b.reload(changing(3))
			}
			l.end(t)
		})
	}
}

// TestNewConnectionsWithoutADaemon: after kill -9 new connections work for any time: ports are released and reused, and
// next hops are found, without a daemon. A pool of 200 ports is too small for 60 s of rest per port, even if a busy
// machine makes few connections, so the oldest closed ones have to be taken. With -short the pool is smaller still: an
// emulated machine makes fewer.
func TestNewConnectionsWithoutADaemon(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	ports := "10000-10199"
	if testing.Short() {
		ports = "10000-10049"
	}
	b.write(b.file(settings{limits: "flows: 100000"}) + "snat: {ports: \"" + ports + "\"}\n")
	b.start()
	b.kill()
	length := 14 * time.Second // beyond the 10 s after which the daemon is taken for dead
	if soak {
		length = 10 * time.Minute
	}
	l := b.begin(t, false) // UDP ports rest for minutes, and cannot be taken early
	<-time.After(length)
	eventually(t, 2*time.Minute, "there are more connections than ports", func() error {
		if b.status().Reasons["port_taken"].Packets == 0 {
			return errors.New("port_taken counts nothing")
		}
		return nil
	})
	l.end(t)
	if b.status().Reasons["fib_fallback"].Packets == 0 {
		t.Error("fib_fallback counts nothing, yet the daemon was dead")
	}
}

// TestSourcePortUsedAgain: a client that uses one source port again and again is served, after either end closed first.
func TestSourcePortUsedAgain(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{}))
	b.start()
	for _, vip := range vips {
		for _, closer := range []string{"server", "reset"} {
			t.Run(family(vip)+"/"+closer, func(t *testing.T) {
				local := netip.AddrPortFrom(b.Client.Addr4(), 40000)
				if vip.Is6() {
					local = netip.AddrPortFrom(b.Client.Addr6(), 40000)
				}
				for i := range 50 {
					if err := b.once(t, local, at(vip, 80), closer); err != nil {
						t.Fatalf("connection %d: %v", i, err)
					}
				}
			})
		}
	}
}

// once makes one connection from a given port with one request on it.
func (b *bed) once(t *testing.T, local netip.AddrPort, address, closer string) error {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	conn, err := b.Client.DialFrom(ctx, "tcp", local, address)
	for errors.Is(err, syscall.EADDRNOTAVAIL) && ctx.Err() == nil { // the client's kernel still has the last connection
		conn, err = b.Client.DialFrom(ctx, "tcp", local, address)
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	how := "close"
	if closer == "reset" {
		how = "keep-alive"
		if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: lab\r\nConnection: %s\r\n\r\n", how); err != nil {
		return err
	}
	buffer := make([]byte, 4096)
	n, err := conn.Read(buffer)
	if err != nil || !strings.HasPrefix(string(buffer[:n]), "HTTP/1.1 200") {
		return fmt.Errorf("read %q: %w", buffer[:n], err)
	}
	for closer == "server" && err == nil {
		_, err = conn.Read(buffer) // until the server has closed
	}
	return nil
}

// TestRemovedBackendOfUDP: UDP sockets in use get another backend when theirs is removed; the rest keep theirs.
func TestRemovedBackendOfUDP(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 3})
	b.write(b.file(settings{}))
	b.start()
	type socket struct {
		net.Conn
		backend string
	}
	var sockets []*socket
	ask := func(s *socket) string {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		defer cancel()
		answer, err := lab.AskUDPOn(ctx, s.Conn, []byte("who?"))
		if err != nil {
			t.Fatal(err)
		}
		return answer.Backend
	}
	for _, vip := range vips {
		for range 12 {
			conn, err := b.Client.Dial(within(t, answerTimeout), "udp", at(vip, 53))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			s := &socket{Conn: conn}
			s.backend = ask(s)
			sockets = append(sockets, s)
		}
	}
	b.reload(b.file(settings{backends: []int{1, 3}}))
	for _, s := range sockets {
		now := ask(s)
		if s.backend != "b2" && now != s.backend {
			t.Errorf("a socket moved from %s, which stays, to %s", s.backend, now)
		}
		if now == "b2" {
			t.Error("the removed backend answered")
		}
		s.backend = now
	}
	b.reload(b.file(settings{}))
	for _, s := range sockets {
		if now := ask(s); now != s.backend {
			t.Errorf("a socket moved from %s to %s when a backend was added", s.backend, now)
		}
	}
}

// TestSignals: SIGHUP applies the file, SIGINT (Ctrl-C) detaches.
func TestSignals(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	before := b.traces(t)
	b.write(b.file(settings{}))
	b.start("--log-format", "text")
	b.write(b.file(settings{backends: []int{1}}))
	if err := b.daemon.command.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "SIGHUP", func() error { return b.webBackends(1) })
	if err := b.daemon.end(syscall.SIGINT); err != nil {
		t.Errorf("SIGINT: %v", err)
	}
	b.nothingLeft(t, before)
}

// TestStopWithNobodyListening: `shunt run 2>&1 | tee log` and Ctrl-C. tee ends first, and shunt still detaches,
// although no process reads its messages.
func TestStopWithNobodyListening(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	before := b.traces(t)
	b.write(b.file(settings{}))
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	c := command(b.Balancer, "run", "--config", b.path, "--instance", b.instance, "--socket", b.socket)
	c.Stdout, c.Stderr = write, write
	err = c.Start()
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(read)
	for lines.Scan() && !strings.Contains(lines.Text(), "msg=running") {
	}
	b.goOn(t, "while somebody listens", nil)
	read.Close()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("shunt run: %v", err)
	}
	b.nothingLeft(t, before)
}

// TestStopDuringReload: SIGTERM during reloads ends the daemon cleanly, with nothing left.
func TestStopDuringReload(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	before := b.traces(t)
	// A backend that does not exist keeps a reload waiting for its next hop.
	with := func(last int) string {
		return strings.Replace(b.file(settings{}), "    backends:\n", fmt.Sprintf("    backends:\n      - {address: 10.0.0.%d, port: 8080}\n", last), 1)
	}
	b.write(b.file(settings{}))
	b.start()
	b.write(with(200))
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Either answer is right; the reload must not outlive the daemon's detaching.
		_, _ = command(b.Balancer, "reload", "--socket", b.socket).CombinedOutput()
	}()
	eventually(t, 10*time.Second, "the reload's question for the next hop", func() error {
		entries, err := b.Balancer.Netlink().NeighList(0, netlink.FAMILY_V4)
		for _, n := range entries {
			if n.IP.String() == "10.0.0.200" {
				return nil
			}
		}
		return fmt.Errorf("no entry for 10.0.0.200 among %d, %v", len(entries), err)
	})
	if err := b.daemon.end(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM during a reload: %v", err)
	}
	<-done
	b.nothingLeft(t, before)
}

// TestOthersPass: packets that are not for a service pass untouched, in both directions, while shunt works: packets of
// the balancer's own servers and connections, and packets that its kernel forwards.
func TestOthersPass(t *testing.T) {
	for _, attach := range []string{"native", "generic"} {
		t.Run(attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.TwoArm, Forwarding: true})
			b.write(b.file(settings{attach: attach}))
			b.start()
			if _, err := b.Balancer.ServeHTTP(":7000", "lb"); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Balancer.ServeUDP(":7000", "lb"); err != nil {
				t.Fatal(err)
			}
			backend := b.Backends[0]
			front, back := b.Balancer.Interfaces()[0], b.Balancer.Interfaces()[1]
			for _, pair := range []struct {
				from *lab.Host
				to   [2]string
			}{
				{b.Client, [2]string{at(front.IPv4.Addr(), 7000), at(front.IPv6.Addr(), 7000)}},
				{backend, [2]string{at(back.IPv4.Addr(), 7000), at(back.IPv6.Addr(), 7000)}},
				{b.Client, [2]string{at(backend.Addr4(), 8050), at(backend.Addr6(), 8050)}},
				{b.Balancer, [2]string{at(backend.Addr4(), 8050), at(backend.Addr6(), 8050)}},
			} {
				for _, address := range pair.to {
					client := pair.from.HTTPClient(false)
					if _, err := lab.Download(within(t, 20*time.Second), client, address, size(4, 1)); err != nil {
						t.Errorf("from %s: %v", pair.from.Name(), err)
					}
					if _, err := lab.Upload(within(t, 20*time.Second), client, address, size(4, 1)); err != nil {
						t.Errorf("from %s: %v", pair.from.Name(), err)
					}
					if _, err := b.askUDP(pair.from, address, []byte("who?")); err != nil {
						t.Errorf("from %s: %v", pair.from.Name(), err)
					}
				}
			}
			b.goOn(t, "beside others' traffic", nil)
		})
	}
}

// TestPathMTUToTheBackend has a router between the balancer and a backend, with a narrow link behind it: its "too big"
// goes to the balancer's address, and belongs to the client.
func TestPathMTUToTheBackend(t *testing.T) {
	const narrow = 1300
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 1})
	inner, err := b.AddHost("inner")
	far, farErr := b.AddHost("far")
	if err := errors.Join(err, farErr); err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	err = errors.Join(
		b.Connect(lab.End{Host: inner, Interface: "eth0", IPv4: prefix("10.0.0.250/24"), IPv6: prefix("2001:db8:1::250/64")},
			lab.End{Host: b.Switch, Interface: "inner"}, lab.Cable{}),
		b.Switch.Plug("inner", "br0"),
		b.Connect(lab.End{Host: inner, Interface: "eth1", IPv4: prefix("10.7.0.1/24"), IPv6: prefix("2001:db8:7::1/64")},
			lab.End{Host: far, Interface: "eth0", IPv4: prefix("10.7.0.2/24"), IPv6: prefix("2001:db8:7::2/64")}, lab.Cable{}),
		inner.AddRoute(lab.Route{To: prefix("10.7.0.2/32"), Interface: "eth1", MTU: narrow}),
		inner.AddRoute(lab.Route{To: prefix("2001:db8:7::2/128"), Interface: "eth1", MTU: narrow}),
		inner.SetForwarding(true),
		far.AddRoute(lab.Route{To: prefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.7.0.1")}),
		far.AddRoute(lab.Route{To: prefix("::/0"), Via: netip.MustParseAddr("2001:db8:7::1")}),
		b.Balancer.AddRoute(lab.Route{To: prefix("10.7.0.0/24"), Via: netip.MustParseAddr("10.0.0.250")}),
		b.Balancer.AddRoute(lab.Route{To: prefix("2001:db8:7::/64"), Via: netip.MustParseAddr("2001:db8:1::250")}),
		b.Ready(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	b.serve(far)
	b.Backends[0] = far
	b.write(b.file(settings{attach: "native"}))
	b.start()
	client := b.Client.HTTPClient(false)
	for _, vip := range vips {
		before := b.status().Reasons["icmp_translated"].Packets
		if _, err := lab.Upload(within(t, 20*time.Second), client, at(vip, 80), size(4, 1)); err != nil {
			t.Errorf("to the backend: %v", err)
		}
		if _, err := lab.Download(within(t, 20*time.Second), client, at(vip, 80), size(4, 1)); err != nil {
			t.Errorf("from the backend: %v", err)
		}
		if after := b.status().Reasons["icmp_translated"].Packets; after == before {
			t.Errorf("no ICMP error was translated over %s: the path is not narrow, and the test proves nothing", family(vip))
		}
	}
}

// TestChangeOfMode: a change of the attach mode leaves an interface without a program for a moment. The host's stack
// gets the packets of that moment, and must not answer them: it would reset the connections through shunt, because the
// host knows none of them.
func TestChangeOfMode(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{attach: "native"}))
	b.start()
	// Often enough to hit the moment, seldom enough to leave an emulated machine time to load.
	l := b.beginWith(t, false, 5*time.Millisecond*patience)
	for _, mode := range []string{"generic", "native", "generic", "native"} {
		b.reload(b.file(settings{attach: mode}))
		for _, a := range b.status().Attached {
			if a.Mode != mode {
				t.Errorf("%s is attached in %s mode, want %s", a.Interface, a.Mode, mode)
			}
		}
	}
	l.end(t)
}
