package net

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// churn is load that tells the allowed effects of a change from others: TCP connections that stay, new
// ones, UDP sockets that stay, and new ones, without a pause.
type churn struct {
	bed  *bed
	ctx  context.Context //nolint:containedctx // of the workers
	stop context.CancelFunc
	done sync.WaitGroup

	mu       sync.Mutex
	failed   []error
	requests int
	moved    int // UDP sockets with an allowed change of their backend
	ended    int // connections that ended with their backend
	// removed backends end their connections; backends that leave or drain let UDP sockets move.
	removed, leaving map[string]bool
	// returned is the time when a removed backend came back. An earlier connection may have hung until
	// then: if another backend still has the tuple in TIME-WAIT, from a connection that it closed
	// first, it sends no reset (RFC 9293, 3.10.7.4).
	returned map[string]time.Time
	// closed has the backends closed to new flows, and the time.
	closed map[string]time.Time
	// A new flow from before the end of a removal may be with the removed backend.
	removedAt time.Time
	sessions  map[*session]int // requests of each
	sockets   map[netip.Addr][]*socket
	// The last use of a client's port, by protocol and port.
	used map[string]use
}

// use is a flow that is over.
type use struct {
	backend string
	at      time.Time
	// The balancer has not seen its end: a UDP flow, or a connection that a backend reset. To the
	// balancer, another flow from the port is no new one.
	open bool
}

// socket is one UDP flow.
type socket struct {
	net.Conn
	backend string
	asked   int
}

// newChurn begins with count connections and sockets to each VIP.
func (b *bed) newChurn(t *testing.T, vips []netip.Addr, count int) *churn {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	c := &churn{bed: b, ctx: ctx, stop: stop, removed: map[string]bool{}, leaving: map[string]bool{}, closed: map[string]time.Time{}, returned: map[string]time.Time{},
		sessions: map[*session]int{}, sockets: map[netip.Addr][]*socket{}, used: map[string]use{}}
	t.Cleanup(func() { stop(); c.done.Wait() })
	c.more(t, vips, count)
	for _, vip := range vips {
		client := b.Client.HTTPClient(false)
		for _, do := range []func(int) error{
			func(n int) error { return c.askSocket(vip, n) },
			func(int) error {
				return c.askAnew("tcp", func() (lab.Answer, error) { return b.get(client, at(vip, 80)) })
			},
			func(int) error {
				return c.askAnew("udp", func() (lab.Answer, error) { return b.askUDP(b.Client, at(vip, 53), []byte("who?")) })
			},
		} {
			c.done.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					c.count(do(n))
				}
			})
		}
	}
	return c
}

// count notes a request, and its error.
func (c *churn) count(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests++
	if err != nil {
		c.failed = append(c.failed, fmt.Errorf("at %s: %w", time.Now().Format("05.000"), err))
	}
}

// sessionPace is the interval of a connection's requests: much shorter than the settle time.
const sessionPace = 200 * time.Millisecond

// more opens connections and sockets that stay.
func (c *churn) more(t *testing.T, vips []netip.Addr, count int) {
	t.Helper()
	for _, vip := range vips {
		for range count {
			s, err := c.bed.session(t, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			conn, err := c.bed.Client.Dial(within(t, answerTimeout), "udp", at(vip, 53))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			c.mu.Lock()
			c.sessions[s] = 0
			c.sockets[vip] = append(c.sockets[vip], &socket{Conn: conn})
			c.mu.Unlock()
			// Each has a worker of its own: one that hangs would keep others idle for longer than the
			// settle time, after which they may be lost.
			c.done.Go(func() {
				pace := time.NewTicker(patience * sessionPace)
				defer pace.Stop()
				for alive := true; alive && c.ctx.Err() == nil; <-pace.C {
					alive = c.askSession(s)
				}
			})
		}
	}
}

// session is a connection to an address, after its first request.
func (b *bed) session(t *testing.T, address string) (*session, error) {
	t.Helper()
	one, err := b.Client.OpenSession(within(t, answerTimeout), "tcp", netip.AddrPort{}, address)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { one.Close() })
	s := &session{Session: one, address: address}
	s.first, err = s.get()
	return s, err
}

