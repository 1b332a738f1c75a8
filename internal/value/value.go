// Package value has the values that people write in the configuration file and that several products
// need: ranges of ports, and durations as the file writes them.
package value

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// PortRange is an inclusive range of ports, in host byte order. First == Last is an
// exact port; AnyPort is every port.
type PortRange struct {
	First, Last uint16
}

// AnyPort matches every port and loses to every narrower range.
var AnyPort = PortRange{First: 0, Last: 65535}

// Exact reports whether the range is one port.
func (r PortRange) Exact() bool { return r.First == r.Last }

// String is the range as the configuration writes it.
func (r PortRange) String() string {
	switch {
	case r == AnyPort:
		return "any"
	case r.Exact():
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// DurationText is a duration as the configuration writes it: "2h4m", not "2h4m0s".
func DurationText(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
