package watch_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// servicePort is the steered port.
const servicePort = 53

// steered is a node with a pod and a server, whose port is steered.
type steered struct {
	*world
	server bedtest.Server
	steers []watch.Steer // IPv4, IPv6
}

func newSteered(t *testing.T, mode shortcut.Mode) *steered {
	t.Helper()
	b, all := bedtest.New(t, 1)
	s := &steered{world: &world{T: t, Bed: b, rules: all}, server: bedtest.NewServer(t, b)}
	for _, is6 := range []bool{false, true} {
		to := s.server.Address(is6)
		s.steers = append(s.steers, watch.Steer{Name: "dns", Interface: "eth1", Network: netip.PrefixFrom(to, to.BitLen()), NextHop: s.server.NextHop(is6),
			Ports: []watch.Port{{Protocol: unix.IPPROTO_UDP, Number: servicePort}, {Protocol: unix.IPPROTO_TCP, Number: servicePort}}})
	}
	var err error
	s.watch, err = watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.Watched()...), Steers: s.steers, In: b.Node.Run})
	s.must(err)
	t.Cleanup(func() { s.must(s.watch.Close()) })
	return s
}

// steer is the status of one family's steer.
func (s *steered) steer(is6 bool) watch.SteerStatus {
	s.Helper()
	for _, one := range s.status().Steers {
		if one.Network.Addr().Is6() == is6 {
			return one
		}
	}
	return watch.SteerStatus{}
}

func (s *steered) is(is6 bool, state string) {
	s.Helper()
	s.until("the steer is "+state, func() bool { return s.steer(is6).State == state })
}

// dial is a TCP connection to the server's port, until the test ends.
func (s *steered) dial(t *testing.T, is6 bool) (client, server net.Conn) {
	t.Helper()
	return bedtest.ConnectPodsAt(t, s.Pods[0], s.server.Host, netip.AddrPortFrom(s.server.Address(is6), servicePort))
}

// taken is the number of packets that the steer took during do.
func (s *steered) taken(is6 bool, do func()) uint64 {
	s.Helper()
	before := s.steer(is6).Counts["taken"].Packets
	do()
	return s.steer(is6).Counts["taken"].Packets - before
}

// Both directions of TCP and UDP go by the interface that was chosen, past the rules, in both modes.
func TestSteeredBothWays(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			s := newSteered(t, mode)
			families(t, func(t *testing.T, is6 bool) {
				s.is(is6, "taken")
				seen, unwatched := s.seen(), s.unwatched(is6)
				if n := s.taken(is6, func() {
					c, o := s.dial(t, is6)
					s.exchange(c, o, 1_000_000)
				}); n < 20 {
					t.Errorf("TCP: %d packets were steered", n)
				}
				late := s.unwatched(is6)
				if n := s.taken(is6, func() { s.ask(t, is6, 0) }) + s.unwatched(is6) - late; n != 2 {
					t.Errorf("UDP: %d packets were steered, want a question and an answer", n)
				}
				if now := s.seen(); now-seen > s.unwatched(is6)-unwatched {
					t.Errorf("the rules have seen %d packets; %v", now-seen, s.steer(is6).Counts)
				}
			})
		})
	}
}

// unwatched is the number of packets that were left to the rules because nobody had judged for a second: an emulated
// machine is that slow.
func (s *steered) unwatched(is6 bool) uint64 {
	s.Helper()
	return s.steer(is6).Counts["unwatched"].Packets
}

// ask sends a datagram to the server's port from a port (0: any) and waits for the answer.
func (s *steered) ask(t *testing.T, is6 bool, from uint16) {
	t.Helper()
	s.askAt(t, s.server.Address(is6), from)
}

// askAt is the same with an address of the server.
func (s *steered) askAt(t *testing.T, at netip.Addr, from uint16) {
	t.Helper()
	p, err := s.server.ListenPacket("udp", netip.AddrPortFrom(at, servicePort).String())
	s.must(err)
	defer p.Close()
	q, err := s.Pods[0].ListenPacket("udp", netip.AddrPortFrom(s.Address(0, at.Is6()), from).String())
	s.must(err)
	defer q.Close()
	_, _ = p.SetDeadline(time.Now().Add(patience)), q.SetDeadline(time.Now().Add(patience))
	_, err = q.WriteTo([]byte("?"), p.LocalAddr())
	s.must(err)
	buffer := make([]byte, 8)
	_, asker, err := p.ReadFrom(buffer)
	s.must(err)
	_, err = p.WriteTo([]byte("!"), asker)
	s.must(err)
	_, _, err = q.ReadFrom(buffer)
	s.must(err)
}

