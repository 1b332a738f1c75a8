package demo

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/internal/lab"
)

// weights are the weights of the backends, in their order. The last backend is the one that is removed.
var weights = []int{3, 2, 1}

const (
	webPort    = 80   // of the VIPs
	serverPort = 8080 // of the web servers behind it
	echoPort   = 7    // of VIPs and servers: the service keeps the port
)

// target is a frontend of the demo.
type target struct {
	service string // "web" or "echo"
	network string // "tcp" or "udp"
	family  string // "ipv4" or "ipv6"
	vip     netip.AddrPort
}

func (t target) String() string { return fmt.Sprintf("%s over %s", t.protocol(), t.familyName()) }

func (t target) protocol() string {
	if t.service == "web" {
		return "HTTP"
	}
	return "UDP"
}

func (t target) familyName() string {
	if t.family == "ipv4" {
		return "IPv4"
	}
	return "IPv6"
}

// wildcard is "from any address, from this port".
func (t target) wildcard(port int) netip.AddrPort {
	if t.family == "ipv4" {
		return netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(port))
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port))
}

var targets = []target{
	{"web", "tcp", "ipv4", netip.AddrPortFrom(lab.VIP4, webPort)},
	{"web", "tcp", "ipv6", netip.AddrPortFrom(lab.VIP6, webPort)},
	{"echo", "udp", "ipv4", netip.AddrPortFrom(lab.VIP4, echoPort)},
	{"echo", "udp", "ipv6", netip.AddrPortFrom(lab.VIP6, echoPort)},
}

// configText returns a configuration with the first backends.
func configText(top *lab.Topology, socket string, backends int) string {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("interfaces:")
	for _, i := range top.Balancer.Interfaces() {
		line("  - {name: %s, attach: native}", i.Name)
	}
	line("services:")
	for _, service := range []struct{ name, protocol, backendPort, check string }{
		{"web", "tcp", fmt.Sprintf(", port: %d", serverPort), "http: {path: /}"},
		{"echo", "udp", "", "udp: {send: ping, expect: ping}"},
	} {
		port := webPort
		if service.name == "echo" {
			port = echoPort
		}
		line("  - name: %s", service.name)
		line("    address: [%s, %q]", lab.VIP4, lab.VIP6)
		line("    port: %d", port)
		line("    protocol: %s", service.protocol)
		line("    announce: none        # the client's route to the VIPs leads to lb")
		line("    health: {%s, interval: %s, timeout: %s, fall: %d, rise: %d}", service.check, checkInterval, checkTimeout, checkFall, checkRise)
		line("    backends:")
		for i, host := range top.Backends[:backends] {
			line("      - {address: %s%s, weight: %d}", host.Addr4(), service.backendPort, weights[i])
			line("      - {address: %q%s, weight: %d}", host.Addr6(), service.backendPort, weights[i])
		}
	}
	line("api: {socket: %s}", socket)
	return out.String()
}

// backendKey returns the name of a host's backend in `shunt status`.
func (t target) backendKey(host *lab.Host) string {
	address := host.Addr4()
	if t.family == "ipv6" {
		address = host.Addr6()
	}
	if t.service == "web" {
		return netip.AddrPortFrom(address, serverPort).String()
	}
	return address.String()
}