// askSession reports whether the connection may send another request.
func (c *churn) askSession(s *session) (alive bool) {
	begin := time.Now()
	err := c.bed.alive(s)
	alive = err == nil
	c.mu.Lock()
	c.sessions[s]++
	if !alive {
		delete(c.sessions, s)
		if c.removed[s.first.Backend] || begin.Before(c.returned[s.first.Backend]) {
			c.ended++
			c.used["tcp"+s.LocalAddr().String()] = use{s.first.Backend, time.Now(), true}
			err = nil
		}
	}
	c.mu.Unlock()
	c.count(err)
	return alive
}

func (c *churn) askSocket(vip netip.Addr, n int) error {
	c.mu.Lock()
	s := c.sockets[vip][n%len(c.sockets[vip])]
	s.asked++
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	answer, err := lab.AskUDPOn(ctx, s.Conn, []byte("who?"))
	if err != nil {
		return fmt.Errorf("a socket that %s answered before: %w", s.backend, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := s.backend
	s.backend = answer.Backend
	switch {
	case before == "" || before == answer.Backend:
		return nil
	case !c.leaving[before]:
		return fmt.Errorf("a UDP socket moved from %s, which stays, to %s", before, answer.Backend)
	}
	c.moved++
	return nil
}

// askAnew sends a request from a socket of its own.
func (c *churn) askAnew(network string, ask func() (lab.Answer, error)) error {
	begin := time.Now()
	answer, err := ask()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		if begin.Before(c.removedAt) {
			return nil
		}
		return fmt.Errorf("a new %s flow: %w", network, err)
	}
	last := c.used[network+answer.Remote]
	c.used[network+answer.Remote] = use{answer.Backend, time.Now(), network == "udp"}
	if since, ok := c.closed[answer.Backend]; ok && begin.After(since) && !last.open {
		err := fmt.Errorf("a new %s flow from %s, begun %s before, went to %s, which takes none for %s", network, answer.Remote, time.Since(begin), answer.Backend, time.Since(since))
		if last.backend != "" {
			err = fmt.Errorf("%w; %s before, %s had answered the same port", err, time.Since(last.at), last.backend)
		}
		return err
	}
	return nil
}

// closing calls a change after which a backend gets no new flows, and its UDP sockets may move.
func (c *churn) closing(backend string, change func()) {
	c.mu.Lock()
	c.leaving[backend] = true
	c.mu.Unlock()
	change()
	c.mu.Lock()
	c.closed[backend] = time.Now()
	c.mu.Unlock()
}

// opening calls a change after which a backend gets new flows again.
func (c *churn) opening(backend string, change func()) {
	c.mu.Lock()
	delete(c.closed, backend)
	c.mu.Unlock()
	change()
	c.mu.Lock()
	if c.removed[backend] {
		c.returned[backend] = time.Now()
	}
	delete(c.removed, backend)
	delete(c.leaving, backend)
	c.mu.Unlock()
}

// removing calls a change that removes a backend and its connections.
func (c *churn) removing(backend string, change func()) {
	c.mu.Lock()
	c.removed[backend] = true
	c.removedAt = time.Now().Add(time.Hour)
	c.mu.Unlock()
	c.closing(backend, change)
	c.mu.Lock()
	c.removedAt = time.Now()
	c.mu.Unlock()
}

// left is the number of UDP sockets that a backend answers.
func (c *churn) left(backend string) (count int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, sockets := range c.sockets {
		for _, s := range sockets {
			if s.backend == backend {
				count++
			}
		}
	}
	return count
}

// round waits until every connection and socket has had a request again. That takes an answerTimeout,
// longer than slots are in transition, if a connection ends with its backend and the backend that gets
// its packets has had one from the same port: in TIME-WAIT it does not reset, it acknowledges.
func (c *churn) round(t *testing.T) {
	t.Helper()
	asked := func() (sessions map[*session]int, sockets map[*socket]int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		sockets = map[*socket]int{}
		for _, all := range c.sockets {
			for _, s := range all {
				sockets[s] = s.asked
			}
		}
		return maps.Clone(c.sessions), sockets
	}
	sessions, sockets := asked()
	// The second request begins after now.
	eventually(t, 3*answerTimeout, "a round of requests", func() error {
		nowSessions, nowSockets := asked()
		for s, before := range sessions {
			if now, alive := nowSessions[s]; alive && now < before+2 {
				return fmt.Errorf("the session with %s from %s was asked %d times", s.first.Backend, s.first.Remote, now-before)
			}
		}
		for s, before := range sockets {
			if now := nowSockets[s]; now < before+2 {
				return fmt.Errorf("the socket %s was asked %d times", s.LocalAddr(), now-before)
			}
		}
		return nil
	})
}

// end stops the load, and fails the test for every unexcused error.
func (c *churn) end(t *testing.T) {
	t.Helper()
	c.stop()
	c.done.Wait()
	for i, err := range c.failed {
		if i == 5 {
			t.Errorf("and %d more", len(c.failed)-i)
			break
		}
		t.Error(err)
	}
	t.Logf("%d requests; %d connections ended with their backend, %d UDP sockets moved", c.requests, c.ended, c.moved)
	if n := c.bed.status().Reasons["not_remembered"].Packets; n != 0 {
		t.Errorf("%d flows could not be remembered", n)
	}
}

// settled waits until no slot is in transition any more.
func (b *bed) settled(t *testing.T, timeout time.Duration) {
	t.Helper()
	eventually(t, timeout, "all slots settled", func() error {
		s := b.status()
		if s.Daemon == nil {
			return errors.New(s.Silent)
		}
		if s.Daemon.Transition != 0 {
			return fmt.Errorf("%d slots in transition, %d marked", s.Daemon.Transition, s.Daemon.Marked)
		}
		return nil
	})
}

// unsettled requires that the status shows slots in transition now; otherwise a test proves little.
func (b *bed) unsettled(t *testing.T) {
	t.Helper()
	switch s := b.status(); {
	case s.Daemon == nil:
		t.Fatal(s.Silent)
	case s.Daemon.Transition == 0:
		t.Fatal("the status shows no slots in transition")
	}
}

// one is a configuration with the services `web` and `twin`, which share their backends, on
// TCP 80 and UDP 53. Each backend is a line of YAML's flow style.
func (b *bed) one(forwarding, more string, backends ...string) string {
	var text strings.Builder
	// Enough remembered flows that their budget exceeds the flows that this machine's client can open.
	text.WriteString("limits: {flows: 20000, remembered: 2000000}\n" + more + "interfaces:\n")
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s, attach: native}\n", i.Name)
	}
	text.WriteString("services:\n")
	for n, name := range []string{"web", "twin"} {
		vips := directVIPs(n)
		fmt.Fprintf(&text, "  - name: %s\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: %s\n    backends:\n",
			name, vips[0], vips[1], forwarding)
		for _, line := range backends {
			fmt.Fprintf(&text, "      - {%s}\n", line)
		}
	}
	return text.String()
}

