package net

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestDownAndBackWithDirectReturn: with direct return, connections outlive the time when their
// backend is down, before and after its slots have settled, and so do the connections that other
// backends got meanwhile.
func TestDownAndBackWithDirectReturn(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(map[bool]string{false: "in transition", true: "when all is settled"}[late], func(t *testing.T) {
			b, file, _ := drainBed(t, "dsr-ipip")
			if late {
				b.reload(strings.Replace(file(), settle(), fmt.Sprintf("timeouts: {settle: %s}\n", patience*3*time.Second), 1))
			}
			vip := directVIPs(0)[0]
			before := b.sessionsOf(t, vip, 64)
			check := func(when string, sessions []*session) {
				t.Helper()
				for _, s := range sessions {
					if err := b.alive(s); err != nil {
						t.Errorf("%s: %v", when, err)
					}
				}
			}
			next := func(health string) {
				t.Helper()
				b.set(t, "health", "b2", health)
				if !late { // otherwise it may have settled by now
					b.unsettled(t)
				}
				check("b2 is "+health, before)
			}
			next("down")
			meanwhile := b.sessionsOf(t, vip, 64)
			if theirs, _ := with("b2", meanwhile); len(theirs) > 0 {
				t.Errorf("%d new connections went to a backend that is down", len(theirs))
			}
			if late {
				b.settled(t, patience*20*time.Second)
			}
			next("auto")
			check("b2 is back", meanwhile)
			if late {
				b.settled(t, patience*20*time.Second)
				check("all is settled", slices.Concat(before, meanwhile))
			}
			theirs, _ := with("b2", before)
			t.Logf("%d connections, of which %d were with the backend that went down, and %d that began meanwhile: none lost", len(before), len(theirs), len(meanwhile))
		})
	}
}
