package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/spread"
)

// bulkPort is the port of iperf3 on one server, and of the service: iperf3's streams of UDP belong
// together and have to reach one address.
const bulkPort = 5201

// Streams of a bulk transfer, and the rate of each with UDP: 300 Mbit/s together, which every arm
// carries, so that losses are in bursts.
const (
	bulkStreams    = 4
	bulkUDPMegabit = 75
)

// bulk is the result of transfers without an end.
type bulk struct {
	Gigabit         float64 `json:"tcp_gbit_per_s"`      // received, of payload
	Retransmissions float64 `json:"tcp_retransmissions"` // of segments
	// UDPLost is a percentage of the datagrams; missing where the arm has no UDP.
	UDPLost *float64 `json:"udp_lost_percent,omitempty"`
	// Dropped is the number of frames that each interface between client and servers counts as
	// dropped, by "host interface direction", and the servers' sockets, in both transfers.
	Dropped map[string]uint64 `json:"dropped,omitempty"`
}

// bulkTransfers runs iperf3 from the client to an arm: TCP, then UDP.
func (r *run) bulkTransfers(ctx context.Context, a arm) (b *bulk, err error) {
	server, err := r.bed.Start(bed.Servers, "iperf3", "--server", "--port", strconv.Itoa(bulkPort))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	before, err := r.bed.Dropped()
	if err != nil {
		return nil, err
	}
	target := a.target.Addr().String()
	tcp, err := r.iperf(ctx, server, target)
	if err != nil {
		return nil, err
	}
	b = &bulk{Gigabit: tcp.End.Received.BitsPerSecond / 1e9, Retransmissions: float64(tcp.End.Sent.Retransmits)}
	if !a.tcpOnly {
		udp, err := r.iperf(ctx, server, target, "--udp", "--bitrate", strconv.Itoa(bulkUDPMegabit)+"M", "--length", "1400")
		if err != nil {
			return nil, err
		}
		b.UDPLost = &udp.End.Sum.LostPercent
	}
	after, err := r.bed.Dropped()
	if err != nil {
		return nil, err
	}
	b.Dropped = map[string]uint64{}
	for where, count := range after {
		if count > before[where] {
			b.Dropped[where] = count - before[where]
		}
	}
	return b, nil
}

// iperfReport is the part of iperf3's report that is read.
type iperfReport struct {
	Error string `json:"error"`
	End   struct {
		Sent struct {
			Retransmits int `json:"retransmits"`
		} `json:"sum_sent"`
		Received struct {
			BitsPerSecond float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct {
			LostPercent float64 `json:"lost_percent"`
		} `json:"sum"`
	} `json:"end"`
}

// iperf makes one transfer. While a server still ends the one before, it is asked again.
func (r *run) iperf(ctx context.Context, server *bed.Child, target string, more ...string) (report iperfReport, err error) {
	args := append([]string{
		"--client", target, "--port", strconv.Itoa(bulkPort), "--parallel", strconv.Itoa(bulkStreams),
		"--time", strconv.Itoa(int(r.options.bulk.Seconds())), "--json",
	}, more...)
	for deadline := time.Now().Add(10 * time.Second); ; {
		out, runErr := r.bed.Run(ctx, bed.Client, "iperf3", args...)
		if report, err = parseIperf(out); err == nil && runErr == nil {
			return report, nil
		}
		select {
		case <-server.Ended():
			return report, fmt.Errorf("iperf3's server ended: %s", server.Output())
		case <-ctx.Done():
			return report, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return report, errors.Join(err, runErr)
		}
	}
}

// parseIperf reads iperf3's report.
func parseIperf(out string) (report iperfReport, err error) {
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		return report, fmt.Errorf("iperf3 printed %q: %w", out, err)
	}
	if report.Error != "" {
		return report, fmt.Errorf("iperf3: %s", report.Error)
	}
	return report, nil
}

// bulkTable writes the medians of bulk transfers for one setting, if there are any.
func (p report) bulkTable(set setting) string {
	var text strings.Builder
	for _, a := range arms {
		var gigabit, retransmissions, lost []float64
		dropped := map[string][]float64{}
		var taken []*bulk
		for _, s := range p.Samples {
			if s.Arm == a.name && s.setting == set && s.Bulk != nil && s.Error == "" {
				taken = append(taken, s.Bulk)
			}
		}
		if len(taken) == 0 {
			continue
		}
		for _, b := range taken {
			gigabit, retransmissions = append(gigabit, b.Gigabit), append(retransmissions, b.Retransmissions)
			if b.UDPLost != nil {
				lost = append(lost, *b.UDPLost)
			}
			for where := range b.Dropped {
				dropped[where] = nil
			}
		}
		var places []string
		for _, where := range slices.Sorted(maps.Keys(dropped)) {
			for _, b := range taken {
				dropped[where] = append(dropped[where], float64(b.Dropped[where]))
			}
			places = append(places, fmt.Sprintf("%s %.0f", where, spread.Median(dropped[where])))
		}
		udp := "–"
		if len(lost) > 0 {
			udp = fmt.Sprintf("%.3f %%", spread.Median(lost))
		}
		fmt.Fprintf(&text, "| %s | %.2f | %.0f | %s | %s |\n", a.name, spread.Median(gigabit), spread.Median(retransmissions), udp, strings.Join(places, ", "))
	}
	if text.Len() == 0 {
		return ""
	}
	return fmt.Sprintf("\nBulk transfers, %d streams to one server (iperf3): TCP as fast as it goes, then UDP at %d Mbit/s. "+
		"Dropped frames as the interfaces between client and servers count them, and the servers' sockets, of both.\n\n"+
		"| arm | TCP Gbit/s | TCP retransmissions | UDP lost | frames dropped |\n|---|---:|---:|---:|---|\n%s",
		bulkStreams, bulkStreams*bulkUDPMegabit, text.String())
}
