package daemon

import (
	"net"
	"net/netip"
	"testing"
)

// TestRoutesThatAreFollowed: the kernel is asked for a route only if the way to the backend is not known, or its
// interface has gone.
func TestRoutesThatAreFollowed(t *testing.T) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	followed, gone, unknown := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")
	asked := map[netip.Addr]int{}
	h := followedHost{out: func(a netip.Addr) (int, bool, bool) {
		asked[a]++
		switch a {
		case followed:
			return lo.Index, true, true
		case gone:
			return 1 << 30, true, true
		}
		return 0, false, false
	}}
	routes := h.Routes([]netip.Addr{followed, gone, unknown})
	for _, a := range []netip.Addr{followed, gone, unknown} {
		if route := routes[a]; route.Err != nil || route.Interface != "lo" || asked[a] != 1 {
			t.Errorf("route to %s: %+v, asked %d times", a, route, asked[a])
		}
		if !routes[a].OnLink {
			t.Errorf("the route to %s has a gateway", a)
		}
	}
}
