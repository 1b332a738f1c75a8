package stamps

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
)

// Ports of UDP at the VIPs: the port of servers that answer probes, and of a service whose only server takes no flows.
const (
	probedPort = 7007
	nobodyPort = 7008
)

// probed has the fields of a probe that the tests read, in `shunt diag ping -o json`.
type probed struct {
	Sequence uint64
	Lost     bool
	Last     string
	AddsUp   bool  `json:"adds_up"`
	Reported bool  `json:"reported"`
	Trip     int64 `json:"round_trip_ns"`
	Stages   []struct {
		Stage string
		Ns    int64
	}
	Drop     *struct{ Host, Verdict, Reason string }
	Balancer *struct {
		Hook, Verdict, Reason string
		Answer                *struct{ Hook, Verdict, Reason string }
		Clock                 *struct {
			OffsetNs int64 `json:"offset_ns"`
			ErrorNs  int64 `json:"error_ns"`
		}
	}
}

// TestProbesShowTheBalancer sends probes of UDP through a balancer to a server and back. Each host reports its part:
//
//	client ── lb: sh_xdp_stamps or sh_tc_stamps, `diag ping -s` ── b1: `diag ping -s --port 7007`
func TestProbesShowTheBalancer(t *testing.T) {
	both := []string{"client.send", "client.queue", "wire.out", "balancer.out", "wire.on", "server.receive", "server.protocol", "server.wakeup", "server.user",
		"server.send", "server.queue", "wire.return", "balancer.back", "wire.back", "client.receive", "client.protocol"}
	out := slices.DeleteFunc(slices.Clone(both), func(s string) bool { return s == "wire.return" || s == "balancer.back" })
	for _, c := range []struct {
		forwarding, attach string
		stages             []string
	}{{"nat", "native", both}, {"nat", "generic", both}, {"dsr-l2", "native", out}, {"nat", "tc", both}, {"dsr-l2", "tc", out}} {
		t.Run(c.forwarding+"/"+c.attach, func(t *testing.T) {
			b := newProbedBed(t, c.forwarding, c.attach)
			hook := "xdp"
			if c.attach == "tc" {
				hook = "tc"
			}
			for _, vip := range vips {
				// The first probes do not wait for the balancer's stamps, and on a busy machine many are the first.
				eventually(t, fmt.Sprintf("%v: half of the probes have the stages %v", vip, c.stages), func() error {
					return b.showsStages(t, vip, hook, c.stages)
				})
			}
			// A probe that the balancer drops has its reason, and so has a probe that the balancer answers itself.
			for _, p := range b.probe(t, lab.VIP4, nobodyPort, 3) {
				if !p.Lost || p.Last != "balancer verdict" || p.Drop == nil || p.Drop.Host != "balancer" || p.Drop.Verdict != "drop" || p.Drop.Reason != "no_backend" {
					t.Errorf("to a service without a server: %+v, %+v", p, p.Drop)
				}
			}
			eventually(t, "the balancer tells of probes of ICMP, which it answers", func() error {
				answered := 0
				for _, p := range b.probe(t, lab.VIP6, 0, 10) {
					if p.Lost || !p.AddsUp {
						t.Errorf("of ICMP: %+v", p)
					}
					if p.Balancer != nil && p.Balancer.Verdict == "answer" && p.Balancer.Reason == "echo_answered" {
						answered++
					}
				}
				if answered < 5 {
					return fmt.Errorf("of %d", answered)
				}
				return nil
			})
			b.switchesStamps(t, c.forwarding, c.attach)
			// Since then the ring is another one, and the process that reads it the same.
			eventually(t, "half of the probes have their stages after a reload", func() error {
				return b.showsStages(t, lab.VIP4, hook, c.stages)
			})
			if c.attach == "tc" { // an upgrade is refused there
				return
			}
			nodetest.Kill(b.Process)
			b.forward(nextVariable + "=1")
			eventually(t, "half of the probes have their stages after an upgrade", func() error {
				return b.showsStages(t, lab.VIP4, hook, c.stages)
			})
		})
	}
}

// showsStages sends probes. The stages of each must add up. An error says that fewer than half have these stages first,
// in order.
func (b *bed) showsStages(t *testing.T, vip netip.Addr, hook string, stages []string) error {
	t.Helper()
	probes := b.probe(t, vip, probedPort, 30)
	complete := 0
	for _, p := range probes {
		if p.Lost || !p.AddsUp || !p.Reported {
			t.Errorf("%v: %+v", vip, p)
			continue
		}
		sum := int64(0)
		var names []string
		for _, s := range p.Stages {
			sum += s.Ns
			names = append(names, s.Stage)
			if s.Ns < 0 {
				t.Errorf("%v: a stage is negative: %+v", vip, p)
			}
		}
		if sum != p.Trip {
			t.Errorf("%v: the stages have %d ns of %d: %+v", vip, sum, p.Trip, p)
		}
		if p.Balancer == nil {
			continue
		}
		// All hosts have one kernel, so the true offset is 0.
		if k := p.Balancer.Clock; k == nil || max(k.OffsetNs, -k.OffsetNs) > k.ErrorNs {
			t.Errorf("%v: the clocks are one, but %+v", vip, k)
		}
		if p.Balancer.Hook != hook || p.Balancer.Answer != nil && p.Balancer.Answer.Hook != hook {
			t.Errorf("%v: the balancer's program is at %s, but %+v, %+v", vip, hook, p.Balancer, p.Balancer.Answer)
		}
		if !strings.HasPrefix(p.Balancer.Verdict, "send_") || p.Balancer.Reason != "" && p.Balancer.Reason != "checksum_completed" {
			t.Errorf("%v: the balancer says %+v", vip, p.Balancer)
		}
		// A running process is not woken, and then two stages are one: "server.wakeup+server.user".
		if strings.HasPrefix(strings.ReplaceAll(strings.Join(names, " "), "+", " "), strings.Join(stages, " ")) {
			complete++
		}
	}
	if complete < len(probes)/2 {
		return fmt.Errorf("of %d probes %d; the last one: %+v", len(probes), complete, probes[len(probes)-1])
	}
	return nil
}

