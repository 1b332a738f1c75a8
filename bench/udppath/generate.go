package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/bench/live"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

// setupTries is the number of measurements of the generator's setup before a turn.
const setupTries = 5

// generator makes frames on its CPU and sends them over the client's link, as fast as the other end takes them: the
// kernel's softirq of that end runs on the same CPU.
type generator struct{ *live.Generator }

func newGenerator(from, to lab.Interface, ifindex int) (g *generator, err error) {
	source := netip.AddrPortFrom(from.IPv4.Addr(), 40000)
	frame, err := packet.Build(packet.NewUDP(source, server, packet.MACs(from.MAC, to.MAC), packet.Data(make([]byte, payloadSize))))
	if err != nil {
		return nil, err
	}
	made, err := live.NewGenerator(live.Offer{Frame: frame, Flows: 1, Ifindex: ifindex})
	return &generator{made}, err
}

// run makes n frames, and returns the time without the setup of a run, which is measured first, and the number of
// frames.
func (g *generator) run(n int) (took time.Duration, sent uint64, err error) {
	var setups []time.Duration
	for range setupTries {
		setup, few, err := g.Run(1)
		if err != nil {
			return 0, 0, err
		}
		setups = append(setups, setup)
		sent += few
	}
	slices.Sort(setups)
	took, many, err := g.Run(n)
	return took - setups[len(setups)/2], sent + many, err
}

// neighbour tells the client the server's hardware address, because some peers answer no ARP.
func neighbour(client *lab.Host, ifindex int, to lab.Interface) error {
	return client.Run(func() error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: ifindex, State: netlink.NUD_PERMANENT, IP: to.IPv4.Addr().AsSlice(), HardwareAddr: to.MAC})
	})
}
