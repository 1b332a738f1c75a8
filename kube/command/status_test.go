package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
)

// fared is an agent's status with an example of each kind.
func fared() *shuntv1.GetStatusResponse {
	at := timestamppb.New(time.Date(2026, 11, 29, 20, 0, 1, 0, time.Local))
	later := timestamppb.New(at.AsTime().Add(time.Hour))
	return &shuntv1.GetStatusResponse{
		Forwarding: true,
		Daemon: &shuntv1.Daemon{Pid: 4711, Since: at, ConfigPath: "/etc/shunt/shunt.yaml",
			Products: []*shuntv1.Product{{Name: "balancer", Does: "forwarding 3 services"}, {Name: "accelerate", Failed: "no room"}},
			Conditions: []*shuntv1.Condition{
				{Code: condition.AddressInUse, Severity: "error", Subject: "192.0.2.8 on eth0", Text: "192.0.2.8 on eth0 is in use", Remedy: "none"},
				{Code: condition.AddressTakenOver, Severity: "warning", Subject: "192.0.2.11 on eth0", Text: "nobody answered for 192.0.2.11 on eth0", Remedy: "none"},
				{Code: "frames_refused", Severity: "warning", Subject: "cni0", Text: "cni0 refuses frames", Remedy: "set attach: tc"},
			}},
		Attached: []*shuntv1.Attachment{{Interface: "eth0", Mode: "native"}, {Interface: "cni0"}},
		Cluster: &shuntv1.Cluster{Node: "n1", NodeAddresses: []string{"10.0.0.1", "fd00::1"}, Zone: "a", PodNetworks: []string{"10.244.1.0/24"}, Apiserver: "https://192.0.2.1:6443",
			InStepSince: at, Changed: later, Services: &shuntv1.ClusterServices{Served: 5, InPart: 1, LeftAlone: 2},
			Faults: []*shuntv1.ClusterFault{{Code: "sctp_refused", Object: "Service a/b", Text: "port 80 is SCTP", Remedy: "use TCP"}},
			Announced: []*shuntv1.ClusterAddress{{Address: "192.0.2.7", Services: []string{"a/c", "a/d"}, Here: true}, {Address: "192.0.2.8", Services: []string{"a/e"}, Here: true},
				{Address: "192.0.2.9", Services: []string{"a/f"}, Node: "n2"}, {Address: "192.0.2.10", Services: []string{"a/g"}},
				{Address: "192.0.2.11", Services: []string{"a/h"}, Node: "n2"}},
		},
	}
}

func TestPrintStatus(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*shuntv1.Cluster)
		unwell string // empty: it is not
		want   string // the lines that begin otherwise than at first
	}{
		{"well", func(*shuntv1.Cluster) {}, "", `In step with the cluster since 2026-11-29 20:00:01; the last change was put in force at 2026-11-29 21:00:01.
agent      process 4711, running since 2026-11-29 20:00:01, with /etc/shunt/shunt.yaml
apiserver  https://192.0.2.1:6443, answers, and shows Services, EndpointSlices and Nodes
node       n1, 10.0.0.1, fd00::1, zone a, pods in 10.244.1.0/24
Services   5 served, 1 served in part, 2 left alone, as headless ones are
product    balancer: forwarding 3 services
product    accelerate: failed: no room
programs   eth0 native, cni0 not attached
address    192.0.2.7 of a/c, a/d: announced here
address    192.0.2.8 of a/e: 192.0.2.8 on eth0 is in use
address    192.0.2.9 of a/f: node n2 announces it
address    192.0.2.10 of a/g: not announced here: its policy is Local, and this node has no endpoint that takes connections
address    192.0.2.11 of a/h: nobody answered for 192.0.2.11 on eth0
condition  warning, frames_refused (cni0): cni0 refuses frames: set attach: tc
fault      Service a/b: port 80 is SCTP: use TCP
`},
		{"nothing has changed, and there is nothing", func(c *shuntv1.Cluster) { c.Changed, c.Services, c.Apiserver = nil, nil, "" }, "", `In step with the cluster since 2026-11-29 20:00:01.
apiserver  of the cluster, answers, and shows Services, EndpointSlices and Nodes
Services   none
`},
		{"refused", func(c *shuntv1.Cluster) { c.InStepSince, c.Refused = nil, "there is no room" }, "not in step", `Not in step with the cluster, and trying again: there is no room.
`},
		{"not yet", func(c *shuntv1.Cluster) { c.InStepSince = nil }, "not in step", `Not in step with the cluster yet.
`},
		{"away", func(c *shuntv1.Cluster) { c.ApiserverAwaySince, c.ApiserverError = c.Changed, "connection refused" }, "it is unknown", `apiserver  https://192.0.2.1:6443, has not answered since 2026-11-29 21:00:01, and its last state is in force: connection refused
`},
		{"forbidden", func(c *shuntv1.Cluster) { c.ApiserverError = "GET /api/v1/services: 403 Forbidden" }, "it is unknown", `apiserver  https://192.0.2.1:6443, answers, but refuses objects that it showed earlier; their last state is in force: GET /api/v1/services: 403 Forbidden
`},
	} {
		st := fared()
		c.change(st.Cluster)
		var out bytes.Buffer
		if err := printStatus(&out, st, false); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.name == "well" && out.String() != c.want {
			t.Errorf("it is\n%s\nwant\n%s", out.String(), c.want)
		}
		for line := range strings.Lines(c.want) {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%s: no %q in\n%s", c.name, line, out.String())
			}
		}
		if err := unwell(st.Cluster); (err == nil) != (c.unwell == "") || err != nil && !strings.Contains(err.Error(), c.unwell) {
			t.Errorf("%s: %v, want %q", c.name, err, c.unwell)
		}
	}
}

