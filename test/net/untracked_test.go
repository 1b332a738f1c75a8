package net

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// track is the configuration with another tracking of one of the services, web or twin.
func track(file, service, tracking string) string {
	before, after, _ := strings.Cut(file, "- name: "+service+"\n")
	return before + "- name: " + service + "\n    tracking: " + tracking + "\n" + after
}

// TestDrainOfUntrackedFlows: a drain cannot keep, and cannot wait for, flows that are not remembered: it
// says so, names the services and the remedy, and the remedy works. If the backend has other services, too,
// it waits for theirs.
func TestDrainOfUntrackedFlows(t *testing.T) {
	b, file, addresses := drainBed(t, "dsr-ipip")
	web, twin, drained := directVIPs(0)[0], directVIPs(1)[0], addresses[1].String()
	// With one backend left, no slot but those of b2 can move, and without tracking a flow follows its slot.
	pair := func(tracking string) string {
		return track(strings.ReplaceAll(file(), fmt.Sprintf("      - {%s, name: b3}\n", line(addresses[2])), ""), "web", tracking)
	}
	b.reload(pair("none"))
	untracked, tracked := b.sessionsWith(t, web, 16, "b2"), b.sessionsWith(t, twin, 16, "b2")
	lost, kept := with("b2", untracked)
	out := b.waitUntilIdle(t, tracked, drained)
	for _, says := range []string{"tracking: none does not remember flows (web)", "UDP flows of direct return (twin)", "backend undrain " + drained,
		"tracking: auto", "did not wait for flows with tracking: none (web)"} {
		if !strings.Contains(out, says) {
			t.Errorf("shunt backend drain --wait does not say %q:\n%s", says, out)
		}
	}
	for _, s := range lost {
		if b.alive(s) == nil {
			t.Error("a connection that nothing remembers has survived a drain: what the command says is untrue")
		}
	}
	for _, s := range kept {
		if err := b.alive(s); err != nil {
			t.Error(err)
		}
	}
	if out := b.set(t, "drain", drained); strings.Contains(out, "tracking") {
		t.Errorf("a second drain moves nothing, and says:\n%s", out)
	}

	b.set(t, "undrain", drained)
	again := b.sessionsWith(t, web, 16, "b2")
	b.set(t, "drain", drained)
	b.set(t, "undrain", drained) // before a packet has reached another backend
	b.reload(pair("auto"))
	if out := b.waitUntilIdle(t, again, drained); strings.Contains(out, "tracking: none") {
		t.Errorf("with tracking: auto the command speaks of another:\n%s", out)
	}
}

// TestDrainOfUDP: UDP of direct return leaves a backend that drains, except for a service that always
// remembers.
func TestDrainOfUDP(t *testing.T) {
	b, file, addresses := drainBed(t, "dsr-ipip")
	vips, drained := []netip.Addr{directVIPs(0)[0], directVIPs(1)[0]}, addresses[1].String()
	b.reload(track(file(), "twin", "always"))
	type flow struct {
		net.Conn
		vip netip.Addr
	}
	ask := func(conn net.Conn) string {
		t.Helper()
		answer, err := lab.AskUDPOn(within(t, answerTimeout), conn, []byte("who?"))
		if err != nil {
			t.Fatal(err)
		}
		return answer.Backend
	}
	var flows []flow
	isThere := func(vip netip.Addr) bool {
		return slices.ContainsFunc(flows, func(f flow) bool { return f.vip == vip })
	}
	for n := 0; n < 32 || n < 320 && !(isThere(vips[0]) && isThere(vips[1])); n++ { // chance decides this
		conn, err := b.Client.Dial(within(t, answerTimeout), "udp", at(vips[n%2], 53))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if ask(conn) == "b2" {
			flows = append(flows, flow{conn, vips[n%2]})
		}
	}
	for _, vip := range vips {
		if !isThere(vip) {
			t.Fatalf("no UDP flow to %s is with b2", vip)
		}
	}
	if out := b.set(t, "drain", drained); !strings.Contains(out, "UDP flows of direct return (web)") {
		t.Errorf("shunt backend drain says\n%s", out)
	}
	for _, f := range flows {
		if is := ask(f); (is == "b2") != (f.vip == vips[1]) {
			t.Errorf("a UDP flow to %s with b2, which drains, was answered by %s", f.vip, is)
		}
	}
}

// waitUntilIdle drains, closes the backend's connections after a while, and expects the command to end only
// then. It returns the output.
func (b *bed) waitUntilIdle(t *testing.T, sessions []*session, drained string) string {
	t.Helper()
	const idle = 2 * time.Second
	busy, others := with("b2", sessions)
	if len(busy) == 0 {
		t.Fatal("no connection is with b2")
	}
	p := b.spawn(b.Balancer, "backend", "drain", drained, "--wait", "--idle", idle.String(), "--instance", b.instance, "--socket", b.socket)
	b.others = append(b.others, p)
	b.awaits(p, "no new flows")
	often := time.NewTicker(idle / 40) // far more often than the drain reads the idle times; without a pause it would take a CPU from other tests
	defer often.Stop()
	for begin := time.Now(); time.Since(begin) < idle+idle/2; <-often.C {
		for _, s := range busy {
			if err := b.alive(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	select {
	case <-p.ended:
		t.Fatalf("shunt backend drain --wait ended while connections were busy: %v\n%s", p.Err(), p.log())
	default:
	}
	for _, s := range busy {
		s.Close()
	}
	eventually(t, 10*time.Second, "the end of shunt backend drain --wait", func() error {
		select {
		case <-p.ended:
			return nil
		default:
			return errors.New(p.log())
		}
	})
	if p.Err() != nil || !strings.Contains(p.log(), "drained") {
		t.Errorf("shunt backend drain --wait: %v\n%s", p.Err(), p.log())
	}
	for _, s := range others {
		if err := b.alive(s); err != nil {
			t.Error(err)
		}
	}
	return p.log()
}
