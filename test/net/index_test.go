package net

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// pinnedMap opens a map of the balancer's instance.
func (b *bed) pinnedMap(t *testing.T, name string) *ebpf.Map {
	t.Helper()
	paths, err := filepath.Glob("/sys/fs/bpf/shunt/" + b.instance + "/*/" + name)
	if err != nil || len(paths) != 1 {
		t.Fatalf("the map %s is at %q, %v", name, paths, err)
	}
	m, err := ebpf.LoadPinnedMap(paths[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// TestPodsOfLargeIndices: pods at interfaces whose indices do not fit into eight bits are served like others: as
// backends of clients that come in at XDP, where the mark has the index, and as clients, where the flow has it for the
// way back. Records take the indices below theirs.
func TestPodsOfLargeIndices(t *testing.T) {
	const first = 300
	b, _ := newNode(t)
	pods := map[string]*lab.Host{"routed": b.Backends[len(b.Backends)-1], "router": b.addRouted(t, "p4", "router", 4)}
	b.serve(pods["router"])
	b.Backends = append(b.Backends, pods["router"])
	if err := b.Ready(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	text := b.nodeFile("nat", "native")
	b.write(strings.Replace(text, ", {name: routed, attach: tc}", "", 1))
	b.start()
	interfaces, ifindexes := b.pinnedMap(t, abi.MapInterfaces), b.pinnedMap(t, abi.MapIfindexes)
	for index := uint32(abi.INTERFACE_MAX); index < first; index++ {
		if err := interfaces.Put(index, abi.Interface{Ifindex: 1<<30 + index}); err != nil {
			t.Fatal(err)
		}
	}
	b.reload(strings.Replace(text, "{name: routed,", `{name: "route?",`, 1))
	taken := map[uint32]bool{}
	for iface := range pods {
		ifindex, err := b.Balancer.InterfaceIndex(iface)
		if err != nil {
			t.Fatal(err)
		}
		var index uint32
		if err := ifindexes.Lookup(uint32(ifindex), &index); err != nil || index != first && index != first+1 || taken[index] {
			t.Errorf("%s has index %d, %v, want %d or the one after it", iface, index, err, first)
		}
		taken[index] = true
	}
	for _, vip := range vips {
		t.Run(family(vip), func(t *testing.T) {
			b.podsAnswer(t, vip, "nat")
			b.datagramsOfEverySize(t, at(vip, 53))
			b.transfer(t, at(vip, 80))
			for iface, pod := range pods {
				client, answered := pod.HTTPClient(false), map[string]bool{}
				for range 40 {
					answer, err := b.get(client, at(vip, 80))
					if err != nil {
						t.Fatalf("the pod at %s asks: %v; %s", iface, err, b.reasonsNow())
					}
					answered[answer.Backend] = true
					if _, err := b.askUDP(pod, at(vip, 53), []byte("who?")); err != nil {
						t.Fatalf("the pod at %s asks: %v; %s", iface, err, b.reasonsNow())
					}
				}
				if !answered["b1"] { // its answers come in at XDP
					t.Errorf("the pod at %s was answered by %v, and not by the backend on another machine", iface, answered)
				}
			}
		})
	}
	b.nothingIsLost(t)
	for _, shows := range []struct {
		more []string
		rows []string
	}{{nil, []string{"\nroute? (2) "}}, {[]string{"--all"}, []string{"\nrouted ", "\nrouter "}}} {
		code, out := b.shunt(append([]string{"status", "--instance", b.instance, "--socket", b.socket}, shows.more...)...)
		for _, row := range shows.rows {
			if code != 0 || strings.Count(out, row) != 1 {
				t.Errorf("`shunt status %s` has no row %q:\n%s", fmt.Sprint(shows.more), row, out)
			}
		}
	}
}
