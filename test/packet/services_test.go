package packet_test

import (
	"flag"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

var (
	vip4, vip6         = addr("192.0.2.10"), addr("2001:db8:1::10") // announced and owned
	rangeVIP4          = addr("192.0.2.12")                         // ranges, any and exact
	rangeVIP6          = addr("2001:db8:1::12")
	hostVIP4, hostVIP6 = addr("192.0.2.1"), addr("2001:db8:1::1") // the host's own too
	directVIP4         = addr("192.0.2.14")                       // of services whose backends answer directly
	directVIP6         = addr("2001:db8:1::14")
	directRangeVIP4    = addr("192.0.2.16")
	directRangeVIP6    = addr("2001:db8:1::16")

	client4, client6 = addr("198.51.100.7"), addr("2001:db8:9::7")

	backend4, backend6           = addr("10.0.0.20"), addr("2001:db8:2::20") // behind the other interface
	sameArm4, sameArm6           = addr("192.0.2.20"), addr("2001:db8:1::20")
	keeper4, keeper6             = addr("10.0.0.21"), addr("2001:db8:2::21") // without a port of their own
	exact4, range4, any4         = addr("10.0.0.22"), addr("10.0.0.23"), addr("10.0.0.24")
	exact6, range6, any6         = addr("2001:db8:2::22"), addr("2001:db8:2::23"), addr("2001:db8:2::24")
	unresolved, unsourced        = addr("10.0.0.28"), addr("10.0.0.29")
	backendPort           uint16 = 8080
)

// sources of full NAT: behind the other interface and on the same, of either family.
var sources = []netip.Addr{addr("10.0.0.9"), addr("192.0.2.9"), addr("2001:db8:2::9"), addr("2001:db8:1::9")}

// Ports of the VIPs' services.
const (
	portNAT            = 80 // to backend4 and backend6
	portDestination    = 81 // the same with nat-destination
	portSameArm        = 82
	portSameArmDest    = 83
	portKept           = 84 // the backend has no port
	portDestinationToo = 85 // as portDestination, to the same backend
	portNobody         = 90 // no backends
	portUnresolved     = 91
	portUnsourced      = 92
	portMoving         = 93 // of the direct VIP: the service whose slots tests write themselves
	portMovingNAT      = 94 // the same with NAT
	portRefused        = 95 // no backends, and an answer
	portNothing        = 99 // no service
)

var forwarding = flag.String("services", "all", "which services worlds have, and so which features the program has: all, nat or direct")

// isKept reports whether worlds have services with direct return, or without.
func isKept(direct bool) bool { return *forwarding == "all" || direct == (*forwarding == "direct") }

// services have TCP and UDP, so that every case can run with both.
func services() []model.Service {
	return slices.DeleteFunc(allServices(), func(s model.Service) bool {
		return !isKept(s.Forwarding.Direct())
	})
}

// isLeftOut reports whether the worlds of this run have no services of a VIP.
func isLeftOut(vip netip.Addr) bool {
	direct := slices.Contains([]netip.Addr{directVIP4, directVIP6, directRangeVIP4, directRangeVIP6}, vip)
	nat := slices.Contains([]netip.Addr{vip4, vip6, rangeVIP4, rangeVIP6, hostVIP4, hostVIP6}, vip)
	return direct && !isKept(true) || nat && !isKept(false)
}

func allServices() []model.Service {
	var all []model.Service
	add := func(name string, forwarding model.Forwarding, vips []netip.Addr, ports value.PortRange, backends ...model.BackendAddress) {
		s := model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceL2, TableSize: 251}
		if name == "nat" || name == "destination" {
			s.Policy.FlowsMax = 1 << 20 // no bound here: soundTable compares the count with the flows
		}
		for _, vip := range vips {
			for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: vip, Ports: ports, Protocol: protocol})
			}
		}
		for _, b := range backends {
			s.Backends = append(s.Backends, model.Backend{BackendAddress: b, Weight: 1})
		}
		all = append(all, s)
	}
	port := func(n uint16) value.PortRange { return value.PortRange{First: n, Last: n} }
	at := func(port uint16, addresses ...netip.Addr) (list []model.BackendAddress) {
		for _, a := range addresses {
			list = append(list, model.BackendAddress{Address: a, Port: port})
		}
		return list
	}
	vips, ranged := []netip.Addr{vip4, vip6}, []netip.Addr{rangeVIP4, rangeVIP6}
	nat, destination := model.ForwardingNAT, model.ForwardingNATDestination
	add("nat", nat, vips, port(portNAT), at(backendPort, backend4, backend6)...)
	add("destination", destination, vips, port(portDestination), at(backendPort, backend4, backend6)...)
	add("destination-too", destination, vips, port(portDestinationToo), at(backendPort, backend4, backend6)...)
	add("same-arm", nat, vips, port(portSameArm), at(backendPort, sameArm4, sameArm6)...)
	add("same-arm-destination", destination, vips, port(portSameArmDest), at(backendPort, sameArm4, sameArm6)...)
	add("kept", nat, vips, port(portKept), at(0, keeper4, keeper6)...)
	add("nobody", nat, vips, port(portNobody))
	add("unresolved", nat, []netip.Addr{vip4}, port(portUnresolved), at(0, unresolved)...)
	add("unsourced", nat, []netip.Addr{vip4}, port(portUnsourced), at(0, unsourced)...)
	add("exact", nat, ranged, port(443), at(0, exact4, exact6)...)
	add("range", nat, ranged, value.PortRange{First: 401, Last: 498}, at(0, range4, range6)...)
	add("any", nat, ranged, value.AnyPort, at(0, any4, any6)...)
	add("host", nat, []netip.Addr{hostVIP4, hostVIP6}, port(portNAT), at(0, keeper4, keeper6)...)
	direct, directRanged := []netip.Addr{directVIP4, directVIP6}, []netip.Addr{directRangeVIP4, directRangeVIP6}
	for _, v := range directWays {
		add(v.name, v.forwarding, direct, port(v.port), at(0, v.backends()...)...)
	}
	add("direct-nat", nat, direct, port(portNAT), at(backendPort, backend4, backend6)...)
	add("moving", model.ForwardingDSRIPIP, direct, port(portMoving), at(0, movingBackends()...)...)
	add("moving-nat", nat, direct, port(portMovingNAT), at(0, movingBackends()...)...)
	add("direct-nobody", model.ForwardingDSRIPIP, direct, port(portNobody))
	add("direct-unresolved", model.ForwardingDSRIPIP, direct, port(portUnresolved), at(0, unresolved)...)
	add("direct-exact", model.ForwardingDSRIPIP, directRanged, port(443), at(0, exact4)...)
	add("direct-range", model.ForwardingDSRGUE, directRanged, value.PortRange{First: 401, Last: 498}, at(0, range4)...)
	add("direct-any", model.ForwardingDSRL2, directRanged, value.AnyPort, at(0, any4, any6)...)
	add("refused", nat, vips, port(portRefused))
	all[len(all)-1].Policy.Rejects = true
	add("direct-refused", model.ForwardingDSRGUE, direct, port(portRefused))
	all[len(all)-1].Policy.Rejects = true
	return all
}

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }
