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

// setting is a value of a node's. The key is as the configuration
// writes it, as in "timeouts.udp"; an interface's is "interface eth0".
type setting struct{ key, value string }

// SettingDifference is another value of a setting.
type SettingDifference struct {
	Key    string `json:"key"`
	Before string `json:"before,omitempty"` // empty: there was none
	After  string `json:"after,omitempty"`  // empty: there is none
}

// String is "~ timeouts.udp: 5m -> 1m", "+ interface eth1: attach auto" or the same with a minus.
func (d SettingDifference) String() string {
	switch {
	case d.Before == "":
		return fmt.Sprintf("+ %s: %s", d.Key, d.After)
	case d.After == "":
		return fmt.Sprintf("- %s: %s", d.Key, d.Before)
	}
	return fmt.Sprintf("~ %s: %s -> %s", d.Key, d.Before, d.After)
}

// DifferentSettings are the settings that differ, sorted by key.
func DifferentSettings(before, after Node) (differences []SettingDifference) {
	was := map[string]string{}
	for _, s := range settings(before) {
		was[s.key] = s.value
	}
	for _, s := range settings(after) {
		if was[s.key] != s.value {
			differences = append(differences, SettingDifference{s.key, was[s.key], s.value})
		}
		delete(was, s.key)
	}
	for key, value := range was {
		differences = append(differences, SettingDifference{Key: key, Before: value})
	}
	slices.SortFunc(differences, func(a, b SettingDifference) int { return cmp.Compare(a.Key, b.Key) })
	return differences
}

// settings are all there are. What is not set has a value, too: what counts then.
func settings(n Node) (all []setting) {
	for _, i := range n.Interfaces {
		all = append(all, setting{"interface " + i.Name, "attach " + string(i.Attach)})
	}
	const interfaces, nobody = "addresses of the interface to the backend", "root only"
	return append(all,
		setting{"timeouts.tcp_established", value.DurationText(n.Timeouts.TCPEstablished)},
		setting{"timeouts.tcp_handshake", value.DurationText(n.Timeouts.TCPHandshake)},
		setting{"timeouts.tcp_closing", value.DurationText(n.Timeouts.TCPClosing)},
		setting{"timeouts.udp", value.DurationText(n.Timeouts.UDP)},
		setting{"timeouts.settle", value.DurationText(n.Timeouts.Settle)},
		setting{"limits.flows", number(n.Limits.Flows)},
		setting{"limits.services", number(n.Limits.Services)},
		setting{"limits.backends", number(n.Limits.Backends)},
		setting{"limits.slots", number(n.Limits.Slots)},
		setting{"limits.remembered", number(n.Limits.Remembered)},
		setting{"limits.filters", number(n.Limits.Filters)},
		setting{"snat.addresses", cmp.Or(ListText(n.SNAT.Addresses), interfaces)},
		setting{"snat.ports", rangeText(n.SNAT.Ports, "ports outside net.ipv4.ip_local_port_range")},
		setting{"encapsulation.source", cmp.Or(prefixes(n.Encapsulation.Sources4, n.Encapsulation.Sources6), interfaces)},
		setting{"encapsulation.gue_port", number(n.Encapsulation.GUEPort)},
		setting{"api.socket", n.API.Socket},
		setting{"api.group", cmp.Or(n.API.Group, nobody)},
		setting{"api.read_group", cmp.Or(n.API.ReadGroup, nobody)},
		setting{"metrics.listen", listenText(n.Metrics.Listen)},
		setting{"metrics.max_series", number(n.Metrics.SeriesMax)},
	)
}

func listenText(a netip.AddrPort) string {
	if !a.IsValid() {
		return "nowhere"
	}
	return a.String()
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

// ListText is the items as words, with commas between.
func ListText[T fmt.Stringer](all []T) string {
	var words []string
	for _, item := range all {
		words = append(words, item.String())
	}
	return strings.Join(words, ", ")
}
