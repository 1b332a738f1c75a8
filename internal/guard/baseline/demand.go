package baseline

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// demand is a demand on a value: every field that is set must hold.
type demand struct {
	Is       []string // one of these, in any case
	Min, Max *int64   // a number
	Without  []string // none of these in a list with commas
	Covers   string   // an octal mask that has all these bits
}

// meets reports whether a value meets the demand.
func (d demand) meets(value string) bool {
	if len(d.Is) > 0 && !slices.ContainsFunc(d.Is, func(one string) bool { return strings.EqualFold(one, value) }) {
		return false
	}
	if d.Min != nil || d.Max != nil {
		n, ok := numberOf(value)
		if !ok || d.Min != nil && n < *d.Min || d.Max != nil && n > *d.Max {
			return false
		}
	}
	if d.Covers != "" {
		mask, err := strconv.ParseUint(value, 8, 32)
		want, wrong := strconv.ParseUint(d.Covers, 8, 32)
		if err != nil || wrong != nil || mask&want != want {
			return false
		}
	}
	// In OpenSSH, a list that begins with - removes its words from the default.
	return strings.HasPrefix(value, "-") && d.Min == nil && d.Max == nil ||
		!slices.ContainsFunc(strings.Split(strings.TrimLeft(value, "+^"), ","), func(one string) bool { return slices.Contains(d.Without, strings.TrimSpace(one)) })
}

// repaired returns the value to write in place of a wrong one; "" if the template has none.
func (d demand) repaired(value, write string) string {
	if write != "" || len(d.Without) == 0 {
		return write
	}
	sign := value[:len(value)-len(strings.TrimLeft(value, "+^"))]
	kept := slices.DeleteFunc(strings.Split(value[len(sign):], ","), func(one string) bool { return slices.Contains(d.Without, strings.TrimSpace(one)) })
	if len(kept) == 0 {
		return ""
	}
	return sign + strings.Join(kept, ",")
}

func (d demand) String() string {
	var all []string
	if len(d.Is) > 0 {
		all = append(all, strings.Join(d.Is, " or "))
	}
	switch {
	case d.Min != nil && d.Max != nil:
		all = append(all, fmt.Sprintf("%d to %d", *d.Min, *d.Max))
	case d.Min != nil:
		all = append(all, fmt.Sprintf("at least %d", *d.Min))
	case d.Max != nil:
		all = append(all, fmt.Sprintf("at most %d", *d.Max))
	}
	if d.Covers != "" {
		all = append(all, "a mask with "+d.Covers)
	}
	if len(d.Without) > 0 {
		all = append(all, "without "+strings.Join(d.Without, ", "))
	}
	return strings.Join(all, ", ")
}

// numberOf reads a number, or a time as sshd_config(5) writes it (1h30m), in seconds.
func numberOf(value string) (int64, bool) {
	if n, err := strconv.ParseInt(value, 10, 64); err == nil {
		return n, true
	}
	units := map[byte]int64{'s': 1, 'm': 60, 'h': 3600, 'd': 86400, 'w': 604800}
	var sum int64
	for value != "" {
		digits := len(value) - len(strings.TrimLeft(value, "0123456789"))
		n, err := strconv.ParseInt(value[:digits], 10, 32)
		if err != nil || digits == len(value) {
			return 0, false
		}
		unit, known := units[value[digits]|0x20]
		if !known {
			return 0, false
		}
		sum += n * unit
		value = value[digits+1:]
	}
	return sum, sum > 0
}
