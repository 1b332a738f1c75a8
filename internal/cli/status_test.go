package cli

import (
	"bytes"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// shown is an instance with one of everything.
func shown() *shuntv1.GetStatusResponse {
	at := timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local))
	weight := &shuntv1.Override{Backend: "10.0.0.2:8080", Kind: "weight", Weight: proto.Uint32(0), Since: at, By: "alice", Client: "shunt"}
	drain := &shuntv1.Override{Backend: "10.0.0.3:8080", Kind: "drain", Deadline: at, Since: at, By: "bob", Uid: 1000, Client: "curl/8.14.1"}
	down := &shuntv1.Override{Backend: "10.0.0.3:8080", Kind: "health", Health: proto.String("down"), Since: at, By: "root"}
	return &shuntv1.GetStatusResponse{Instance: "default", Forwarding: true, HeartbeatAgeSeconds: 0.25,
		Daemon: &shuntv1.Daemon{Pid: 4711, Since: at, ConfigPath: "/etc/shunt/shunt.yaml", Instance: "default",
			Attachments: []*shuntv1.Attachment{{Interface: "eth0", Mode: "generic", Reason: "the driver has no XDP"}},
			Conditions: []*shuntv1.Condition{{Code: "no_backend", Severity: "error", Subject: "web", Text: "no backend takes new flows",
				Remedy: "give a backend a weight", Since: at}},
			Overrides: []*shuntv1.Override{weight, drain, down}},
		Attached: []*shuntv1.Attachment{{Interface: "eth0", Mode: "generic"}},
		Services: []*shuntv1.Service{{Name: "web", Forwarding: "nat", Frontends: []string{"tcp 192.0.2.10:80"}, PacketsIn: 1 << 40, FlowsCreated: 3,
			Backends: []*shuntv1.ServiceBackend{{Address: "10.0.0.4:8080", Slots: 251, Share: 1, PacketsIn: 1 << 40, BytesIn: 1 << 50}}}},
		Backends: []*shuntv1.Backend{
			{Address: "10.0.0.2:8080", Names: []string{"green"}, State: "draining", Services: []string{"web"}, Overrides: []*shuntv1.Override{weight}},
			{Address: "10.0.0.3:8080", State: "out", Services: []string{"web"}, Overrides: []*shuntv1.Override{drain, down}},
			{Address: "10.0.0.4:8080", State: "active", Services: []string{"api", "web"}, Slots: 502, PacketsIn: 1 << 40, BytesIn: 1 << 50},
		},
		Reasons: map[string]*shuntv1.Count{"flow_moved": {Packets: 2, Bytes: 120}, "malformed": {Packets: 5, Bytes: 300}}}
}

func TestStatusOutput(t *testing.T) {
	zone := time.Local
	time.Local = time.UTC // golden files are read everywhere
	defer func() { time.Local = zone }()
	var text, json bytes.Buffer
	printStatus(&text, shown(), false)
	golden(t, "status.golden", text.Bytes())
	if err := writeMessage(&json, shown()); err != nil {
		t.Fatal(err)
	}
	golden(t, "status.json.golden", json.Bytes())

	text.Reset()
	json.Reset()
	printBackends(&text, shown().Backends)
	golden(t, "backends.golden", text.Bytes())
	if err := writeMessages(&json, shown().Backends); err != nil {
		t.Fatal(err)
	}
	golden(t, "backends.json.golden", json.Bytes())

	text.Reset()
	printOverrides(&text, shown().Daemon.Overrides)
	golden(t, "overrides.golden", text.Bytes())

	json.Reset()
	if err := writeMessages[*shuntv1.Override](&json, nil); err != nil || json.String() != "[]\n" {
		t.Errorf("no overrides are %q, %v", json.String(), err)
	}
}
