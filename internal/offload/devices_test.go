package offload

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// above makes a device above another one, and skips the test where the kernel lacks the kind.
func above(t *testing.T, n *nstest.Namespace, link netlink.Link, below string) {
	t.Helper()
	_, isBond := link.(*netlink.Bond)
	var err error
	n.Do(t, func() {
		var l netlink.Link
		if l, err = netlink.LinkByName(below); err != nil {
			return
		}
		if !isBond {
			link.Attrs().ParentIndex = l.Attrs().Index
		}
		if err = netlink.LinkAdd(link); err == nil && isBond {
			err = errors.Join(netlink.LinkSetDown(l), netlink.LinkSetMaster(l, link))
		}
	})
	if errors.Is(err, unix.EOPNOTSUPP) && os.Getenv("SHUNT_KERNEL_TEST") == "" {
		t.Skipf("the kernel has no %s", link.Type())
	}
	if err != nil {
		t.Fatalf("make a %s above %s: %v", link.Type(), below, err)
	}
}

func vlan(name string, id int) netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return &netlink.Vlan{LinkAttrs: attrs, VlanId: id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
}

// TestWhatFramesComeInBy: packets are merged, and tags taken off, below a VLAN and a bond.
func TestWhatFramesComeInBy(t *testing.T) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bond0"
	for _, test := range []struct {
		name  string
		stack []netlink.Link
		p     Purpose
		want  string // in the message
	}{
		{"a VLAN in a VLAN", []netlink.Link{vlan("lan.7", 7), vlan("lan.7.8", 8)}, Merging, "lan: rx-gro"},
		{"a bond", []netlink.Link{netlink.NewLinkBond(attrs)}, Merging, "lan: rx-gro"},
		{"tags at a bond", []netlink.Link{netlink.NewLinkBond(attrs)}, Tags, "lan: rx-vlan-hw-parse"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := nstest.New(t)
			aggregating(t, a, a)
			top := "lan"
			for _, link := range test.stack {
				above(t, a, link, top)
				top = link.Attrs().Name
			}
			all := func() map[string]map[string]ethtool.FeatureState {
				return map[string]map[string]ethtool.FeatureState{"lan": features(t, a, "lan", nil), "eth": features(t, a, "eth", nil), top: features(t, a, top, nil)}
			}
			before := all()
			var state State
			var still []string
			var err error
			a.Do(t, func() {
				if state, err = test.p.Disable(top, State{}, forget); err == nil {
					still, err = test.p.On(top)
				}
			})
			if err != nil || len(still) > 0 {
				t.Fatalf("still on: %q, %v", still, err)
			}
			now := all()
			for device, list := range map[string][]string{"lan": test.p.receiving, top: test.p.receiving, "eth": test.p.sending} {
				if left := on(now[device], list); len(left) > 0 {
					t.Errorf("still on at %s: %v", device, left)
				}
			}
			if said := strings.Join(state.Of(top, test.p), "; "); !strings.Contains(said, test.want) || !strings.Contains(said, "the other end of lan: tx-") {
				t.Errorf("said %q", said)
			}
			var left State
			a.Do(t, func() { left, err = state.Restore(top, test.p) })
			if err != nil || len(left.Changes) > 0 {
				t.Fatalf("restore: %v, left %+v", err, left)
			}
			if diff := cmp.Diff(before, all()); diff != "" {
				t.Errorf("features after restoring (-before +after):\n%s", diff)
			}
		})
	}
}

// TestParentOutOfReach: a VLAN may be in another network namespace than its parent.
func TestParentOutOfReach(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	aggregating(t, a, a)
	link := vlan("lan.7", 7)
	above(t, a, link, "lan")
	var err error
	a.Do(t, func() { err = netlink.LinkSetNsFd(link, int(b.Handle)) })
	if err != nil {
		t.Fatal(err)
	}
	b.Do(t, func() { _, err = Merging.Disable("lan.7", State{}, forget) })
	var unreachable *Unreachable
	if !errors.As(err, &unreachable) || unreachable.Index != a.Index(t, "lan") ||
		!strings.Contains(err.Error(), "cannot switch aggregation off on the parent of lan.7") || !strings.Contains(unreachable.Command(), "gro off") {
		t.Errorf("error %v, want an *Unreachable for lan", err)
	}
}
