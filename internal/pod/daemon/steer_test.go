package daemon_test

import (
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
)

const steerFile = `accelerate: {steer: [{name: dns, ports: [53/udp, 53/tcp], to: 10.50.0.53, via: 192.168.50.2, interface: eth1}]}`

// steers waits until the steer has a state.
func (w *world) steers(state string) *shuntv1.GetStatusResponse {
	w.Helper()
	return w.Is("the steer is "+state, func(st *shuntv1.GetStatusResponse) bool {
		all := st.Acceleration.GetSteers()
		return len(all) == 1 && all[0].State == state && (nodetest.Condition(st, "steer_left", "dns") == "") == (state == "taken")
	})
}

// ofSteer is the number of packets that the steer took.
func ofSteer(st *shuntv1.GetStatusResponse) uint64 {
	return st.Acceleration.GetSteers()[0].Counts["taken"].GetPackets()
}

// A user steers a port and sees the packets that the steer took; a connection outlives a reload, and
// the daemon's death.
func TestSteer(t *testing.T) {
	w := newWorld(t, 1, steerFile)
	server := bedtest.NewServer(t, w.Bed)
	w.run()
	w.steers("taken")
	dial := func() (c, s *net.TCPConn) {
		return bedtest.ConnectPodsAt(t, w.Pods[0], server.Host, netip.MustParseAddrPort("10.50.0.53:53"))
	}
	c, s := dial()
	seen := w.forwarded()
	w.Must(bedtest.Exchange(c, s, 100_000))
	if now := w.forwarded(); now > seen {
		t.Errorf("the rules have seen %d packets of what is steered", now-seen)
	}
	for words, want := range map[string]string{
		"accelerate list":             "dns 53/udp 53/tcp 10.50.0.53/32 eth1 taken",
		"accelerate show dns":         "go through eth1 to the next hop 192.168.50.2.",
		"accelerate show dns -o json": `"nextHop"`,
		"status":                      "STEER",
	} {
		out := w.command(words)
		if !strings.Contains(strings.ReplaceAll(strings.Join(strings.Fields(out), " "), "next_hop", "nextHop"), want) {
			t.Errorf("shunt %s says\n%s\nwithout %q", words, out, want)
		}
		t.Logf("shunt %s\n%s", words, out[:min(len(out), 1200)])
	}
	for _, want := range []string{`shunt_accelerate_steer_up{steer="dns"} 1`, `shunt_accelerate_steer_packets_total{steer="dns",reason="taken"} `} {
		if text := w.Scrape(); !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s:\n%s", want, text)
		}
	}

	// The connection keeps its way when the steer leaves the file.
	w.Write("accelerate: {}")
	t.Log(w.Reload())
	w.Must(bedtest.Exchange(c, s, 100_000))
	if now := w.forwarded(); now > seen {
		t.Errorf("the rules have seen %d packets of a connection that was steered before", now-seen)
	}
	w.Write(steerFile)
	t.Log(w.Reload())
	before := ofSteer(w.steers("taken"))
	c, s = dial()
	w.Must(bedtest.Exchange(c, s, 1000))
	st, err := w.Ask()
	w.Must(err)
	if ofSteer(st) <= before {
		t.Error("a new connection is not steered")
	}

	w.Must(w.Node.SetUp("eth1", false))
	w.steers("down")
	if out := w.command("accelerate show dns"); !strings.Contains(out, "Now its packets follow the host's routes: down: eth1 is down") {
		t.Errorf("shunt accelerate show dns says\n%s", out)
	}
	w.Must(w.Node.SetUp("eth1", true))
	w.steers("taken")

	// Nobody judges any more: packets go where the routes lead, also those of this connection.
	c, s = dial()
	w.Must(bedtest.Exchange(c, s, 1000))
	w.Must(w.Process.Process.Signal(syscall.SIGKILL))
	<-w.Process.Ended
	w.Must(server.Lead(w.Bed, "eth2"))
	all := w.seen()
	w.Must(bedtest.Exchange(c, s, 100_000))
	other, end := dial()
	w.Must(bedtest.Exchange(other, end, 1000))
	if w.seen() == all {
		t.Error("after the daemon's death packets are steered")
	}
}