// settle is short, yet long enough for every connection to be busy in it, and for a test to find slots
// in transition after its commands: on a loaded machine each takes a second.
func settle() string { return fmt.Sprintf("timeouts: {settle: %s}\n", patience*8*time.Second) }

// line is a backend of dsr-*, or of NAT if the servers have the services' ports.
func line(address netip.Addr, more ...string) string {
	return strings.Join(append([]string{fmt.Sprintf("address: %q", address)}, more...), ", ")
}

// TestChangesUnderLoad: backends come, go, drain and change their weights, and the daemon is killed,
// in the middle of transitions and while connections and UDP sockets are busy: only connections to a
// removed backend end, and only UDP sockets of backends that drain or go move.
func TestChangesUnderLoad(t *testing.T) {
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 4}, 2)
	vips := slices.Concat(directVIPs(0), directVIPs(1))
	b.decap(vips, b.Backends...)
	vips = vips[:2]
	file := func(weights ...int) string { // of b1, b2, …; -1: none
		var lines []string
		for n, weight := range weights {
			if weight >= 0 {
				for _, address := range both(b.Backends[n]) {
					lines = append(lines, line(address, fmt.Sprintf("weight: %d", weight)))
				}
			}
		}
		return b.one("dsr-ipip", settle(), lines...)
	}
	b.write(file(1, 1))
	b.start()
	c := b.newChurn(t, vips, churnCount)
	cycles := 1
	if soak {
		cycles = 10
	}
	for range cycles {
		c.cycle(t, vips, file)
	}
	c.end(t)
	if c.ended == 0 || c.moved == 0 {
		t.Errorf("%d connections ended and %d sockets moved: nothing was with the removed backends, so the test proves less than it says", c.ended, c.moved)
	}
}

