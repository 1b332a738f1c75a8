package daemon_test

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Alone in the file, the product finds the pods, counts for each of them, and follows pods that come and go.
func TestPodsAreFoundAndCounted(t *testing.T) {
	w := newWorld(t, 2, "accelerate: {}")
	w.run()
	w.are("taken", "taken")
	c, s := w.connect(false)
	w.settle(c, s)
	w.Must(bedtest.Exchange(c, s, 300_000))
	st := w.Is("both pods have counted", func(st *shuntv1.GetStatusResponse) bool {
		return find(st, "veth1").Counts["taken"].GetPackets() > 0 && find(st, "veth2").Counts["taken"].GetPackets() > 0
	})
	if sum := find(st, "veth1").Counts["taken"].Packets + find(st, "veth2").Counts["taken"].Packets; sum != count(st, "taken") || count(st, "handshake") == 0 {
		t.Errorf("the pods have %d packets taken, and all have %v", sum, st.Acceleration.Counts)
	}
	if p := st.Daemon.Products; len(p) != 1 || p[0].Does != "accelerating 2 of 2 pods, checked" {
		t.Errorf("the products are %v", p)
	}
	for words, want := range map[string]string{
		"accelerate list":               "10.244.1.1 2001:db8:244:1::1",
		"accelerate show veth2":         "The program is at its veth by " + find(st, "veth2").Attached,
		"accelerate show veth1 -o json": `"handshake"`,
		"status":                        "MOST LEFT FOR",
		"status -o json":                `"same_node": true`,
	} {
		if out := w.command(words); !strings.Contains(out, want) {
			t.Errorf("shunt %s says\n%s\nwithout %q", words, out, want)
		}
	}
	for _, want := range []string{`shunt_accelerate_addresses{state="taken"} 4`, `shunt_accelerate_pod_packets_total{interface="veth1",reason="taken"} `,
		`shunt_accelerate_packets_total{reason="handshake"} `, `shunt_accelerate_bytes_total{reason="taken"} `} {
		if text := w.Scrape(); !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s:\n%s", want, text)
		}
	}

	taken := count(st, "taken")
	w.Must(w.Node.DeleteInterface("veth2"))
	w.Is("the pod is gone, and what it has sent is still counted", func(st *shuntv1.GetStatusResponse) bool {
		return find(st, "veth2") == nil && count(st, "taken") >= taken
	})
	pod, err := w.Lab.AddHost("later")
	w.Must(err)
	w.Must(w.Lab.Connect(lab.End{Host: w.Node, Interface: "veth7", IPv4: netip.MustParsePrefix("169.254.1.1/32"), IPv6: netip.MustParsePrefix("fd00::1/128")},
		lab.End{Host: pod, Interface: "eth0", IPv4: netip.MustParsePrefix("10.244.1.7/32"), IPv6: netip.MustParsePrefix("2001:db8:244:1::7/128")}, lab.Cable{}))
	w.Is("it is a pod once a route leads to it", func(st *shuntv1.GetStatusResponse) bool {
		return state(st, "veth7") == "no_route" && nodetest.Condition(st, "pod_left_alone", "veth7") != ""
	})
	w.Must(w.Node.AddRoute(lab.Route{To: netip.MustParsePrefix("10.244.1.7/32"), Interface: "veth7"}))
	w.Is("the pod has come", func(st *shuntv1.GetStatusResponse) bool {
		return state(st, "veth7") == "taken" && nodetest.Condition(st, "pod_left_alone", "veth7") == ""
	})
}

// However the daemon ends, connections go on through the host's stack, though a rule drops invalid packets; and take
// the shortcut again when the daemon is back.
func TestConnectionsOutliveTheDaemon(t *testing.T) {
	for _, mode := range []string{"checked", "bypass"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, 2, "accelerate: {mode: "+mode+"}")
			w.run()
			w.are("taken", "taken")
			c4, s4 := w.connect(false)
			c6, s6 := w.connect(true)
			for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL, syscall.SIGINT} {
				w.settle(c4, s4)
				w.settle(c6, s6)
				w.Must(bedtest.Exchange(c4, s4, 300_000))
				w.Must(bedtest.Exchange(c6, s6, 300_000))
				streamed := make(chan error, 1)
				go func() { streamed <- bedtest.Exchange(c6, s6, stream()) }() // it is under way when the daemon ends
				w.Must(w.Process.Process.Signal(signal))
				<-w.Process.Ended
				if err := <-streamed; err != nil {
					t.Errorf("after %s the stream stops: %v", signal, err)
				}
				w.leave(c4, s4)
				w.Must(bedtest.Exchange(c4, s4, 300_000))
				w.run()
				w.are("taken", "taken")
			}
		})
	}
}

