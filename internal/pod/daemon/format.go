package daemon

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"golang.org/x/sys/unix"
)

// document is the section accelerate.
type document struct {
	config.Mark `json:"-"`
	Interfaces  config.Many[config.Text] `json:"interfaces,omitempty" doc:"The host's ends of the pods' veths: all, names, or patterns with * and ?. all and patterns mean veths that lead into another network namespace, also veths that appear later. A pod's addresses are the addresses to which the main table has a route by its veth." min:"1" max:"15" default:"all" example:"cali*"`
	Mode        config.Word              `json:"mode,omitempty" doc:"Which packets may take the shortcut. checked: packets of connections whose beginning the host's rules have allowed. bypass: also the first packets of connections; shunt then judges rules for new connections beforehand, and packets do not pass them." enum:"checked|bypass" default:"checked" example:"checked"`
	SameNode    config.Boolean           `json:"same_node,omitempty" doc:"Whether packets between two pods of this host take the shortcut. false switches the whole pod shortcut off, and does not go with the key uplinks." default:"true" example:"true"`
	Uplinks     config.Many[config.Text] `json:"uplinks,omitempty" doc:"Interfaces towards other hosts. Packets between pods of this host and networks beyond an uplink take a shortcut, too. These are networks to which the main table has a route by a gateway and the uplink, except for the default route. Without uplinks these packets go through the host's stack." min:"1" max:"15" example:"eth0"`
	Steer       config.List[steerEntry]  `json:"steer,omitempty" doc:"Ports to which packets from pods of this host go through a chosen interface, past routes and rules; the answers go straight to the pod. See docs/guide/pods.md." example:"[{name: dns, ports: [53/udp, 53/tcp], to: 10.50.0.53, interface: eth1}]"`
	Sockets     socketsEntry             `json:"sockets,omitempty" doc:"Experimental. Sockets of one host, of chosen cgroups, hand each other their data past TCP. See docs/guide/pods.md for what this breaks." example:"{cgroups: [/sys/fs/cgroup/web], ports: [8080], limit: 2MiB}"`
}

// steerEntry is an element of steer.
type steerEntry struct {
	config.Mark `json:"-"`
	Name        config.Text       `json:"name" doc:"The name in commands and metrics. It must be unique." min:"1" max:"63" example:"dns"`
	Ports       config.Many[port] `json:"ports" doc:"The destinations' ports, each with its protocol: 53/udp or 53/tcp. An entry has up to 64." example:"[53/udp, 53/tcp]"`
	To          config.Prefix     `json:"to" doc:"The destinations: one address or a network. Other destinations are not steered." example:"10.50.0.53"`
	Interface   config.Text       `json:"interface" doc:"The Ethernet interface for the packets and their answers: a second network card, the host's end of a pod's veth, a virtual machine's tap." min:"1" max:"15" example:"eth1"`
	Via         config.Address    `json:"via,omitempty" doc:"The next hop: a neighbour at the interface, which shunt probes every second. Without this key the destination is the neighbour, and to must be one address." example:"192.168.50.1"`
	Fallback    config.Later      `json:"fallback,omitempty" doc:"Another interface to use when the first fails." instead:"leave it out: without its interface or next hop an entry's packets follow the host's routes"`
}

// port is a destination's port, with its protocol.
type port struct {
	config.Mark
	watch.Port
}

// protocols are the protocols that can be steered, by name.
var protocols = map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}

func (p *port) Read(s config.Scalar, f *config.Field) *config.Complaint {
	const want = "a port and a protocol such as 53/udp"
	number, protocol, _ := strings.Cut(s.Text, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	switch {
	case err != nil || n == 0 || !config.IsDigits(number):
		return config.Wanted(s, want, "")
	case protocols[protocol] == 0:
		return config.Wanted(s, want, fmt.Sprintf("write %s/tcp or %s/udp, or both in a list", number, number))
	}
	p.Port = watch.Port{Protocol: protocols[protocol], Number: uint16(n)}
	return nil
}

// Schema implements config.Leaf.
func (*port) Schema(*config.Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[0-9]+/(tcp|udp)$"}
}

// Describe implements config.Leaf.
func (*port) Describe() string { return "port/protocol" }
