package load

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/lab"
)

// service is one of the two services under load. Both take TCP 80 and UDP 53 and have all
// backends, so they share them unless a configuration says otherwise.
type service struct {
	name, forwarding string
	vips             []netip.Addr
}

var (
	translated = service{"translated", "nat", []netip.Addr{lab.VIP4, lab.VIP6}}
	direct     = service{"direct", "dsr-ipip", []netip.Addr{lab.VIP4.Next(), lab.VIP6.Next()}}
)

// member is a backend in a service.
type member struct {
	weight int
	name   string // "": none
}

// config is a configuration file as a value: the members of each service, by the backend's
// number.
type config struct {
	members  map[string]map[int]member
	sizes    map[string]int // table_size of a service; missing: the file has none
	order    []int          // of the backends in the file
	extra    []int          // backends of a service without traffic; nil: there is none
	settings string         // more YAML
	settle   string
	limits   string // of flows
}

// plain gives every backend weight 1.
func plain() config {
	c := config{members: map[string]map[int]member{}, sizes: map[string]int{}, settle: "10s", limits: "flows: 100000"}
	for _, s := range []service{translated, direct} {
		c.members[s.name] = map[int]member{}
		for n := range backendCount {
			c.members[s.name][n+1] = member{weight: 1}
		}
	}
	for n := range backendCount {
		c.order = append(c.order, n+1)
	}
	return c
}

func (c config) clone() config {
	members := map[string]map[int]member{}
	for name, all := range c.members {
		members[name] = maps.Clone(all)
	}
	c.members, c.sizes, c.order, c.extra = members, maps.Clone(c.sizes), slices.Clone(c.order), slices.Clone(c.extra)
	return c
}

// file is the configuration as YAML.
func (c config) file(b *bed) string {
	var text strings.Builder
	fmt.Fprintf(&text, "limits: {%s, services: 100, backends: 1000, slots: 131072, remembered: 100000, filters: 1000}\ntimeouts: {settle: %s, udp: 1m}\ninterfaces:\n", c.limits, c.settle)
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s, attach: native}\n", i.Name)
	}
	text.WriteString("services:\n")
	backends := func(numbers []int, of map[int]member) {
		text.WriteString("    backends:\n")
		for _, n := range numbers {
			m, ok := of[n]
			if !ok {
				continue
			}
			host := b.Backends[n-1]
			for _, address := range []netip.Addr{host.Addr4(), host.Addr6()} {
				name := ""
				if m.name != "" {
					name = fmt.Sprintf(", name: %s-%d", m.name, address.BitLen())
				}
				fmt.Fprintf(&text, "      - {address: %q, weight: %d%s}\n", address, m.weight, name)
			}
		}
	}
	for _, s := range []service{translated, direct} {
		fmt.Fprintf(&text, "  - name: %s\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: %s\n", s.name, s.vips[0], s.vips[1], s.forwarding)
		if size, said := c.sizes[s.name]; said {
			fmt.Fprintf(&text, "    table_size: %d\n", size)
		}
		backends(c.order, c.members[s.name])
	}
	if c.extra != nil {
		text.WriteString("  - name: extra\n    address: 192.0.2.77\n    port: 80\n    forwarding: nat\n    backends:\n")
		for _, n := range c.extra {
			fmt.Fprintf(&text, "      - {address: %s}\n", b.Backends[n-1].Addr4())
		}
	}
	text.WriteString(c.settings)
	return text.String()
}

// mayBreak is the model: the flows that docs/design/13 and the rules of NAT let a change
// break. A removal takes the flows of the removed backends or services. A backend that begins
// to drain gives away the UDP flows that direct return has not remembered. Nothing else moves
// a flow.
func (c config) mayBreak(after config) (may []Permission) {
	for _, s := range []service{translated, direct} {
		for n, before := range c.members[s.name] {
			backend := fmt.Sprintf("b%d", n)
			now, stays := after.members[s.name][n]
			switch {
			case !stays:
				may = append(may, Permission{Service: s.name, Backend: backend})
			case s.name == direct.name && before.weight > 0 && now.weight == 0:
				may = append(may, Permission{Service: s.name, Backend: backend, UDP: true})
			}
		}
	}
	return may
}