// leave exchanges octets until the host forwards them: the daemon is gone or stopped. A program that a link holds ends with its
// process; one in a filter (before Linux 6.6) stays, and takes nothing after a second without the daemon.
func (w *world) leave(c, s net.Conn) {
	w.Helper()
	began := time.Now()
	for before := w.seen(); w.seen() == before; {
		if err := bedtest.Exchange(c, s, 10_000); err != nil {
			w.Fatalf("without the daemon the connection stops: %v", err)
		}
		if time.Since(began) > nodetest.Patience {
			w.Fatalf("%s after the daemon the host has forwarded nothing", nodetest.Patience)
		}
	}
	w.Logf("%s after the daemon its shortcut has ended", time.Since(began).Round(10*time.Millisecond))
}

func (w *world) seen() (packets uint64) {
	w.Helper()
	w.onNode(func() (err error) {
		packets, err = w.rules.Seen()
		return err
	})
	return packets
}

// Nobody takes the shortcut while the daemon cannot see new rules.
func TestNobodyWatches(t *testing.T) {
	w := newWorld(t, 2, "accelerate: {mode: checked}")
	w.run()
	w.are("taken", "taken")
	c, s := w.connect(false)
	w.settle(c, s)
	w.Must(w.Process.Process.Signal(syscall.SIGSTOP))
	w.leave(c, s)
	w.onNode(func() error {
		_, err := w.rules.Insert(plain.Destination(w.Address(1, false)), plain.Drop())
		return err
	})
	_ = s.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	_, err := c.Write([]byte{1})
	w.Must(err)
	if _, err := s.Read(make([]byte, 1)); err == nil {
		t.Error("an octet has arrived though a rule drops it")
	}
	w.Must(w.Process.Process.Signal(syscall.SIGCONT))
	st := w.Is("the rule is seen", func(st *shuntv1.GetStatusResponse) bool {
		return find(st, "veth1").Addresses[0].State == "rule" && find(st, "veth2").Addresses[0].State == "rule"
	})
	if count(st, "unwatched") == 0 {
		t.Errorf("nothing was counted as unwatched: %v", st.Acceleration.Counts)
	}
}

// A reload changes only the differing settings, and breaks no connection.
func TestReload(t *testing.T) {
	w := newWorld(t, 3, "accelerate: {}")
	w.run()
	w.are("taken", "taken", "taken")
	c, s := w.connect(false)
	w.settle(c, s)
	attached := w.programs("veth1")
	w.Write("accelerate: {interfaces: [veth1, \"veth?\"]}")
	if text := w.Reload(); text != "~ accelerate interfaces: all -> veth1, veth?" {
		t.Errorf("the difference is %q", text)
	}
	w.Write("accelerate: {interfaces: [veth1, veth2, veth9]}")
	w.Reload()
	st := w.Is("the third is no pod any more", func(st *shuntv1.GetStatusResponse) bool {
		return find(st, "veth3") == nil && nodetest.Condition(st, "pod_left_alone", "veth9") != ""
	})
	if state(st, "veth1") != "taken" || state(st, "veth9") != "down" || w.programs("veth1") != attached || w.programs("veth3") != "" {
		t.Errorf("veth1 has the program %s and had %s; veth3 has %q; the pods are %v", w.programs("veth1"), attached, w.programs("veth3"), st.Acceleration)
	}
	w.Must(bedtest.Exchange(c, s, 300_000))
	for _, change := range []string{"{mode: bypass}", "{same_node: false}", "{mode: checked}", "{interfaces: \"cali*\"}", "{}"} {
		before := count(w.Is("it answers", func(*shuntv1.GetStatusResponse) bool { return true }), "taken")
		w.Write("accelerate: " + change)
		if text := w.Reload(); !strings.HasPrefix(text, "~ accelerate ") {
			t.Errorf("the difference to %s is %q", change, text)
		}
		w.Must(bedtest.Exchange(c, s, 300_000))
		st, err := w.Ask()
		w.Must(err)
		if count(st, "taken") < before {
			t.Errorf("after %s %d packets are counted, and %d were before", change, count(st, "taken"), before)
		}
		if change == "{interfaces: \"cali*\"}" && nodetest.Condition(st, "pods_missing", "accelerate") == "" {
			t.Errorf("there is no pod, and the conditions are %v", st.Daemon.Conditions)
		}
	}
	w.settle(c, s)
	w.Write("accelerate: {interfaces: v/1}")
	r, err := w.API.Reload(t.Context())
	w.Must(err)
	if r.Applied || len(r.Faults) != 1 {
		t.Errorf("a bad file: %v", r)
	}
	w.settle(c, s)
}

