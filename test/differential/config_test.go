package differential_test

import (
	"net"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// An arm is an interface of the balancer. Every frame comes in through one of them, and the source address of
// an outgoing frame tells the arm that it leaves by.
type arm struct {
	name      string
	mac       net.HardwareAddr
	generic   bool // XDP in the kernel's stack, which still knows which checksums are unfinished
	mtu       int
	addresses []string
}

const (
	armA  = iota // clients, and backends of one-armed services
	armC         // backends, and clients too
	armsN = iota
)

var arms = [armsN]arm{
	{"shunt-a", mac("02:00:00:00:0a:01"), false, 1500, []string{"192.0.2.1/24", "2001:db8:1::1/64"}},
	{"shunt-c", mac("02:00:00:00:0c:01"), true, 1400, []string{"10.0.0.1/24", "2001:db8:2::1/64"}},
}

// own is the address of an arm's interface.
func (a arm) own(six bool) netip.Addr {
	if six {
		return netip.MustParsePrefix(a.addresses[1]).Addr()
	}
	return netip.MustParsePrefix(a.addresses[0]).Addr()
}

// Frames come from these stations too. They are routers towards clients.
var (
	routers = []net.HardwareAddr{mac("02:00:00:00:00:07"), mac("02:00:00:00:00:08")}
	foreign = mac("02:00:00:00:00:99")
)

// stationOf is a backend's hardware address: no two have the same.
func stationOf(backend netip.Addr) net.HardwareAddr {
	b := backend.As16()
	family := byte(4)
	if backend.Is6() {
		family = 6
	}
	return net.HardwareAddr{2, 0xbe, byte(behind(backend)), family, 0, b[15]}
}

// VIPs, IPv4 and IPv6 in turn.
var (
	vips        = [2]netip.Addr{addr("192.0.2.10"), addr("2001:db8:1::10")} // announced and owned
	rangeVIPs   = [2]netip.Addr{addr("192.0.2.12"), addr("2001:db8:1::12")} // not owned
	hostVIPs    = [2]netip.Addr{addr("192.0.2.1"), addr("2001:db8:1::1")}   // the host's own
	directVIPs  = [2]netip.Addr{addr("192.0.2.14"), addr("2001:db8:1::14")}
	anyVIPs     = [2]netip.Addr{addr("192.0.2.16"), addr("2001:db8:1::16")}
	hashedVIPs  = [2]netip.Addr{addr("192.0.2.18"), addr("2001:db8:1::18")}
	tcpOnlyVIPs = [2]netip.Addr{addr("192.0.2.19"), addr("2001:db8:1::19")}
)

// ownedAddresses are the addresses that the balancer answers ARP and ND for.
var ownedAddresses = []netip.Addr{vips[0], vips[1], directVIPs[0], directVIPs[1], natSources[0], natSources[1]}

// natSources are the source addresses of full NAT: towards arm C, then towards arm A.
var natSources = []netip.Addr{addr("10.0.0.9"), addr("2001:db8:2::9"), addr("192.0.2.9"), addr("2001:db8:1::9")}

// Backends with a fault.
var (
	unresolved = addr("10.0.0.28") // no neighbour entry has its hardware address
	unsourced  = addr("10.0.0.29") // no NAT source reaches it
	gone       = addr("10.0.0.27") // removed, though slots still name it
)

// Outer headers: IPv4 sources vary, IPv6 ones are the interface's.
var outer = model.Encapsulation{GUEPort: 6080, Sources4: netip.MustParsePrefix("203.0.113.64/28")}

var timeouts = model.Timeouts{TCPEstablished: 2*time.Hour + 4*time.Minute, TCPHandshake: 30 * time.Second,
	TCPClosing: 10 * time.Second, UDP: 5 * time.Minute, Settle: 15 * time.Minute}

// The pools of source ports. With the narrow one all ports of a backend are soon taken: a search tries 64
// ports with an odd stride, so it tries all 8 of them.
var pools = [2]value.PortRange{{First: 1024, Last: 32767}, {First: 4096, Last: 4103}}

// flowsMax bounds one service.
const flowsMax = 12

// services are the services that the tests balance. Each kind exists for TCP and UDP and for both families,
// unless it is about one of them.
func services() []model.Service {
	var all []model.Service
	add := func(name string, forwarding model.Forwarding, addresses [2]netip.Addr, ports value.PortRange, backends ...string) *model.Service {
		s := model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceL2, TableSize: 251}
		for _, vip := range addresses {
			for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: vip, Ports: ports, Protocol: protocol})
			}
		}
		for _, b := range backends {
			s.Backends = append(s.Backends, backendFrom(b))
		}
		all = append(all, s)
		return &all[len(all)-1]
	}
	at := func(first uint16) value.PortRange { return value.PortRange{First: first, Last: first} }
	nat, destination := model.ForwardingNAT, model.ForwardingNATDestination
	add("nat", nat, vips, at(80), "10.0.0.20:8080", "10.0.0.21:8080", "[2001:db8:2::20]:8080", "[2001:db8:2::21]:8080").Backends[1].Weight = 3
	add("destination", destination, vips, at(81), "10.0.0.20:8080", "[2001:db8:2::20]:8080", "10.0.0.22", "2001:db8:2::22")
	add("nat-one-arm", nat, vips, at(82), "192.0.2.20:8080", "[2001:db8:1::20]:8080")
	add("destination-one-arm", destination, vips, at(83), "192.0.2.20:8080", "[2001:db8:1::20]:8080")
	add("kept", nat, vips, at(84), "10.0.0.22", "2001:db8:2::22")
	add("destination-too", destination, vips, at(85), "10.0.0.20:8080", "[2001:db8:2::20]:8080")
	lists(add("listed", nat, vips, at(86), "10.0.0.23:8080", "[2001:db8:2::23]:8080"))
	add("rated", nat, vips, at(87), "10.0.0.23:8081", "[2001:db8:2::23]:8081").Policy.SourceRate = 1
	add("bounded", nat, vips, at(88), "10.0.0.23:8082", "[2001:db8:2::23]:8082").Policy.FlowsMax = flowsMax
	add("addresses", nat, vips, at(89), "10.0.0.20:8080", "10.0.0.21:8080", "[2001:db8:2::20]:8080", "[2001:db8:2::21]:8080").Policy.HashAddresses = true
	add("affine", nat, vips, at(94), "10.0.0.20:8080", "10.0.0.21:8080", "[2001:db8:2::20]:8080", "[2001:db8:2::21]:8080").AffinityTimeout = time.Hour
	add("silent", nat, vips, at(90))
	add("rejecting", nat, vips, at(95)).Policy.Rejects = true
	drained := add("drained", destination, vips, at(96), "10.0.0.24", "2001:db8:2::24")
	drained.Policy.Rejects, drained.Backends[0].Weight, drained.Backends[1].Weight = true, 0, 0
	four := [2]netip.Addr{vips[0], rangeVIPs[0]}
	add("unresolved", nat, four, at(91), unresolved.String())
	add("unsourced", nat, four, at(92), unsourced.String())
	add("gone", nat, four, at(93), gone.String())

	add("exact", nat, rangeVIPs, at(443), "10.0.0.25", "2001:db8:2::25")
	add("range", destination, rangeVIPs, value.PortRange{First: 401, Last: 498}, "10.0.0.26", "2001:db8:2::26")
	add("any", nat, rangeVIPs, value.AnyPort, "10.0.0.24", "2001:db8:2::24")
	add("host", nat, hostVIPs, at(80), "10.0.0.22", "2001:db8:2::22")
	one := add("tcp-only", nat, tcpOnlyVIPs, at(53), "10.0.0.22", "2001:db8:2::22")
	one.Frontends = []model.Frontend{one.Frontends[0], one.Frontends[2]}

	port := uint16(8000)
	for _, forwarding := range []model.Forwarding{model.ForwardingDSRL2, model.ForwardingDSRIPIP, model.ForwardingDSRGUE} {
		for _, backends := range [][]string{{"10.0.0.30", "10.0.0.31"}, {"2001:db8:2::30", "2001:db8:2::31"}, {"192.0.2.30"}, {"2001:db8:1::30"}} {
			if forwarding == model.ForwardingDSRL2 {
				backends = append(backends, map[string]string{"10.0.0.30": "2001:db8:2::30", "2001:db8:2::30": "10.0.0.30",
					"192.0.2.30": "2001:db8:1::30", "2001:db8:1::30": "192.0.2.30"}[backends[0]])
			}
			add("direct-"+string(rune('a'+port-8000)), forwarding, directVIPs, at(port), backends...)
			port++
		}
	}
	lists(add("direct-listed", model.ForwardingDSRIPIP, directVIPs, at(86), "10.0.0.30"))
	rated := add("direct-rated", model.ForwardingDSRGUE, directVIPs, at(87), "10.0.0.30")
	rated.Policy.SourceRate, rated.Frontends = 1, []model.Frontend{rated.Frontends[0], rated.Frontends[2]}
	add("direct-always", model.ForwardingDSRIPIP, directVIPs, at(88), "10.0.0.30", "10.0.0.31").Tracking = model.TrackingAlways
	add("direct-affine", model.ForwardingDSRIPIP, directVIPs, at(94), "10.0.0.30", "10.0.0.31").AffinityTimeout = time.Hour
	add("direct-silent", model.ForwardingDSRIPIP, directVIPs, at(90))
	add("direct-rejecting", model.ForwardingDSRGUE, directVIPs, at(95)).Policy.Rejects = true
	add("direct-unresolved", model.ForwardingDSRIPIP, directVIPs, at(91), unresolved.String())
	add("direct-gone", model.ForwardingDSRGUE, directVIPs, at(93), gone.String())
	add("direct-nat", nat, directVIPs, at(80), "10.0.0.20:8080", "[2001:db8:2::20]:8080")

	add("direct-exact", model.ForwardingDSRIPIP, anyVIPs, at(443), "10.0.0.30")
	add("direct-range", model.ForwardingDSRGUE, anyVIPs, value.PortRange{First: 401, Last: 498}, "2001:db8:2::30")
	add("direct-any", model.ForwardingDSRL2, anyVIPs, value.AnyPort, "10.0.0.30", "2001:db8:2::30")
	hashed := add("direct-hashed", model.ForwardingDSRIPIP, hashedVIPs, at(80), "10.0.0.30", "10.0.0.31")
	hashed.Policy.HashAddresses = true
	for _, f := range hashed.Frontends {
		f.Ports = at(81)
		hashed.Frontends = append(hashed.Frontends, f)
	}
	return all
}

