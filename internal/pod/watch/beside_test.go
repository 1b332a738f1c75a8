package watch_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// insertAt makes a base chain with one rule.
func (w *world) insertAt(hook *nftables.ChainHook, priority *nftables.ChainPriority, parts ...[]expr.Any) (remove func()) {
	w.Helper()
	table := &nftables.Table{Name: "inserted", Family: nftables.TableFamilyINet}
	onNode := func(do func(conn *nftables.Conn)) {
		w.Helper()
		w.must(w.Node.Run(func() error {
			conn, err := nftables.New()
			if err != nil {
				return err
			}
			do(conn)
			return conn.Flush()
		}))
	}
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	onNode(func(conn *nftables.Conn) {
		conn.AddTable(table)
		c := conn.AddChain(&nftables.Chain{Name: "one", Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: priority})
		conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: all})
	})
	return func() { w.Helper(); onNode(func(conn *nftables.Conn) { conn.DelTable(table) }) }
}

// Rules where iptables has its tables raw and mangle leave alone in both modes, if they do something to the pods' packets.
func TestRulesOfRawAndMangle(t *testing.T) {
	noTrack := []expr.Any{&expr.Notrack{}}
	// Version and length, which are so without options, and another type of service; with the checksum.
	setDSCP := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Immediate{Register: 1, Data: []byte{0x45, 0x28}},
		&expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 2, CsumType: expr.CsumTypeInet, CsumOffset: 10},
	}
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			elsewhere := plain.Destination(netip.MustParseAddr("192.0.2.1"))
			pod := plain.Source(w.Address(0, false))
			for name, c := range map[string]struct {
				hook     *nftables.ChainHook
				priority *nftables.ChainPriority
				rule     [][]expr.Any
				state    string
			}{
				"raw, notrack":                    {nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, [][]expr.Any{pod, noTrack}, "rule"},
				"raw, drop":                       {nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, [][]expr.Any{pod, plain.Drop()}, "rule"},
				"raw, drop of others":             {nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, [][]expr.Any{elsewhere, plain.Drop()}, "taken"},
				"mangle before routing":           {nftables.ChainHookPrerouting, nftables.ChainPriorityMangle, [][]expr.Any{pod, setDSCP}, "rule"},
				"mangle while forwarding":         {nftables.ChainHookForward, nftables.ChainPriorityMangle, [][]expr.Any{pod, setDSCP}, "rule"},
				"mangle after routing":            {nftables.ChainHookPostrouting, nftables.ChainPriorityMangle, [][]expr.Any{pod, setDSCP}, "rule"},
				"mangle of others, after routing": {nftables.ChainHookPostrouting, nftables.ChainPriorityMangle, [][]expr.Any{elsewhere, setDSCP}, "taken"},
				"mangle of what the host sends":   {nftables.ChainHookOutput, nftables.ChainPriorityMangle, [][]expr.Any{setDSCP}, "taken"},
			} {
				w.T = t
				t.Log(name)
				remove := w.insertAt(c.hook, c.priority, c.rule...)
				drop := w.insert(pod, plain.Drop())
				w.becomes(0, "rule", "")
				drop() // from now on all rules have been read since the other one was made
				w.becomes(0, c.state, map[string]string{"rule": "inet inserted one"}[c.state])
				remove()
				w.becomes(0, "taken", "")
			}
		})
	}
}

// A NetworkPolicy is written as rules. In bypass, which asks no rule about new connections, a pod with one is left
// alone; in checked the rules still see each connection begin, so that the policy holds for it, and the pod takes the
// shortcut for the connections that they have let in.
func TestNetworkPolicies(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 3)
			const closed, open = 4711, 4712
			isNew := []expr.Any{
				&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
				&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitNEW), Xor: make([]byte, 4)},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
			}
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				remove := w.insert(plain.Destination(w.Address(1, is6)), plain.Port(unix.IPPROTO_TCP, closed), isNew, plain.Drop())
				defer remove()
				want := map[shortcut.Mode]string{shortcut.Checked: "taken", shortcut.Bypass: "rule"}[mode]
				w.until("the policy is judged", func() bool { state, _ := w.stateOf(w.Address(1, is6)); return state == want })
				c, s := bedtest.ConnectPodsAt(t, w.Pods[0], w.Pods[1], netip.AddrPortFrom(w.Address(1, is6), open))
				taken := w.count("taken")
				w.until("the port that is open is served", func() bool {
					w.exchange(c, s, 1000)
					return mode == shortcut.Bypass || w.count("taken") > taken
				})
				if now := w.count("taken"); mode == shortcut.Bypass && now != taken {
					t.Errorf("%d packets of a pod with a policy took the shortcut", now-taken)
				}
				l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, is6), closed).String())
				w.must(err)
				defer l.Close() //nolint:errcheck // of the test
				if c, err := w.dialBriefly(l.Addr()); err == nil {
					_ = c.Close()
					t.Error("a connection that the policy forbids is established")
				}
			})
		})
	}
}

