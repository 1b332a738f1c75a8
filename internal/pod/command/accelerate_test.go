package command

import (
	"bytes"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/test/golden"
)

// sampleAcceleration has a pod that takes the shortcut, one that does so by one of its addresses, one that is left
// alone, and one without an address.
func sampleAcceleration() *shuntv1.Acceleration {
	count := func(packets uint64) *shuntv1.Count { return &shuntv1.Count{Packets: packets, Bytes: 100 * packets} }
	return &shuntv1.Acceleration{
		Mode: "checked", SameNode: true,
		Counts: map[string]*shuntv1.Count{"taken": count(1900), "handshake": count(30), "nat": count(50), "qdisc": count(7)},
		Pods: []*shuntv1.AcceleratedPod{
			{Interface: "cali1", Attached: "tcx", Counts: map[string]*shuntv1.Count{"taken": count(1000), "handshake": count(20), "nat": count(50)},
				Addresses: []*shuntv1.AcceleratedAddress{{Address: "10.244.1.1", State: "taken"}, {Address: "2001:db8::1", State: "taken"}}},
			{Interface: "cali2", Attached: "tcx", Counts: map[string]*shuntv1.Count{"taken": count(900)},
				Addresses: []*shuntv1.AcceleratedAddress{{Address: "10.244.1.2", State: "taken"}, {Address: "2001:db8::2", State: "rule", Why: "ip6 filter FORWARD handle 7: drop"}}},
			{Interface: "cali3", Attached: "tcx", Counts: map[string]*shuntv1.Count{"qdisc": count(7)},
				Addresses: []*shuntv1.AcceleratedAddress{{Address: "10.244.1.3", State: "qdisc", Why: "cali3 has the qdisc tbf"}}},
			{Interface: "veth9", Addresses: []*shuntv1.AcceleratedAddress{{State: "bridged", Why: "veth9 is a port of interface 4"}}},
		},
		Uplinks: []*shuntv1.AcceleratedUplink{
			{Interface: "eth0", Attached: "tcx", Counts: map[string]*shuntv1.Count{"taken": count(800), "handshake": count(4)}},
			{Interface: "eth1", Why: "no route of the main table leads to a network by a gateway and eth1"},
		},
		Networks: []*shuntv1.AcceleratedNetwork{
			{Network: "10.244.2.0/24", Interface: "eth0", NextHop: "192.0.2.2", State: "taken"},
			{Network: "10.244.2.9/32", State: "route", Why: "another route leads there by wg0"},
			{Network: "10.244.3.0/24", Interface: "eth0", State: "route", Why: "several routes or next hops lead there"},
		},
	}
}

func TestAccelerateOutput(t *testing.T) {
	var out bytes.Buffer
	a := sampleAcceleration()
	printPods(&out, a, true)
	for _, p := range a.Pods {
		out.WriteString("\n")
		printPod(&out, p)
	}
	for _, iface := range []string{"eth0", "eth1"} {
		out.WriteString("\n")
		if err := showAccelerated(&out, a, iface, false); err != nil {
			t.Error(err)
		}
	}
	if err := showAccelerated(&out, a, "eth7", false); err == nil || err.Error() != `show the pod behind "eth7": no pod, uplink or steer has this name; there are cali1, cali2, cali3 and 3 others` {
		t.Errorf("of an interface that is none: %v", err)
	}
	out.WriteString("\n")
	printPods(&out, &shuntv1.Acceleration{Mode: "bypass", SameNode: true}, true)
	printPods(&out, &shuntv1.Acceleration{Mode: "bypass", SameNode: true, Uplinks: a.Uplinks[1:]}, true)
	printPods(&out, &shuntv1.Acceleration{Mode: "bypass"}, true)
	for len(a.Pods) <= cli.RowsMax {
		a.Pods = append(a.Pods, a.Pods[3])
	}
	var short bytes.Buffer
	a.Uplinks = nil
	printPods(&short, a, false)
	if n := bytes.Count(short.Bytes(), []byte("\n")); n != cli.RowsMax+3 {
		t.Errorf("of %d pods %d lines are shown", len(a.Pods), n)
	}
	pairs := &shuntv1.SocketPairs{Cgroups: []string{"/sys/fs/cgroup/web"}, Ports: []string{"8080", "9000-9010"}, Limit: 2 << 20, State: "paired", Paired: 4, Waiting: 70,
		Checks: []*shuntv1.SocketCheck{{Name: "order", Must: true}, {Name: "splice", Broken: "it moves 0 of 5 bytes", Waived: true}},
		Counts: map[string]*shuntv1.Count{"taken": {Packets: 900, Bytes: 90_000}, "full": {Packets: 3, Bytes: 9000}, "joined": {Packets: 5}, "foreign": {Packets: 2}}}
	refused := &shuntv1.SocketPairs{Cgroups: []string{"/sys/fs/cgroup/web"}, Limit: 2 << 20, State: "refused", Why: "this kernel breaks oob (it comes inline)",
		Checks: []*shuntv1.SocketCheck{{Name: "oob", Broken: "it comes inline"}}}
	for _, p := range []*shuntv1.SocketPairs{pairs, refused} {
		printPods(&out, &shuntv1.Acceleration{Mode: "checked", Sockets: p}, true)
		if err := showAccelerated(&out, &shuntv1.Acceleration{Sockets: p}, "sockets", false); err != nil {
			t.Error(err)
		}
	}
	golden.Require(t, "testdata/accelerate.golden", out.String())
}

func TestAccelerateArguments(t *testing.T) {
	for _, args := range [][]string{{"accelerate", "show"}, {"accelerate", "show", "a", "b"}, {"accelerate", "list", "a"}, {"accelerate", "list", "-o", "yaml"}} {
		var out, errOut bytes.Buffer
		if code := Main(args, nil, &out, &errOut); code != cli.ExitUsage {
			t.Errorf("%v ends with %d: %s", args, code, errOut.String())
		}
	}
}