// lists lets in the clients 198.51.100.0/25 and 2001:db8:9::/64, but of the first eight of each only number 3.
func lists(s *model.Service) {
	for _, p := range []string{"198.51.100.0/25", "198.51.100.3/32", "2001:db8:9::/64", "2001:db8:9::3/128"} {
		s.AllowFrom = append(s.AllowFrom, netip.MustParsePrefix(p))
	}
	s.DenyFrom = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/29"), netip.MustParsePrefix("2001:db8:9::/125")}
}

func backendFrom(text string) model.Backend {
	if at, err := netip.ParseAddrPort(text); err == nil {
		return model.Backend{BackendAddress: model.BackendAddress{Address: at.Addr(), Port: at.Port()}, Weight: 1}
	}
	return model.Backend{BackendAddress: model.BackendAddress{Address: addr(text)}, Weight: 1}
}

// natSourceFor is the source address of full NAT towards a backend.
func natSourceFor(backend netip.Addr) netip.Addr {
	family := 0
	if backend.Is6() {
		family = 1
	}
	if behind(backend) == armA {
		return natSources[2+family]
	}
	return natSources[family]
}

// behind returns the arm that leads to an address.
func behind(a netip.Addr) int {
	for _, p := range arms[armA].addresses {
		if netip.MustParsePrefix(p).Contains(a) {
			return armA
		}
	}
	return armC
}

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

func mac(text string) net.HardwareAddr {
	a, err := net.ParseMAC(text)
	if err != nil {
		panic(err)
	}
	return a
}