// newProbedBed is a bed with one server, shunt with stamps of probes, and `diag ping -s` on both.
func newProbedBed(t *testing.T, forwarding, attach string) *bed {
	t.Helper()
	b := newBed(t)
	if forwarding != "nat" { // the server has the VIPs, but does not announce them
		server := b.Backends[0]
		b.Must(errors.Join(server.SetSysctl("net.ipv4.conf.all.arp_ignore", "1"), server.SetSysctl("net.ipv4.conf.all.arp_announce", "2")))
		for _, vip := range vips {
			b.Must(server.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())))
		}
	}
	b.Write(b.probedFile(forwarding, attach, true))
	b.forward()
	b.serve(b.Backends[0], "types: ", "diag", "ping", "-s", "--port", fmt.Sprint(probedPort))
	b.serve(b.Balancer, "types: ", "diag", "ping", "-s")
	return b
}

func (b *bed) probedFile(forwarding, attach string, stamps bool) string {
	var more strings.Builder
	for name, s := range map[string]struct {
		port   uint16
		weight int
	}{"probed": {probedPort, 1}, "nobody": {nobodyPort, 0}} {
		fmt.Fprintf(&more, "  - name: %s\n    address: [%s, %q]\n    port: %d\n    protocol: udp\n    on_no_backend: drop\n    backends:\n      - {address: %s, weight: %d}\n      - {address: %q, weight: %d}\n",
			name, lab.VIP4, lab.VIP6, s.port, b.Backends[0].Addr4(), s.weight, b.Backends[0].Addr6(), s.weight)
	}
	services := more.String()
	text := fmt.Sprintf("stamp_probes: %t\ndefaults: {forwarding: %s, announce: l2}\nlimits: {flows: 10000}\ninterfaces:\n", stamps, forwarding)
	for _, i := range b.Balancer.Interfaces() {
		text += fmt.Sprintf("  - {name: %s, attach: %s}\n", i.Name, attach)
	}
	return text + "services:\n" + services
}

// probe sends probes of UDP from the client; port 0: of ICMP.
func (b *bed) probe(t *testing.T, to netip.Addr, port, count int) []probed {
	t.Helper()
	return b.beginProbes(to, port, count)(t)
}

// beginProbes starts the probes; wait returns the result of probe.
func (b *bed) beginProbes(to netip.Addr, port, count int) (wait func(*testing.T) []probed) {
	args := []string{"diag", "ping", "-c", to.String(), "-C", fmt.Sprint(count), "-i", "5000", "-o", "json"}
	if port != 0 {
		args = append(args, "--port", fmt.Sprint(port))
	}
	type result struct {
		text []byte
		err  error
	}
	ended := make(chan result, 1)
	go func() {
		text, err := command(b.Client, args...).CombinedOutput()
		ended <- result{text, err}
	}()
	return func(t *testing.T) (probes []probed) {
		t.Helper()
		r := <-ended
		if r.err != nil {
			t.Fatalf("shunt %s: %v\n%s", strings.Join(args, " "), r.err, r.text)
		}
		for line := range strings.Lines(string(r.text)) {
			if !strings.HasPrefix(line, `{"type":"probe"`) {
				continue
			}
			var p probed
			if err := json.Unmarshal([]byte(line), &p); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			probes = append(probes, p)
		}
		if len(probes) != count {
			t.Fatalf("shunt %s told of %d probes:\n%s", strings.Join(args, " "), len(probes), r.text)
		}
		return probes
	}
}

// switchesStamps removes the key from the file and puts it back, and no probe is lost meanwhile.
func (b *bed) switchesStamps(t *testing.T, forwarding, attach string) {
	t.Helper()
	for _, stamps := range []bool{false, true} {
		wait := b.beginProbes(lab.VIP4, probedPort, 100)
		b.Write(b.probedFile(forwarding, attach, stamps))
		if out := b.Reload(); !strings.Contains(out, "stamp_probes") {
			t.Errorf("the reload does not tell of stamp_probes:\n%s", out)
		}
		for _, p := range wait(t) {
			if p.Lost {
				t.Errorf("lost while stamp_probes became %t: %+v", stamps, p)
			}
		}
		if _, err := os.Stat("/sys/fs/bpf/shunt/" + instanceOf(b.Config()) + "/stamps-1"); (err == nil) != stamps {
			t.Errorf("with stamp_probes: %t, the stamps are there: %t, %v", stamps, err == nil, err)
		}
	}
}
