package protect

import (
	"context"
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

// Ten times as many audited operations as their buffer has room for cost no denial: each is reported, and losses are
// counted.
func TestAuditsTakeNoRoomOfDenials(t *testing.T) {
	b := newBench(t)
	audited, denied := b.Folder("audited"), b.Folder("denied")
	rules := append(rule(b, policy.Audit, audited).Rules, rule(b, policy.Deny, denied).Rules...)
	rules[0].Name, rules[1].Name = "audited", "denied"
	g := b.start(policy.Policy{Rules: rules})
	size := uint64(event.HeaderSize) + uint64(unsafe.Sizeof(guardGuardEvent{}))
	storm, few := 10*(1<<20)/size, uint64(20)
	for i := range storm {
		if err := trial.OpenWrite(work{audited}.prot("f"), unix.O_WRONLY|unix.O_TRUNC); err != nil {
			t.Fatal(err)
		}
		if i%(storm/few+1) == 0 {
			if err := trial.OpenWrite(work{denied}.prot("f"), unix.O_WRONLY); !errors.Is(err, os.ErrPermission) {
				t.Fatal(err)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the events until now
	told := map[bool]uint64{}
	if err := g.Listen(ctx, func(a judge.Attempt) error { told[a.Denied]++; return nil }); err != nil {
		t.Fatal(err)
	}
	lostDenied, lostAudited := g.Lost()
	t.Logf("%d of %d audited ones told, %d known to be lost", told[false], storm, lostAudited)
	if told[true] != few || lostDenied != 0 {
		t.Errorf("%d of %d denials were told, %d lost", told[true], few, lostDenied)
	}
	if told[false] == 0 || told[false] >= storm {
		t.Errorf("%d of %d audited ones were told: the test wants a storm", told[false], storm)
	}
}
