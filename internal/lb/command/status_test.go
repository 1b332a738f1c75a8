package command

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/test/golden"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// shown is the status of an instance with one of everything.
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
		Attached: []*shuntv1.Attachment{{Interface: "eth0", Mode: "generic", FramesMissed: proto.Uint64(17), Chain: []*shuntv1.ChainedProgram{
			{Position: "before", Name: "filter", Id: 57},
			{Position: "shunt", Name: "sh_xdp", Id: 60},
			{Position: "guest", Name: "sh_udp", Id: 62},
			{Position: "after", Name: "count", Id: 58}}}},
		Services: []*shuntv1.Service{{Name: "web", Forwarding: "nat", Frontends: []string{"tcp 192.0.2.10:80"}, PacketsIn: 1 << 40, FlowsCreated: 3,
			Backends: []*shuntv1.ServiceBackend{
				{Address: "10.0.0.4:8080", Name: "10.0.0.4:8080", State: "active", Slots: 251, Share: 1, PacketsIn: 1 << 40, BytesIn: 1 << 50},
				{Address: "10.0.0.2:8080", Name: "green", State: "draining"}}}},
		Backends: []*shuntv1.Backend{
			{Address: "10.0.0.2:8080", Names: []string{"green"}, State: "draining", Services: []string{"web"}, Overrides: []*shuntv1.Override{weight}},
			{Address: "10.0.0.3:8080", State: "out", Services: []string{"web"}, Overrides: []*shuntv1.Override{drain, down}},
			{Address: "10.0.0.4:8080", State: "active", Services: []string{"api", "web"}, Slots: 502, PacketsIn: 1 << 40, BytesIn: 1 << 50},
		},
		Reasons: map[string]*shuntv1.Count{"flow_moved": {Packets: 2, Bytes: 120}, "malformed": {Packets: 5, Bytes: 300}},
		Sockets: map[string]uint64{"chosen": 7, "kept": 12}}
}

func TestStatusOutput(t *testing.T) {
	zone := time.Local
	time.Local = time.UTC // golden files are read everywhere
	defer func() { time.Local = zone }()
	var text, json bytes.Buffer
	printStatus(&text, shown(), false, rows{})
	golden.Require(t, "testdata/status.golden", text.String())
	if err := cli.WriteMessage(&json, shown()); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/status.json.golden", json.String())

	text.Reset()
	json.Reset()
	printBackends(&text, shown().Backends, nil, rows{})
	golden.Require(t, "testdata/backends.golden", text.String())
	if err := cli.WriteMessages(&json, shown().Backends); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/backends.json.golden", json.String())

	text.Reset()
	printOverrides(&text, shown().Daemon.Overrides)
	golden.Require(t, "testdata/overrides.golden", text.String())

	json.Reset()
	if err := cli.WriteMessages[*shuntv1.Override](&json, nil); err != nil || json.String() != "[]\n" {
		t.Errorf("no overrides are %q, %v", json.String(), err)
	}
}

// many is a status with many services of many backends each, of which the last is drained.
func many(services, backends int) *shuntv1.GetStatusResponse {
	st := shown()
	st.Services, st.Backends, st.Daemon.Conditions = nil, nil, nil
	for i := range services {
		service := &shuntv1.Service{Name: fmt.Sprintf("service-%d", i), Forwarding: "nat"}
		for port := range 10 {
			service.Frontends = append(service.Frontends, fmt.Sprintf("tcp 192.0.2.10:%d", 1000*i+port))
		}
		for j := range backends {
			address := fmt.Sprintf("10.0.%d.%d:80", i, j)
			b := &shuntv1.ServiceBackend{Address: address, Name: address, State: "active", Slots: 1}
			if j == backends-1 {
				b.State, b.Slots = "draining", 0
			}
			service.Backends = append(service.Backends, b)
			st.Backends = append(st.Backends, &shuntv1.Backend{Address: address, State: b.State, Slots: b.Slots, Services: []string{service.Name}})
		}
		st.Services = append(st.Services, service)
		st.Daemon.Conditions = append(st.Daemon.Conditions, &shuntv1.Condition{Code: "no_backend", Subject: service.Name})
	}
	return st
}

// TestMergedService shows a service whose frontends belong to another service by now.
func TestMergedService(t *testing.T) {
	var text bytes.Buffer
	open := uint64(3)
	printServices(&text, []*shuntv1.Service{{Name: "shop", Forwarding: "nat", FlowsOpen: &open}}, rows{})
	if lines := strings.Split(strings.TrimSpace(text.String()), "\n"); len(lines) != 3 || !strings.Contains(lines[1], "  3     0 ") ||
		strings.TrimSpace(lines[2]) != "← nothing: another service has its frontends; its flows go on" {
		t.Errorf("output:\n%s", text.String())
	}
}

