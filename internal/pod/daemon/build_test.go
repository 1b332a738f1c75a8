package daemon

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/shunt-lb/shunt/internal/value"
)

// read is a file's settings and faults, without the file's name.
func read(t *testing.T, text string, check func(*parsed)) (p *parsed, said []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.NewFormat(Product().Part).Read(path)
	if err != nil {
		t.Fatal(err)
	}
	p, _ = c.Settings[Name].(*parsed)
	if check != nil {
		check(p)
	}
	for _, f := range c.Faults.Sorted() {
		_, what, _ := strings.Cut(f.String(), "a.yaml:")
		said = append(said, what)
	}
	return p, said
}

func TestSettings(t *testing.T) {
	for text, want := range map[string]settings{
		"accelerate: {}": {[]string{"all"}, shortcut.Checked, true, nil, nil, socketSettings{}},
		`accelerate: {interfaces: ["cali*", veth1], mode: bypass}`: {[]string{"cali*", "veth1"}, shortcut.Bypass, true, nil, nil, socketSettings{}},
		"accelerate: {interfaces: all, same_node: false}":          {[]string{"all"}, shortcut.Checked, false, nil, nil, socketSettings{}},
		"accelerate: {uplinks: [eth0, eth1]}":                      {[]string{"all"}, shortcut.Checked, true, []string{"eth0", "eth1"}, nil, socketSettings{}},
		"accelerate: {steer: [{name: dns, ports: [53/udp, 53/tcp], to: 10.50.0.53, interface: eth1}, {name: db, ports: 5432/tcp, to: \"2001:db8:5::/64\", via: \"2001:db8::1\", interface: eth2}]}": {
			[]string{"all"}, shortcut.Checked, true, nil, []watch.Steer{
				{Name: "dns", Ports: []watch.Port{{Protocol: 17, Number: 53}, {Protocol: 6, Number: 53}}, Network: netip.MustParsePrefix("10.50.0.53/32"), Interface: "eth1", NextHop: netip.MustParseAddr("10.50.0.53")},
				{Name: "db", Ports: []watch.Port{{Protocol: 6, Number: 5432}}, Network: netip.MustParsePrefix("2001:db8:5::/64"), Interface: "eth2", NextHop: netip.MustParseAddr("2001:db8::1")}}, socketSettings{}},
		"accelerate: {sockets: {cgroups: /sys/fs/cgroup/web/}}": {[]string{"all"}, shortcut.Checked, true, nil, nil, socketSettings{cgroups: []string{"/sys/fs/cgroup/web"}, limit: 2 << 20}},
		"accelerate: {sockets: {cgroups: [/a, /b], ports: [80, 9000-9010], limit: 512KiB, unused: [splice, oob]}}": {[]string{"all"}, shortcut.Checked, true, nil, nil, socketSettings{
			cgroups: []string{"/a", "/b"}, ports: []value.PortRange{{First: 80, Last: 80}, {First: 9000, Last: 9010}}, limit: 512 << 10, unused: []string{"splice", "oob"}}},
	} {
		p, said := read(t, text, nil)
		if len(said) > 0 || !reflect.DeepEqual(p.settings, want) {
			t.Errorf("%s: %+v, %q; want %+v", text, p, said, want)
		}
	}
}

// steer is a file with an entry of steer that has one key of its own.
func steer(own string) string {
	rest := ""
	for _, key := range []string{"name: dns", "ports: 53/udp", "to: 10.50.0.53", "interface: eth1"} {
		if name, _, _ := strings.Cut(key, ":"); !strings.HasPrefix(own, name+":") {
			rest += ", " + key
		}
	}
	return "accelerate: {steer: [{" + own + rest + "}]}"
}