// programs are the programs at the tc ingress of an interface; empty: none.
func (w *world) programs(iface string) (found string) {
	w.Helper()
	st, err := w.Ask()
	w.Must(err)
	p := find(st, iface)
	if p == nil {
		return ""
	}
	return fmt.Sprint(p.Attached, p.Counts["handshake"].GetPackets())
}

// A request of the user that cannot be met is a condition that names it.
func TestWhatIsLeftAloneIsTold(t *testing.T) {
	w := newWorld(t, 2, "accelerate: {interfaces: [veth1, veth2, br0]}")
	w.run()
	w.Is("one is missing", func(st *shuntv1.GetStatusResponse) bool {
		return state(st, "veth1") == "taken" && strings.Contains(nodetest.Condition(st, "pod_left_alone", "br0"), "left to the host's stack: down: ")
	})
	w.onNode(func() error { return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}) })
	w.Is("it is no veth", func(st *shuntv1.GetStatusResponse) bool { return state(st, "br0") == "not_veth" })
	w.onNode(func() error { return netlink.LinkSetMaster(w.link("veth2"), w.link("br0")) })
	st := w.Is("a pod is bridged", func(st *shuntv1.GetStatusResponse) bool {
		return state(st, "veth2") == "bridged" && nodetest.Condition(st, "pod_left_alone", "veth2") != ""
	})
	if text := nodetest.Condition(st, "pod_left_alone", "veth2"); !strings.HasPrefix(text, "the pod behind veth2 (10.244.1.2) is left to the host's stack: bridged: ") {
		t.Error(text)
	}
	w.onNode(func() error { return netlink.LinkSetNoMaster(w.link("veth2")) })
	w.Is("it is not any more", func(st *shuntv1.GetStatusResponse) bool {
		return state(st, "veth2") == "taken" && nodetest.Condition(st, "pod_left_alone", "veth2") == ""
	})

	c, s := w.connect(false)
	w.settle(c, s)
	limit := unix.Rlimit{}
	w.Must(unix.Prlimit(w.Process.Process.Pid, unix.RLIMIT_NOFILE, nil, &limit))
	w.Must(unix.Prlimit(w.Process.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}, nil)) // it can open nothing
	w.onNode(func() error { return netlink.LinkDel(w.link("br0")) })                                           // so that it looks for pods
	for end := time.Now().Add(nodetest.Patience); !strings.Contains(w.Process.Log(), "pods_unjudged"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("nothing was said\n%s", w.Process.Log())
		}
	}
	for end, before := time.Now().Add(nodetest.Patience), w.seen(); w.seen() == before; {
		w.Must(bedtest.Exchange(c, s, 10))
		if time.Now().After(end) {
			t.Fatal("pods are not judged, and a connection still takes the shortcut")
		}
	}
	w.Must(unix.Prlimit(w.Process.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil))
	w.Is("they are judged again", func(st *shuntv1.GetStatusResponse) bool {
		return nodetest.Condition(st, "pods_unjudged", "accelerate") == ""
	})
	w.settle(c, s)
}

// The product runs beside the balancer and the UDP path.
func TestBesideOthers(t *testing.T) {
	w := newWorld(t, 2, "accelerate: {}")
	w.Write(`interfaces: [{name: lb0}]
services: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 192.0.2.20}]}]
udp: [{name: feed, interface: udp0, address: 192.0.2.11, port: 5000, allow: {user: root}}]
udp_socket: ` + filepath.Join(filepath.Dir(w.Config()), "udp.sock") + `
accelerate: {interfaces: "veth*"}`)
	w.onNode(func() error {
		for _, name := range []string{"lb0", "udp0"} {
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: 1}, PeerName: name + "p"}); err != nil {
				return err
			}
		}
		return nil
	})
	w.run()
	w.are("taken", "taken")
	c, s := w.connect(false)
	w.settle(c, s)
	if st, err := w.Ask(); err != nil || len(st.Daemon.Products) != 3 || len(st.Services) != 1 || len(st.Udp) != 1 {
		t.Errorf("%v, %v", st, err)
	}
}