// churnCount is the number of connections and of sockets to each VIP while no slot is in transition.
const churnCount = 12

// again kills the daemon in the middle of a transition and starts it anew.
func (c *churn) again(t *testing.T, vips []netip.Addr) {
	t.Helper()
	c.bed.unsettled(t)
	c.bed.kill()
	c.more(t, vips, 2) // without a daemon, with slots in transition
	c.bed.start()
	c.bed.unsettled(t) // each has the whole settle time again
	c.round(t)
}

// cycle leads from two backends over every kind of change back to the first two.
func (c *churn) cycle(t *testing.T, vips []netip.Addr, file func(weights ...int) string) {
	t.Helper()
	b := c.bed
	c.opening("b3", func() { b.reload(file(1, 1, 1)) }) // the table grows, too
	c.again(t, vips)
	c.more(t, vips, churnCount)
	c.opening("b4", func() { b.reload(file(5, 1, 1, 1)) })
	c.again(t, vips)
	c.more(t, vips, churnCount)
	b.reload(file(1, 1, 3, 1)) // before the last change has settled
	c.round(t)
	c.closing("b3", func() { b.drain(t, b.Backends[2]) })
	c.again(t, vips)
	c.more(t, vips, 2)
	c.opening("b3", func() { b.undrain(t, b.Backends[2]) })
	c.more(t, vips, 2)
	b.settled(t, 60*time.Second)
	b.kill()
	b.start() // no slot is in transition now, and none may enter one
	c.round(t)

	c.removing("b4", func() { b.reload(file(1, 1, 3)) })
	c.again(t, vips)
	if left := c.left("b4"); left != 0 {
		t.Errorf("%d UDP sockets are still answered by the removed backend", left)
	}
	c.opening("b4", func() { b.reload(file(1, 1, 3, 2)) })
	c.closing("b2", func() { b.reload(file(1, 0, 3, 2)) })
	c.again(t, vips)
	c.more(t, vips, 2)
	b.settled(t, 60*time.Second)
	c.removing("b2", func() { b.reload(file(1, -1, 3, 2)) })
	c.round(t)
	if !soak {
		return
	}
	c.removing("b3", func() { b.reload(file(1, -1, -1, 2)) })
	c.round(t)
	c.removing("b4", func() { b.reload(file(1)) })
	c.round(t)
	c.opening("b2", func() { b.reload(file(1, 1)) })
}

// drain drains both addresses of a backend.
func (b *bed) drain(t *testing.T, backend *lab.Host) {
	t.Helper()
	for _, address := range both(backend) {
		if code, out := b.backend("drain", address.String()); code != 0 {
			t.Fatalf("shunt backend drain %s: exit code %d\n%s", address, code, out)
		}
	}
}

func (b *bed) undrain(t *testing.T, backend *lab.Host) {
	t.Helper()
	for _, address := range both(backend) {
		if code, out := b.backend("undrain", address.String()); code != 0 {
			t.Fatalf("shunt backend undrain %s: exit code %d\n%s", address, code, out)
		}
	}
}

