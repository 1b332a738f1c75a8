package sock

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// A connection goes to a backend, and its program sees the VIP.
func TestTCP(t *testing.T) {
	for _, c := range []struct {
		name          string
		family        int
		vip, backend  string
		frontend, ask string
	}{
		{"IPv4", unix.AF_INET, vip, first + ":8080", vip + ":80", vip + ":80"},
		{"IPv6", unix.AF_INET6, vip6, "[" + first6 + "]:8080", "[" + vip6 + "]:80", "[" + vip6 + "]:80"},
		{"IPv4 in IPv6", unix.AF_INET6, vip, first + ":8080", vip + ":80", vip + ":80"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			b.serve(service("web", c.vip, one(80), b.listenTCP(c.backend)))
			s := b.socket(c.family, unix.SOCK_STREAM, 0)
			must(t, s.connect(c.ask))
			s.wantGreeting(c.backend)
			s.wantPeer(c.frontend)
			if n := b.outcome("chosen"); n != 1 {
				t.Errorf("chosen %d times, want once", n)
			}
		})
	}
}

// Datagrams go to a backend, connected or not, and answers come from the VIP.
func TestUDP(t *testing.T) {
	for _, c := range []struct {
		name         string
		family       int
		vip, backend string
		to           string
	}{
		{"IPv4", unix.AF_INET, vip, first + ":5353", vip + ":53"},
		{"IPv6", unix.AF_INET6, vip6, "[" + first6 + "]:5353", "[" + vip6 + "]:53"},
		{"IPv4 in IPv6", unix.AF_INET6, vip, first + ":5353", vip + ":53"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			b.serve(service("dns", c.vip, one(53), b.listenUDP(c.backend)))
			s := b.socket(c.family, unix.SOCK_DGRAM, 0)
			s.wantAsk(c.to, c.backend, c.to)
			s.wantAsk(c.to, c.backend, c.to)
			if n := b.outcome("kept"); n != 1 {
				t.Errorf("the second datagram: kept %d times, want once", n)
			}
			must(t, s.connect(c.to))
			s.wantPeer(c.to)
			s.wantAsk("", c.backend, c.to)
			s.disconnect()
			s.wantPeer(unix.ENOTCONN.Error())
			s.wantAsk(c.backend, c.backend, c.backend)
			s.wantAsk(c.to, c.backend, c.to)
		})
	}
}

// A socket that goes to a VIP and then to the same backend itself sees the backend.
func TestThenTheBackendItself(t *testing.T) {
	b := newBed(t)
	backend := b.listenUDP(first + ":5353")
	b.serve(service("dns", vip, one(53), backend))

	connected := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, connected.connect(vip+":53"))
	connected.wantPeer(vip + ":53")
	must(t, connected.connect(backend))
	connected.wantPeer(backend)
	connected.wantAsk("", backend, backend)

	datagrams := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	datagrams.wantAsk(vip+":53", backend, vip+":53")
	datagrams.wantAsk(backend, backend, backend)
	datagrams.wantAsk(vip+":53", backend, vip+":53")
	if n := b.outcome("forgotten"); n != 2 {
		t.Errorf("forgotten %d times, want twice", n)
	}
}

// A second connect is a new choice.
func TestConnectAgain(t *testing.T) {
	b := newBed(t)
	one1, two := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	b.serve(service("a", vip, one(53), one1), service("b", vip2, one(53), two))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	for range 3 {
		must(t, s.connect(vip+":53"))
		s.wantPeer(vip + ":53")
		s.wantAsk("", one1, vip+":53")
		must(t, s.connect(vip2+":53"))
		s.wantPeer(vip2 + ":53")
		s.wantAsk("", two, vip2+":53")
	}
}

// A connected socket can send elsewhere in between, and stays connected.
func TestConnectedAndElsewhere(t *testing.T) {
	b := newBed(t)
	one1, two := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	b.serve(service("a", vip, one(53), one1), service("b", vip2, one(53), two))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, s.connect(vip+":53"))
	for range 2 * sockSockLimitCHOICES_MAX {
		must(t, s.send(vip2+":53")) // a connected socket does not get the answer
	}
	s.wantPeer(vip + ":53")
	s.wantAsk("", one1, vip+":53")
}

