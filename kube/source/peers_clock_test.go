package source

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
)

// TestPeersAge: what becomes of a node whose agent is not ready, is not listed, and is back, minute by minute.
func TestPeersAge(t *testing.T) {
	gue := place.Tunnel{Forwarding: model.ForwardingDSRGUE, Port: 6080}
	p := newPeers("n1", Direct{Tunnel: gue})
	ready := map[string]listing{"n2": {[]netip.Addr{netip.MustParseAddr("10.0.0.2")}, true}}
	not := map[string]listing{"n2": {ready["n2"].addresses, false}}
	opens := map[string]place.Tunnel{"n2": gue}
	begin := time.Unix(0, 0)
	for _, step := range []struct {
		minute  time.Duration
		listed  map[string]listing
		entries map[string]place.Tunnel
		want    string
	}{
		{0, not, nil, "peers map[] away map[n2:true] senders [10.0.0.2] faults 0"}, // it starts
		{1, not, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{9, ready, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{10, not, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{14, not, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{15, not, opens, "peers map[n2:[10.0.0.2]] away map[n2:true] senders [10.0.0.2] faults 1"},
		{16, nil, opens, "peers map[n2:[10.0.0.2]] away map[n2:true] senders [10.0.0.2] faults 0"}, // its pod is replaced
		{17, ready, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{18, nil, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{22, nil, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
		{23, nil, opens, "peers map[] away map[n2:true] senders [] faults 0"}, // it has gone, and its entry stays
		{24, nil, nil, "peers map[] away map[] senders [] faults 0"},
		{25, ready, nil, "peers map[] away map[] senders [10.0.0.2] faults 0"}, // an agent without tunnels
		{26, not, nil, "peers map[] away map[] senders [10.0.0.2] faults 0"},
		{27, not, opens, "peers map[n2:[10.0.0.2]] away map[] senders [10.0.0.2] faults 0"},
	} {
		now := begin.Add(step.minute * time.Minute)
		p.note(step.listed, step.entries, now)
		peers, away := p.known(now)
		if got := fmt.Sprintf("peers %v away %v senders %v faults %d", peers, away, p.from(), len(p.faults(now))); got != step.want {
			t.Errorf("minute %d: %s, want %s", step.minute, got, step.want)
		}
	}
}

// TestPeersFamilies: a pod's addresses of two families come and go one after the other.
func TestPeersFamilies(t *testing.T) {
	p := newPeers("n1", Direct{})
	for _, step := range []struct {
		minute time.Duration
		n2, n3 string // addresses that are listed
		want   string // of n2
	}{
		{0, "10.0.0.2 fd00::2", "10.0.0.3", "[10.0.0.2 fd00::2]"},
		{1, "fd00::2", "10.0.0.3", "[10.0.0.2 fd00::2]"},
		{2, "10.0.0.22 fd00::2", "10.0.0.3", "[10.0.0.22 fd00::2]"}, // another one in its place
		{3, "10.0.0.22", "10.0.0.3", "[10.0.0.22 fd00::2]"},
		{7, "10.0.0.22", "10.0.0.3", "[10.0.0.22 fd00::2]"},
		{8, "10.0.0.22", "10.0.0.3", "[10.0.0.22]"}, // for long
		{9, "10.0.0.22 fd00::2", "10.0.0.3", "[10.0.0.22 fd00::2]"},
		{10, "10.0.0.22", "10.0.0.3 fd00::2", "[10.0.0.22]"}, // another node's now
	} {
		listed := map[string]listing{}
		for node, text := range map[string]string{"n2": step.n2, "n3": step.n3} {
			var l listing
			for _, a := range strings.Fields(text) {
				l.addresses = append(l.addresses, netip.MustParseAddr(a))
			}
			listed[node] = l
		}
		p.note(listed, nil, time.Unix(0, 0).Add(step.minute*time.Minute))
		if got := fmt.Sprint(p.agents["n2"].addresses); got != step.want {
			t.Errorf("minute %d: %s, want %s", step.minute, got, step.want)
		}
	}
}