// backend runs `shunt backend …`.
func (b *bed) backend(command string, args ...string) (code int, output string) {
	b.t.Helper()
	all := append([]string{"backend", command}, args...)
	if command == "list" || command == "drain" {
		all = append(all, "--instance", b.instance)
	}
	return b.shunt(append(all, "--socket", b.socket)...)
}

// listed has the fields of `shunt backend list -o json` that the tests read.
type listed struct {
	Address  string
	State    string
	Services []string
	Slots    int
	Health   []struct{ Service, State string }
	// The fields of `overrides`.
	Overrides []struct {
		Kind            string
		Since, Deadline time.Time
		By              string
		UID             int
		Client          string
	}
}

// list is `shunt backend list -o json`, by address.
func (b *bed) list(t *testing.T) map[string]listed {
	t.Helper()
	code, out := b.backend("list", "-o", "json")
	var lines []listed
	if err := json.Unmarshal([]byte(out), &lines); err != nil || code != 0 {
		t.Fatalf("shunt backend list: exit code %d, %v:\n%s", code, err, out)
	}
	found := map[string]listed{}
	for _, l := range lines {
		found[l.Address] = l
	}
	return found
}

// fresh counts the backends that answer new connections and datagrams to a VIP.
func (b *bed) fresh(t *testing.T, vip netip.Addr) map[string]int {
	t.Helper()
	const requests = 24 // none to one of three backends: once in 17,000 runs
	seen := map[string]int{}
	client := b.Client.HTTPClient(false)
	for range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatal(err)
		}
		dns, err := b.askUDP(b.Client, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatal(err)
		}
		seen[web.Backend]++
		seen[dns.Backend]++
	}
	return seen
}

// drainBed is a bed of three backends that two services share, and its configuration. NAT has backends
// of both families; the tunnel's lead over IPv6 alone.
func drainBed(t *testing.T, forwarding string) (b *bed, file func(more ...string) string, addresses []netip.Addr) {
	t.Helper()
	b = newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 3}, 2)
	of := only4
	if forwarding == "dsr-ipip" {
		of = only6
		b.decap(slices.Concat(directVIPs(0), directVIPs(1)), b.Backends...)
	} else {
		for _, backend := range b.Backends {
			b.serveOwn(backend)
		}
	}
	for _, backend := range b.Backends {
		addresses = append(addresses, of(backend)...)
	}
	file = func(more ...string) string {
		var lines []string
		for n, address := range addresses {
			lines = append(lines, line(address, fmt.Sprintf("name: %s", b.Backends[n].Name())))
		}
		text := b.one(forwarding, settle(), append(lines, more...)...)
		if forwarding == "nat" { // without backends of IPv6
			text = strings.NewReplacer(fmt.Sprintf(", %q]", directVIPs(0)[1]), "]", fmt.Sprintf(", %q]", directVIPs(1)[1]), "]").Replace(text)
		}
		return text
	}
	b.write(file())
	b.start()
	return b, file, addresses
}

