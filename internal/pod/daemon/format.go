package daemon

import "github.com/shunt-lb/shunt/internal/config"

// document is the section accelerate.
type document struct {
	config.Mark `json:"-"`
	Interfaces  config.Many[config.Text] `json:"interfaces,omitempty" doc:"The host's ends of the pods' veths: all, names, or patterns with * and ?. all and patterns mean veths that lead into another network namespace, also those that appear later. A pod's addresses are those that a route of the main table leads to by its veth." min:"1" max:"15" default:"all" example:"cali*"`
	Mode        config.Word              `json:"mode,omitempty" doc:"Which packets may take the shortcut. checked: those of connections that the host's rules have let begin. bypass: also how connections begin, so rules for new connections are judged beforehand and not asked." enum:"checked|bypass" default:"checked" example:"checked"`
	SameNode    config.Boolean           `json:"same_node,omitempty" doc:"Whether packets between two pods of this host take the shortcut. false switches all of the pod shortcut off, and the key uplinks cannot be beside it." default:"true" example:"true"`
	Uplinks     config.Many[config.Text] `json:"uplinks,omitempty" doc:"Interfaces towards other hosts. Packets between pods of this host and networks beyond an uplink take a shortcut, too: networks that a route of the main table leads to by a gateway and the uplink, but for the default route. Without uplinks these packets go through the host's stack." min:"1" max:"15" example:"eth0"`
	Ports       config.Later             `json:"ports,omitempty" doc:"Ports whose traffic goes through an interface of its own." instead:"leave it out, and write a policy route: \"ip rule add dport PORT table N\""`
	Sockets     config.Later             `json:"sockets,omitempty" doc:"Whether sockets of one host hand each other their data." instead:"leave it out: the data goes through the host's stack"`
}
