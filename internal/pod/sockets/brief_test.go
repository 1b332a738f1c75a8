package sockets_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// Many connections of one request each, one after the other: each is answered.
func TestBriefConnections(t *testing.T) {
	w := newPaired(t)
	server, err := traffic.Serve(w.Pods[1], netip.AddrPortFrom(w.Address(1, false), 0))
	w.must(err)
	defer server.Close()
	for range 10 {
		r, err := traffic.Measure(w.Pods[0], traffic.CRR, server.Address, 200*time.Millisecond)
		if err != nil {
			counts, _ := w.Counts()
			n, queued, _ := w.Paired()
			t.Fatalf("%v; %v; %d sockets in the map, %d bytes wait", err, counts, n, queued)
		}
		t.Log(r.Transactions)
	}
	counts, err := w.Counts()
	t.Log(counts, err)
}
