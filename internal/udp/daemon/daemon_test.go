package daemon_test

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
)

const all = "{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, tx: true, allow: {user: 65534}}"

// accounted requires that every datagram is in a counter.
func accounted(t *testing.T, what string, c *shuntv1.UDPCounts) {
	t.Helper()
	if c.Matched != c.PassedNoSocket+c.DroppedNoSocket+c.Delivered+c.Waiting+c.FillEmpty+c.RingFull {
		t.Errorf("%s: %d matched, but passed, dropped without a socket, delivered, waiting, fill empty and ring full are %d + %d + %d + %d + %d + %d", what,
			c.Matched, c.PassedNoSocket, c.DroppedNoSocket, c.Delivered, c.Waiting, c.FillEmpty, c.RingFull)
	}
}

// The life of a lease, with no service in the file: nobody has it, a program without rights has it, the program is
// killed, another one has it, the daemon ends, and is started again.
func TestLifeOfALease(t *testing.T) {
	b := newBed(t, all)
	b.run()
	b.until("kernel")
	if st := b.Is("nobody has it", func(st *shuntv1.GetStatusResponse) bool { return len(st.Udp) == 1 }); nodetest.Condition(st, "udp_kernel_socket", "feed") == "" ||
		len(st.Daemon.Products) != 1 || st.Daemon.Products[0].Does != "lending 1 UDP lease" {
		t.Errorf("nobody has it, and the status is %v", st)
	}

	first := b.work("feed", 0)
	b.until("x")
	st := b.Is("veth copies, which is less than auto tries", func(st *shuntv1.GetStatusResponse) bool {
		return strings.HasPrefix(nodetest.Condition(st, "udp_mode_reduced", "feed"), "lend feed in the mode copy: ") && nodetest.Condition(st, "udp_kernel_socket", "feed") == ""
	})
	if h := lease(st, "feed").Holder; h.GetPid() != int32(first.Process.Pid) || h.Uid != nobody || h.Mode != "copy" || len(h.Queues) != 2 || h.RingSize != 256 || h.Queues[0].Free == 0 {
		t.Errorf("the holder is %v", h)
	}

	for args, want := range map[string]string{
		"list":          "process " + strconv.Itoa(first.Process.Pid) + ", user 65534  copy  ",
		"show feed":     "Its mode is copy (",
		"show other":    "show the lease \"other\": no lease has this name; there are feed",
		"top --count 1": "MATCHED/s",
		"list -o json":  `"uid": 65534`,
	} {
		var out bytes.Buffer
		code := cli.Main(line, strings.Fields("udp "+args+" --socket "+b.Socket()), nil, &out, &out)
		if code != 0 && args != "show other" || !strings.Contains(out.String(), want) {
			t.Errorf("shunt udp %s ends with %d and says\n%s", args, code, out.String())
		}
	}

	nodetest.Kill(first)
	b.until("kernel")
	st = b.Is("the program was killed", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Ended["died"] == 1 })
	if l := lease(st, "feed"); l.Holder != nil || l.Given != 1 || l.LastEnd != "died" || l.Total.Delivered == 0 {
		t.Errorf("after its program was killed the lease is %v", l)
	}
	accounted(t, "killed", lease(st, "feed").Total)

	second := b.work("feed", 0)
	b.until("x")
	b.Must(b.Process.End(syscall.SIGTERM, nodetest.Patience))
	b.until("kernel")
	if err := second.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("with the daemon the program has ended: %v\n%s", err, second.Log())
	}
	b.run()
	b.until("x") // the same program has asked again
	if h := lease(b.Is("it has asked again", func(*shuntv1.GetStatusResponse) bool { return true }), "feed").Holder; h.GetPid() != int32(second.Process.Pid) {
		t.Errorf("the new daemon has lent it to %v", h)
	}
}

