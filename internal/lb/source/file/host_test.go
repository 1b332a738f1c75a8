package file

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/shunt-lb/shunt/internal/config"
)

// fakeHost is a machine with two networks.
type fakeHost struct{ err error }

func (h fakeHost) Interfaces() ([]HostInterface, error) {
	return []HostInterface{
		{Name: "lo", Prefixes: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
		{Name: "eth0", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("192.0.2.99/32")}},
		{Name: "eth2"}, {Name: "eth3"},
		{Name: "eth1", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.1.1/24")}},
	}, h.err
}

func (fakeHost) Occupant(iface string) (whose, takeOff string, err error) {
	switch iface {
	case "eth2":
		return `"filter" (program 7, tag 0123456789abcdef) on eth2, in native mode`, "stop process 12 (filterd)", nil
	case "eth3":
		return "program 8 on eth3, in native mode; its other properties are unknown: operation not permitted; run as root", "", nil
	}
	return "", "", nil
}

func (h fakeHost) Authorities(path string) error { return h.lacks(path + " has no certificates") }
func (h fakeHost) Program(path string) error     { return h.lacks(path + " is not there") }
func (fakeHost) Release() string                 { return "6.18.1" }

func (h fakeHost) lacks(text string) error {
	if h.err != nil {
		return nil
	}
	return errors.New(text)
}

func (fakeHost) Routes(to []netip.Addr) map[netip.Addr]Route {
	routes := map[netip.Addr]Route{}
	for _, a := range to {
		switch {
		case netip.MustParsePrefix("10.0.0.0/16").Contains(a):
			routes[a] = Route{Interface: "eth1"}
		case netip.MustParsePrefix("192.0.2.0/24").Contains(a):
			routes[a] = Route{Interface: "eth0"}
		default:
			routes[a] = Route{Err: errors.New("no route")}
		}
	}
	return routes
}

const hostConfig = `interfaces: [{name: eth0}, {name: etg0}, {name: eth2}, {name: eth3}]
services:
  - name: web
    address: 198.51.100.10
    port: 80
    backends:
      - address: 192.0.2.2
      - address: 10.0.0.2
      - address: 203.0.113.2
      - address: 192.0.2.1
  - name: direct
    address: 198.51.100.11
    port: 80
    forwarding: nat-destination
    backends: [{address: 192.0.2.2}, {address: 192.0.2.3}]
  - name: link
    address: 198.51.100.12
    port: 80
    forwarding: dsr-l2
    backends: [{address: 192.0.2.4}, {address: 10.0.0.3}]
    health: {exec: {command: [/usr/bin/probe, -q]}}
  - name: too
    address: 198.51.100.13
    port: 80
    backends: [{address: 192.0.2.5}]
    health: {https: {ca_file: /etc/ca.pem}}
  - name: same
    address: 198.51.100.14
    port: 80
    backends: [{address: 192.0.2.5}]
    health: {https: {ca_file: /etc/ca.pem}}
`

func TestCheckHost(t *testing.T) {
	for _, strict := range []bool{false, true} {
		p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": hostConfig}), "shunt.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Faults) != 0 {
			t.Fatalf("faults without a host: %v", p.Faults)
		}
		p.CheckHost(fakeHost{}, strict)
		var b bytes.Buffer
		for _, f := range p.Faults {
			b.WriteString(f.String()[strings.LastIndex(f.File, "/")+1:] + "\n")
		}
		name := "testdata/host.golden"
		if strict {
			name = "testdata/host_strict.golden"
		}
		golden(t, name, b.Bytes())
		if config.HasErrors(p.Faults) != strict {
			t.Errorf("strict is %v, and the faults are %v", strict, p.Faults)
		}
	}
}

// TestCheckHostAtTC: at tc the machine may be client and backend, and other XDP programs are no
// hindrance.
func TestCheckHostAtTC(t *testing.T) {
	const config = `interfaces: [{name: eth0, attach: tc}, {name: eth2, attach: tc}]
services:
  - {name: web, address: 198.51.100.10, port: 80, backends: [{address: 192.0.2.1}, {address: 192.0.2.2}]}
`
	p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": config}), "shunt.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p.CheckHost(fakeHost{}, true)
	if len(p.Faults) != 0 {
		t.Errorf("faults are %v, want none", p.Faults)
	}
}

// TestCheckHostInAMesh: the machine is a backend of its own services with direct return.
func TestCheckHostInAMesh(t *testing.T) {
	const end = "announce: none, backends: [{address: 192.0.2.1}, {address: 192.0.2.2}]}\n"
	for _, c := range []struct {
		what, config string
		want         []string
	}{
		{"as it should be", "interfaces: [{name: eth0}]\ndecapsulation: {from: 192.0.2.0/24}\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-ipip, " + end, nil},
		{"without the key", "interfaces: [{name: eth0}]\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-gue, " + end,
			[]string{"this backend gets no traffic while the service has others; add decapsulation"}},
		{"announced", "interfaces: [{name: eth0}]\ndecapsulation: {from: 192.0.2.0/24}\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-ipip, backends: [{address: 192.0.2.1}]}\n",
			[]string{"shunt does not announce them here; write announce: none"}},
		{"at tc", "interfaces: [{name: eth0, attach: tc}]\ndecapsulation: {from: 192.0.2.0/24}\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-ipip, " + end,
			[]string{"decapsulation is at XDP, and an interface has attach: tc; use attach: native"}},
		{"other machines", "interfaces: [{name: eth0}]\ndecapsulation: {from: 192.0.2.0/24}\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-ipip, announce: none, backends: [{address: 192.0.2.2}]}\n",
			[]string{"so decapsulation has no effect here; ignore this"}},
		{"a stranger", "interfaces: [{name: eth0}]\ndecapsulation: {from: 192.0.2.3}\nservices:\n  - {name: web, address: 198.51.100.10, port: 80, forwarding: dsr-ipip, " + end,
			[]string{"backend 192.0.2.2 is not in decapsulation.from: if such a machine balances, too, its packets to this one are dropped; add its address"}},
	} {
		p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": c.config}), "shunt.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Faults) != 0 {
			t.Errorf("%s: faults without a host: %v", c.what, p.Faults)
		}
		p.CheckHost(fakeHost{}, true)
		var got []string
		for _, f := range p.Faults {
			if !strings.Contains(f.Message, "connections from this machine itself") { // of every machine with XDP alone
				got = append(got, f.Message+"; "+f.Suggestion)
			}
		}
		same := len(got) == len(c.want)
		for i := range got {
			same = same && strings.Contains(got[i], c.want[i])
		}
		if !same {
			t.Errorf("%s: faults are %q, want %q", c.what, got, c.want)
		}
	}
}

