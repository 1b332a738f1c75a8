package products

import (
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
)

// The UDP path cannot have an address and port of the balancer's: the error names both positions.
func TestProductsDoNotShare(t *testing.T) {
	const balancer = "interfaces: [{name: eth0}]\nservices: [{name: dns, address: [192.0.2.10, \"2001:db8::10\"], port: [53, \"8000-8099\"], protocol: [tcp, udp], backends: [{address: 10.0.0.2}, {address: \"2001:db8:1::2\"}]}]\n"
	const one = "a datagram can belong to one of them only; give one of them another port or address"
	for entry, want := range map[string][]string{
		"interface: eth1, address: 192.0.2.10, port: 54":   nil,
		"interface: eth1, address: 192.0.2.11, port: 53":   nil,
		"interface: eth1, address: 192.0.2.10, port: 53":   {`3:64: error: udp[0].port: udp 192.0.2.10:53 is also a frontend of service "dns", at 2:70: ` + one},
		"interface: eth1, address: 192.0.2.10, port: 8010": {`3:64: error: udp[0].port: udp 192.0.2.10:8010 is also a frontend of service "dns", at 2:74: ` + one},
		`interface: eth1, address: "2001:db8::10", port: [54, 53]`: {
			`3:73: error: udp[0].port[1]: udp [2001:db8::10]:53 is also a frontend of service "dns", at 2:70: ` + one},
		"interface: eth0, address: 192.0.2.11, port: 53": nil, // the balancer's
		"interface: eth0, address: 192.0.2.10, port: 53": {`3:64: error: udp[0].port: udp 192.0.2.10:53 is also a frontend of service "dns", at 2:70: ` + one},
	} {
		text := balancer + "udp: [{name: feed, " + entry + ", allow: {user: root}}]\n"
		var have []string
		for _, f := range faultsOf(t, text) {
			have = append(have, strings.TrimPrefix(strings.ReplaceAll(f.String(), f.File+":", ""), f.File+":"))
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s\nhas  %q\nwant %q", entry, have, want)
		}
	}
	if all := faultsOf(t, "udp: [{name: feed, interface: eth0, address: 192.0.2.10, port: 53, allow: {user: root}}]\n"); config.HasErrors(all) {
		t.Errorf("a file with the UDP path alone has %v", all)
	}
}

// An interface of the balancer or the UDP path is no pod's; a pattern is looked at on the machine.
func TestPodsShareNoInterface(t *testing.T) {
	const others = "interfaces: [{name: eth0}]\nservices: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]\n" +
		"udp: [{name: feed, interface: eth1, address: 192.0.2.11, port: 53, allow: {user: root}}]\n"
	for entry, want := range map[string][]string{
		"[veth1, \"eth*\"]": nil,
		"[veth1, eth0]": {"4:34: error: accelerate.interfaces[1]: interface eth0 is also one of the balancer's interfaces, at 1:21: " +
			"a pod's veth can belong only to the pod shortcut; remove it from one of them"},
		"eth1": {"4:26: error: accelerate.interfaces: interface eth1 is also the UDP path's, at 3:31: " +
			"a pod's veth can belong only to the pod shortcut; remove it from one of them"},
	} {
		var have []string
		for _, f := range faultsOf(t, others+"accelerate: {interfaces: "+entry+"}\n") {
			have = append(have, strings.TrimPrefix(strings.ReplaceAll(f.String(), f.File+":", ""), f.File+":"))
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s\nhas  %q\nwant %q", entry, have, want)
		}
	}
}