// TestDrain: an operator drains a backend. It gets no new flows in any of its services; the existing
// ones go on until they end or are given up, also without the daemon.
func TestDrain(t *testing.T) {
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		t.Run(forwarding, func(t *testing.T) {
			b, file, addresses := drainBed(t, forwarding)
			vip, twin, drained := directVIPs(0)[0], directVIPs(1)[0], addresses[1].String()
			sessions := b.sessionsWith(t, vip, 16, "b2")
			b.refusals(t)

			if code, out := b.backend("drain", "b2"); code != 0 || !strings.Contains(out, drained) {
				t.Fatalf("shunt backend drain b2: exit code %d\n%s", code, out)
			}
			check := func(when string) {
				t.Helper()
				for _, v := range []netip.Addr{vip, twin} {
					if seen := b.fresh(t, v); seen["b2"] != 0 || len(seen) != 2 {
						t.Errorf("%s: new flows to %s were answered by %v", when, v, seen)
					}
				}
				for _, s := range sessions {
					if err := b.alive(s); err != nil {
						t.Errorf("%s: %v", when, err)
					}
				}
				l := b.list(t)[drained]
				if l.State != "draining" || !slices.Equal(l.Services, []string{"twin", "web"}) || len(l.Overrides) != 1 || l.Overrides[0].By == "" || l.Overrides[0].Since.IsZero() {
					t.Errorf("%s: shunt backend list: %+v", when, l)
				}
			}
			check("drained")
			if _, out := b.backend("list"); !strings.Contains(out, "draining") || !strings.Contains(out, drained+": drain without a deadline, set by ") {
				t.Errorf("shunt backend list does not say what drains:\n%s", out)
			}
			b.kill()
			if code, out := b.backend("list"); code != 0 || !strings.Contains(out, "Overrides and health are not shown") {
				t.Errorf("shunt backend list after kill -9: exit code %d\n%s", code, out)
			}
			b.start()
			check("after kill -9 and a start")
			b.reload(file(line(addresses[2].Next())))
			b.reload(file())
			check("after reloads")
			b.waitInVain(t, sessions, drained)

			if code, out := b.backend("undrain", drained); code != 0 {
				t.Fatalf("shunt backend undrain %s: exit code %d\n%s", drained, code, out)
			}
			if seen := b.fresh(t, vip); seen["b2"] == 0 {
				t.Errorf("after undrain new flows went to %v", seen)
			}
			b.waitUntilIdle(t, b.sessionsWith(t, vip, 16, "b2"), drained)

			b.reload(strings.ReplaceAll(file(), fmt.Sprintf("      - {%s, name: b2}\n", line(addresses[1])), ""))
			b.reload(file())
			if l := b.list(t)[drained]; l.State != "active" || len(l.Overrides) != 0 {
				t.Errorf("a backend that left the file and came back: %+v", l)
			}
		})
	}
}

// sessionsOf opens connections to a VIP, with some to each backend.
func (b *bed) sessionsOf(t *testing.T, vip netip.Addr, count int) []*session {
	t.Helper()
	var all []*session
	for range count {
		s, err := b.session(t, at(vip, 80))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

// sessionsWith opens so many, and more until one is with the backend, because chance decides.
func (b *bed) sessionsWith(t *testing.T, vip netip.Addr, count int, backend string) []*session {
	t.Helper()
	all := b.sessionsOf(t, vip, count)
	for range 10 * count {
		if there, _ := with(backend, all); len(there) > 0 {
			return all
		}
		all = append(all, b.sessionsOf(t, vip, 1)...)
	}
	t.Fatalf("of %d connections to %s none is with %s", len(all), vip, backend)
	return nil
}

// refusals runs wrong command lines, and checks their messages.
func (b *bed) refusals(t *testing.T) {
	t.Helper()
	for _, r := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"drain", "10.9.9.9"}, 1, "10.9.9.9"},
		{[]string{"drain", "nobody"}, 1, `"nobody"`},
		{[]string{"drain"}, 2, "name one backend"},
		{[]string{"drain", "b1", "b2"}, 2, "name one backend"},
		{[]string{"drain", "b1", "--wait", "--idle", "10s", "--deadline", "5s"}, 2, "--deadline"},
		{[]string{"drain", "b1", "--deadline", "-5s"}, 2, "--deadline"},
		{[]string{"drain", "b1", "--idle", "1ms", "--wait"}, 2, "--idle"},
		{[]string{"drain", "b1", "--idle", "5s"}, 2, "--wait"},
		{[]string{"undrain", "b1"}, 1, "no backend with an override of its drain"},
		{[]string{"weight", "b1"}, 2, "a backend and its weight"},
		{[]string{"weight", "b1", "70000"}, 1, "weight: 70000 is above 65535"},
		{[]string{"weight", "b1", "much"}, 2, "not a number"},
		{[]string{"weight", "nobody", "1"}, 1, `"nobody"`},
		{[]string{"health", "b1", "well"}, 2, "up, down and auto"},
		{[]string{"health", "b1", "auto"}, 1, "no backend with an override of its health"},
	} {
		if code, out := b.backend(r.args[0], r.args[1:]...); code != r.code || !strings.Contains(out, r.says) {
			t.Errorf("shunt backend %s: exit code %d, want %d and %q:\n%s", strings.Join(r.args, " "), code, r.code, r.says, out)
		}
	}
	for address, l := range b.list(t) {
		if l.State != "active" || len(l.Overrides) != 0 {
			t.Errorf("after refused commands %s is %+v", address, l)
		}
	}
}

