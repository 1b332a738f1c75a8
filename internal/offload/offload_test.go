package offload

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// features reads all of a device's features; change sets some.
func features(t *testing.T, n *nstest.Namespace, name string, change map[string]bool) map[string]ethtool.FeatureState {
	t.Helper()
	var states map[string]ethtool.FeatureState
	var err error
	n.Do(t, func() {
		var tool *ethtool.Ethtool
		if tool, err = ethtool.NewEthtool(); err != nil {
			return
		}
		defer tool.Close()
		if change != nil {
			if err = tool.Change(name, change); err != nil {
				return
			}
		}
		states, err = tool.FeaturesWithState(name)
	})
	if err != nil {
		t.Fatalf("features of %s: %v", name, err)
	}
	return states
}

func on(states map[string]ethtool.FeatureState, list []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(f string) bool { return !states[f].Active })
}

func forget(State) error { return nil }

// aggregating is a veth pair whose first end merges packets that it receives, but for one feature
// that somebody has switched off, and whose second end merges packets that it sends, but for one.
func aggregating(t *testing.T, a *nstest.Namespace, b *nstest.Namespace) {
	t.Helper()
	nstest.Veth(t, a, "lan", b, "eth")
	features(t, a, "lan", map[string]bool{"rx-gro": true, "rx-gro-list": true, "rx-udp-gro-forwarding": false})
	features(t, b, "eth", map[string]bool{"tx-udp-segmentation": false, "tx-tcp-segmentation": true})
}

func TestSwitchesOffAndBackPrecisely(t *testing.T) {
	for _, test := range []struct {
		name  string
		other func(t *testing.T, a *nstest.Namespace) *nstest.Namespace
	}{
		{"the other end in the same namespace", func(_ *testing.T, a *nstest.Namespace) *nstest.Namespace { return a }},
		{"the other end in a named namespace", func(t *testing.T, _ *nstest.Namespace) *nstest.Namespace {
			return nstest.NewNamed(t, fmt.Sprintf("shunt-offload-%d", os.Getpid()))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := nstest.New(t)
			b := test.other(t, a)
			aggregating(t, a, b)
			ours, theirs := features(t, a, "lan", nil), features(t, b, "eth", nil)
			if len(on(ours, Merging.receiving)) < 2 || len(on(theirs, Merging.sending)) < 3 {
				t.Fatalf("nothing merges before the test: %v, %v", on(ours, Merging.receiving), on(theirs, Merging.sending))
			}

			var stored []byte
			var state State
			var err error
			a.Do(t, func() {
				state, err = Merging.Disable("lan", State{}, func(s State) error {
					if left := on(features(t, a, "lan", nil), Merging.receiving); len(left) < 2 {
						t.Errorf("switched off before it was stored: only %v left", left)
					}
					stored, _ = json.Marshal(s)
					return nil
				})
			})
			if err != nil {
				t.Fatal(err)
			}
			if left := on(features(t, a, "lan", nil), Merging.receiving); len(left) > 0 {
				t.Errorf("still on: %v", left)
			}
			if left := on(features(t, b, "eth", nil), Merging.sending); len(left) > 0 {
				t.Errorf("still on at the other end: %v", left)
			}
			if said := state.Of("lan", Merging); len(said) != 2 || said[0] != "lan: rx-gro, rx-gro-list" || !strings.HasPrefix(said[1], "the other end of lan: tx-") {
				t.Errorf("said %q", said)
			}

			// A successor finds everything off, and must not forget the features that were on.
			var before, after State
			if err := json.Unmarshal(stored, &before); err != nil {
				t.Fatal(err)
			}
			a.Do(t, func() { after, err = Merging.Disable("lan", before, forget) })
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(state, after); diff != "" {
				t.Errorf("the successor's state differs (-first +second):\n%s", diff)
			}
			var left State
			a.Do(t, func() { left, err = after.Restore("lan", Merging) })
			if err != nil || len(left.Changes) > 0 {
				t.Fatalf("restore: %v, left %+v", err, left)
			}
			if diff := cmp.Diff(ours, features(t, a, "lan", nil)); diff != "" {
				t.Errorf("features after restoring (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(theirs, features(t, b, "eth", nil)); diff != "" {
				t.Errorf("the other end's features after restoring (-before +after):\n%s", diff)
			}
		})
	}
}

func TestOtherEndOutOfReach(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t) // without a name, and no process in it
	aggregating(t, a, b)
	before := features(t, b, "eth", nil)
	var state State
	var err error
	a.Do(t, func() { state, err = Merging.Disable("lan", State{}, forget) })
	var unreachable *Unreachable
	if !errors.As(err, &unreachable) {
		t.Fatalf("error %v, want an *Unreachable", err)
	}
	if unreachable.Where != "at the other end of lan" || unreachable.Index != b.Index(t, "eth") || !strings.Contains(unreachable.Command(), "ethtool -K") {
		t.Errorf("%#v: %v", unreachable, err)
	}
	if left := on(features(t, a, "lan", nil), Merging.receiving); len(left) > 0 {
		t.Errorf("still on: %v", left)
	}
	if len(state.Changes) != 1 {
		t.Errorf("state %+v, want one change", state)
	}
	if diff := cmp.Diff(before, features(t, b, "eth", nil)); diff != "" {
		t.Errorf("the other end changed:\n%s", diff)
	}
	// The command does the missing steps.
	if _, err := exec.LookPath("ethtool"); err != nil {
		return
	}
	// It reads sysfs, which shows the namespace it was mounted in.
	command := fmt.Sprintf("unshare -m sh -c 'mount -t sysfs sysfs /sys && %s'", unreachable.Command())
	var out []byte
	b.Do(t, func() { out, err = exec.Command("sh", "-c", command).CombinedOutput() })
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	if left := on(features(t, b, "eth", nil), Merging.sending); len(left) > 0 {
		t.Errorf("after the command still on: %v", left)
	}
}

func TestNothingChangesUnlessItIsStored(t *testing.T) {
	a := nstest.New(t)
	aggregating(t, a, a)
	before := features(t, a, "lan", nil)
	full := errors.New("disk full")
	var err error
	a.Do(t, func() { _, err = Merging.Disable("lan", State{}, func(State) error { return full }) })
	if !errors.Is(err, full) {
		t.Errorf("error %v, want the store's", err)
	}
	if diff := cmp.Diff(before, features(t, a, "lan", nil)); diff != "" {
		t.Errorf("features changed all the same:\n%s", diff)
	}
}

func TestRestoreAfterTheInterfaceIsGone(t *testing.T) {
	a := nstest.New(t)
	aggregating(t, a, a)
	var state State
	var err error
	a.Do(t, func() { state, err = Merging.Disable("lan", State{}, forget) })
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Net.LinkDel(a.Link(t, "lan")); err != nil {
		t.Fatal(err)
	}
	aggregating(t, a, a) // another one of the same name
	var left, next State
	a.Do(t, func() { left, err = state.RestoreAll() })
	if err != nil || len(left.Changes) > 0 {
		t.Errorf("restore: %v, left %+v; want nothing to do", err, left)
	}
	a.Do(t, func() { next, err = Merging.Disable("lan", state, forget) })
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range next.Changes {
		if c.Index != a.Index(t, "lan") {
			t.Errorf("the state still names the interface that is gone: %+v", c)
		}
	}
}

func TestMissingInterface(t *testing.T) {
	a := nstest.New(t)
	var err error
	a.Do(t, func() { _, err = Merging.Disable("nowhere", State{}, forget) })
	if err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("error %v, want the interface named", err)
	}
}
