package net

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/kube/hold"
)

// TestMoving: a connection that the node's connection tracking has, as kube-proxy's rules make it, stays with it when
// shunt-kube comes with --moving and when the rules go; new connections are shunt's. Without --moving shunt takes the
// connection's packets, and it ends.
func TestMoving(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.must(b.Balancer.SetForwarding(true))
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.node("n1", front)
	b.node("n2")
	for i, node := range []string{"n1", "n1", "n2"} {
		b.pod(b.Backends[i], node, "web")
	}
	web := b.service("web", "selector: {app: web}, type: NodePort, ports: [{port: 80, targetPort: 8080}]")
	port := web.Spec.Ports[0].NodePort
	address := at(front.String(), port)
	b.translate(t, front, port, b.Backends[1].Addr4())
	before := b.session(t, address, "b2")
	b.start("--moving")
	b.served(t, "tcp", address, "b1", "b2", "b3")
	b.goesOn(t, "when shunt-kube has come", before, "b2")
	b.nft(t, "delete table ip "+rules) // the last ones of this node but the agent's
	b.goesOn(t, "when the rules have gone", before, "b2")
	own := b.session(t, address, "b3")
	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.goesOn(t, "without an agent", before, "b2")
	b.start("--moving")
	b.goesOn(t, "with the next agent", before, "b2")
	b.holds(t, true)
	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.start()
	b.holds(t, false)
	b.goesOn(t, "with an agent that moves no more", own, "b3")
	if answer, err := before.Ask(within(t), "/"); err == nil {
		t.Errorf("an agent that does not move leaves the connection alone: %s answers", answer.Backend)
	}
	for _, end := range []func() error{
		func() error { return b.agent.End(syscall.SIGINT, patience) },
		func() error {
			if code, out := b.run("shunt", "detach", "--instance", b.instance, "--socket", b.socket()); code != 0 {
				return fmt.Errorf("shunt detach: exit code %d\n%s", code, out)
			}
			return nil
		},
	} {
		b.must(b.agent.End(syscall.SIGTERM, patience))
		b.start("--moving")
		b.holds(t, true)
		b.must(end())
		b.holds(t, false)
	}
}

// holds reports whether the agent's own table is on the node or not.
func (b *bed) holds(t *testing.T, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("the table %s is there: %t", hold.Table, want), func() error {
		out, err := b.Balancer.Command(within(t), "nft", "list", "tables").CombinedOutput()
		if err == nil && strings.Contains(string(out), "table inet "+hold.Table+"\n") != want {
			err = errors.New(string(out))
		}
		return err
	})
}

// TestMovingLeavesPorts: the kernel has given source ports towards a pod to connections of kube-proxy's, most of which have closed. It sends
// the pod's answers at such a port to the old client for two minutes more, before shunt sees them at the bridge. So no new connection has such a
// port with --moving, also if the agent is ready long before it learns of the Service. Without the reservation every third one here is lost.
func TestMovingLeavesPorts(t *testing.T) {
	t.Parallel()
	const pool, old, more, port = "20000-21023", 400, 400, 30080
	b := newNode(t, "p1")
	b.settings += "\nsnat: {ports: " + pool + "}"
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.node("n1", front)
	b.pod(b.Backends[0], "n1", "web")
	address := at(front.String(), port)
	b.translateFrom(t, front, port, b.Backends[0].Addr4(), "meta l4proto tcp ct status dnat masquerade to :"+pool+" fully-random")
	b.start("--moving")
	before := b.session(t, address, "p1")
	ask := func(times int, when string) {
		t.Helper()
		for i := range times {
			if _, err := b.ask("tcp", address); err != nil {
				t.Fatalf("%s, connection %d of %d: %v", when, i+1, times, err)
			}
		}
	}
	ask(old, "by the kernel")
	b.service("web", fmt.Sprintf("selector: {app: web}, type: NodePort, ports: [{port: 80, targetPort: 8080, nodePort: %d}]", port))
	b.awaits(b.agent, "+ service default/web") // its frontends are in force, perhaps before its endpoint
	eventually(t, "shunt serves the node port", func() error { _, err := b.ask("tcp", address); return err })
	ask(more, "by shunt")
	b.goesOn(t, "after all of them", before, "p1")
}

// TestMovingLeavesClientsPorts: a client uses one source port for two Services with the same pod, one connection with the kernel's
// translation of its address, and the other one with shunt, which keeps its address. At the bridge the pod's answers on the first connection have the
// client's address already, and not yet the Service's. Without the reservation shunt takes them for answers on the second connection.
func TestMovingLeavesClientsPorts(t *testing.T) {
	t.Parallel()
	const old, port = 30080, 30081
	b := newNode(t, "p1")
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.node("n1", front)
	b.pod(b.Backends[0], "n1", "web")
	b.translate(t, front, old, b.Backends[0].Addr4())
	own := netip.AddrPortFrom(b.Client.Addr4(), 40000)
	open := func(port int32) *lab.Session {
		s, err := b.Client.OpenSession(within(t), "tcp", own, at(front.String(), port))
		b.must(err)
		t.Cleanup(func() { s.Close() })
		return s
	}
	before := open(old)
	b.goesOn(t, "with the kernel", before, "p1")
	b.service("near", fmt.Sprintf("selector: {app: web}, type: NodePort, externalTrafficPolicy: Local, ports: [{port: 80, targetPort: 8080, nodePort: %d}]", port))
	b.start("--moving")
	b.served(t, "tcp", at(front.String(), port), "p1")
	after := open(port)
	for range 2 {
		answer, err := after.Ask(within(t), "/")
		if seen, bad := netip.ParseAddrPort(answer.Remote); err != nil || bad != nil || seen.Addr() != own.Addr() || seen == own {
			t.Errorf("the pod sees the client %s as %s, and not at another port: %v", own, answer.Remote, errors.Join(err, bad))
		}
		b.goesOn(t, "beside another one from the same port", before, "p1")
	}
}
