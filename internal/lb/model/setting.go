package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/value"
)

// Settings returns all settings. A setting that is not set has its effective value.
func (n Node) Settings() (all []value.Setting) {
	for _, i := range n.Interfaces {
		all = append(all, value.Setting{Key: "interface " + i.Name, Value: "attach " + string(i.Attach)})
	}
	const interfaces = "addresses of the interface to the backend"
	return append(all,
		value.Setting{Key: "timeouts.tcp_established", Value: value.DurationText(n.Timeouts.TCPEstablished)},
		value.Setting{Key: "timeouts.tcp_handshake", Value: value.DurationText(n.Timeouts.TCPHandshake)},
		value.Setting{Key: "timeouts.tcp_closing", Value: value.DurationText(n.Timeouts.TCPClosing)},
		value.Setting{Key: "timeouts.tcp_half_closed", Value: value.DurationText(n.Timeouts.TCPHalfClosed)},
		value.Setting{Key: "timeouts.udp", Value: value.DurationText(n.Timeouts.UDP)},
		value.Setting{Key: "timeouts.settle", Value: value.DurationText(n.Timeouts.Settle)},
		value.Setting{Key: "limits.flows", Value: number(n.Limits.Flows)},
		value.Setting{Key: "limits.services", Value: number(n.Limits.Services)},
		value.Setting{Key: "limits.backends", Value: number(n.Limits.Backends)},
		value.Setting{Key: "limits.slots", Value: number(n.Limits.Slots)},
		value.Setting{Key: "limits.remembered", Value: number(n.Limits.Remembered)},
		value.Setting{Key: "limits.filters", Value: number(n.Limits.Filters)},
		value.Setting{Key: "snat.addresses", Value: cmp.Or(ListText(n.SNAT.Addresses), interfaces)},
		value.Setting{Key: "snat.ports", Value: rangeText(n.SNAT.Ports, "ports outside net.ipv4.ip_local_port_range")},
		value.Setting{Key: "encapsulation.source", Value: cmp.Or(prefixes(n.Encapsulation.Sources4, n.Encapsulation.Sources6), interfaces)},
		value.Setting{Key: "encapsulation.gue_port", Value: number(n.Encapsulation.GUEPort)},
		value.Setting{Key: "decapsulation.from", Value: cmp.Or(ListText(n.Decapsulation.From), "none")},
		value.Setting{Key: "sockets.cgroup", Value: cmp.Or(n.Sockets.Cgroup, "none")},
		value.Setting{Key: "stamp_probes", Value: strconv.FormatBool(n.StampProbes)},
	)
}

func number[N uint16 | uint32](n N) string { return strconv.FormatUint(uint64(n), 10) }

func rangeText(r value.PortRange, otherwise string) string {
	if r == (value.PortRange{}) {
		return otherwise
	}
	return r.String()
}

func prefixes(all ...netip.Prefix) string {
	return ListText(slices.DeleteFunc(all, func(p netip.Prefix) bool { return !p.IsValid() }))
}

// ListText returns the items as words, with commas between.
func ListText[T fmt.Stringer](all []T) string {
	var words []string
	for _, item := range all {
		words = append(words, item.String())
	}
	return strings.Join(words, ", ")
}