// When the path of a steer ends, for any reason, the steer is removed, and old and new connections go by the routes. When the path is
// back, only new connections are steered.
func TestSteersFallBack(t *testing.T) {
	s := newSteered(t, shortcut.Checked)
	onNode := func(do func(netlink.Link) error) func() error {
		return func() error {
			return s.Node.Run(func() error {
				l, err := netlink.LinkByName("eth1")
				if err != nil {
					return err
				}
				return do(l)
			})
		}
	}
	for _, c := range []struct {
		name, state string
		begin, end  func() error
	}{
		{"link down", "down", func() error { return s.Node.SetUp("eth1", false) }, func() error {
			if err := s.Node.SetUp("eth1", true); err != nil {
				return err
			}
			return s.Node.AddAddress("eth1", netip.MustParsePrefix("2001:db8:50::1/64")) // which goes with the link
		}},
		{"no carrier at the peer", "down", func() error { return s.server.SetUp("eth1", false) }, func() error {
			if err := s.server.SetUp("eth1", true); err != nil {
				return err
			}
			return s.server.AddAddress("eth1", netip.MustParsePrefix("2001:db8:50::2/64"))
		}},
		{"next hop silent", "next_hop", func() error {
			_ = s.server.SetSysctl("net.ipv4.conf.eth1.arp_ignore", "8")
			return s.server.DeleteAddress("eth1", netip.MustParsePrefix("2001:db8:50::2/64"))
		}, func() error {
			_ = s.server.SetSysctl("net.ipv4.conf.eth1.arp_ignore", "0")
			return s.server.AddAddress("eth1", netip.MustParsePrefix("2001:db8:50::2/64"))
		}},
		{"link deleted", "down", onNode(netlink.LinkDel), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			families(t, func(t *testing.T, is6 bool) { s.is(is6, "taken") })
			var conns [2][2]net.Conn
			for i, is6 := range []bool{false, true} {
				conns[i][0], conns[i][1] = s.dial(t, is6)
				if n := s.taken(is6, func() { s.exchange(conns[i][0], conns[i][1], 10_000) }); n == 0 {
					t.Error("the connection is not steered")
				}
			}
			begin := time.Now()
			s.must(c.begin())
			s.must(s.server.Lead(s.Bed, "eth2"))
			families(t, func(t *testing.T, is6 bool) { s.is(is6, c.state) })
			t.Logf("%s: the steer was taken away within %s", c.name, time.Since(begin).Round(time.Millisecond))
			each := func(what string) {
				for i, is6 := range []bool{false, true} {
					if n := s.taken(is6, func() { s.exchange(conns[i][0], conns[i][1], 10_000) }); n != 0 {
						t.Errorf("IPv6 %v: %s: %d packets of the old connection are steered", is6, what, n)
					}
				}
			}
			each("without the way")
			for _, is6 := range []bool{false, true} {
				if n := s.taken(is6, func() { c, o := s.dial(t, is6); s.exchange(c, o, 1000); s.ask(t, is6, 0) }); n != 0 {
					t.Errorf("IPv6 %v: %d packets are steered without a way", is6, n)
				}
			}
			if c.end == nil {
				return
			}
			s.must(c.end())
			s.must(s.server.Lead(s.Bed, "eth1"))
			families(t, func(t *testing.T, is6 bool) { s.is(is6, "taken") })
			each("the way is back")
			for _, is6 := range []bool{false, true} {
				if n := s.taken(is6, func() { c, o := s.dial(t, is6); s.exchange(c, o, 1000) }); n == 0 {
					t.Errorf("IPv6 %v: a new connection is not steered", is6)
				}
			}
		})
	}
}

// A connection from before a steer, and one that was steered when the steer goes, stay where they are.
func TestConnectionsStayWhereTheyBegan(t *testing.T) {
	s := newSteered(t, shortcut.Checked)
	families(t, func(t *testing.T, is6 bool) {
		s.is(is6, "taken")
		s.must(s.watch.SetSteers(nil))
		old, oldEnd := s.dial(t, is6)
		s.exchange(old, oldEnd, 1000)
		s.ask(t, is6, 4000)
		s.must(s.watch.SetSteers(s.steers))
		s.is(is6, "taken")
		if n := s.taken(is6, func() { s.exchange(old, oldEnd, 10_000); s.ask(t, is6, 4000) }); n != 0 || s.steer(is6).Counts["pinned"].Packets == 0 {
			t.Errorf("%d packets of older connections were steered: %v", n, s.steer(is6).Counts)
		}
		c, o := s.dial(t, is6)
		s.exchange(c, o, 1000)
		s.must(s.watch.SetSteers(nil))
		seen := s.seen()
		s.exchange(c, o, 100_000)
		if now := s.seen(); now != seen {
			t.Errorf("the rules have seen %d packets of a connection that was steered", now-seen)
		}
		later, end := s.dial(t, is6)
		s.exchange(later, end, 1000)
		if s.seen() == seen {
			t.Error("a new connection is steered though the steer has gone")
		}
		s.must(s.watch.SetSteers(s.steers))
	})
}

// A rule that could affect steered packets removes the steer, and with it running connections: the rule stops them.
func TestRulesStopSteers(t *testing.T) {
	s := newSteered(t, shortcut.Bypass)
	families(t, func(t *testing.T, is6 bool) {
		s.is(is6, "taken")
		c, o := s.dial(t, is6)
		s.exchange(c, o, 1000)
		remove := s.insert(plain.Drop())
		s.is(is6, "rule")
		s.until("the rule stops the connection", func() bool { return bedtest.Carry(c, o, 1, 100*time.Millisecond) != nil })
		remove()
		s.is(is6, "taken")
	})
}
