package command

import (
	"bytes"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/test/golden"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// unwell is a status with a backend in every state of health.
func unwell() *shuntv1.GetStatusResponse {
	since := timestamppb.New(time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC))
	const refused = "tcp connect: connection refused"
	backend := func(address, state string, slots uint32, h *shuntv1.BackendHealth) *shuntv1.Backend {
		h.Service, h.Backend, h.Check = "web", address, "http"
		if !h.Adopted {
			h.Since = since
		}
		return &shuntv1.Backend{Address: address, State: state, Services: []string{"web"}, Slots: slots, Health: []*shuntv1.BackendHealth{h}}
	}
	saidDown := backend("10.0.0.8:80", "down", 0, &shuntv1.BackendHealth{State: "up", Override: "down"})
	saidDown.Overrides = []*shuntv1.Override{{Backend: saidDown.Address, Kind: "health", Health: proto.String("down"), Since: since, By: "alice"}}
	return &shuntv1.GetStatusResponse{
		Instance: "default", Forwarding: true,
		Attached: []*shuntv1.Attachment{{Interface: "eth0", Mode: "native"}},
		Services: []*shuntv1.Service{
			{Name: "dns", Forwarding: "nat", Frontends: []string{"udp 192.0.2.11:53"}, Backends: []*shuntv1.ServiceBackend{{Address: "10.0.0.2", Slots: 251, Share: 1}}},
			{Name: "web", Forwarding: "nat", Frontends: []string{"tcp 192.0.2.10:80"}, Backends: []*shuntv1.ServiceBackend{
				{Address: "10.0.0.2:80", Slots: 126, Share: 0.5}, {Address: "10.0.0.3:80", Slots: 125, Share: 0.5}}},
		},
		Daemon: &shuntv1.Daemon{Pid: 7, Since: since, ConfigPath: "/etc/shunt/shunt.yaml", Instance: "default"},
		Backends: []*shuntv1.Backend{
			{Address: "10.0.0.2", State: "active", Services: []string{"dns"}, Slots: 251},
			backend("10.0.0.2:80", "active", 126, &shuntv1.BackendHealth{State: "up"}),
			backend("10.0.0.3:80", "active", 125, &shuntv1.BackendHealth{State: "up", LastError: "http status 503 Service Unavailable, want 200-399"}),
			backend("10.0.0.4:80", "down", 0, &shuntv1.BackendHealth{State: "down", LastError: refused}),
			backend("10.0.0.5:80", "down", 0, &shuntv1.BackendHealth{State: "down", LastError: refused, KeptDownUntil: timestamppb.New(since.AsTime().Add(2 * time.Minute))}),
			backend("10.0.0.6:80", "waiting", 0, &shuntv1.BackendHealth{State: "waiting", LastError: "tcp connect: no answer within 1s"}),
			backend("10.0.0.7:80", "standby", 0, &shuntv1.BackendHealth{State: "up", Adopted: true}),
			saidDown,
			backend("10.0.0.9:80", "active", 0, &shuntv1.BackendHealth{State: "down", LastError: refused, Override: "up"}),
		},
	}
}

func TestHealthOutput(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = local })
	var list, asJSON, shown bytes.Buffer
	printBackends(&list, unwell().Backends, nil, rows{})
	golden.Require(t, "testdata/health.backends.golden", list.String())
	if err := cli.WriteMessages(&asJSON, unwell().Backends); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/health.backends.json.golden", asJSON.String())
	printStatus(&shown, unwell(), false, rows{})
	golden.Require(t, "testdata/health.status.golden", shown.String())
}