// TestCheckHostOfVeryMany: a fault that very many backends share is reported once.
func TestCheckHostOfVeryMany(t *testing.T) {
	var config strings.Builder
	config.WriteString("interfaces: [{name: eth0}]\nservices:\n")
	for i, forwarding := range []string{"nat", "nat-destination", "dsr-l2"} {
		fmt.Fprintf(&config, "  - name: %s\n    address: 198.51.100.%d\n    port: 80\n    forwarding: %[1]s\n    backends:\n", forwarding, 10+i)
		for _, network := range []string{"10.0", "203.0"} {
			for j := range 2000 {
				fmt.Fprintf(&config, "      - address: %s.%d.%d\n", network, 2+j/250, 1+j%250)
			}
		}
	}
	p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": config.String()}), "shunt.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p.CheckHost(fakeHost{}, false)
	var got []string
	for _, f := range p.Faults {
		got = append(got, fmt.Sprintf("%d: %s; %s", f.Line, f.Message, f.Suggestion))
	}
	want := []string{
		"8: backend 10.0.2.1 and 1999 more are behind eth1, which is not under interfaces: its answers would not pass shunt; add {name: eth1} to interfaces",
		"2008: this machine has no route to backend 203.0.2.1 and 1999 more: no route; ",
		"8018: backend 10.0.2.1 and 1999 more are behind eth1, which is not under interfaces: shunt does not send there; add {name: eth1} to interfaces",
		"8018: backend 10.0.2.1 and 3999 more are in no network of this machine: dsr-l2 reaches only backends on the same link; use forwarding: dsr-ipip",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
}

func TestCheckHostUnknown(t *testing.T) {
	p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": hostConfig}), "shunt.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p.CheckHost(fakeHost{err: errors.New("netlink is closed")}, false)
	if len(p.Faults) != 1 || !strings.Contains(p.Faults[0].Message, "netlink is closed") {
		t.Errorf("faults are %v, want one with the reason", p.Faults)
	}
}

// TestLocalHost reads the machine that the test runs on: every one has a loopback.
func TestLocalHost(t *testing.T) {
	interfaces, err := LocalHost{}.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(interfaces, func(i HostInterface) bool { return i.Name == "lo" })
	if i < 0 {
		t.Fatalf("no lo among %v", interfaces)
	}
	if !slices.Contains(interfaces[i].Prefixes, netip.MustParsePrefix("127.0.0.1/8")) {
		t.Skip("lo is down: there is no route to ask for")
	}
	loop, two := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")
	routes := (LocalHost{}).Routes([]netip.Addr{loop, two})
	for _, a := range []netip.Addr{loop, two} {
		if r := routes[a]; r.Interface != "lo" || r.Err != nil {
			t.Errorf("the route to %s is by %q, %v; want lo", a, r.Interface, r.Err)
		}
	}
}

// olderHost has a kernel that loses pages in generic mode, and interfaces with long frames.
type olderHost struct {
	fakeHost
	release string
}

func (olderHost) Interfaces() ([]HostInterface, error) {
	return []HostInterface{{Name: "eth0", MTU: 1500}, {Name: "eth1", MTU: 3500}, {Name: "eth2", MTU: 9000}}, nil
}

func (h olderHost) Release() string                       { return h.release }
func (olderHost) Occupant(string) (string, string, error) { return "", "", nil }

func TestLongFramesInGenericMode(t *testing.T) {
	for _, c := range []struct {
		release, iface, attach string
		want                   string // a part of the warning
	}{
		{"6.12.117-amd64", "eth2", "generic", `in generic mode, Linux 6.12.117-amd64 logs "Bad page state"`},
		{"6.12.1", "eth2", "auto", "in generic mode, which attach: auto becomes where the driver has no native mode, Linux 6.12.1"},
		{"6.12.117-amd64", "eth2", "native", ""},
		{"6.12.117-amd64", "eth2", "tc", ""},
		{"6.12.117-amd64", "eth1", "generic", ""},
		{"6.12.117-amd64", "eth0", "generic", ""},
		{"6.1.0-57-amd64", "eth2", "generic", ""},
		{"6.120.1", "eth2", "generic", ""},
		{"6.18.1", "eth2", "generic", ""},
	} {
		text := fmt.Sprintf("interfaces: [{name: %s, attach: %s}]\nservices: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]\n", c.iface, c.attach)
		p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": text}), "shunt.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		p.CheckHost(olderHost{release: c.release}, true)
		said := ""
		for _, f := range p.Faults {
			if strings.Contains(f.Message, "Bad page state") && f.Severity == config.SeverityWarning {
				said += f.Message
			}
		}
		if (said == "") != (c.want == "") || !strings.Contains(said, c.want) {
			t.Errorf("%+v: %q", c, said)
		}
	}
}
