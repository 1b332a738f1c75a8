package source

import (
	"fmt"
	"net/netip"
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
