package net

import (
	"syscall"
	"testing"
)

// TestMoving: a connection that the node's connection tracking has, as kube-proxy's rules make it, stays with it when shunt-kube
// comes with --moving and when the rules go; what begins is shunt's. Without --moving shunt takes the connection's packets, and it ends.
func TestMoving(t *testing.T) {
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
	// A chain of type nat and a rule that needs connection tracking stay, as others' do on a node: without any the kernel
	// neither tracks nor translates.
	b.nft(t, "flush chain ip "+rules+" in")
	b.goesOn(t, "when the rules have gone", before, "b2")
	own := b.session(t, address, "b3")
	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.goesOn(t, "without an agent", before, "b2")
	b.start()
	b.goesOn(t, "with an agent that moves no more", own, "b3")
	if answer, err := before.Ask(within(t), "/"); err == nil {
		t.Errorf("an agent that does not move leaves the connection alone: %s answers", answer.Backend)
	}
}