// TestPrintMuch: of many faults and addresses the first are shown, unless all are asked for; of addresses whose conditions are joined nobody
// says that they are announced.
func TestPrintMuch(t *testing.T) {
	st := fared()
	st.Daemon.Conditions = []*shuntv1.Condition{{Code: condition.AddressInUse, Subject: condition.Several, Text: "several"}}
	for i := range linesMax {
		st.Cluster.Announced = append(st.Cluster.Announced, &shuntv1.ClusterAddress{Address: fmt.Sprintf("2001:db8::%d", i), Here: true})
	}
	var few, all bytes.Buffer
	if err := printStatus(&few, st, false); err != nil {
		t.Fatal(err)
	}
	if err := printStatus(&all, st, true); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what, text string
		count      int
	}{{few.String(), "\naddress ", linesMax + 1}, {few.String(), "and 5 more; --all shows each", 1}, {all.String(), "\naddress ", linesMax + 5}, {all.String(), "--all", 0},
		{all.String(), "unless it is among those of the condition address_in_use", linesMax + 2}, {all.String(), ": announced here", 0}} {
		if n := strings.Count(c.what, c.text); n != c.count {
			t.Errorf("%q is there %d times, want %d:\n%s", c.text, n, c.count, c.what)
		}
	}
}

// TestStatusOfNobody: a socket at which no agent answers, and words that make no sense.
func TestStatusOfNobody(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "shunt.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	listener.Close() // as a killed agent leaves it
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--socket", socket}, exitRefused, "no daemon answers at " + socket},
		{[]string{"--socket", socket + "-other"}, exitRefused, "until then its log says what it waits for"},
		{[]string{"-o", "xml"}, exitUsage, `"xml"`},
		{[]string{"--instance", "a/b"}, exitUsage, "a/b"},
		{[]string{"more"}, exitRefused, "more"},
	} {
		var out, errOut bytes.Buffer
		if code := Main(append([]string{"status"}, c.args...), &out, &errOut); code != c.code || !strings.Contains(errOut.String(), c.want) || out.Len() > 0 {
			t.Errorf("%v: exit code %d, want %d and %q\n%s%s", c.args, code, c.code, c.want, out.String(), errOut.String())
		}
	}
}

// showsStatus: the agent reports that it is in step, as text and as JSON.
func showsStatus(d *nodetest.Daemon) {
	d.Helper()
	var out, errOut bytes.Buffer
	if code := Main([]string{"status", "--socket", d.Socket()}, &out, &errOut); code != exitOK {
		d.Errorf("status: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	for _, line := range []string{"In step with the cluster since ", "\nagent      process " + fmt.Sprint(d.Process.Process.Pid) + ", ", "\nnode       n1\n", "\nServices   1 served\n", "\nprograms   up0 generic\n",
		"\nfault      Node n1: the cluster has no such node"} {
		if !strings.Contains(out.String(), line) {
			d.Errorf("no %q in\n%s", line, out.String())
		}
	}
	out.Reset()
	var answer struct {
		Cluster struct {
			Node     string
			Services map[string]int
		}
		Daemon struct{ Pid int }
	}
	if code := Main([]string{"status", "--socket", d.Socket(), "-o", "json"}, &out, os.Stderr); code != exitOK {
		d.Errorf("status -o json: exit code %d", code)
	}
	d.Must(json.Unmarshal(out.Bytes(), &answer))
	if answer.Cluster.Node != "n1" || answer.Cluster.Services["served"] != 1 || answer.Daemon.Pid != d.Process.Process.Pid {
		d.Errorf("it says %s", out.String())
	}
}

// TestProgramsOfManyPods: interfaces of pods are counted by pattern and mode; others are named.
func TestProgramsOfManyPods(t *testing.T) {
	attached := []*shuntv1.Attachment{{Interface: "cali1", Mode: "tcx", Pattern: "cali*"}, {Interface: "cni0", Mode: "tcx"}, {Interface: "eth0", Mode: "native"},
		{Interface: "veth1", Mode: "tcx", Pattern: "veth*"}, {Interface: "veth2", Pattern: "veth*"}, {Interface: "veth3", Mode: "tcx", Pattern: "veth*"}}
	for _, c := range []struct {
		attached []*shuntv1.Attachment
		want     string
	}{{attached, "cali1 tcx, cni0 tcx, eth0 native, veth* (2) tcx, veth2 not attached"}, {nil, "none is attached"}} {
		if got := programsText(c.attached); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
