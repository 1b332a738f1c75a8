package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	slowRate  = 10_000 // bytes a second that the server's queue sends: an answer takes some 60 ms
	slowBurst = 1600   // bytes that it sends at once: two answers
	probes    = 20
	probeGap  = 10_000 // µs
	guilty    = "server.queue"
)

// Packet is the slow network, and the findings of `shunt diag ping`.
type Packet struct {
	Rate     int     `json:"rate_bytes_per_second"`
	Sent     uint64  `json:"told_sent"`
	Answered uint64  `json:"told_answered"`
	Trip     float64 `json:"told_round_trip_ms"` // median
	Longest  string  `json:"told_longest"`       // the stage that is the longest in most probes
	In       uint64  `json:"told_longest_in"`    // probes
	Stage    float64 `json:"told_stage_ms"`      // its median
	Share    float64 `json:"told_stage_share"`   // the median of its part of a round trip, in these probes
	Uneven   uint64  `json:"told_do_not_add_up"`
}

func (d *demo) latePacket(ctx context.Context) error {
	client, server, err := d.buildHosts(ctx)
	if err != nil {
		return err
	}
	d.Say("  client %s ═══ %s server    two network namespaces\n\n  The server's queue lets out %d bytes a second: what is asked every %d ms is answered every 60.\n\n",
		clientAddress.Addr(), serverAddress.Addr(), slowRate, probeGap/1000)
	s, err := d.begin(ctx, server, "ping", "-s", "-t", "60")
	if err != nil {
		return err
	}
	c, err := d.begin(ctx, client, "ping", "-c", serverAddress.Addr().String(), "-C", fmt.Sprint(probes), "-i", fmt.Sprint(probeGap))
	if err != nil {
		return err
	}
	var all []probe
	err = c.rest(ctx, func(kind string, text []byte) error {
		if kind == "probe" {
			var one probe
			err := json.Unmarshal(text, &one)
			all = append(all, one)
			return err
		}
		return d.readPing(kind, text)
	})
	if err != nil {
		return err
	}
	if err := s.end(ctx, func(string, []byte) error { return nil }); err != nil {
		return err
	}
	p := &d.facts.Packet
	p.Rate, p.Share = slowRate, share(all, p.Longest)
	d.Say("\n  It says: %d of %d probes answered; round trip %.1f ms in the median; in %d of them the longest\n  stage is %s, with %.1f ms in the median.\n\n", p.Answered, p.Sent, p.Trip, p.In, p.Longest, p.Stage)
	d.Claim(p.Sent == probes && p.Answered == probes && p.Uneven == 0, "ping follows all %d probes, and the stages of each add up to its round trip", probes)
	// The burst is sent at once, and so are two more answers after each pause of the client that lasts 160 ms, as it can on a busy machine.
	d.Claim(p.Longest == guilty && p.In > probes/2 && p.Share >= 0.9, "ping names the stage: %s, which has %.0f %% of the round trip", p.Longest, 100*p.Share)
	return nil
}

var (
	clientAddress = netip.MustParsePrefix("10.0.0.1/24")
	serverAddress = netip.MustParsePrefix("10.0.0.2/24")
)

func (d *demo) buildHosts(ctx context.Context) (client, server *lab.Host, err error) {
	l, err := lab.New(d.id)
	if err != nil {
		return nil, nil, err
	}
	d.atEnd(l.Close)
	client, err1 := l.AddHost("client")
	server, err2 := l.AddHost("server")
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, err
	}
	if err := l.Connect(lab.End{Host: client, Interface: "eth0", IPv4: clientAddress}, lab.End{Host: server, Interface: "eth0", IPv4: serverAddress}, lab.Cable{}); err != nil {
		return nil, nil, err
	}
	if err := l.Ready(ctx); err != nil {
		return nil, nil, err
	}
	index, err := server.InterfaceIndex("eth0")
	if err != nil {
		return nil, nil, err
	}
	err = server.Netlink().QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       slowRate, Limit: 1 << 20, Buffer: netlink.Xmittime(slowRate, slowBurst),
	})
	if err != nil {
		return nil, nil, fmt.Errorf("make the server's queue slow (tbf): %w", err)
	}
	return client, server, nil
}

// probe is one round trip, and its stages.
type probe struct {
	Trip   int64 `json:"round_trip_ns"`
	Stages []struct {
		Stage string
		Ns    int64
	}
}

// share returns the median of a stage's part of a round trip, in the probes whose longest stage it is; 0: in none. The
// median of the stage and the median of all round trips are of different probes where the server's report of some came
// late.
func share(all []probe, stage string) float64 {
	var shares []float64
	for _, one := range all {
		longest, ns := "", int64(0)
		for _, s := range one.Stages {
			if s.Ns > ns {
				longest, ns = s.Stage, s.Ns
			}
		}
		if longest == stage && one.Trip > 0 {
			shares = append(shares, float64(ns)/float64(one.Trip))
		}
	}
	if len(shares) == 0 {
		return 0
	}
	slices.Sort(shares)
	return shares[len(shares)/2]
}

func (d *demo) readPing(kind string, text []byte) error {
	if kind != "summary" {
		return nil
	}
	var line struct {
		Sent, Answered uint64
		Uneven         uint64 `json:"do_not_add_up"`
		Trip           struct {
			Median int64 `json:"median_ns"`
		} `json:"round_trip"`
		Stages []struct {
			Stage   string
			Median  int64  `json:"median_ns"`
			Longest uint64 `json:"longest_in"`
		}
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return err
	}
	p := &d.facts.Packet
	p.Sent, p.Answered, p.Uneven, p.Trip = line.Sent, line.Answered, line.Uneven, float64(line.Trip.Median)/1e6
	for _, one := range line.Stages {
		if one.Longest > p.In {
			p.Longest, p.In, p.Stage = one.Stage, one.Longest, float64(one.Median)/1e6
		}
	}
	return nil
}
