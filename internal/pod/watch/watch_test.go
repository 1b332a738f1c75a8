package watch_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// patience bounds waits for events that take milliseconds, and much longer on an emulated machine.
const patience = time.Minute

// ownPort is a port that the kernel does not give away by itself (net.ipv4.ip_local_port_range).
const ownPort = 20000

// world is a host with two pods or more, rules, and a watch.
type world struct {
	*testing.T
	*bed.Bed
	rules *plain.Rules
	watch *watch.Watch
}

func newWorld(t *testing.T, mode shortcut.Mode, pods int, more ...plain.Service) *world {
	t.Helper()
	b, rules := bedtest.New(t, pods, more...)
	w := &world{T: t, Bed: b, rules: rules}
	var err error
	w.watch, err = watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.Watched()...), In: b.Node.Run})
	w.must(err)
	t.Cleanup(func() { w.must(w.watch.Close()) })
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) status() watch.Status {
	w.Helper()
	s, err := w.watch.Status()
	w.must(err)
	return s
}

func (w *world) count(reason string) uint64 { return w.status().Counts[reason].Packets }

// until waits for a condition.
func (w *world) until(what string, ok func() bool) {
	w.Helper()
	for end := time.Now().Add(patience); ; {
		begin := time.Now()
		if ok() {
			return
		}
		if time.Now().After(end) {
			w.Fatalf("%s: not within %s; status: %+v", what, patience, w.status())
		}
		time.Sleep(max(2*time.Millisecond, time.Since(begin))) // where asking takes long, the watch has half of the time for other things
	}
}

// state is that of a pod's IPv4 address, with the reason.
func (w *world) state(pod int) (state, why string) { return w.stateOf(w.Address(pod, false)) }

func (w *world) stateOf(a netip.Addr) (state, why string) {
	w.Helper()
	for _, p := range w.status().Pods {
		if p.Address == a {
			return p.State, p.Why
		}
	}
	w.Fatalf("pod %s has no status", a)
	return "", ""
}

// entries are conntrack's of the host, between addresses of one family.
func (w *world) entries(is6 bool) (flows []*netlink.ConntrackFlow) {
	w.Helper()
	family := netlink.InetFamily(unix.AF_INET)
	if is6 {
		family = unix.AF_INET6
	}
	w.must(w.Node.Run(func() (err error) {
		flows, err = netlink.ConntrackTableList(netlink.ConntrackTable, family)
		return err
	}))
	return flows
}

func families(t *testing.T, do func(t *testing.T, is6 bool)) {
	for _, is6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[is6], func(t *testing.T) { do(t, is6) })
	}
}

// Each kind of traffic takes the shortcut, and the rules see only how connections begin.
func TestEveryKindTakesTheShortcut(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				server, err := traffic.Serve(w.Pods[1], netip.AddrPortFrom(w.Address(1, is6), 0))
				w.must(err)
				defer server.Close()
				for _, kind := range traffic.Kinds {
					before, seen := w.count("taken"), w.forwarded()
					r, err := traffic.Measure(w.Pods[0], kind, server.Address, 50*time.Millisecond)
					for end := time.Now().Add(patience); err == nil && mode == shortcut.Checked && kind != traffic.CRR && w.count("taken") == before && time.Now().Before(end); {
						r, err = traffic.Measure(w.Pods[0], kind, server.Address, 200*time.Millisecond) // conntrack is told soon
					}
					w.must(err)
					taken, forwarded := w.count("taken")-before, w.forwarded()-seen
					if r.Transactions == 0 || taken == 0 && (mode == shortcut.Bypass || kind != traffic.CRR) { // checked, such connections are too short
						t.Errorf("%s: %d transactions, %d packets took the shortcut", kind, r.Transactions, taken)
					}
					if mode == shortcut.Bypass && forwarded > 0 {
						t.Errorf("%s: the rules have seen %d packets; counts %v", kind, forwarded, w.status().Counts)
					}
				}
			})
		})
	}
}

func (w *world) seen() (packets uint64) {
	w.Helper()
	w.must(w.Node.Run(func() (err error) {
		packets, err = w.rules.Seen()
		return err
	}))
	return packets
}

// insert puts a rule before all others.
func (w *world) insert(parts ...[]expr.Any) (remove func()) {
	w.Helper()
	remove, err := w.tryInsert(parts...)
	w.must(err)
	return remove
}

func (w *world) tryInsert(parts ...[]expr.Any) (remove func(), err error) {
	var undo func() error
	err = w.Node.Run(func() (err error) {
		undo, err = w.rules.Insert(parts...)
		return err
	})
	return func() { w.Helper(); w.must(w.Node.Run(undo)) }, err
}

// pair is a TCP connection between two pods: it is established, and its bytes take the shortcut.
func (w *world) pair(is6 bool) (client, server *net.TCPConn) {
	w.Helper()
	c, s := w.connect(is6)
	before := w.count("taken")
	w.until("the connection takes the shortcut", func() bool {
		w.exchange(c, s, 4)
		return w.count("taken") > before
	})
	return c, s
}

// connect is a TCP connection between two pods.
func (w *world) connect(is6 bool) (client, server *net.TCPConn) {
	w.Helper()
	return bedtest.Connect(w.T, w.Bed, is6)
}

// exchange sends so many octets there, and back.
func (w *world) exchange(a, b net.Conn, octets int) {
	w.Helper()
	w.must(bedtest.Exchange(a, b, octets))
}

