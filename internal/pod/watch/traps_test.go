package watch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/nftables/expr"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// at finds the host's end of a pod's veth, for a change.
func (w *world) at(pod int, do func(netlink.Link) error) {
	w.Helper()
	w.must(w.Node.Run(func() error {
		l, err := netlink.LinkByName(w.Interface(pod))
		if err != nil {
			return err
		}
		return do(l)
	}))
}

// becomes waits for a pod's state, whose reason names something.
func (w *world) becomes(pod int, state, names string) {
	w.Helper()
	w.until(fmt.Sprintf("pod %d is %s", pod, state), func() bool {
		s, why := w.state(pod)
		return s == state && strings.Contains(why, names)
	})
}

// A bridge, or a foreign qdisc, program or filter at a pod's interface keeps the pod off the shortcut until it is gone.
func TestInterfacesAreLookedAt(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	tbf := func(l netlink.Link) *netlink.Tbf {
		return &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, Rate: 1 << 20, Limit: 1 << 20, Buffer: 1 << 20}
	}
	var foreign link.Link
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	client, server := w.pair(false)
	for _, c := range []struct {
		state, names string
		begin, end   func(netlink.Link) error
	}{
		{
			"qdisc", "tbf", func(l netlink.Link) error { return netlink.QdiscAdd(tbf(l)) },
			func(l netlink.Link) error { return netlink.QdiscDel(tbf(l)) },
		},
		{"bridged", "port of interface", func(l netlink.Link) error {
			if err := netlink.LinkAdd(bridge); err != nil {
				return err
			}
			return netlink.LinkSetMaster(l, bridge)
		}, func(netlink.Link) error { return netlink.LinkDel(bridge) }},
		{"tc", "program", func(l netlink.Link) error {
			p, err := passes()
			if err != nil {
				return err
			}
			defer p.Close()
			foreign, err = link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: p, Attach: ebpf.AttachTCXEgress})
			return err
		}, func(netlink.Link) error { return foreign.Close() }},
		{"tc", "filter of kind bpf", func(l netlink.Link) error {
			if err := netlink.QdiscAdd(clsact(l)); err != nil && !errors.Is(err, unix.EEXIST) { // without tcx the shortcut's own filter has it
				return err
			}
			p, err := passes()
			if err != nil {
				return err
			}
			defer p.Close()
			return netlink.FilterAdd(foreignFilter(l, p.FD()))
		}, func(l netlink.Link) error { return netlink.FilterDel(foreignFilter(l, -1)) }},
		{"down", "down", netlink.LinkSetDown, netlink.LinkSetUp}, // the last one, because the host's route goes with it
	} {
		if c.state == "tc" && c.names == "program" && !hasTCX(t) {
			continue
		}
		w.becomes(1, "taken", "")
		w.at(1, c.begin)
		w.becomes(1, c.state, c.names)
		if c.state == "qdisc" || c.state == "tc" { // with which the host's stack still sends there
			taken, left := w.count("taken"), w.count(c.state)
			w.exchange(client, server, 10_000)
			if now := w.count("taken"); now != taken || w.count(c.state) == left {
				t.Errorf("%s: %d packets took the shortcut; counts %v", c.state, now-taken, w.status().Counts)
			}
		}
		w.at(1, c.end)
		w.becomes(1, "taken", "")
	}
}

// passes is a program of another owner.
func passes() (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
}

func foreignFilter(l netlink.Link, fd int) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:          fd, Name: "foreign", DirectAction: true,
	}
}

func clsact(l netlink.Link) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// hasTCX reports whether the kernel has tcx (Linux 6.6).
func hasTCX(t *testing.T) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 6
}

