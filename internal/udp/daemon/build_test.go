package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// read is a file's settings and faults.
func read(t *testing.T, text string) (*parsed, *config.Contents) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.NewFormat(Product().Part).Read(path)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := c.Settings[Name].(*parsed)
	return p, c
}

// said are the messages about a file, without its name.
func said(c *config.Contents) (all []string) {
	for _, f := range c.Faults.Sorted() {
		_, text, _ := strings.Cut(f.String(), "a.yaml:")
		all = append(all, text)
	}
	return all
}

func TestSettings(t *testing.T) {
	p, c := read(t, `
udp:
  - {name: feed, interface: eth0, address: [192.0.2.10, "2001:db8::10", 239.1.2.3], port: [5000, 5001], queues: [0, 2], mode: copy,
     max_queue_delay: 100us, expected_rate: 2500k/s, tx: true, timestamps: true, kill: true, wait: spin, on_no_socket: drop, cpu: [3, 5], busy_poll: 200us, allow: {user: [root, 1000], group: 7, cgroup: /a}}
  - {name: plain, interface: eth1, address: 192.0.2.10, port: 5000, allow: {user: root}}
`)
	if all := said(c); len(all) > 0 {
		t.Fatal(all)
	}
	feed, missing := p.entries[0].resolve()
	zero, thousand, seven := uint32(0), uint32(1000), uint32(7)
	rules := []broker.Rule{{User: &zero, Group: &seven, Cgroup: "/a"}, {User: &thousand, Group: &seven, Cgroup: "/a"}}
	if diff := cmp.Diff(rules, feed.Allow); diff != "" || missing != nil {
		t.Errorf("the rules, and %v is missing (-want +got):\n%s", missing, diff)
	}
	if feed.RingSize != 128 || !feed.Transmit || !feed.Kill || feed.Mode != xsk.Copy || feed.BusyPoll != 200*time.Microsecond || !feed.Drop || feed.Wait != proto.WaitSpin || !cmp.Equal(feed.CPUs, []int{3, 5}) || !cmp.Equal(feed.Queues, []int{0, 2}) ||
		fmt.Sprint(feed.Addresses) != "[192.0.2.10:5000 192.0.2.10:5001 [2001:db8::10]:5000 [2001:db8::10]:5001 239.1.2.3:5000 239.1.2.3:5001]" {
		t.Errorf("%+v", feed)
	}
	plain := p.entries[1]
	want := broker.Offer{Name: "plain", Interface: "eth1", Addresses: plain.offer.Addresses, Mode: xsk.Auto, RingSize: 256}
	if !reflect.DeepEqual(want, plain.offer) || plain.delay != 300*time.Microsecond || plain.rate != 1_000_000 || p.socket != "/run/shunt/udp.sock" {
		t.Errorf("with the defaults: %+v", plain)
	}
	const text = "interface eth0, queues 0,2, 192.0.2.10:5000 192.0.2.10:5001 [2001:db8::10]:5000 [2001:db8::10]:5001 239.1.2.3:5000 239.1.2.3:5001, " +
		"mode copy, delay 100µs at 2500k/s, tx, timestamps, on CPUs 3,5, busy polling 200µs, waiting: spin, dropping without a socket, kill, for users root 1000, for groups 7, for cgroups /a"
	if got := p.list()[1]; got.Key != "udp feed" || got.Value != text {
		t.Errorf("the setting is %+v", got)
	}
	if counts, lines := p.describe(); counts != "2 UDP leases on 2 interfaces" || lines[0] != "UDP lease feed: rings for 128 datagrams each, which last at most 51µs at 2500k/s." {
		t.Errorf("%q, %q", counts, lines)
	}
}