func TestFaults(t *testing.T) {
	for text, want := range map[string]string{
		"accelerate: {interfaces: [all, veth1]}":                     `1:27: error: accelerate.interfaces[0]: interfaces are all, or names and patterns; write interfaces: all, or a list without all`,
		"accelerate: {interfaces: veth/1}":                           `1:26: error: accelerate.interfaces: "veth/1" cannot be an interface's name or a pattern; in a pattern, * stands for any characters and ? for one`,
		`accelerate: {interfaces: "veth[12]"}`:                       `1:26: error: accelerate.interfaces: "veth[12]" cannot be an interface's name or a pattern; in a pattern, * stands for any characters and ? for one`,
		"accelerate: {interfaces: [veth1, veth1]}":                   `1:34: error: accelerate.interfaces[1]: interface veth1 is in the list twice; remove one of them`,
		"accelerate: {mode: fast}":                                   `1:20: error: accelerate.mode: `,
		"accelerate: {across_nodes: true}":                           `1:14: error: accelerate.across_nodes: `,
		"accelerate: {uplinks: \"eth*\"}":                            `1:23: error: accelerate.uplinks: "eth*" cannot be an interface's name; name each uplink, as `,
		"accelerate: {uplinks: [eth0, eth0]}":                        `1:30: error: accelerate.uplinks[1]: interface eth0 is in the list twice; remove one of them`,
		"accelerate: {interfaces: a, uplinks: a}":                    `1:38: error: accelerate.uplinks: interface a is among accelerate's interfaces, too`,
		"accelerate: {same_node: false, uplinks: a}":                 `1:41: error: accelerate.uplinks: same_node: false switches the whole pod shortcut off`,
		"accelerate: {interface: veth1}":                             `1:14: error: accelerate.interface: `,
		"accelerate: {sockets: {ports: 80}}":                         `1:23: error: accelerate.sockets: `,
		"accelerate: {sockets: {cgroups: web}}":                      `1:33: error: accelerate.sockets.cgroups: the path "web" is not absolute; begin it with /`,
		"accelerate: {sockets: {cgroups: [/a, /a/]}}":                `1:38: error: accelerate.sockets.cgroups[1]: cgroup /a is in the list twice; remove one of them`,
		"accelerate: {sockets: {cgroups: /a, limit: 1MB}}":           `1:44: error: accelerate.sockets.limit: found text "1MB", want a size such as 2MiB`,
		"accelerate: {sockets: {cgroups: /a, limit: 1KiB}}":          `1:44: error: accelerate.sockets.limit: limit 1KiB is out of range, want 256KiB to 1GiB`,
		"accelerate: {sockets: {cgroups: /a, limit: 4294967295GiB}}": `1:44: error: accelerate.sockets.limit: limit 4294967295GiB is out of range`,
		"accelerate: {sockets: {cgroups: /a, unused: carry}}":        `1:45: error: accelerate.sockets.unused: unknown unused "carry"`,
		"accelerate: {ports: 53}":                                    `1:14: error: accelerate.ports: `,
		steer("ports: 53"):                                           `1:30: error: accelerate.steer[0].ports: found the number 53, want a port and a protocol such as 53/udp; write 53/tcp or 53/udp, or both in a list`,
		steer("ports: 53/sctp"):                                      `1:30: error: accelerate.steer[0].ports: found text "53/sctp", want a port and a protocol`,
		steer("ports: 0/udp"):                                        `1:30: error: accelerate.steer[0].ports: found text "0/udp", want a port and a protocol`,
		steer("ports: [53/udp, 53/udp]"):                             `1:39: error: accelerate.steer[0].ports[1]: port 53/udp is in the list twice; remove one of them`,
		steer("to: 10.50.0.0/24"):                                    `1:27: error: accelerate.steer[0].to: 10.50.0.0/24 is a network, so the destination cannot be the next hop; write via: and the next hop, a neighbour at eth1`,
		steer("to: 0.0.0.0/0"):                                       `1:27: error: accelerate.steer[0].to: steering to every address is not supported; name the networks`,
		steer("via: \"2001:db8::1\""):                                `1:28: error: accelerate.steer[0].via: the next hop 2001:db8::1 is not of the family of 10.50.0.53/32; write an entry for each family`,
		steer("interface: \"eth*\""):                                 `1:34: error: accelerate.steer[0].interface: "eth*" cannot be an interface's name; name one interface`,
		steer("fallback: eth2"):                                      `1:23: error: accelerate.steer[0].fallback: `,
		"accelerate: {interfaces: [], mode: checked}":                `1:26: error: accelerate.interfaces: `,
	} {
		if _, said := read(t, text, nil); len(said) != 1 || !strings.HasPrefix(said[0], want) {
			t.Errorf("%s: %q; want %q", text, said, want)
		}
	}
}

// An interface that this machine lacks is a warning, and with `shunt check --host` an error.
func TestCheckHost(t *testing.T) {
	for strict, word := range map[bool]string{false: "warning", true: "error"} {
		_, said := read(t, "accelerate: {interfaces: [no-such-veth, lo, \"no-such-*\"], uplinks: [lo2]}", func(p *parsed) { p.checkHost(node.HostCheck{Strict: strict}) })
		said = slices.DeleteFunc(said, func(s string) bool { return strings.Contains(s, "no conntrack") }) // of the machine
		if len(said) != 3 || !strings.Contains(said[0], word+": accelerate.interfaces[0]: shunt cannot use this machine's interface no-such-veth:") ||
			!strings.Contains(said[1], word+": accelerate.interfaces[1]: this machine's interface lo is of kind device, but a pod is behind a veth") ||
			!strings.Contains(said[2], word+": accelerate.uplinks[0]: shunt cannot use this machine's interface lo2:") {
			t.Errorf("strict %v: %q", strict, said)
		}
	}
}

// A steer cannot lead to this machine itself, and the message explains how to reach a cache there.
func TestCheckSteerToOwnAddress(t *testing.T) {
	_, said := read(t, "accelerate: {steer: [{name: dns, ports: 53/udp, to: 127.0.0.1, interface: lo}]}", func(p *parsed) { p.checkHost(node.HostCheck{Strict: true}) })
	said = slices.DeleteFunc(said, func(s string) bool { return strings.Contains(s, "no conntrack") }) // of the machine
	if len(said) != 1 || !strings.Contains(said[0], "error: accelerate.steer[0].interface: 127.0.0.1 is this machine's own address") || !strings.Contains(said[0], "`sockets: {cgroup: …}`") {
		t.Errorf("%q", said)
	}
}

// The file has a word for each thing that programs may do without.
func TestUnusedWords(t *testing.T) {
	all := strings.Join(sockets.Waivable(), ", ")
	if _, said := read(t, "accelerate: {sockets: {cgroups: /a, unused: ["+all+"]}}", nil); len(said) > 0 {
		t.Errorf("%s: %q", all, said)
	}
}