// A rule that is not understood leaves alone, one that cannot match does not.
func TestRulesAreJudged(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 3)
			elsewhere := netip.MustParseAddr("192.0.2.1")
			for i := range w.Pods { // each pod's own chains drop packets that are not the pod's, and these are the pod's
				w.becomes(i, "taken", "")
			}
			lacking := 0
			for name, c := range map[string]struct {
				rule  [][]expr.Any
				state string
			}{
				"drop to elsewhere":    {[][]expr.Any{plain.Destination(elsewhere), plain.Drop()}, "taken"},
				"drop from a pod":      {[][]expr.Any{plain.Source(w.Address(0, false)), plain.Drop()}, "rule"},
				"drop by interface":    {[][]expr.Any{plain.Name(expr.MetaKeyOIFNAME, w.Interface(0)), plain.Drop()}, "rule"},
				"drop by port":         {[][]expr.Any{plain.Port(unix.IPPROTO_TCP, 4711), plain.Drop()}, "rule"},
				"log":                  {[][]expr.Any{{&expr.Log{}}}, "rule"},
				"change of a mark":     {[][]expr.Any{{&expr.Immediate{Register: 1, Data: []byte{1, 0, 0, 0}}, &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}}}, "taken"},
				"mark of a connection": {[][]expr.Any{{&expr.Immediate{Register: 1, Data: []byte{1, 0, 0, 0}}, &expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: 1}}}, "rule"},
				"another interface":    {[][]expr.Any{plain.Name(expr.MetaKeyOIFNAME, "eth7"), plain.Drop()}, "taken"},
				"a count of a pod":     {[][]expr.Any{plain.Source(w.Address(0, false)), {&expr.Counter{}}}, "taken"},
				"a limit for the pods": {[][]expr.Any{{&expr.Limit{Type: expr.LimitTypePkts, Rate: 10, Unit: expr.LimitTimeSecond, Burst: 5}}, plain.Drop()}, "rule"},
			} {
				remove, err := w.tryInsert(c.rule...)
				if errors.Is(err, unix.ENOENT) { // a module of nf_tables (nft_log, nft_limit, nft_ct), which guests may lack
					t.Logf("%s: not tested, because this kernel has no such rule: %v", name, err)
					lacking++
					continue
				}
				w.must(err)
				w.must(w.watch.Judge())
				w.becomes(0, c.state, "")
				remove()
				w.becomes(0, "taken", "")
				t.Logf("%s: %s", name, c.state)
			}
			if lacking > 3 { // log, limit, and the mark of a connection; the others are of nf_tables itself
				t.Errorf("%d kinds of rules are lacking", lacking)
			}
		})
	}
}

// send sends a datagram from a pod to another, by a socket with an option, and expects it to arrive; with a TTL of 1 it
// expects the host's error.
func (w *world) send(is6 bool, from netip.Addr, level, option int, value []byte, size int) {
	w.Helper()
	listener, err := w.Pods[1].ListenPacket("udp", netip.AddrPortFrom(w.Address(1, is6), 0).String())
	w.must(err)
	defer listener.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := w.Pods[0].DialFrom(ctx, "udp", netip.AddrPortFrom(from, 0), listener.LocalAddr().String())
	w.must(err)
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	w.must(err)
	if value != nil {
		var set error
		w.must(raw.Control(func(fd uintptr) { set = unix.SetsockoptString(int(fd), level, option, string(value)) }))
		w.must(set)
	}
	_ = listener.SetReadDeadline(time.Now().Add(patience))
	hasTTL := level == unix.IPPROTO_IP && option == unix.IP_TTL || level == unix.IPPROTO_IPV6 && option == unix.IPV6_UNICAST_HOPS
	if hasTTL { // without it a socket hears of some ICMP errors only
		tell := map[bool]int{false: unix.IP_RECVERR, true: unix.IPV6_RECVERR}[is6]
		w.must(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, tell, 1) }))
		w.must(err)
	}
	_, err = c.Write(make([]byte, size))
	w.must(err)
	if hasTTL {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "host") {
			w.Errorf("a packet with a TTL of 1: %v; want the host's answer that time is exceeded", err)
		}
		return
	}
	if n, _, err := listener.ReadFrom(make([]byte, size+1)); err != nil || n != size {
		w.Errorf("%d of %d octets arrive: %v", n, size, err)
	}
}

// Packets that need the host go to it, each for its reason, and arrive.
func TestPacketsThatNeedTheHost(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				own := w.Address(0, is6)
				other := map[bool]string{false: "10.244.1.99/32", true: "2001:db8:244:1::99/128"}[is6]
				w.must(w.Pods[0].AddAddress("eth0", netip.MustParsePrefix(other)))
				level, ttl := unix.IPPROTO_IP, unix.IP_TTL
				options, optionsValue := unix.IP_OPTIONS, []byte{1, 1, 1, 0} // three times no operation, and the end: RFC 791
				if is6 {
					level, ttl = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
					options, optionsValue = unix.IPV6_HOPOPTS, []byte{0, 0, 1, 4, 0, 0, 0, 0} // PadN: RFC 8200, 4.2
				}
				for _, c := range []struct {
					reason string
					send   func()
				}{
					{"fragment", func() { w.send(is6, own, 0, 0, nil, 4000) }},
					{"options", func() { w.send(is6, own, level, options, optionsValue, 10) }},
					{"ttl", func() { w.send(is6, own, level, ttl, []byte{1, 0, 0, 0}, 10) }},
				} {
					before := w.count(c.reason)
					c.send()
					if w.count(c.reason) == before {
						t.Errorf("no packet was left alone for %q: %v", c.reason, w.status().Counts)
					}
				}
				// An address that is not the pod's: the policy of the plain path drops it.
				before := w.count("source")
				c, err := w.Pods[0].DialFrom(context.Background(), "udp", netip.AddrPortFrom(netip.MustParsePrefix(other).Addr(), 0), netip.AddrPortFrom(w.Address(1, is6), 9).String())
				w.must(err)
				defer c.Close()
				_, err = c.Write([]byte{1})
				w.must(err)
				w.until("the packet is counted", func() bool { return w.count("source") > before })
			})
		})
	}
}

