package baseline

import (
	"fmt"
	"slices"
	"strings"
)

// diffContext is the number of lines that are shown around a change.
const diffContext = 2

// secrets are files whose lines are not shown.
var secrets = []string{"/etc/shadow", "/etc/gshadow"}

// diff returns the change as text.
func (c change) diff() string {
	var b strings.Builder
	switch {
	case c.Before == nil && c.After.Kind == kindLink:
		return fmt.Sprintf("+++ %s, a new link to %s\n", c.Path, c.After.Target)
	case c.Before == nil && c.After.Kind == kindFolder:
		return fmt.Sprintf("+++ %s, a new folder, mode %04o\n", c.Path, c.After.Mode)
	case c.After == nil:
		return fmt.Sprintf("--- %s, removed\n", c.Path)
	case c.Before == nil:
		fmt.Fprintf(&b, "+++ %s, new, mode %04o\n", c.Path, c.After.Mode)
	default:
		fmt.Fprintf(&b, "--- %s\n", c.Path)
		if c.Before.Mode != c.After.Mode || c.Before.UID != c.After.UID || c.Before.GID != c.After.GID {
			fmt.Fprintf(&b, "-mode %04o, owner %d, group %d\n+mode %04o, owner %d, group %d\n", c.Before.Mode, c.Before.UID, c.Before.GID, c.After.Mode, c.After.UID, c.After.GID)
		}
	}
	if !c.After.Read {
		return b.String()
	}
	var old []string
	if c.Before != nil && len(c.Before.Content) > 0 {
		old = linesOf(c.Before.Content)
	}
	lines := difference(old, linesOf(c.After.Content))
	if slices.Contains(secrets, c.Path) {
		changed := 0
		for _, line := range lines {
			if line[0] != ' ' {
				changed++
			}
		}
		if changed > 0 {
			b.WriteString("(the lines that change are not shown: they have passwords' hashes)\n")
		}
		return b.String()
	}
	shown := -1
	for i, line := range lines {
		near := lines[max(0, i-diffContext):min(len(lines), i+diffContext+1)]
		if !slices.ContainsFunc(near, func(l string) bool { return l[0] != ' ' }) {
			continue
		}
		if shown >= 0 && shown != i-1 {
			b.WriteString("…\n")
		}
		b.WriteString(line[:1] + printable(line[1:]) + "\n")
		shown = i
	}
	return b.String()
}

// differenceMax limits the memory: with more pairs of lines, all old lines and all new lines are shown.
const differenceMax = 4_000_000

// difference returns all lines, each with a space, - or + before it: the longest common subsequence stays.
func difference(old, now []string) (all []string) {
	begin := 0
	for begin < len(old) && begin < len(now) && old[begin] == now[begin] {
		begin++
	}
	end := 0
	for end < len(old)-begin && end < len(now)-begin && old[len(old)-1-end] == now[len(now)-1-end] {
		end++
	}
	add := func(sign string, lines []string) {
		for _, line := range lines {
			all = append(all, sign+line)
		}
	}
	add(" ", old[:begin])
	a, b := old[begin:len(old)-end], now[begin:len(now)-end]
	if len(a)*len(b) > differenceMax {
		add("-", a)
		add("+", b)
		a, b = nil, nil
	}
	width := len(b) + 1
	common := make([]int32, (len(a)+1)*width) // lengths for the lines from i and from j on
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				common[i*width+j] = common[(i+1)*width+j+1] + 1
			} else {
				common[i*width+j] = max(common[(i+1)*width+j], common[i*width+j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			add(" ", a[i:i+1])
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && common[(i+1)*width+j] >= common[i*width+j+1]:
			add("-", a[i:i+1])
			i++
		default:
			add("+", b[j:j+1])
			j++
		}
	}
	add(" ", old[len(old)-end:])
	return all
}
