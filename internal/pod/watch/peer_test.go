package watch

import (
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
)

// A pod whose end of the veth cannot be looked at, as its namespace ends, is left alone.
func TestPeerThatCannotBeSeen(t *testing.T) {
	s := (&Watch{}).judgePeer(state{}, &netlink.LinkAttrs{Name: "veth1", ParentIndex: 1 << 20, NetNsID: 1 << 20})
	if s.left != shortcut.NotVeth || !strings.HasPrefix(s.why, "look at the pod's end of veth1: ") {
		t.Errorf("%s: %s", s.left, s.why)
	}
}
