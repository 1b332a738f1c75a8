package demo

import "testing"

// Packets that the watch had no CPU time for are no failure, and are told.
func TestSeen(t *testing.T) {
	for _, c := range []struct {
		seen seen
		none bool
		text string
	}{
		{seen{}, true, "0 packets"},
		{seen{all: 2}, false, "2 packets"},
		{seen{all: 2, late: 2}, true, "2 packets (2 while shunt had no CPU time to judge the pods)"},
		{seen{all: 3, late: 2}, false, "3 packets (2 while shunt had no CPU time to judge the pods)"},
		{seen{all: requestsEach + 1, late: 2 * requestsEach}, false, "101 packets (200 while shunt had no CPU time to judge the pods)"},
		{seen{late: 1}, true, "0 packets"}, // it was not forwarded yet
	} {
		if none, text := c.seen.none(), c.seen.String(); none != c.none || text != c.text {
			t.Errorf("%+v: %t, %q", c.seen, none, text)
		}
	}
}