// TestLongOutput: output that is too long for a terminal is cut, says so, and is complete with --all.
func TestLongOutput(t *testing.T) {
	text := func(services, backends int, show rows) string {
		var b bytes.Buffer
		printStatus(&b, many(services, backends), false, show)
		return b.String()
	}
	for _, c := range []struct {
		what string
		got  string
		rows int // that name a backend or service
		says []string
	}{
		{"few backends", text(2, 50, rows{}), 102 + 2, []string{"10.0.1.49:80", "← and 2 more", "no_backend (service-1)"}},
		{"many backends", text(2, 51, rows{}), 2 + 2, []string{"FRONTENDS  BACKENDS  WITH NEW FLOWS", "service-1 (nat)  10         51        50", "too many backends to show; --service NAME"}},
		{"many of one service", text(1, 150, rows{}), 101 + 1, []string{"50 backends more; --all shows", "tcp 192.0.2.10:9"}},
		{"all of it", text(2, 150, rows{all: true}), 302 + 2, []string{"10.0.1.149:80", "tcp 192.0.2.10:1009"}},
		{"many services", text(150, 1, rows{}), 100 + 100, []string{"50 services more", "50 more; --all shows every one"}},
		{"a summary", text(2, 3, rows{summary: true}), 2 + 2, []string{"service-1 (nat)  10         3         2"}},
	} {
		named := regexp.MustCompile(`(?m)service-\d|^ +10\.0\.`).FindAllString(c.got, -1)
		if len(named) != c.rows {
			t.Errorf("%s: %d rows, want %d\n%s", c.what, len(named), c.rows, c.got)
		}
		for _, says := range c.says {
			if !strings.Contains(c.got, says) {
				t.Errorf("%s: %q is missing\n%s", c.what, says, c.got)
			}
		}
		if strings.Contains(c.what, "summary") && strings.Contains(c.got, "too many") {
			t.Errorf("a summary that was asked for gives excuses\n%s", c.got)
		}
	}
	var list bytes.Buffer
	printBackends(&list, many(2, 150).Backends, nil, rows{})
	lines := strings.Split(list.String(), "\n")
	if !strings.HasPrefix(lines[1], "10.0.0.149:80") || !strings.HasPrefix(lines[2], "10.0.1.149:80") || !strings.HasPrefix(lines[3], "10.0.0.0:80") ||
		!strings.HasPrefix(lines[101], "200 backends more") {
		t.Errorf("of 300 backends are shown\n%s", list.String())
	}
}

func TestOnly(t *testing.T) {
	st := many(3, 2)
	if err := only(st, "service-1"); err != nil || len(st.Services) != 1 || st.Services[0].Name != "service-1" || len(st.Backends) != 2 || st.Backends[0].Address != "10.0.1.0:80" {
		t.Errorf("only service-1 is %v, %v", st, err)
	}
	if err := only(many(5, 1), "web"); err == nil || err.Error() != `show service "web": no service has this name; there are service-0, service-1, service-2 and 2 others` {
		t.Error(err)
	}
	withoutBackends(st)
	if len(st.Backends) != 0 || len(st.Services[0].Backends) != 0 {
		t.Errorf("a summary has backends: %v", st)
	}
}

// TestBackendsOutOfReach: each has its reason, and very many have one line together.
func TestBackendsOutOfReach(t *testing.T) {
	var text bytes.Buffer
	printBackends(&text, shown().Backends, []*shuntv1.Condition{
		{Code: "neighbour_unresolved", Subject: "10.0.0.2", Text: "cannot send to it"},
		{Code: "no_backend", Subject: "web", Text: "this is about something else"}}, rows{})
	if !strings.Contains(text.String(), "\n10.0.0.2: cannot send to it.\n") || strings.Contains(text.String(), "something else") {
		t.Errorf("of one it says\n%s", text.String())
	}
	text.Reset()
	printBackends(&text, shown().Backends, []*shuntv1.Condition{{Code: "neighbour_unresolved", Subject: condition.Several, Text: "50000 times: 10.0.0.2 and more"}}, rows{})
	if !strings.Contains(text.String(), "\nneighbour_unresolved: 50000 times: 10.0.0.2 and more.\n") {
		t.Errorf("of very many it says\n%s", text.String())
	}
}
