package net

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// session is one TCP connection for a series of requests.
type session struct {
	*lab.Session
	address string
	first   lab.Answer
	// The times of the first and the last answer, for the message of a failure.
	opened, answered time.Time
}

// open makes sessions to both VIPs, count of each.
func (b *bed) open(t *testing.T, count int) []*session {
	t.Helper()
	var all []*session
	for _, vip := range vips {
		for range count {
			one, err := b.Client.OpenSession(within(t, answerTimeout), "tcp", netip.AddrPort{}, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { one.Close() })
			s := &session{Session: one, address: at(vip, 80)}
			if s.first, err = s.get(); err != nil {
				t.Fatal(err)
			}
			all = append(all, s)
		}
	}
	return all
}

// get asks for the server's name, on the session's connection.
func (s *session) get() (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	answer, err := s.Ask(ctx, "/")
	if err == nil {
		s.answered = time.Now()
		if s.opened.IsZero() {
			s.opened = s.answered
		}
	}
	return answer, err
}

// alive returns nil if the session's connection works, with its first backend.
func (b *bed) alive(s *session) error {
	answer, err := s.get()
	if err != nil {
		return fmt.Errorf("session with %s through %s, which it sees as %s, first answered %s ago and last %s ago: %w",
			s.first.Backend, s.address, s.first.Remote, time.Since(s.opened), time.Since(s.answered), err)
	}
	if answer.Remote != s.first.Remote || answer.Backend != s.first.Backend {
		return fmt.Errorf("session with %s through %s, from %s: now %s from %s", s.first.Backend, s.address, s.first.Remote, answer.Backend, answer.Remote)
	}
	return nil
}

// goOn requires that all sessions are alive, and that new ones can be opened.
func (b *bed) goOn(t *testing.T, when string, sessions []*session) {
	t.Helper()
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	for _, vip := range vips {
		if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
			t.Errorf("%s: a new connection: %v", when, err)
		}
		if _, err := b.askUDP(b.Client, at(vip, 53), []byte("who?")); err != nil {
			t.Errorf("%s: a datagram: %v", when, err)
		}
	}
}

// TestKill: no client misses a killed daemon: existing and new connections go on, its successor
// takes over without losing any, and one that stops leaves nothing behind.
func TestKill(t *testing.T) {
	for _, attach := range []string{"native", "generic"} {
		t.Run(attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.TwoArm})
			for _, i := range b.Balancer.Interfaces() {
				if err := b.Balancer.SetOffload(i.Name, map[string]bool{"gro": true}); err != nil { // as on a network card
					t.Fatal(err)
				}
			}
			before := b.traces(t)
			b.write(b.file(settings{attach: attach}))
			b.start()
			eventually(t, 10*time.Second, "announcement", b.announced)
			sessions := b.open(t, 8)
			b.goOn(t, "at first", sessions)
			b.tracesSeen(t, before, attach)
			b.kill()
			b.goOn(t, "after kill -9", sessions)
			s := b.status()
			if !s.Forwarding || s.Daemon != nil || s.Silent == "" {
				t.Errorf("shunt status after kill -9: %+v", s)
			}
			_, text := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
			if !strings.Contains(text, "Still forwarding") || !strings.Contains(text, "There is no daemon") {
				t.Errorf("shunt status does not say that the daemon is dead:\n%s", text)
			}
			sessions = append(sessions, b.open(t, 2)...)
			b.start()
			b.goOn(t, "under the successor", sessions)
			if err := b.daemon.end(syscall.SIGTERM); err != nil {
				t.Errorf("SIGTERM: %v", err)
			}
			b.nothingLeft(t, before)

			b.start()
			b.goOn(t, "started anew", b.open(t, 2))
			b.kill()
			if code, out := b.shunt("detach", "--instance", b.instance); code != 0 {
				t.Errorf("shunt detach after kill -9: exit code %d\n%s", code, out)
			}
			b.nothingLeft(t, before)
			if code, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket); code != 1 || !strings.Contains(out, "not forwarding") {
				t.Errorf("shunt status after detach: exit code %d\n%s", code, out)
			}
		})
	}
}

// announced returns nil once the VIPs are answered for, which SIGTERM has to undo as well.
func (b *bed) announced() error { return b.announces(vips) }

func (b *bed) announces(vips []netip.Addr) error {
	for _, vip := range vips {
		if log := b.daemon.log(); !strings.Contains(log, fmt.Sprintf("address=%s ", vip)) {
			return fmt.Errorf("%s is not answered for yet", vip)
		}
	}
	return nil
}

