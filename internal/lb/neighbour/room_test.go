package neighbour

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// TestRooms: the kernel reports the sizes in any network namespace, also where the settings are not visible.
func TestRooms(t *testing.T) {
	s := newUntunedSite(t)
	n, err := openNeighbours(s.balancer.Handle, false)
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	if err := n.ask(key{s.balancer.Index(t, "lan"), netip.MustParseAddr("10.8.0.2")}, true); err != nil {
		t.Fatal(err)
	}
	rooms, err := n.rooms()
	if err != nil || len(rooms) != 2 {
		t.Fatalf("rooms are %+v, %v; want two", rooms, err)
	}
	for f, r := range rooms {
		text, err := os.ReadFile(fmt.Sprintf("/proc/sys/net/ipv%d/neigh/default/gc_thresh3", f))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if strings.TrimSpace(string(text)) != fmt.Sprint(r.most) {
			t.Errorf("IPv%d: room for %d, and gc_thresh3 is %s, %v", f, r.most, text, err)
		}
	}
	if rooms[4].entries == 0 {
		t.Errorf("rooms are %+v: IPv4 has no entry at all", rooms)
	}
}

// TestTableWithoutRoom: while the kernel's table is full or nearly so, and no longer, a condition names the
// settings that make room.
func TestTableWithoutRoom(t *testing.T) {
	s := newSite(t)
	conditions := &condition.Set{}
	var full atomic.Bool
	var most atomic.Int64
	full.Store(true)
	most.Store(3000)
	w, _ := s.watch(t, Options{
		Conditions: conditions,
		full:       full.Load,
		rooms: func() (map[int]room, error) {
			return map[int]room{4: {1000, int(most.Load()), 128}, 6: {1, 1024, 128}}, nil
		},
	})
	shown := func(addr string) (c condition.Condition) {
		for _, c := range conditions.List() {
			if c.Subject == addr {
				return c
			}
		}
		return c
	}
	const makesRoom = "`sysctl -w net.ipv4.neigh.default.gc_thresh2=4096 net.ipv4.neigh.default.gc_thresh3=8192`"
	w.Want(addrs("10.8.0.2"))
	nstest.Eventually(t, "it is said that there is no room, and what makes room", func() bool {
		c := shown("10.8.0.2")
		return strings.Contains(c.Text, "the kernel's table of neighbours has no room for 10.8.0.2 on interface") && strings.Contains(c.Remedy, makesRoom)
	})
	full.Store(false)
	mustResolve(t, w, "10.8.0.2")
	nstest.Eventually(t, "the condition is cleared", func() bool { return len(conditions.List()) == 0 })

	most.Store(1024)
	w.Want(addrs("10.8.0.2", "10.8.0.77", "fd00:8::77", "10.99.1.1"))
	const toHalf = "net.ipv4.neigh.default.gc_thresh3=2048`"
	nstest.Eventually(t, "the table that is nearly full is named, where that can be why", func() bool {
		usual, _ := condition.Lookup(condition.NeighbourUnresolved)
		return strings.Contains(shown("10.8.0.77").Remedy, toHalf) && shown("fd00:8::77").Remedy == usual.Remedy && shown("10.99.1.1").Remedy == usual.Remedy
	})
	most.Store(1200)
	nstest.Eventually(t, "a little more room is not enough", func() bool {
		return strings.Contains(shown("10.8.0.77").Remedy, "net.ipv4.neigh.default.gc_thresh3=4096`")
	})
	most.Store(2048)
	nstest.Eventually(t, "with room the remedy is the usual one", func() bool {
		c := shown("10.8.0.77")
		return c.Text != "" && !strings.Contains(c.Remedy, "gc_thresh")
	})
}

// TestMakeRoom: twice the needed entries, and the same number while backends come and go.
func TestMakeRoom(t *testing.T) {
	for _, c := range []struct {
		most, needed int
		gives        string
	}{
		{1024, 50000, "net.ipv6.neigh.default.gc_thresh2=65536 net.ipv6.neigh.default.gc_thresh3=131072`"},
		{1024, 60000, "net.ipv6.neigh.default.gc_thresh3=131072`"},
		{1024, 3, "net.ipv6.neigh.default.gc_thresh3=2048`"},
	} {
		if text := makeRoom(6, c.most, c.needed); !strings.Contains(text, c.gives) || strings.Contains(text, "%!") {
			t.Errorf("room for %d, %d needed: %q lacks %q", c.most, c.needed, text, c.gives)
		}
	}
}