// A pod with another MTU is not sent packets that its interface would refuse, in either direction.
func TestMTUs(t *testing.T) {
	w := newWorld(t, shortcut.Bypass, 2)
	w.must(w.Node.SetMTU(w.Interface(1), 1400))
	c, s := w.connect(false)
	w.until("the MTU is noticed", func() bool {
		before := w.count("mtu")
		w.exchange(c, s, 1)
		return w.count("mtu") > before
	})
	taken := w.count("taken")
	w.exchange(c, s, 300_000)
	if now := w.count("taken"); now != taken {
		t.Errorf("%d packets took the shortcut between interfaces of 1500 and 1400 octets", now-taken)
	}
	w.must(w.Node.SetMTU(w.Interface(1), 1500))
	w.until("both MTUs are equal", func() bool {
		before := w.count("taken")
		w.exchange(c, s, 1)
		return w.count("taken") > before
	})
}

// A connection whose bytes conntrack has not seen goes on through the stack, though a rule drops invalid packets.
func TestConnectionsOutliveTheShortcut(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				c, s := w.pair(is6)
				w.exchange(c, s, 300_000)
				w.must(w.watch.Suspend())
				seen := w.seen()
				w.exchange(c, s, 300_000)
				if w.seen() == seen {
					t.Error("the host has forwarded nothing though the shortcut is off")
				}
				w.must(w.watch.Resume())
				taken := w.count("taken")
				w.exchange(c, s, 300_000)
				if w.count("taken") == taken {
					t.Error("nothing took the shortcut though it is on again")
				}
			})
		})
	}
}

// Conntrack's entry lives as long as its connection, though conntrack does not see the packets.
func TestEntriesAreKeptAlive(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	families(t, func(t *testing.T, is6 bool) {
		w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
		c, s := w.pair(is6)
		port := c.LocalAddr().(*net.TCPAddr).Port
		left := func() (seconds uint32) {
			for _, f := range w.entries(is6) {
				if int(f.Forward.SrcPort) == port {
					seconds = f.TimeOut
				}
			}
			return seconds
		}
		whole := left()
		family := netlink.InetFamily(map[bool]int{false: unix.AF_INET, true: unix.AF_INET6}[is6])
		w.until("the entry lives 1000 s", func() bool { // an ACK that was delayed has it live longer again
			for _, f := range w.entries(is6) {
				if int(f.Forward.SrcPort) == port {
					f.TimeOut = 1000
					f.Labels = nil
					w.must(w.Node.Run(func() error { return netlink.ConntrackUpdate(netlink.ConntrackTable, family, f) }))
				}
			}
			return left() <= 1000
		})
		w.exchange(c, s, 1)
		if now := left(); now+100 < whole {
			t.Errorf("the entry lives %d s after packets by the shortcut, want %d", now, whole)
		}
	})
}

// A connection from a port that an ended one has just left is established as any other.
func TestPortsAreUsedAgain(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	families(t, func(t *testing.T, is6 bool) {
		w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
		l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, is6), 0).String())
		w.must(err)
		defer l.Close()
		local := netip.AddrPortFrom(w.Address(0, is6), ownPort)
		for range 3 {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			c, err := w.Pods[0].DialFrom(ctx, "tcp", local, l.Addr().String())
			cancel()
			w.must(err)
			s, err := l.Accept()
			w.must(err)
			taken := w.count("taken")
			w.until("the connection takes the shortcut", func() bool {
				w.exchange(c, s, 100_000)
				return w.count("taken") > taken
			})
			w.must(c.Close())
			_ = s.SetDeadline(time.Now().Add(patience))
			_, _ = s.Read(make([]byte, 1))
			w.must(s.Close())
		}
	})
}

// A pod that is no longer watched has its packets through the stack, and its connections go on.
func TestPodsComeAndGo(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	c, s := w.pair(false)
	w.exchange(c, s, 300_000)
	w.must(w.watch.Set(watch.Fixed(w.Watched()[:1]...), nil))
	taken := w.count("taken")
	w.exchange(c, s, 300_000)
	if now := w.count("taken"); now != taken || w.count("not_local") == 0 {
		t.Errorf("%d packets took the shortcut to a pod that is not watched: %v", now-taken, w.status().Counts)
	}
	w.must(w.watch.Set(watch.Fixed(w.Watched()...), nil))
	w.exchange(c, s, 300_000)
	if w.count("taken") == taken {
		t.Error("nothing took the shortcut though the pod is watched again")
	}
}
