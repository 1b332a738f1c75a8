package detour

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// blind is a program that sees no packet.
type blind struct{ failed error }

func (b blind) Attach(int) error            { return b.failed }
func (b blind) Name(uintptr, Target) error  { return b.failed }
func (b blind) Taken(uintptr) (bool, error) { return false, nil }
func (b blind) Close() error                { return nil }
func markOf(number uint8) uint32            { return 0x10000 | uint32(number) }
func noteIn(noted *uint8, failed error) func(number uint8) error {
	return func(number uint8) error { *noted = number; return failed }
}

var (
	vip4, vip6 = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	server     = netip.MustParseAddr("10.0.0.2")
)

// bed is a host with an address, a neighbour that answers nothing, and a way to everywhere.
type bed struct{ *nstest.Namespace }

func newBed(t *testing.T) bed {
	n, far := nstest.New(t), nstest.New(t)
	nstest.Veth(t, n, "eth0", far, "eth0")
	n.Address(t, "eth0", "10.0.0.1/24")
	n.Address(t, "eth0", "2001:db8:1::1/64")
	n.Route(t, "192.0.2.0/24", "10.0.0.2")
	n.Route(t, "2001:db8::/64", "2001:db8:1::2")
	return bed{n}
}

// seen returns the devices and the rules in addition to the usual ones.
func (b bed) seen(t *testing.T) (devices, rules []string) {
	t.Helper()
	links, err := b.Net.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if name := link.Attrs().Name; name != "lo" && name != "eth0" {
			devices = append(devices, name)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := b.Net.RuleList(family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.Mark != 0 {
				rules = append(rules, fmt.Sprintf("%d: %#x to %d", r.Priority, r.Mark, r.Table))
			}
		}
		routes, err := b.Net.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.Table >= 0x10000 {
				rules = append(rules, fmt.Sprintf("table %d: type %d", r.Table, r.Type))
			}
		}
	}
	slices.Sort(devices)
	return devices, rules
}

// dial connects to a VIP at the server, and requires an error with this text that says nothing about the server.
func (b bed) dial(t *testing.T, w *Detour, vip netip.Addr, want string) {
	t.Helper()
	b.Do(t, func() {
		conn, err := w.Dial(context.Background(), "udp", Target{VIP: netip.AddrPortFrom(vip, 80), Backend: server, Forwarding: model.ForwardingDSRIPIP})
		if err == nil {
			defer conn.Close()
			_, err = conn.Write([]byte("well?"))
		}
		var stray *NotMadeError
		if !errors.As(err, &stray) || !strings.Contains(err.Error(), want) {
			t.Errorf("asking %s: %v, %v; want %q", vip, conn, err, want)
		}
	})
}

func (b bed) remove(t *testing.T, instance string, number uint8) {
	t.Helper()
	b.Do(t, func() {
		if err := Remove(instance, number, markOf(number)); err != nil {
			t.Error(err)
		}
	})
}

// TestInstancesHaveWaysOfTheirOwn: each finds a free number, leaves devices of others alone, and removes its
// own device and rules.
func TestInstancesHaveWaysOfTheirOwn(t *testing.T) {
	b := newBed(t)
	if err := b.Net.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: Device(1)}}); err != nil {
		t.Fatal(err)
	}
	const astray = "did not take the path of clients' packets"
	ways, numbers := map[string]*Detour{}, map[string]*uint8{}
	for _, instance := range []string{"red", "blue"} {
		numbers[instance] = new(uint8)
		ways[instance] = New(Options{Instance: instance, Mark: markOf, Note: noteIn(numbers[instance], nil),
			Load: func() (Program, error) { return blind{}, nil }})
		b.dial(t, ways[instance], vip4, astray)
		b.dial(t, ways[instance], vip6, astray)
	}
	if *numbers["red"] != 2 || *numbers["blue"] != 3 {
		t.Errorf("red has number %d, blue %d", *numbers["red"], *numbers["blue"])
	}
	both, rules := b.seen(t)
	if want := []string{Device(1), Device(2), peer(2), Device(3), peer(3)}; !slices.Equal(both, want) {
		t.Errorf("there are %v, want %v", both, want)
	}
	b.dial(t, ways["red"], vip4, astray) // makes the present device and rules again
	if _, now := b.seen(t); !slices.Equal(now, rules) || len(rules) != 2*2*3 {
		t.Errorf("the rules and routes were %v, and are %v", rules, now)
	}

	// A killed instance's successor finds the device without the record, and takes it over.
	again := New(Options{Instance: "red", Mark: markOf, Note: noteIn(numbers["red"], nil), Load: func() (Program, error) { return blind{}, nil }})
	b.dial(t, again, vip4, astray)
	b.dial(t, again, vip6, astray)
	if devices, _ := b.seen(t); *numbers["red"] != 2 || len(devices) != len(both) {
		t.Errorf("red has number %d then; there are %v", *numbers["red"], devices)
	}

	b.remove(t, "red", 3) // not its own
	if devices, now := b.seen(t); len(devices) != len(both) || !slices.Equal(now, rules) {
		t.Errorf("red removed what is blue's: %v and %v are left", devices, now)
	}

	// A broken device is made anew under the same number, even if another number is free now.
	for what, destroy := range map[string]func(netlink.Link) error{"deleted": b.Net.LinkDel, "set down": b.Net.LinkSetDown} {
		if err := errors.Join(destroy(b.Link(t, Device(3))), b.Net.LinkSetAlias(b.Link(t, Device(2)), alias("green"))); err != nil {
			t.Fatal(err)
		}
		b.dial(t, ways["blue"], vip4, astray)
		b.dial(t, ways["blue"], vip4, astray)
		b.dial(t, ways["blue"], vip6, astray)
		if devices, now := b.seen(t); !slices.Equal(devices, both) || !slices.Equal(now, rules) {
			t.Errorf("after a device was %s there are %v and %v, want %v and %v", what, devices, now, both, rules)
		}
	}
	if err := b.Net.LinkSetAlias(b.Link(t, Device(2)), alias("red")); err != nil {
		t.Fatal(err)
	}
	b.remove(t, "red", 2)
	b.remove(t, "blue", 3)
	b.remove(t, "blue", 3)
	if devices, rules := b.seen(t); !slices.Equal(devices, []string{Device(1)}) || len(rules) != 0 {
		t.Errorf("%v and %v are left", devices, rules)
	}
	if err := ways["blue"].Close(); err != nil {
		t.Error(err)
	}
}