// Two VIPs of one socket are told apart by their backends. If they have one in common, all its answers come from
// the VIP that was used last.
func TestTwoVIPs(t *testing.T) {
	b := newBed(t)
	one1, two := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	b.serve(service("a", vip, one(53), one1), service("b", vip2, one(53), two))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, s.send(vip+":53"))
	must(t, s.send(vip2+":53"))
	want := map[string]string{one1: vip + ":53", two: vip2 + ":53"}
	for range 2 {
		if by, as := s.receive(); want[by] != as {
			t.Errorf("%s answered as %s, want %s", by, as, want[by])
		}
	}
	b.serve(service("a", vip, one(53), one1), service("b", vip2, one(53), one1))
	s = b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, s.send(vip+":53"))
	must(t, s.send(vip2+":53"))
	for range 2 {
		if by, as := s.receive(); by != one1 || as != vip2+":53" {
			t.Errorf("%s answered as %s, want %s as the VIP used last", by, as, one1)
		}
	}
}

// More VIPs than a socket keeps: it knows the ones used last.
func TestManyVIPs(t *testing.T) {
	b := newBed(t)
	var services []model.Service
	const count = 2 * int(sockSockLimitCHOICES_MAX)
	for i := range count {
		services = append(services, service(fmt.Sprint("s", i), fmt.Sprint("192.0.2.", 20+i), one(53), b.listenUDP(fmt.Sprint(first, ":", 6000+i))))
	}
	b.serve(services...)
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	for range 2 {
		for i := range count {
			s.wantAsk(fmt.Sprint("192.0.2.", 20+i, ":53"), fmt.Sprint(first, ":", 6000+i), fmt.Sprint("192.0.2.", 20+i, ":53"))
		}
	}
}

// MSG_FASTOPEN connects without connect().
func TestFastOpen(t *testing.T) {
	b := newBed(t)
	b.serve(service("web", vip, one(80), b.listenTCP(first+":8080")))
	s := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	must(t, unix.Sendto(s.fd, []byte("?"), unix.MSG_FASTOPEN, sockaddr(unix.AF_INET, vip+":80")))
	s.wantGreeting(first + ":8080")
	s.wantPeer(vip + ":80")
}

// A known limit: the connection works, and the program sees the backend as its peer, because the
// choice is kept with the subflow.
func TestMPTCP(t *testing.T) {
	b := newBed(t)
	b.serve(service("web", vip, one(80), b.listenTCP(first+":8080")))
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("this kernel has no MPTCP")
	}
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	s := socket{b, fd}
	must(t, s.connect(vip+":80"))
	s.wantGreeting(first + ":8080")
	s.wantPeer(first + ":8080")
}

// A socket finds the same frontend as the data plane for a packet: an exact port beats a range, and a range any port.
// A backend without a port gets the port that the client asked for.
func TestPorts(t *testing.T) {
	b := newBed(t)
	for port := 7000; port <= 7003; port++ {
		b.listenUDP(fmt.Sprint(first, ":", port))
	}
	exact, span, rest := b.listenUDP(second+":1"), b.listenUDP(second+":2"), b.listenUDP(second+":3")
	b.serve(service("exact", vip, one(100), exact), service("range", vip, value.PortRange{First: 99, Last: 200}, span),
		service("any", vip, value.AnyPort, rest), service("keeps", vip2, value.PortRange{First: 7001, Last: 7002}, first+":0"))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	for port, backend := range map[int]string{100: exact, 99: span, 200: span, 98: rest, 201: rest, 65535: rest} {
		s.wantAsk(fmt.Sprint(vip, ":", port), backend, fmt.Sprint(vip, ":", port))
	}
	for port := 7001; port <= 7002; port++ {
		s.wantAsk(fmt.Sprint(vip2, ":", port), fmt.Sprint(first, ":", port), fmt.Sprint(vip2, ":", port))
	}
	before, err := b.sockets.Outcomes()
	must(t, err)
	if err := s.send(vip2 + ":7003"); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("sending to a port of the VIP that no service has: %v, want %v, as without shunt", err, unix.ENETUNREACH)
	}
	if after, err := b.sockets.Outcomes(); err != nil || fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("a port of the VIP that no service has was counted: %v, before %v, %v", after, before, err)
	}
}