// TestFaults has one wrong thing each.
func TestFaults(t *testing.T) {
	const entry = "udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, allow: {user: root}%s}]"
	const two = "udp:\n- {name: a, interface: eth0, address: 192.0.2.10, port: 5000, allow: {user: root}}\n- {%s, allow: {user: root}}"
	with := func(more string) string { return fmt.Sprintf(entry, ", "+more) }
	second := func(more string) string { return fmt.Sprintf(two, more) }
	for text, want := range map[string]string{
		with("queues: dedicated"):              "1:99: error: udp[0].queues: queues dedicated is not supported yet; write the numbers of the queues, and steer the port to them: `ethtool -N INTERFACE flow-type udp4 dst-port PORT action QUEUE`",
		with("queues: al"):                     `1:99: error: udp[0].queues: found text "al", want all, or the numbers of receive queues; did you mean "all"?`,
		with("queues: [64]"):                   "1:100: error: udp[0].queues[0]: queue 64 is out of range: queues 0 to 63 can have sockets; set fewer queues with `ethtool -L`",
		with("queues: [1, 1]"):                 "1:103: error: udp[0].queues[1]: queue 1 is in the list twice; remove one of them",
		with("queues: [all, 1]"):               "1:100: error: udp[0].queues[0]: queues are all, or numbers; write queues: all",
		with("wait: spinn"):                    `1:97: error: udp[0].wait: unknown wait "spinn", want spin, adaptive or sleep; did you mean "spin"?`,
		with("cpu: 8192"):                      "1:96: error: udp[0].cpu: cpu 8192 is out of range, want 0 to 8191",
		with("queues: 1, cpu: [2, 3]"):         "1:111: error: udp[0].cpu[1]: there are 2 CPUs for 1 queue; name one CPU for each queue, or one for all",
		with("busy_poll: 5us"):                 "1:102: error: udp[0].busy_poll: busy_poll 5us is out of range, want 10µs to 10ms",
		with("mode: generic, busy_poll: 50us"): "1:117: error: udp[0].busy_poll: mode generic has no queue of the driver that the program could poll; remove busy_poll, or use another mode",
		with("on_no_socket: reject"):           `1:105: error: udp[0].on_no_socket: unknown on_no_socket "reject", want pass or drop`,
		with("expected_rate: 1G"):              `1:106: error: udp[0].expected_rate: found text "1G", want datagrams per second such as 250k or 1M; the units are k (thousand) and M (million): write for example 250k`,
		with("expected_rate: 2000M"):           "1:106: error: udp[0].expected_rate: expected_rate 2000M is out of range, want 1 to 1000M",
		with("max_queue_delay: 100"):           "1:108: error: udp[0].max_queue_delay: found the number 100, want a duration with a unit; if seconds are meant, write 100s",
		with("max_queue_delay: 10us"):          "1:108: warning: udp[0].max_queue_delay: a ring has room for at least 64 datagrams, which take 64µs at 1M/s: longer than 10µs",
		with("max_queue_delay: 1s"):            "1:108: warning: udp[0].max_queue_delay: a ring has room for at most 65536 datagrams, which take 65.536ms at 1M/s",
		with("mode: zerocopy"):                 `1:97: error: udp[0].mode: unknown mode "zerocopy", want auto, zero-copy, copy or generic; did you mean "zero-copy"?`,
		with("ring: 64"):                       `1:91: error: udp[0].ring: unknown key "ring"; the keys here are name, interface, queues, address, port, mode, max_queue_delay, expected_rate, tx, timestamps, kill, on_no_socket, allow, wait, cpu and busy_poll`,
		"udp_socket: /a":                       `1:13: error: udp_socket: it has no effect without the key "udp"; add udp, or remove this key`,
		"udp: [{name: feed, interface: e/0, address: 192.0.2.10, port: 5000, allow: {user: root}}]":                                                           `1:31: error: udp[0].interface: "e/0" cannot be an interface's name`,
		"udp: [{name: feed, interface: eth0, address: 127.0.0.1, port: 5000, allow: {user: root}}]":                                                           "1:46: error: udp[0].address: 127.0.0.1 is a loopback address: packets to it never cross a network; write an address of a network",
		"udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17], allow: {user: 1}}]":                      "1:64: error: udp[0].port: this makes 17 combinations of address and port, and an entry has up to 16; split it into several entries",
		"udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, allow: {}}]":                                                                    "1:77: error: udp[0].allow: allow is empty, so no program could have the lease; write for example allow: {user: feed}",
		"udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 5000}]":                                                                               "1:7: error: udp[0]: key \"allow\" is missing; add for example allow: {user: feed}",
		"udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, allow: {cgroup: a}}]":                                                           `1:86: error: udp[0].allow.cgroup: cgroup "a" does not begin with /; write it as in /proc/PID/cgroup: /a`,
		"udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, allow: {user: 4294967295}}]":                                                    "1:84: error: udp[0].allow.user: 4294967295 is no user and no group: the kernel uses this number for \"none\"",
		second("name: a, interface: eth0, address: 192.0.2.11, port: 5000"):                                                                                   `3:10: error: udp[1].name: lease "a" is in the list twice, first at a.yaml:2:10; give one of them another name`,
		second("name: b, interface: eth0, address: 192.0.2.10, port: 5000"):                                                                                   `3:57: error: udp[1].port: 192.0.2.10:5000 is also in lease "a", at a.yaml:2:57; a datagram can belong to one lease only: give the leases different ports or addresses`,
		second("name: b, interface: eth0, address: 192.0.2.11, port: 5000, mode: generic"):                                                                    `3:69: error: udp[1].mode: mode generic of lease "b" on interface eth0 does not go with mode auto of lease "a", at a.yaml:2:24: an interface has one program; give all leases of the interface mode generic, or none`,
		strings.Replace(second("name: b, interface: eth0, address: 192.0.2.11, port: 5000, busy_poll: 1ms"), "user: root}", "user: root}, busy_poll: 2ms", 1): `3:74: error: udp[1].busy_poll: busy_poll 1ms of lease "b" on interface eth0 does not go with 2ms of lease "a", at a.yaml:2:95: the time is a setting of the interface; give them the same time`,
	} {
		_, c := read(t, text)
		all := said(c)
		if len(all) != 1 || strings.ReplaceAll(all[0], filepath.Dir(c.Faults.Sorted()[0].File)+"/", "") != want {
			t.Errorf("%s\nhas %q\nwant %q", text, all, want)
		}
	}
}

// Only the rule with a name that this machine does not have is missing, and check --host names it.
func TestNamesOfTheHost(t *testing.T) {
	p, c := read(t, "udp: [{name: feed, interface: no-such, address: 192.0.2.10, port: 5000, allow: {user: [no-such-user, root], group: no-such-group}}]")
	p.checkHost(node.HostCheck{Strict: true})
	all := said(c)
	if len(all) != 3 || !strings.Contains(all[0], "error: udp[0].interface: shunt cannot use this machine's interface no-such:") ||
		!strings.Contains(all[1], `error: udp[0].allow.user[0]: this machine has no user "no-such-user"`) || !strings.Contains(all[2], `group "no-such-group"`) {
		t.Errorf("%q", all)
	}
	offer, missing := p.entries[0].resolve()
	if len(offer.Allow) != 0 || !cmp.Equal(missing, []string{"user no-such-user", "group no-such-group"}) {
		t.Errorf("%+v, %v", offer.Allow, missing)
	}
}
