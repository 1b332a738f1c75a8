package watch_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

// newPair is two nodes that know of each other's pods.
func newPair(t *testing.T, mode shortcut.Mode) (pair [2]*world) {
	beds, all := bedtest.NewPair(t, 2)
	for i, b := range beds {
		w := &world{T: t, Bed: b, rules: all[i]}
		other := beds[1-i]
		var err error
		w.watch, err = watch.Open(watch.Options{
			Mode: mode, Find: watch.Fixed(b.Watched()...), In: b.Node.Run,
			FindFar: func() ([]watch.Far, error) { return other.Far(), nil },
		})
		w.must(err)
		t.Cleanup(func() { w.must(w.watch.Close()) })
		pair[i] = w
	}
	return pair
}

// across is a connection from a pod of one node to a pod of the other, whose packets take the shortcut of both.
func across(t *testing.T, pair [2]*world, is6 bool) (client, server *net.TCPConn) {
	t.Helper()
	client, server = bedtest.ConnectPods(t, pair[0].Pods[0], pair[1].Pods[0], pair[1].Address(0, is6))
	for i, w := range pair {
		for _, iface := range []string{w.Interface(0), "eth0"} {
			before := w.status().From[iface]["taken"].Packets
			w.T = t
			w.until("packets that come in by "+iface+" take the shortcut of node "+string(rune('1'+i)), func() bool {
				w.exchange(client, server, 4)
				return w.status().From[iface]["taken"].Packets > before
			})
		}
	}
	return client, server
}

// Both directions take the shortcut of both nodes, in both modes, and both ends of the connection can close.
func TestAcrossNodes(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			pair := newPair(t, mode)
			families(t, func(t *testing.T, is6 bool) {
				before := [2]uint64{pair[0].seen(), pair[1].seen()}
				client, server := across(t, pair, is6)
				if mode == shortcut.Checked {
					before = [2]uint64{pair[0].seen(), pair[1].seen()} // it has begun
				}
				pair[0].exchange(client, server, 1_000_000)
				pair[0].must(client.CloseWrite())
				_ = server.SetReadDeadline(time.Now().Add(patience))
				if n, err := server.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Fatalf("the end of the stream: %d octets, %v", n, err)
				}
				pair[0].must(server.CloseWrite())
				_ = client.SetReadDeadline(time.Now().Add(patience))
				if n, err := client.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Fatalf("the end of the answer: %d octets, %v", n, err)
				}
				for i, w := range pair {
					if now := w.seen(); now != before[i] {
						t.Errorf("node %d: the rules have seen %d packets; counts %v", i+1, now-before[i], w.status().Counts)
					}
				}
			})
		})
	}
}

// A rule that one node gets while a connection runs stops it, and the connection goes on without the rule.
func TestRulesTakeEffectAcrossNodes(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			pair := newPair(t, mode)
			families(t, func(t *testing.T, is6 bool) {
				client, server := across(t, pair, is6)
				remove := pair[1].insert(plain.Drop())
				begin := time.Now()
				pair[1].until("the rule stops the connection", func() bool { return bedtest.Carry(client, server, 1, 100*time.Millisecond) != nil })
				t.Logf("the rule took effect within %s", time.Since(begin)-100*time.Millisecond)
				remove()
				_ = server.SetDeadline(time.Now().Add(patience))
				if _, err := server.Read(make([]byte, 1)); err != nil {
					t.Errorf("the octet that was held up: %v", err)
				}
				pair[0].exchange(client, server, 100_000)
			})
		})
	}
}

// The interface towards the other machine has a smaller MTU than the pods: longer packets go through the stack,
// which tells their sender.
func TestOversizeAcrossNodes(t *testing.T) {
	pair := newPair(t, shortcut.Bypass)
	for _, w := range pair {
		w.must(w.Node.SetMTU("eth0", 1400))
	}
	families(t, func(t *testing.T, is6 bool) {
		client, server := across(t, pair, is6)
		left := pair[0].count("oversize")
		pair[0].exchange(client, server, 1_000_000)
		if now := pair[0].count("oversize"); now == left {
			t.Errorf("no packet was too long; counts %v", pair[0].status().Counts)
		}
	})
}

// Nobody watches one of the nodes any more: the connection goes on.
func TestANodeEndsItsShortcut(t *testing.T) {
	pair := newPair(t, shortcut.Checked)
	families(t, func(t *testing.T, is6 bool) {
		client, server := across(t, pair, is6)
		for _, w := range pair {
			w.must(w.watch.Suspend())
			pair[0].exchange(client, server, 100_000)
		}
		for _, w := range pair {
			w.must(w.watch.Resume())
		}
		pair[0].exchange(client, server, 100_000)
	})
}