// Closing works, though conntrack has not seen the bytes: no FIN is invalid, and the entry ends soon.
func TestConnectionsEnd(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	families(t, func(t *testing.T, is6 bool) {
		w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
		for name, end := range map[string]func(c, s *net.TCPConn) error{
			"FIN": func(c, s *net.TCPConn) error {
				if err := c.CloseWrite(); err != nil {
					return err
				}
				_ = s.SetDeadline(time.Now().Add(patience))
				if n, err := s.Read(make([]byte, 1)); n != 0 || err == nil || err.Error() != "EOF" {
					return fmt.Errorf("the server reads %d octets, %v; want EOF", n, err)
				}
				if err := bedtest.Carry(s, c, 1000, patience); err != nil { // half-closed: the other side still sends
					return err
				}
				if err := s.Close(); err != nil {
					return err
				}
				_ = c.SetDeadline(time.Now().Add(patience))
				if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || err.Error() != "EOF" {
					return fmt.Errorf("the client reads %d octets, %v; want EOF", n, err)
				}
				return nil
			},
			"RST": func(c, s *net.TCPConn) error {
				if err := c.SetLinger(0); err != nil {
					return err
				}
				if err := c.Close(); err != nil {
					return err
				}
				_ = s.SetDeadline(time.Now().Add(patience))
				if _, err := s.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
					return fmt.Errorf("the server reads %v; want a reset", err)
				}
				return nil
			},
		} {
			t.Run(name, func(t *testing.T) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				c, s := w.pair(is6)
				port := c.LocalAddr().(*net.TCPAddr).Port
				w.exchange(c, s, 300_000) // far beyond conntrack's window
				w.must(end(c, s))
				w.until("the entry has seconds left", func() bool {
					for _, f := range w.entries(is6) {
						if int(f.Forward.SrcPort) == port {
							return f.TimeOut <= 10 // nf_conntrack_tcp_timeout_close
						}
					}
					return true
				})
			})
		}
	})
}

// Packets to a service's address are translated, and so are their answers.
func TestTranslatedConnectionsAreLeftAlone(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			const port = 8080
			var more []plain.Service
			for _, is6 := range []bool{false, true} {
				vip := netip.MustParseAddrPort(map[bool]string{false: "10.97.0.1:80", true: "[2001:db8:97::1]:80"}[is6])
				for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
					more = append(more, plain.Service{Address: vip, Endpoint: netip.AddrPortFrom(bed.AddressOn(1, 1, is6), port), Protocol: protocol})
				}
			}
			w := newWorld(t, mode, 2, more...)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				server, err := traffic.Serve(w.Pods[1], netip.AddrPortFrom(w.Address(1, is6), port))
				w.must(err)
				defer server.Close()
				vip := more[map[bool]int{false: 0, true: 2}[is6]].Address
				before := w.count("nat")
				for _, kind := range traffic.Kinds {
					r, err := traffic.Measure(w.Pods[0], kind, vip, 20*time.Millisecond)
					w.must(err)
					if r.Transactions == 0 {
						t.Errorf("%s: no transaction", kind)
					}
				}
				if w.count("nat") == before {
					t.Errorf("no packet was left alone for its translation: %v", w.status().Counts)
				}
				// From the same ports to the pod itself: its answers have the addresses of the service's.
				from := netip.AddrPortFrom(w.Address(0, is6), ownPort)
				for _, network := range []string{"tcp", "udp"} {
					for _, to := range []netip.AddrPort{vip, netip.AddrPortFrom(w.Address(1, is6), port)} {
						w.asks(network, from, to)
					}
				}
			})
		})
	}
}

// asks connects, and has an octet echoed.
func (w *world) asks(network string, from, to netip.AddrPort) {
	w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := w.Pods[0].DialFrom(ctx, network, from, to.String())
	if err != nil {
		w.Fatalf("%s from %s to %s: %v", network, from, to, err)
	}
	defer c.Close() //nolint:errcheck // its data is sent
	w.must(c.SetDeadline(time.Now().Add(patience)))
	_, err = c.Write([]byte{1})
	w.must(err)
	if _, err := c.Read(make([]byte, 1)); err != nil {
		w.Fatalf("%s from %s to %s: no answer: %v", network, from, to, err)
	}
}

// A rule that names a pod takes effect while its connections run, and they go on when it is gone.
func TestRulesTakeEffect(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				both := func(want string) func() bool {
					return func() bool {
						a, _ := w.stateOf(w.Address(0, is6))
						b, _ := w.stateOf(w.Address(1, is6))
						return a == want && b == want
					}
				}
				w.until("both pods may take the shortcut", both("taken"))
				c, s := w.pair(is6)
				w.exchange(c, s, 100_000)
				inserted := time.Now()
				remove := w.insert(plain.Destination(w.Address(1, is6)), plain.Drop())
				w.until("both pods are left alone", both("rule"))
				t.Logf("the rule took effect %s after it was inserted", time.Since(inserted).Round(time.Millisecond))
				taken := w.count("taken")
				if err := bedtest.Carry(c, s, 1, 100*time.Millisecond); err == nil {
					t.Error("an octet has arrived though a rule drops it")
				}
				if now := w.count("taken"); now != taken {
					t.Errorf("%d packets took the shortcut though a rule drops them", now-taken)
				}
				remove()
				_ = s.SetReadDeadline(time.Now().Add(patience))
				if _, err := s.Read(make([]byte, 1)); err != nil { // lost data is sent again
					t.Fatalf("without the rule: %v", err)
				}
				w.must(bedtest.Carry(s, c, 100_000, patience))
			})
		})
	}
}