// Changes of other entries do not disturb a lease, and an entry whose interface is missing is tried again.
func TestReloadDisturbsNoOther(t *testing.T) {
	one, two := entry("one", 5000, 0, ""), entry("two", 5001, 1, "")
	b := newBed(t, one, two)
	b.run()
	b.work("one", 0)
	b.work("two", 0)
	held := func(st *shuntv1.GetStatusResponse, name string) bool { return lease(st, name).Holder != nil }
	b.Is("both are held", func(st *shuntv1.GetStatusResponse) bool { return held(st, "one") && held(st, "two") })
	undisturbed := func(after string, st *shuntv1.GetStatusResponse) {
		t.Helper()
		if l := lease(st, "one"); l.Given != 1 || l.Holder == nil || len(l.Ended) > 0 {
			t.Errorf("after %s the lease of one is %v", after, l)
		}
	}

	two = entry("two", 5001, 1, ", max_queue_delay: 1ms")
	missing := strings.ReplaceAll(entry("missing", 5000, 0, ""), "eth0", "late0")
	stranger := strings.ReplaceAll(entry("stranger", 5002, 0, ""), "65534", "no-such-user")
	b.write(one, two, missing, stranger)
	if text := b.Reload(); strings.Contains(text, "udp one") || !strings.Contains(text, "~ udp two: ") || !strings.Contains(text, "+ udp missing: interface late0") {
		t.Errorf("the difference is\n%s", text)
	}
	st := b.Is("two is lent anew", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "two").Given == 2 && held(st, "two") })
	undisturbed("a change", st)
	if l := lease(st, "two"); l.Ended["revoked"] != 1 || l.Holder.RingSize != 512 {
		t.Errorf("the changed lease is %v", l)
	}
	if text := nodetest.Condition(st, "udp_lease_failed", "missing"); !strings.HasPrefix(text, "cannot lend missing: attach to interface late0: ") || lease(st, "missing").Failed == "" {
		t.Errorf("of a missing interface is said %q", text)
	}
	if text := nodetest.Condition(st, "udp_lease_failed", "stranger"); !strings.Contains(text, "this machine has no user no-such-user") {
		t.Errorf("of a missing user is said %q", text)
	}

	b.addVeth("late0", "late1")
	st = b.Is("the interface is there", func(st *shuntv1.GetStatusResponse) bool {
		return lease(st, "missing").Failed == "" && nodetest.Condition(st, "udp_lease_failed", "missing") == ""
	})
	undisturbed("an interface has come", st)
	// Another interface of the same name has no program yet.
	b.removeLink("late0")
	b.Is("the interface is gone", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "missing").Failed != "" })
	b.addVeth("late0", "late1")
	st = b.Is("the interface is there again", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "missing").Failed == "" })
	undisturbed("an interface has gone and come", st)

	b.write(one)
	b.Reload()
	st = b.Is("one is left", func(st *shuntv1.GetStatusResponse) bool { return len(st.Udp) == 1 })
	undisturbed("a removal", st)
	// In another mode the interface has another attachment, so that this lease has to end.
	b.write(entry("one", 5000, 0, ", tx: true, mode: generic"))
	b.Reload()
	st = b.Is("one is lent in another mode", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "one").Holder.GetMode() == "generic" })
	if l := lease(st, "one"); l.Given != 2 || l.Ended["revoked"] != 1 || l.Program != "generic" {
		t.Errorf("in another mode the lease of one is %v", l)
	}
	b.until("x")
	b.write(strings.Replace(one, "eth0", "e/0", 1))
	r, err := b.API.Reload(t.Context())
	b.Must(err)
	if r.Applied || len(r.Faults) != 1 {
		t.Errorf("a bad file: %v", r)
	}
	if l := lease(b.Is("it answers", func(*shuntv1.GetStatusResponse) bool { return true }), "one"); l.Given != 2 || l.Holder == nil {
		t.Errorf("after a bad file the lease of one is %v", l)
	}
}