// dialBriefly tries to connect from the first pod for as long as it takes where nothing is in the way.
func (w *world) dialBriefly(to net.Addr) (c net.Conn, err error) {
	w.must(w.Pods[0].Run(func() error {
		c, err = net.DialTimeout("tcp", to.String(), 300*time.Millisecond)
		return nil
	}))
	return c, err
}

// A policy of IPsec drops or encrypts packets that pass the host. One that comes while a connection runs is obeyed, and
// packets that it is not about are not left alone.
func TestPoliciesOfIPsec(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 4)
			families(t, func(t *testing.T, is6 bool) {
				w := &world{T: t, Bed: w.Bed, rules: w.rules, watch: w.watch}
				c, s := w.pair(is6)
				of := func(pod int) *net.IPNet {
					a := w.Address(pod, is6)
					return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
				}
				policy := &netlink.XfrmPolicy{Src: of(0), Dst: of(1), Dir: netlink.XFRM_DIR_FWD, Action: netlink.XFRM_POLICY_BLOCK}
				err := w.Node.Run(func() error { return netlink.XfrmPolicyAdd(policy) })
				if errors.Is(err, unix.EPROTONOSUPPORT) {
					t.Skip("the kernel has no IPsec")
				}
				w.must(err)
				w.until("both pods are left alone", func() bool {
					a, why := w.stateOf(w.Address(0, is6))
					b, _ := w.stateOf(w.Address(1, is6))
					return a == "rule" && b == "rule" && strings.Contains(why, "IPsec: the policy (dir fwd) from "+w.Address(0, is6).String())
				})
				if state, why := w.stateOf(w.Address(2, is6)); state != "taken" {
					t.Errorf("a pod that the policy is not about is %s: %s", state, why)
				}
				if err := bedtest.Carry(c, s, 1, 100*time.Millisecond); err == nil {
					t.Error("an octet has arrived though a policy blocks it")
				}
				w.must(w.Node.Run(func() error { return netlink.XfrmPolicyDel(policy) }))
				_ = s.SetReadDeadline(time.Now().Add(patience))
				if _, err := s.Read(make([]byte, 1)); err != nil { // lost data is sent again
					t.Fatalf("without the policy: %v", err)
				}
				taken := w.count("taken")
				w.until("the connection takes the shortcut again", func() bool { w.exchange(c, s, 1000); return w.count("taken") > taken })
			})
		})
	}
}

// A pod that drops packets by an XDP program of its own is left alone. A pod that does so at tc need not be:
// redirect_peer passes that program, too.
func TestProgramsInPods(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	c, s := w.pair(false)
	for _, at := range []struct {
		state  string
		kind   ebpf.ProgramType
		drop   int32
		attach func(p *ebpf.Program, ifindex int) (link.Link, error)
	}{
		{"tc", ebpf.XDP, 1, func(p *ebpf.Program, ifindex int) (link.Link, error) { // XDP_DROP
			return link.AttachXDP(link.XDPOptions{Program: p, Interface: ifindex, Flags: link.XDPDriverMode})
		}},
		{"taken", ebpf.SchedCLS, 2, func(p *ebpf.Program, ifindex int) (link.Link, error) { // TC_ACT_SHOT
			return link.AttachTCX(link.TCXOptions{Program: p, Interface: ifindex, Attach: ebpf.AttachTCXIngress})
		}},
	} {
		if at.kind == ebpf.SchedCLS && !hasTCX(t) {
			continue
		}
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: at.kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, at.drop), asm.Return()}})
		w.must(err)
		defer p.Close() //nolint:errcheck // of the test
		var attached link.Link
		w.must(w.Pods[1].Run(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			attached, err = at.attach(p, l.Attrs().Index)
			return err
		}))
		w.becomes(1, at.state, map[string]string{"tc": "XDP program"}[at.state])
		if err := bedtest.Carry(c, s, 1, 100*time.Millisecond); err == nil {
			t.Errorf("%s: an octet has arrived though the pod's own program drops it", at.kind)
		}
		w.must(attached.Close())
		w.becomes(1, "taken", "")
		_ = s.SetReadDeadline(time.Now().Add(patience))
		if _, err := s.Read(make([]byte, 1)); err != nil { // lost data is sent again
			t.Fatalf("%s: without the program: %v", at.kind, err)
		}
		taken := w.count("taken")
		w.until("the connection takes the shortcut again", func() bool { w.exchange(c, s, 1000); return w.count("taken") > taken })
	}
}