// traces is everything on the balancer that shunt may change, as text, by its name.
func (b *bed) traces(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, file := range []string{"igmp", "igmp6", "dev_mcast"} {
		err := b.Balancer.Run(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/" + file)
			found[file] = memberships(string(text))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range b.Balancer.Interfaces() {
		link, err := b.Balancer.Netlink().LinkByName(i.Name)
		if err != nil {
			t.Fatal(err)
		}
		found["xdp "+i.Name] = fmt.Sprint(link.Attrs().Xdp != nil && link.Attrs().Xdp.Attached)
		found["promisc "+i.Name] = fmt.Sprint(link.Attrs().Promisc, link.Attrs().Allmulti)
		far, name, err := b.FarEnd(b.Balancer, i.Name)
		if err != nil {
			t.Fatal(err)
		}
		found["offload "+i.Name] = offload(t, b.Balancer, i.Name)
		found["offload of "+i.Peer] = offload(t, far, name)
	}
	found["managed neighbours"] = b.managed(t)
	found["devices"], found["rules"] = b.devicesAndRules(t)
	for _, family := range []string{"ipv4", "ipv6"} {
		name := "net/" + family + "/conf/lo/forwarding"
		err := b.Balancer.Run(func() error {
			text, err := os.ReadFile("/proc/sys/" + name)
			found[name] = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// devicesAndRules are the names of the network devices, and the routing rules.
func (b *bed) devicesAndRules(t *testing.T) (devices, rules string) {
	t.Helper()
	links, err := b.Balancer.Netlink().LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		devices += link.Attrs().Name + "\n"
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := b.Balancer.Netlink().RuleList(family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			rules += fmt.Sprintf("%d: mark %#x table %d\n", r.Priority, r.Mark, r.Table)
		}
	}
	return devices, rules
}

// memberships is a listing of multicast groups without the fields that the kernel's own reports
// change from one moment to the next: flags, timers and reporters, behind the count of users.
func memberships(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 6: // igmp6: index, name, group, users, flags, timer
			fields = fields[:4]
		case len(fields) == 4 && strings.Contains(fields[2], ":"): // igmp: group, users, timer, reporter
			fields = fields[:2]
		}
		lines = append(lines, strings.Join(fields, " "))
	}
	return strings.Join(lines, "\n")
}

// tracesSeen shows that traces would notice any state that a stopped daemon might leave.
func (b *bed) tracesSeen(t *testing.T, before map[string]string, attach string) {
	t.Helper()
	now := b.traces(t)
	want := []string{"igmp6", "xdp eth0", "xdp eth1", "managed neighbours", "net/ipv4/conf/lo/forwarding", "net/ipv6/conf/lo/forwarding"}
	if attach == "generic" {
		want = append(want, "offload eth0", "offload eth1", "offload of client/eth0", "offload of switch/lb")
	}
	for _, what := range want {
		if now[what] == before[what] {
			t.Errorf("%s is as before while shunt runs, so the test would not notice if it stayed: %q", what, now[what])
		}
	}
}

// offload lists the features that are on, as text.
func offload(t *testing.T, h *lab.Host, iface string) string {
	t.Helper()
	features, err := h.Offload(iface)
	if err != nil {
		t.Fatal(err)
	}
	on := slices.DeleteFunc(slices.Sorted(maps.Keys(features)), func(name string) bool { return !features[name] })
	return strings.Join(on, "\n")
}

// managed are the neighbour entries that the kernel was asked to keep for ever.
func (b *bed) managed(t *testing.T) string {
	t.Helper()
	var found []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		entries, err := b.Balancer.Netlink().NeighList(0, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range entries {
			if n.Flags&unix.NTF_EXT_LEARNED != 0 || n.FlagsExt != 0 || n.State&unix.NUD_PERMANENT != 0 {
				found = append(found, fmt.Sprintf("%s flags %x %x state %x", n.IP, n.Flags, n.FlagsExt, n.State))
			}
		}
	}
	slices.Sort(found)
	return strings.Join(found, "\n")
}

// nothingLeft compares the traces with the state before shunt was first started.
func (b *bed) nothingLeft(t *testing.T, before map[string]string) {
	t.Helper()
	if difference := cmp.Diff(before, b.traces(t)); difference != "" {
		t.Errorf("the balancer is not as it was before (-before +now):\n%s", difference)
	}
	if _, err := os.Stat("/sys/fs/bpf/shunt/" + b.instance); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
	left, _ := filepath.Glob("/run/shunt/" + b.instance + "*")
	if _, err := os.Stat(b.socket); err == nil && b.daemon != nil {
		left = append(left, b.socket) // a killed daemon cannot remove it
	}
	if len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}
}

// TestSecondDaemon: a second daemon of the same instance names the first and leaves it alone.
func TestSecondDaemon(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{}))
	b.start()
	sessions := b.open(t, 1)
	second := b.launch()
	select {
	case <-second.ended:
	case <-time.After(patience * 10 * time.Second):
		_ = second.end(syscall.SIGKILL)
		t.Fatal("the second daemon runs")
	}
	first := fmt.Sprint("process ", b.daemon.command.Process.Pid)
	if code := second.command.ProcessState.ExitCode(); code != 1 || !strings.Contains(second.log(), first) {
		t.Errorf("the second daemon: exit code %d, want 1 and the words %q:\n%s", code, first, second.log())
	}
	if code, out := b.shunt("detach", "--instance", b.instance); code != 1 || !strings.Contains(out, first) {
		t.Errorf("shunt detach while a daemon runs: exit code %d, want 1 and the words %q:\n%s", code, first, out)
	}
	third := b.launch() // the lock must survive a refused daemon
	<-third.ended
	if !strings.Contains(third.log(), first) {
		t.Errorf("the third daemon does not name the first:\n%s", third.log())
	}
	b.goOn(t, "after the refused ones", sessions)
}

