package watch_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// machine is a virtual machine to the node: a tap, whose frames a monitor hands to the machine's own network card, and
// back. Its kernel is this one, in a namespace of its own; the card is a tap, too.
//
//	node tap0  10.70.0.1  2001:db8:70::1 ── monitor ── 10.70.0.2  2001:db8:70::2  tap0 machine
type machine struct {
	*lab.Host
	taps [2]*os.File // the node's, the machine's
}

const tapName = "tap0"

func machineAddress(is6 bool) netip.Addr {
	if is6 {
		return netip.MustParseAddr("2001:db8:70::2")
	}
	return netip.MustParseAddr("10.70.0.2")
}

// newMachine starts one, until the test ends.
func newMachine(w *world) *machine {
	w.Helper()
	host, err := w.Lab.AddHost("machine")
	w.must(err)
	m := &machine{Host: host}
	for i, of := range []*lab.Host{w.Node, host} {
		tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: tapName}, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_NO_PI, Queues: 1, NonPersist: true}
		w.must(of.Run(func() error { return netlink.LinkAdd(tap) }))
		m.taps[i] = tap.Fds[0]
		w.must(errors.Join(of.SetSysctl("net.ipv6.conf."+tapName+".accept_dad", "0"), of.SetSysctl("net.ipv6.conf."+tapName+".disable_ipv6", "0"), of.SetUp(tapName, true),
			of.AddAddress(tapName, netip.MustParsePrefix([]string{"10.70.0.1/24", "10.70.0.2/24"}[i])), of.AddAddress(tapName, netip.MustParsePrefix([]string{"2001:db8:70::1/64", "2001:db8:70::2/64"}[i]))))
	}
	for is6, via := range map[bool]string{false: "10.70.0.1", true: "2001:db8:70::1"} {
		w.must(host.AddRoute(lab.Route{To: w.Network(is6), Via: netip.MustParseAddr(via), Interface: tapName}))
	}
	var monitor sync.WaitGroup
	for i := range m.taps {
		monitor.Go(func() { m.copy(i, 1-i) })
	}
	w.Cleanup(func() {
		w.must(errors.Join(m.taps[0].Close(), m.taps[1].Close()))
		monitor.Wait()
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	w.must(w.Lab.Ready(ctx))
	return m
}

// copy hands frames from one tap to the other, until they are closed.
func (m *machine) copy(from, to int) {
	frame := make([]byte, 1<<16)
	for {
		n, err := m.taps[from].Read(frame)
		if errors.Is(err, unix.EIO) || errors.Is(err, unix.EBADFD) { // the link is down
			time.Sleep(time.Millisecond)
			continue
		}
		if err != nil {
			return
		}
		_, _ = m.taps[to].Write(frame[:n]) // a frame is lost, as on a cable
	}
}

// Packets of pods to a port of a virtual machine go to its tap, and the answers to the pod, past the rules. Frames have full
// checksums and at most one MTU there, since a machine behind a tap has promised no more.
func TestSteeredToAVirtualMachine(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			b, all := bedtest.New(t, 1)
			s := &steered{world: &world{T: t, Bed: b, rules: all}}
			s.server.Host = newMachine(s.world).Host
			for _, is6 := range []bool{false, true} {
				to := machineAddress(is6)
				s.steers = append(s.steers, watch.Steer{Name: "machine", Interface: tapName, Network: netip.PrefixFrom(to, to.BitLen()), NextHop: to,
					Ports: []watch.Port{{Protocol: unix.IPPROTO_UDP, Number: servicePort}, {Protocol: unix.IPPROTO_TCP, Number: servicePort}}})
			}
			var err error
			s.watch, err = watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.Watched()...), Steers: s.steers, In: b.Node.Run})
			s.must(err)
			t.Cleanup(func() { s.must(s.watch.Close()) })
			for _, port := range []uint16{servicePort, servicePort + 1} { // the other one last, as the end of its connections is seen late
				families(t, func(t *testing.T, is6 bool) {
					s.is(is6, "taken")
					seen, unwatched := s.seen(), s.unwatched(is6)
					n := s.taken(is6, func() {
						c, o := bedtest.ConnectPodsAt(t, s.Pods[0], s.server.Host, netip.AddrPortFrom(machineAddress(is6), port))
						s.exchange(c, o, 1_000_000)
						if port == servicePort {
							s.askAt(t, machineAddress(is6), 0)
						}
					})
					forwarded := s.seen() - seen
					if port == servicePort { // the monitor may keep a slow machine from judging for a second
						forwarded -= min(forwarded, s.unwatched(is6)-unwatched)
					}
					t.Logf("port %d: %d packets were steered, the rules have seen %d", port, n, forwarded)
					if port == servicePort && (n < 20 || forwarded > 0) || port != servicePort && (n > 0 || forwarded == 0) {
						t.Errorf("port %d: %d packets were steered, the rules have seen %d; %v", port, n, forwarded, s.steer(is6).Counts)
					}
				})
			}
			// The machine ends: its tap loses the carrier, and comes back with the next one.
			s.must(s.Node.SetUp(tapName, false))
			families(t, func(t *testing.T, is6 bool) { s.is(is6, "down") })
		})
	}
}