// A workload that has its pod's end of the veth at a bridge, as a virtual machine in a pod may have it, is reached by the host's stack: the shortcut leaves
// Ethernet addresses as they are.
func TestBridgesInPods(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	c, s := w.pair(false)
	pod := w.Pods[1]
	w.must(pod.AddBridge("br0"))
	w.must(pod.Run(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		bridge, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, bridge)
	}))
	w.becomes(1, "bridged", "the pod's end of "+w.Interface(1))
	address := netip.PrefixFrom(w.Address(1, false), 32)
	w.must(pod.DeleteAddress("eth0", address))
	w.must(pod.AddAddress("br0", address))
	gateway := netip.MustParsePrefix("169.254.1.1/32")
	w.must(pod.AddRoute(lab.Route{To: gateway, Interface: "br0"}))
	w.must(pod.AddRoute(lab.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: gateway.Addr(), Interface: "br0"}))
	taken := w.count("taken")
	w.exchange(c, s, 100_000)
	if now := w.count("taken"); now != taken {
		t.Errorf("%d packets took the shortcut to a bridge", now-taken)
	}
	w.must(pod.DeleteInterface("br0"))
	w.becomes(1, "taken", "")
}

// A pod with a tap has a virtual machine, no matter how that gets the frames of the pod's interface. A tun is for a
// program's own packets.
func TestVirtualMachinesInPods(t *testing.T) {
	w := newWorld(t, shortcut.Checked, 2)
	for _, c := range []struct {
		mode  netlink.TuntapMode
		state string
	}{{netlink.TUNTAP_MODE_TUN, "taken"}, {netlink.TUNTAP_MODE_TAP, "bridged"}} {
		tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tap0"}, Mode: c.mode, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_NO_PI, Queues: 1, NonPersist: true}
		w.must(w.Pods[1].Run(func() error { return netlink.LinkAdd(tap) }))
		w.must(w.watch.Judge()) // which looks at each interface
		if state, why := w.state(1); state != c.state || c.state == "bridged" && !strings.Contains(why, "the tap tap0") {
			t.Errorf("with an interface of mode %v the pod is %s: %s; want %s", c.mode, state, why, c.state)
		}
		w.must(tap.Fds[0].Close())
		w.becomes(1, "taken", "")
	}
}

// kube-proxy in mode ipvs: conntrack's entries do not say that IPVS translates, so no pod takes the shortcut while it has a service.
func TestServicesOfIPVS(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, 2)
			at := netip.MustParseAddrPort("10.98.0.1:80")
			to := netip.AddrPortFrom(w.Address(1, false), 8080)
			err := w.Node.AddIPVS(unix.IPPROTO_TCP, at, to)
			if errors.Is(err, lab.ErrNoIPVS) {
				t.Skip("the kernel has no IPVS")
			}
			w.must(err)
			w.must(w.Node.SetUp("lo", true))
			w.must(w.Node.AddAddress("lo", netip.PrefixFrom(at.Addr(), 32)))
			w.becomes(0, "rule", "IPVS")
			w.becomes(1, "rule", "IPVS")
			l, err := w.Pods[1].Listen("tcp", to.String())
			w.must(err)
			defer l.Close() //nolint:errcheck // of the test
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			c, err := w.Pods[0].Dial(ctx, "tcp", at.String())
			w.must(err)
			defer c.Close() //nolint:errcheck // of the test
			s, err := l.Accept()
			w.must(err)
			defer s.Close() //nolint:errcheck // of the test
			for range 100 { // conntrack is told of the connection soon, and without IPVS it would take the shortcut
				w.exchange(c, s, 10_000)
			}
			w.must(w.Node.DeleteIPVS(unix.IPPROTO_TCP, at))
			w.becomes(0, "taken", "")
		})
	}
}