// A service without a backend that takes new flows refuses at once.
func TestNoBackend(t *testing.T) {
	b := newBed(t)
	s := service("empty", vip, one(80), first+":8080")
	s.Backends[0].Weight = 0
	b.serve(s, service("none", vip2, one(80)))
	for _, to := range []string{vip + ":80", vip2 + ":80"} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			stream, datagram := b.socket(family, unix.SOCK_STREAM, 0), b.socket(family, unix.SOCK_DGRAM, 0)
			for name, err := range map[string]error{"TCP": stream.connect(to), "UDP": datagram.connect(to), "sendto": datagram.send(to)} {
				if !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("%s to %s: %v, want %v", name, to, err, unix.ECONNREFUSED)
				}
			}
			waiting := b.socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
			if err := waiting.connect(to); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("TCP, not blocking, to %s: %v, want %v", to, err, unix.ECONNREFUSED)
			}
		}
	}
	if n := b.outcome("no_backend"); n != 2*2*4 {
		t.Errorf("no_backend %d times, want 16", n)
	}
}

// Services with rules that only packets can be held against are left alone: the socket gets the same answer as
// without shunt.
func TestLeftToPackets(t *testing.T) {
	b := newBed(t)
	b.listenUDP(first + ":53")
	direct := service("direct", vip, one(53), first+":53")
	direct.Forwarding, direct.Backends[0].Port = model.ForwardingDSRIPIP, 0
	listed := service("listed", vip2, one(53), first+":53")
	listed.DenyFrom = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	rated := service("rated", "192.0.2.12", one(53), first+":53")
	rated.Policy.SourceRate = 1
	bounded := service("bounded", "192.0.2.13", one(53), first+":53")
	bounded.Policy.FlowsMax = 1
	b.serve(direct, listed, rated, bounded)
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	for _, to := range []string{vip, vip2, "192.0.2.12", "192.0.2.13"} {
		if err := s.send(to + ":53"); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("sending to %s: %v, want %v", to, err, unix.ENETUNREACH)
		}
		if err := s.connect(to + ":53"); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("connecting to %s: %v, want %v", to, err, unix.ENETUNREACH)
		}
	}
	if direct, policy := b.outcome("direct"), b.outcome("policy"); direct != 2 || policy != 6 {
		t.Errorf("direct %d times and policy %d, want 2 and 6", direct, policy)
	}
}

// A socket keeps its backend while the backend lives, even if the table has changed; another backend takes over
// when it is gone.
func TestKeptWhileItLives(t *testing.T) {
	b := newBed(t)
	one1, two := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	b.serve(service("dns", vip, one(53), one1))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	s.wantAsk(vip+":53", one1, vip+":53")
	draining := service("dns", vip, one(53), one1, two)
	draining.Backends[0].Weight = 0
	b.serve(draining)
	s.wantAsk(vip+":53", one1, vip+":53")
	b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).wantAsk(vip+":53", two, vip+":53")
	b.serve(service("dns", vip, one(53), two))
	s.wantAsk(vip+":53", two, vip+":53")
	if n := b.outcome("chosen_anew"); n != 1 {
		t.Errorf("chosen anew %d times, want once", n)
	}
}

// Sockets are spread over backends; with affinity, the sockets of a network namespace are not.
func TestSpread(t *testing.T) {
	b := newBed(t)
	backends := []string{b.listenUDP(first + ":5353"), b.listenUDP(second + ":5353")}
	together := service("together", vip2, one(53), backends...)
	together.AffinityTimeout = time.Hour
	b.serve(service("apart", vip, one(53), backends...), together)
	apart, near := map[string]int{}, map[string]int{}
	for range 64 {
		s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		by, _ := s.ask(vip + ":53")
		apart[by]++
		by, _ = s.ask(vip2 + ":53")
		near[by]++
	}
	if len(apart) != 2 { // one of 2^63 runs would have all of 64 on one side
		t.Errorf("64 sockets went to %v", apart)
	}
	if len(near) != 1 {
		t.Errorf("with affinity, 64 sockets of one namespace went to %v", near)
	}
}
