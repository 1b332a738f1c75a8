package file

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// serviceText returns the text of a service with these addresses and ports, and a small table.
func serviceText(name, addresses, ports string) string {
	return fmt.Sprintf("  - {name: %s, address: %s, port: %s, table_size: 251, backends: [{address: 10.0.0.2}]}\n", name, addresses, ports)
}

// spanOf returns a list of n values that format makes of 0 to n-1.
func spanOf(n int, format func(int) string) string {
	values := make([]string, n)
	for i := range values {
		values[i] = format(i)
	}
	return "[" + strings.Join(values, ", ") + "]"
}

// TestRoom has as many services or ports as just fit the maps, and one more.
func TestRoom(t *testing.T) {
	address := func(net int) func(int) string {
		return func(i int) string { return fmt.Sprintf("192.%d.%d.%d", net, i/250, i%250+1) }
	}
	port := func(i int) string { return fmt.Sprint(i + 1) }
	// 1-65534 is 30 blocks; 1024 of them are all there is room for.
	wide := func(n int) string { return serviceText("wide", spanOf(n, address(1)), `"1-65534"`) }
	for _, c := range []struct {
		Name, services, more, fault string
	}{
		{"exact ports", serviceText("a", "192.0.2.1", spanOf(model.FrontendsMin, port)), "", ""},
		{"one exact port more", serviceText("a", "192.0.2.1", spanOf(model.FrontendsMin+1, port)), "",
			"the services have 16385 frontends with an exact port, limits.services is 1000, which makes room for 16384; set limits.services to 1025 or more; or use ranges"},
		{"with room for it", serviceText("a", "192.0.2.1", spanOf(model.FrontendsMin+1, port)), "limits: {services: 1025}", ""},
		{"ranges", wide(1024), "", ""},
		{"one range more", wide(1024) + serviceText("b", "192.0.2.1", "any"), "", "need 30721 entries (one for each aligned block of a range), there is room for 30720"},
		{"addresses", serviceText("a", spanOf(10000, address(1)), "80") + serviceText("b", spanOf(6383, address(2)), "80"), "snat: {addresses: 192.3.0.1}", ""},
		{"one address more", serviceText("a", spanOf(10000, address(1)), "80") + serviceText("b", spanOf(6384, address(2)), "80"), "snat: {addresses: [192.1.0.1, 192.3.0.1]}",
			"the services and snat have 16385 different addresses, there is room for 16384"},
		{"sources", serviceText("a", "192.0.2.1", "80"), "snat: {addresses: " + spanOf(1024, address(4)) + "}", ""},
		{"one source more", serviceText("a", "192.0.2.1", "80"), "snat: {addresses: " + spanOf(1025, address(4)) + "}", "there are 1025 source addresses, there is room for 1024"},
		{"both families", serviceText("a", "192.0.2.1", "80") + "  - {name: b, address: [192.0.2.2, \"2001:db8::2\"], port: 80, forwarding: dsr-ipip, backends: [{address: 10.0.0.2}]}\n", "limits: {services: 2}",
			"there are 3 services (a service with addresses of both families counts twice), limits.services is 2; set limits.services to 3 or more"},
	} {
		t.Run(c.Name, func(t *testing.T) {
			text := "interfaces: [{name: eth0}]\nservices:\n" + c.services + c.more + "\n"
			_, faults := load(t, filepath.Join(write(t, map[string]string{"a.yaml": text}), "a.yaml"))
			switch {
			case c.fault == "" && len(faults) != 0:
				t.Errorf("what fits is refused: %v", faults)
			case c.fault != "" && (len(faults) != 1 || !strings.Contains(faults[0].String(), c.fault)):
				t.Errorf("faults are %v, want one: %s", faults, c.fault)
			}
		})
	}
}

// TestRaise: no message asks for a limit beyond its maximum.
func TestRaise(t *testing.T) {
	for need, want := range map[uint64]string{
		65535: "set limits.services to 65535 or more",
		65536: "that is more than one shunt can have: limits.services is at most 65535",
	} {
		if got := raise("limits.services", need); got != want {
			t.Errorf("for %d services: %q, want %q", need, got, want)
		}
	}
}

func TestPieces(t *testing.T) {
	for _, c := range []struct {
		first, last uint16
		want        int
	}{{0, 65535, 1}, {1, 65534, 30}, {1, 65535, 16}, {8192, 8319, 1}, {80, 81, 1}, {81, 82, 2}, {65535, 65535, 1}} {
		if got := piecesOf(value.PortRange{First: c.first, Last: c.last}); got != c.want {
			t.Errorf("%d-%d is %d pieces, want %d", c.first, c.last, got, c.want)
		}
	}
}