// quickNeighbours makes the balancer's kernel doubt a next hop after a second instead of half a
// minute.
func (b *bed) quickNeighbours(t *testing.T) {
	t.Helper()
	for _, i := range b.Balancer.Interfaces() {
		for _, f := range []string{"ipv4", "ipv6"} {
			for name, value := range map[string]string{"base_reachable_time_ms": "1000", "delay_first_probe_time": "1", "interval_probe_time_ms": "1000"} {
				if err := b.Balancer.SetSysctl("net."+f+".neigh."+i.Name+"."+name, value); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestBackendChangesItsMAC: a backend that comes back with another MAC address is found again,
// with a daemon and without one, because the kernel keeps the next hop fresh and the program asks
// it.
func TestBackendChangesItsMAC(t *testing.T) {
	for _, layout := range []lab.Layout{lab.TwoArm, lab.OneArm} {
		t.Run(string(layout), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: layout, Backends: 1})
			b.quickNeighbours(t)
			b.write(b.file(settings{}))
			b.start()
			sessions := b.open(t, 1)
			b.swapMAC(t, 0x51)
			b.recovers(t, "with the daemon")
			b.goOn(t, "after a change of MAC", sessions)
			b.kill()
			b.swapMAC(t, 0x52)
			b.recovers(t, "after kill -9")
			b.goOn(t, "after a change of MAC with no daemon", sessions)
			if b.status().Reasons["fib_fallback"].Packets == 0 {
				t.Error("fib_fallback counts nothing, yet the daemon was dead")
			}
		})
	}
}

func (b *bed) swapMAC(t *testing.T, last byte) {
	t.Helper()
	mac := net.HardwareAddr{2, 0, 0, 0, 0xaa, last}
	if err := b.Backends[0].SetMAC("eth0", mac); err != nil {
		t.Fatal(err)
	}
	// The balancer must not have learned of it by accident: that would prove nothing.
	if err := b.tryUDP(at(lab.VIP4, 53)); err == nil {
		t.Log("the first datagram after the change was answered already")
	}
}

// tryUDP gives up soon, so that repeated tries show when it begins to work.
func (b *bed) tryUDP(address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err := b.Client.AskUDP(ctx, address, []byte("who?"))
	return err
}

func (b *bed) recovers(t *testing.T, when string) {
	t.Helper()
	for _, vip := range vips {
		begin := time.Now()
		eventually(t, 30*time.Second, "answers over "+family(vip)+" "+when, func() error { return b.tryUDP(at(vip, 53)) })
		t.Logf("%s, %s: recovered after another %s", when, family(vip), time.Since(begin).Round(10*time.Millisecond))
	}
}

// TestStartWithoutRoute: a start without a route to the backends loses no connection of NAT: the
// source address of packets to them stays, until there is a route that determines it.
func TestStartWithoutRoute(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{attach: "native"}))
	b.start()
	sessions := b.open(t, 8)
	b.kill()
	routes := b.Balancer.Netlink()
	var taken []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := routes.RouteList(nil, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if r.Dst == nil || !slices.ContainsFunc(both(b.Backends[0]), func(a netip.Addr) bool { return r.Dst.Contains(a.AsSlice()) }) {
				continue
			}
			if err := routes.RouteDel(&r); err != nil {
				t.Fatal(err)
			}
			taken = append(taken, r)
		}
	}
	if len(taken) != 2 {
		t.Fatalf("want a route to the backends for each family, took away %v", taken)
	}
	b.start()
	for _, s := range sessions {
		if err := b.alive(s); err != nil {
			t.Errorf("while there is no route: %v", err)
		}
	}
	for _, r := range taken {
		if err := routes.RouteAdd(&r); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 10*time.Second, "backends", func() error {
		if c := b.status().condition("neighbour_unresolved"); c != "" {
			return errors.New(c)
		}
		return nil
	})
	b.goOn(t, "with the routes again", sessions)
}
