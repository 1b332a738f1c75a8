package watch_test

import (
	"testing"

	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

// A connection between pods of two nodes, both with the shortcut: its packets go through both hosts, each of them is
// counted at the node of the pod that sent it, and packets to a pod of the same node take the shortcut beside it.
func TestPodsOfAnotherNode(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			pair, rules := bedtest.NewPair(t, 2)
			var worlds [2]*world
			for i, b := range pair {
				w := &world{T: t, Bed: b, rules: rules[i]}
				var err error
				w.watch, err = watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.Watched()...), In: b.Node.Run})
				w.must(err)
				t.Cleanup(func() { w.must(w.watch.Close()) })
				worlds[i] = w
			}
			families(t, func(t *testing.T, is6 bool) {
				near, far := *worlds[0], *worlds[1]
				near.T, far.T = t, t
				taken, left := near.count("taken")+far.count("taken"), [2]uint64{near.count("not_local"), far.count("not_local")}
				seen := [2]uint64{near.seen(), far.seen()}
				client, server := bedtest.ConnectPods(t, near.Pods[0], far.Pods[0], far.Address(0, is6))
				const octets = 100_000
				near.exchange(client, server, octets)
				if now := near.count("taken") + far.count("taken"); now != taken {
					t.Errorf("%d packets to the other node took the shortcut", now-taken)
				}
				for i, w := range []*world{&near, &far} {
					if now := w.count("not_local"); now < left[i]+3 {
						t.Errorf("node %d: %d packets to the other node are counted", i+1, now-left[i])
					}
					if now := w.seen(); now < seen[i]+6 {
						t.Errorf("node %d: the rules have seen %d packets of both directions", i+1, now-seen[i])
					}
				}
				near.pair(is6) // which waits until the shortcut is taken
			})
		})
	}
}
