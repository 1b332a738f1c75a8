package command

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/kube/translate"
)

// levels are the two levels of a port with direct return.
func levels() []translate.VariantExplanation {
	frontend := func(address string, protocol model.Protocol) []model.Frontend {
		return []model.Frontend{{Address: netip.MustParseAddr(address), Ports: value.PortRange{First: 30080, Last: 30080}, Protocol: protocol}}
	}
	node := func(name, address string, weight uint16) model.Backend {
		return model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(address)}, Name: name, Weight: weight}
	}
	pod := model.BackendAddress{Address: netip.MustParseAddr("10.244.1.5"), Port: 8080}
	return []translate.VariantExplanation{
		{Service: model.Service{Name: "default/web@direct", Forwarding: model.ForwardingDSRGUE, Policy: model.Policy{Tunnelled: true, Rejects: true}, Frontends: frontend("10.0.0.1", model.TCP),
			Backends: []model.Backend{node("n1", "10.0.0.1", 2), node("n2", "10.0.0.2", 0)}},
			Endpoints: []translate.EndpointExplanation{{BackendAddress: pod, Pod: "a", Takes: true, Why: "ready, on this node"}}},
		{Service: model.Service{Name: "default/web@here", Forwarding: model.ForwardingNATDestination, Frontends: frontend("0.0.0.0", model.TCP|model.Tunnelled),
			Backends: []model.Backend{{BackendAddress: pod, Name: "a", Weight: 1}}},
			Endpoints: []translate.EndpointExplanation{{BackendAddress: pod, Pod: "a", Takes: true, Why: "ready"}}},
		{Service: model.Service{Name: "default/web@direct-ipv6", Forwarding: model.ForwardingDSRGUE, Policy: model.Policy{Tunnelled: true, Rejects: true}, Frontends: frontend("fd00::1", model.TCP)}},
	}
}

// TestExplainDirect: nodes are named, and the reason for NAT, where there is one.
func TestExplainDirect(t *testing.T) {
	var out strings.Builder
	plain := levels()[0]
	plain.Service.Name, plain.Forwarding, plain.Policy = "default/web:b", model.ForwardingNAT, model.Policy{PassesBegun: true}
	plain.Endpoints[0].Why = "ready"
	if err := printExplanation(&out, "default/web", "", translate.Explanation{Ports: []translate.PortExplanation{
		{Port: 80, Protocol: "TCP", Variants: levels()}, {Port: 81, Protocol: "TCP", NAT: "endpoint 10.244.9.5:8080 is on no node", Variants: []translate.VariantExplanation{plain}},
	}}); err != nil {
		t.Fatal(err)
	}
	want := `port 80 TCP
  at tcp 10.0.0.1:30080
  by dsr-gue, as service default/web@direct
  to nodes n1 (10.0.0.1, weight 2), n2 (10.0.0.2, no new flows)
    10.244.1.5:8080  a  takes  ready, on this node
port 80 TCP
  at tcp-tunnelled 0.0.0.0:30080
  by nat-destination, as service default/web@here
  for packets that nodes, this one too, send to this node's endpoints
    10.244.1.5:8080  a  takes  ready
port 80 TCP
  at tcp [fd00::1]:30080
  by dsr-gue, as service default/web@direct-ipv6
  to nodes none
  No endpoint takes new connections: TCP is refused, and UDP gets "port unreachable".
port 81 TCP
  at tcp 10.0.0.1:30080
  by nat, as service default/web:b
  TCP connections from before are left to the host (--moving)
    10.244.1.5:8080  a  takes  ready
  Clients outside have nat, not direct return: endpoint 10.244.9.5:8080 is on no node.
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// TestServicesDirect: nodes are named, and pods are not.
func TestServicesDirect(t *testing.T) {
	var out strings.Builder
	var services []model.Service
	for _, v := range levels() {
		services = append(services, v.Service)
	}
	if err := printServices(&out, services, nil); err != nil {
		t.Fatal(err)
	}
	want := `SERVICE                  FRONTENDS                    FORWARDING       BACKENDS
default/web@direct       tcp 10.0.0.1:30080           dsr-gue          n1 (10.0.0.1, weight 2), n2 (10.0.0.2, no new flows)
default/web@here         tcp-tunnelled 0.0.0.0:30080  nat-destination  10.244.1.5:8080
default/web@direct-ipv6  tcp [fd00::1]:30080          dsr-gue          none
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