// with splits sessions into those with a backend and the others.
func with(backend string, sessions []*session) (with, others []*session) {
	for _, s := range sessions {
		if s.first.Backend == backend {
			with = append(with, s)
		} else {
			others = append(others, s)
		}
	}
	return with, others
}

// waitInVain drains with a deadline that comes while connections are busy: exit code 3, and then they
// are given up.
func (b *bed) waitInVain(t *testing.T, sessions []*session, drained string) {
	t.Helper()
	busy, others := with("b2", sessions)
	if len(busy) == 0 {
		t.Fatal("no connection is with b2")
	}
	begin := time.Now()
	p := b.spawn(b.Balancer, "backend", "drain", drained, "--wait", "--idle", "2s", "--deadline", "3s", "--instance", b.instance, "--socket", b.socket)
	b.others = append(b.others, p)
	for running := true; running; {
		for _, s := range busy {
			// Another backend may answer late requests already, with a reset.
			if err := b.alive(s); err != nil && time.Since(begin) < 3*time.Second {
				t.Fatalf("before the deadline: %v", err)
			}
		}
		select {
		case <-p.ended:
			running = false
		case <-time.After(20 * time.Millisecond): // a hundredth of the idle time
		}
	}
	if code := p.command.ProcessState.ExitCode(); code != 3 || time.Since(begin) < 3*time.Second || !strings.Contains(p.log(), "shunt gives up its flows now") {
		t.Errorf("shunt backend drain --wait: exit code %d after %s, want 3 after 3s\n%s", code, time.Since(begin), p.log())
	}
	for _, s := range busy {
		eventually(t, 10*time.Second, "the end of a connection past the deadline", func() error {
			if b.alive(s) == nil {
				return errors.New("it is alive")
			}
			return nil
		})
	}
	for _, s := range others {
		if err := b.alive(s); err != nil {
			t.Errorf("past the deadline of another backend: %v", err)
		}
	}
	if l := b.list(t)[drained]; l.State == "active" || len(l.Overrides) == 0 {
		t.Errorf("past the deadline, shunt backend list: %+v of %v", l, slices.Sorted(maps.Keys(b.list(t))))
	}
	b.others = slices.DeleteFunc(b.others, func(x *process) bool { return x == p })
}

// TestWeightOfOneService: the weights of a backend in two services are independent: 0 in one of them
// holds for that service alone.
func TestWeightOfOneService(t *testing.T) {
	for _, forwarding := range []string{"nat", "dsr-ipip"} {
		t.Run(forwarding, func(t *testing.T) {
			b, file, addresses := drainBed(t, forwarding)
			web, twin := directVIPs(0)[0], directVIPs(1)[0]
			sessions := append(b.sessionsOf(t, web, 8), b.sessionsOf(t, twin, 8)...)
			b.reload(strings.Replace(file(), line(addresses[0])+",", line(addresses[0])+", weight: 0,", 1))
			if seen := b.fresh(t, web); seen["b1"] != 0 || len(seen) != 2 {
				t.Errorf("with weight 0 for b1, new flows were answered by %v", seen)
			}
			if seen := b.fresh(t, twin); len(seen) != 3 {
				t.Errorf("with weight 0 for b1 in another service, new flows were answered by %v", seen)
			}
			for _, s := range sessions {
				if err := b.alive(s); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