// TestWayThatCannotBeMade says why, makes nothing that was not noted, and tries again.
func TestWayThatCannotBeMade(t *testing.T) {
	b := newBed(t)
	var number uint8
	var noting, loading, attaching error
	w := New(Options{Instance: "red", Mark: markOf,
		Note: func(n uint8) error { number = n; return noting },
		Load: func() (Program, error) { return blind{attaching}, loading }})

	loading = errors.New("no memory for it")
	b.dial(t, w, vip4, "no memory for it")
	loading, noting = nil, errors.New("the disk is full")
	b.dial(t, w, vip4, "the disk is full")
	if devices, rules := b.seen(t); len(devices)+len(rules) != 0 {
		t.Errorf("%v and %v were made without a note", devices, rules)
	}
	noting = nil
	b.dial(t, w, vip4, "did not take the path")

	attaching = errors.New("refused by the verifier")
	w = New(Options{Instance: "blue", Mark: markOf, Note: noteIn(&number, nil), Load: func() (Program, error) { return blind{attaching}, nil }})
	b.dial(t, w, vip4, "refused by the verifier")
	attaching = nil
	w.program = nil // Load makes another one
	b.dial(t, w, vip4, "did not take the path")
	b.remove(t, "blue", number)
	b.remove(t, "red", 1)
	if devices, rules := b.seen(t); len(devices)+len(rules) != 0 {
		t.Errorf("%v and %v are left", devices, rules)
	}
}

// TestDialTooLate: a check that has spent its time on waiting for the way says nothing about the backend.
func TestDialTooLate(t *testing.T) {
	b := newBed(t)
	var number uint8
	w := New(Options{Instance: "red", Mark: markOf, Note: noteIn(&number, nil), Load: func() (Program, error) { return blind{}, nil }})
	over, cancel := context.WithCancel(context.Background())
	cancel()
	b.Do(t, func() {
		_, err := w.Dial(over, "tcp", Target{VIP: netip.AddrPortFrom(vip4, 80), Backend: server, Forwarding: model.ForwardingDSRIPIP})
		var late *NotMadeError
		if !errors.As(err, &late) {
			t.Errorf("a check that is too late: %v", err)
		}
	})
	b.remove(t, "red", number)
}

// TestSource: the source address of a check is the routing table's for the VIP, or else for the backend; a host
// that has the VIP cannot check it at others.
func TestSource(t *testing.T) {
	b := newBed(t)
	b.Address(t, "eth0", "10.9.0.1/24")
	b.Route(t, "198.51.100.0/24", "10.9.0.2")
	b.Address(t, "lo", "203.0.113.1/32")
	backend6 := netip.MustParseAddr("2001:db8:1::2")
	for _, c := range []struct {
		vip     string
		backend netip.Addr
		want    string
	}{
		{"192.0.2.10", server, "10.0.0.1"},
		{"198.51.100.10", server, "10.9.0.1"},
		{"203.0.113.2", server, "10.0.0.1"}, // no route to it
		{"203.0.113.2", backend6, "no source address for checks of 203.0.113.2: network is unreachable"},
		{"2001:db8::10", server, "2001:db8:1::1"},
		{"203.0.113.1", server, "this host has the address 203.0.113.1 itself"},
	} {
		b.Do(t, func() {
			from, err := new(sources).of(Target{VIP: netip.AddrPortFrom(netip.MustParseAddr(c.vip), 80), Backend: c.backend})
			if got := fmt.Sprint(from, " ", err); !strings.Contains(got, c.want) {
				t.Errorf("to %s at %s: %s, want %s", c.vip, c.backend, got, c.want)
			}
		})
	}
	b.Sysctl(t, "ipv4/conf/eth0/rp_filter", "2")
	b.Do(t, func() {
		target := Target{VIP: netip.MustParseAddrPort("203.0.113.2:80"), Backend: server, Interface: b.Index(t, "eth0")}
		want := "no route to 203.0.113.2 (network is unreachable), so it drops the backends' answers (net.ipv4.conf.eth0.rp_filter = 2): add a route"
		if from, err := new(sources).of(target); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without a route, under rp_filter: %s, %v; want %s", from, err, want)
		}
	})
}