// A program that is too slow loses datagrams, and each of them is accounted for: in the daemon's counters, in the
// program's, and in the metrics. Datagrams on a queue that the lease does not have go to the kernel's socket, which is
// a condition.
func TestOverloadIsAccountedFor(t *testing.T) {
	b := newBed(t, entry("feed", 5000, 0, ", tx: true, max_queue_delay: 64us"))
	b.run()
	b.work("feed", 100*time.Microsecond)
	b.Is("it is held", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Holder != nil })
	enough := func(st *shuntv1.GetStatusResponse) bool {
		c := lease(st, "feed").Total
		return c.GetFillEmpty()+c.GetRingFull() > 100 && c.Delivered > 100 && c.PassedNoSocket > 100 && nodetest.Condition(st, "udp_queue_missed", "feed") != ""
	}
	for port := 0; ; port++ {
		conn := b.dial(5000) // another source port, and so another queue
		for range 2000 {
			_, _ = conn.Write([]byte("flood"))
		}
		b.Must(conn.Close())
		ctx := t.Context()
		st, err := b.API.Status(ctx)
		b.Must(err)
		if enough(st) {
			break
		}
		if port == 500 {
			t.Fatalf("so much was sent, and the lease is %v, %v", lease(st, "feed"), st.Daemon.Conditions)
		}
	}
	before := uint64(0)
	st := b.Is("the rings are empty", func(st *shuntv1.GetStatusResponse) bool {
		c := lease(st, "feed").Total
		quiet := c.Matched == before && c.Waiting == 0
		before = c.Matched
		return quiet
	})
	l := lease(st, "feed")
	accounted(t, "overload", l.Total)
	for _, q := range l.Holder.Queues {
		accounted(t, fmt.Sprintf("overload, queue %d", q.Queue), q.Counts)
	}
	if l.Holder.Elsewhere.Matched != l.Total.PassedNoSocket || l.Holder.Elsewhere.PassedNoSocket != l.Total.PassedNoSocket {
		t.Errorf("on queues that it does not have were %v, and all that passed is %d", l.Holder.Elsewhere, l.Total.PassedNoSocket)
	}
	st = b.Is("the program has told of its sending", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").GetClaimed().GetKicks() > 0 })
	if claimed := lease(st, "feed"); claimed.Total.String() != l.Total.String() || claimed.Holder.Queues[0].Claim.GetKicks() != claimed.Claimed.Kicks {
		t.Errorf("the claims %v and %v are beside %v, which was %v", claimed.Claimed, claimed.Holder.Queues[0].Claim, claimed.Total, l.Total)
	}
	text := b.Scrape()
	for _, line := range []string{
		fmt.Sprintf("shunt_udp_datagrams_total{lease=\"feed\"} %d\n", l.Total.Matched),
		fmt.Sprintf("shunt_udp_datagrams_dropped_total{lease=\"feed\",reason=\"fill_empty\"} %d\n", l.Total.FillEmpty),
		fmt.Sprintf("shunt_udp_queue_datagrams_total{lease=\"feed\",queue=\"0\"} %d\n", l.Holder.Queues[0].Counts.Matched),
		fmt.Sprintf("shunt_udp_queue_datagrams_delivered_total{lease=\"feed\",queue=\"0\"} %d\n", l.Holder.Queues[0].Counts.Delivered),
		fmt.Sprintf("shunt_udp_queue_datagrams_dropped_total{lease=\"feed\",queue=\"0\",reason=\"fill_empty\"} %d\n", l.Holder.Queues[0].Counts.FillEmpty),
		"shunt_udp_ring_size{lease=\"feed\",queue=\"0\"} 64\n",
		"\nshunt_udp_claimed_kicks_total{lease=\"feed\"} ", // the next renewal may have a larger number
	} {
		if !strings.Contains(text, line) {
			t.Errorf("the metrics do not have %q:\n%s", line, text)
		}
	}
	t.Logf("%v", l.Total)
	b.Must(b.Process.End(syscall.SIGTERM, nodetest.Patience))
	b.until("kernel")
}

// The rights that the systemd unit gives suffice for everything but killing.
func TestRightsOfTheUnit(t *testing.T) {
	b := newBed(t, strings.Replace(all, "tx: true", "tx: true, kill: true", 1))
	b.run(rightsVariable + "=1")
	p := b.work("feed", 0)
	b.until("x")
	st := b.Is("it cannot kill", func(st *shuntv1.GetStatusResponse) bool {
		return strings.HasPrefix(nodetest.Condition(st, "udp_lease_failed", "feed"), "cannot kill processes that keep the sockets of the lease feed")
	})
	if h := lease(st, "feed").Holder; h.GetPid() != int32(p.Process.Pid) {
		t.Errorf("the holder is %v", h)
	}
	nodetest.Kill(p)
	b.Is("the kernel's socket has taken over", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Ended["died"] == 1 })
	b.until("kernel")
}

// The balancer has other interfaces of the same host.
func TestBesideTheBalancer(t *testing.T) {
	b := newBed(t, all)
	b.addVeth("late0", "late1")
	text, err := os.ReadFile(b.Config())
	b.Must(err)
	text = append(text, "interfaces: [{name: late0}]\nservices: [{name: web, address: 192.0.2.20, port: 80, announce: none, backends: [{address: 192.0.2.1}]}]\n"...)
	b.Must(os.WriteFile(b.Config(), text, 0o600))
	b.run()
	b.work("feed", 0)
	b.until("x")
	st := b.Is("both run", func(st *shuntv1.GetStatusResponse) bool { return st.Forwarding && lease(st, "feed").Holder != nil })
	if len(st.Services) != 1 || len(st.Daemon.Products) != 2 {
		t.Errorf("%v", st)
	}
	b.Must(b.Process.End(syscall.SIGINT, nodetest.Patience))
}
