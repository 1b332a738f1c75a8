package health

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

func backend(address string, port uint16) model.Backend {
	b := model.BackendAddress{Address: netip.MustParseAddr(address), Port: port}
	return model.Backend{BackendAddress: b, Weight: 1, Name: b.String()}
}

// TestServe writes backends as words: the state's first letter (U, D, W), B for a backup, 0 for
// weight 0, 6 for IPv6, L for out of reach, and an operator's word in ! or ? (up or down). It expects for each: S
// serves, D is down, - is idle.
func TestServe(t *testing.T) {
	for _, c := range []struct {
		name, backends string
		panics         uint32
		want           string
		panicking      bool
	}{
		{"those that live", "U D W", 0, "S D -", false},
		{"a backup is not needed", "U UB", 0, "S -", false},
		{"a backup that is down and not needed is still down", "U DB", 0, "S D", false},
		{"backups where no other lives", "D W UB DB UB", 0, "D - S D S", false},
		{"backups where the others have weight 0", "U0 UB", 0, "S S", false},
		{"nobody", "D W DB", 0, "D - D", false},
		{"families are apart", "U D6 UB UB6", 0, "S D - S", false},
		{"above the threshold", "U U D D", 50, "S S D D", false},
		{"below it", "U D D W", 50, "S S S S", true},
		{"nobody lives", "D D", 1, "S S", true},
		{"backups come before panic", "D D UB", 50, "D D S", false},
		{"and keep it off where some live", "U D D D UB", 50, "S D D D -", false},
		{"weight 0 does not count", "U D0 D0", 50, "S D D", false},
		{"without a threshold none", "D D", 0, "D D", false},
		{"an operator says up", "D! D", 0, "S D", false},
		{"an operator says down, and panic obeys", "U? D D", 50, "D S S", true},
		{"who is out of reach is down", "U UL", 0, "S D", false},
		{"also with a check that fails", "U DL WL", 0, "S D D", false},
		{"all are out of reach", "UL UL", 0, "S S", false},
		{"all that live are", "UL UL D W", 0, "S S D -", false},
		{"and the only other one has weight 0", "UL U0", 0, "S S", false},
		{"a backup can be reached", "UL UL UB", 0, "D D S", false},
		{"it is not needed", "U UL UB", 0, "S D -", false},
		{"a backup is out of reach, too", "D UBL", 0, "D S", false},
		{"reach of families is apart", "U UL6", 0, "S S", false},
		{"an operator knows better", "UL! U", 0, "S S", false},
		{"panic reaches those it can", "U UL UL D", 50, "S D D S", true},
		{"only backups, and none lives", "DB", 50, "D", false},
	} {
		s := model.Service{Name: "web", Health: model.Health{Check: model.CheckTCP, Panic: c.panics}}
		facts, gone := map[model.BackendAddress]found{}, map[netip.Addr]bool{}
		for i, word := range strings.Fields(c.backends) {
			b := backend(fmt.Sprintf("10.0.0.%d", i+1), 80)
			if strings.Contains(word, "6") {
				b = backend(fmt.Sprintf("2001:db8::%d", i+1), 80)
			}
			facts[b.BackendAddress] = found{state: map[byte]model.HealthState{'U': up, 'D': down, 'W': waiting}[word[0]]}
			gone[b.Address] = strings.Contains(word, "L")
			b.Backup = strings.Contains(word, "B")
			if strings.Contains(word, "0") {
				b.Weight = 0
			}
			if strings.Contains(word, "!") {
				b.Override.Health = up
			}
			if strings.Contains(word, "?") {
				b.Override.Health = down
			}
			s.Backends = append(s.Backends, b)
		}
		served, panics := serve(s, func(b model.Backend) found { return facts[b.BackendAddress] }, func(a netip.Addr) bool { return gone[a] })
		var got []string
		for _, b := range served.Backends {
			word := "S"
			if b.Observed.Idle {
				word = "-"
			}
			if b.Observed.Down {
				word = "D"
			}
			if b.Observed.Down && !b.Observed.Idle {
				t.Errorf("%s: %s is down and takes flows", c.name, b.BackendAddress)
			}
			got = append(got, word)
		}
		if strings.Join(got, " ") != c.want || panics != c.panicking {
			t.Errorf("%s: %q with panic at %d %% is %q (panic %t), want %q (%t)", c.name, c.backends, c.panics, strings.Join(got, " "), panics, c.want, c.panicking)
		}
		for _, b := range s.Backends {
			if b.Observed.Idle || b.Observed.Down {
				t.Errorf("%s: serve has changed what it was given", c.name)
			}
		}
	}
}

func TestRamp(t *testing.T) {
	const slow = 10 * time.Second
	seen := []uint8{}
	for now := start; ; {
		percent, next := rampOf(start, now, slow)
		seen = append(seen, percent)
		if percent == 0 {
			break
		}
		if next.Sub(now) != time.Second {
			t.Fatalf("at %s the next step is at %s", now, next)
		}
		if before, _ := rampOf(start, next.Add(-1), slow); before != percent {
			t.Fatalf("just before %s it is %d %%, want %d", next, before, percent)
		}
		now = next
	}
	if len(seen) != rampSteps || seen[0] != 10 || seen[8] != 90 {
		t.Errorf("the steps are %v, want 10, 20, … 90 and all", seen)
	}
	if percent, _ := rampOf(time.Time{}, start, slow); percent != 0 {
		t.Errorf("a backend that was up before this process began has %d %%", percent)
	}
	if percent, _ := rampOf(start, start, 0); percent != 0 {
		t.Errorf("without a slow start it has %d %%", percent)
	}
}
