package lab

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Draw is the topology as a picture in text, with the addresses that matter. It ends in a
// newline and is at most 105 columns wide.
//
//	client ────────── lb ────────────── switch ────┬─ b1     10.0.0.2   2001:db8:1::2
//	198.51.100.7      198.51.100.1                 └─ b2     10.0.0.3   2001:db8:1::3
//	2001:db8:c::7     2001:db8:c::1
//	                  10.0.0.1
//	                  2001:db8:1::1
func (t *Topology) Draw() string {
	chain, leaves := t.shape()
	columns := make([][]string, len(chain))
	for i, h := range chain {
		columns[i] = []string{h.name}
		if h == t.Switch {
			continue
		}
		for _, iface := range h.Interfaces() {
			columns[i] = append(columns[i], iface.IPv4.Addr().String(), iface.IPv6.Addr().String())
		}
		if t.Options.Layout == Direct && h == t.Balancer { // the rest stands beside the backends
			columns[i] = columns[i][:3]
		}
	}
	branches := make([]string, len(leaves))
	for i, h := range leaves {
		joint := "├─"
		switch {
		case len(leaves) == 1:
			joint = "──"
		case i == 0:
			joint = "┬─"
		case i == len(leaves)-1:
			joint = "└─"
		}
		branches[i] = fmt.Sprintf("%s %-6s %-10s %s", joint, h.name, h.Addr4(), h.Addr6())
	}
	var out strings.Builder
	rows := len(branches)
	for _, column := range columns {
		rows = max(rows, len(column))
	}
	for row := range rows {
		var line strings.Builder
		for i, column := range columns {
			line.WriteString(cell(column, row, i == len(columns)-1))
		}
		if row < len(branches) {
			line.WriteString(branches[row])
		}
		out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	how := fmt.Sprintf("routed to %s and %s", t.Balancer.Addr4(), t.Balancer.Addr6())
	if t.Options.VIPOnLink {
		how = "on the link before lb"
	}
	fmt.Fprintf(&out, "VIPs %s and %s: on no host, %s\n", VIP4, VIP6, how)
	return out.String()
}

// shape is the hosts in a line from the client on, and the hosts that hang off the last one.
func (t *Topology) shape() (chain, leaves []*Host) {
	chain = append(chain, t.Client)
	if t.Router != nil {
		chain = append(chain, t.Router)
	}
	switch t.Options.Layout {
	case OneArm:
		return append(chain, t.Switch), append([]*Host{t.Balancer}, t.Backends...)
	case TwoArm:
		return append(chain, t.Balancer, t.Switch), t.Backends
	}
	return append(chain, t.Balancer), t.Backends
}

// cell is one row of a column; in the first row a line leads on to the next column, or
// without a gap to the joints after the last.
func cell(column []string, row int, last bool) string {
	width := 0
	for _, text := range column {
		width = max(width, utf8.RuneCountInString(text))
	}
	width += 5
	text := ""
	if row < len(column) {
		text = column[row]
	}
	rest := width - utf8.RuneCountInString(text)
	switch {
	case row > 0:
		return text + strings.Repeat(" ", rest)
	case last:
		return text + " " + strings.Repeat("─", rest-1)
	}
	return text + " " + strings.Repeat("─", rest-2) + " "
}
