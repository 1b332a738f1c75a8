package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
)

// traffic is a kind of packet that clients send.
type traffic string

// The kinds that are measured.
const (
	tcp4 traffic = "tcp4"
	tcp6 traffic = "tcp6"
	udp4 traffic = "udp4"
)

var trafficNames = map[traffic]string{tcp4: "IPv4 TCP", tcp6: "IPv6 TCP", udp4: "IPv4 UDP"}

// forwardings are the ways of direct return, as the configuration calls them.
var forwardings = []string{"dsr-l2", "dsr-ipip", "dsr-gue"}

// The combination with which all others are compared. Only it is measured in slots that are not settled.
const (
	mainForwarding = "dsr-ipip"
	mainTraffic    = tcp4
)

// The aims: net cost over the whole cost of the front with the stub that encapsulates; the largest
// difference between the least and the most flows; and the others over the main one.
const (
	aimRatio  = 0.65
	aimSpread = 0.15
	aimOthers = 1.2
)

// directFigures is one row. Costs are nanoseconds per packet, the front included unless
// the name says net.
type directFigures struct {
	Forwarding string  `json:"forwarding"`
	Traffic    traffic `json:"traffic"`
	Slots      string  `json:"slots"` // the state that all of them are in
	Flows      uint32  `json:"flows"`
	FrontDrop  float64 `json:"front_drop_ns"`
	FrontPush  float64 `json:"front_push_ns"`
	FrontShunt float64 `json:"front_shunt_ns"`
	Net        float64 `json:"net_ns"`           // above the stub that encapsulates; of dsr-l2, above the one that drops
	NetRatio   ratio   `json:"net_ratio"`        // of each round separately
	OfMinima   float64 `json:"net_ratio_minima"` // of the figures above
	Katran     *peer   `json:"katran,omitempty"` // with --katran
	Program    string  `json:"program"`
	Config     string  `json:"config"`
}

// peer are the figures of another balancer that does the same, from the same rounds.
type peer struct {
	Front    float64 `json:"front_ns"`  // the front included
	Net      float64 `json:"net_ns"`    // above the stub that encapsulates
	OfItsNet ratio   `json:"net_ratio"` // shunt's net cost of the peer's
}

// The aims beside katran: net cost over katran's by the number of flows.
var katranAims = map[uint32]float64{1: 0.35, 1048576: 0.10}

// settle computes the figures of all rounds.
func (f *directFigures) settle(drop, push, shunt costs) {
	stub := push
	if f.Forwarding == "dsr-l2" {
		stub = drop
	}
	f.FrontDrop, f.FrontPush, f.FrontShunt = drop.least(), push.least(), shunt.least()
	f.Net = f.FrontShunt - stub.least()
	f.NetRatio = ratioOf(shunt, stub, push)
	f.OfMinima = f.Net / f.FrontPush
}

// is reports whether a row belongs to the comparison of settled slots.
func (f *directFigures) is(forwarding string, kind traffic) bool {
	return f.Forwarding == forwarding && f.Traffic == kind && f.Slots == slotsSettled
}

// runDirect measures everything asked for and prints the result.
func runDirect(o options) error {
	var all []directFigures
	packets := packetStore{}
	for _, flows := range o.flows {
		for _, forwarding := range o.forwardings {
			rows, err := measureDirect(o, packets, forwarding, flows)
			if err != nil {
				return fmt.Errorf("%s, %d flows: %w", forwarding, flows, err)
			}
			all = append(all, rows...)
		}
		clear(packets) // 160 MB for each kind at the most
	}
	if o.json {
		encoder := json.NewEncoder(os.Stdout)
		encoder.SetIndent("", "  ")
		return encoder.Encode(all)
	}
	if err := printHead("direct-return packet"); err != nil {
		return err
	}
	printDirect(o, all)
	return nil
}

// measureDirect starts shunt with one service and measures all rows with it.
func measureDirect(o options, packets packetStore, forwarding string, flows uint32) (rows []directFigures, err error) {
	s, err := startDirect(o, forwarding, flows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var k *katran
	if o.katran != "" && forwarding == mainForwarding {
		if k, err = loadKatran(o, s.clients.mac); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, k.close()) }()
	}
	for _, kind := range o.traffics {
		frames, err := packets.get(s, o.clients, kind, flows, o.ordered)
		if err != nil {
			return nil, err
		}
		for _, slots := range o.slots {
			if slots != slotsSettled && (forwarding != mainForwarding || kind != mainTraffic) {
				continue
			}
			f := directFigures{Forwarding: forwarding, Traffic: kind, Slots: slots, Flows: flows, Program: s.describe(), Config: s.config}
			fmt.Fprintf(os.Stderr, "%s, %s, slots %s, %d flows\n", forwarding, trafficNames[kind], slots, flows)
			if err := s.in(func() error { return s.measure(o, frames, k, &f) }); err != nil {
				return nil, fmt.Errorf("%s in slots that are %s: %w", trafficNames[kind], slots, err)
			}
			rows = append(rows, f)
		}
	}
	return rows, nil
}

// measure takes the figures of one row, candidates interleaved: with katran among them, unless it is nil.
func (s *directSubject) measure(o options, frames []packetBytes, k *katran, f *directFigures) (err error) {
	if err := s.checkOutput(s.clients, frames[0], f.Traffic); err != nil {
		return err
	}
	b, err := newBench(s.clients, frames, 1)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := s.setSlots(f.Slots); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.setSlots(slotsSettled)) }()
	if f.Slots == slotsTransition {
		if err := s.rememberAll(b); err != nil {
			return err
		}
	} else if err := b.check(s.clients.program); err != nil {
		return err
	}
	before, err := s.reasons()
	if err != nil {
		return err
	}
	var drop, push, shunt, other costs
	candidates := []candidate{
		{"drop", b, b.ShStubDrop, &drop},
		{"push", b, b.ShStubPush, &push},
		{"shunt", b, s.clients.program, &shunt},
	}
	var missed uint64
	if k != nil {
		beside := s.clients
		beside.program = k.program()
		if err := s.checkOutput(beside, frames[0], f.Traffic); err != nil {
			return fmt.Errorf("katran: %w", err)
		}
		if err := k.rememberAll(b); err != nil {
			return err
		}
		if missed, err = k.missed(); err != nil {
			return err
		}
		candidates = append(candidates, candidate{"katran", b, k.program(), &other})
	}
	if err := interleave(candidates, o.rounds, max(o.repeat, len(frames))); err != nil {
		return err
	}
	f.settle(drop, push, shunt)
	if k != nil {
		if after, err := k.missed(); err != nil || after != missed {
			return errors.Join(err, fmt.Errorf("katran lost flows while it was measured: %d packets found none", after-missed))
		}
		f.Katran = &peer{Front: other.least(), Net: other.least() - push.least(), OfItsNet: netRatio(shunt, other, push)}
	}
	return s.checkReasons(before, len(frames))
}

// printDirect prints the table, and compares it with the aims.
func printDirect(o options, all []directFigures) {
	order := "random order"
	if o.ordered {
		order = "the order of the clients' addresses"
	}
	fmt.Printf("CPU %d, minimum of %d rounds, flows in %s, nanoseconds per packet\n\n", o.cpu, o.rounds, order)
	fmt.Println("| service | packets | slots | flows | front + drop | front + push | front + shunt | net | net / (front + push) | the same of minima |")
	fmt.Println("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
	for _, f := range all {
		fmt.Printf("| %s | %s | %s | %d | %.0f | %.0f | %.0f | %.0f | %s | %.2f |\n", f.Forwarding, trafficNames[f.Traffic], f.Slots,
			f.Flows, f.FrontDrop, f.FrontPush, f.FrontShunt, f.Net, f.NetRatio, f.OfMinima)
	}
	fmt.Println("\nNet is above front + push, which encapsulates; for dsr-l2, which does not, above front + drop.")
	printKatran(all)
	fmt.Println(howRatio)
	fmt.Println("Configuration:", all[len(all)-1].Config)
	fmt.Println("Program:", all[len(all)-1].Program)
	fmt.Print("\n", judge(all))
}

// printKatran prints the rows that have katran beside them, if there are any.
func printKatran(all []directFigures) {
	if !slices.ContainsFunc(all, func(f directFigures) bool { return f.Katran != nil }) {
		return
	}
	fmt.Println("\n| packets | slots | flows | front + katran | katran, net | shunt, net | shunt's net / katran's |")
	fmt.Println("|---|---|---:|---:|---:|---:|---:|")
	for _, f := range all {
		if f.Katran != nil {
			fmt.Printf("| %s | %s | %d | %.0f | %.0f | %.0f | %s |\n", trafficNames[f.Traffic], f.Slots, f.Flows, f.Katran.Front, f.Katran.Net, f.Net, f.Katran.OfItsNet)
		}
	}
	fmt.Printf("\nKatran, github.com/facebookincubator/katran, has the same service and backends, IPIP, and a table of %d flows a CPU that holds all flows.\n\n", katranFlows)
}

func verdict(good bool) string {
	if good {
		return "met"
	}
	return "NOT met"
}

// judge compares rows with the aims, by the medians of ratios: rows are measured at different
// times, and front + push is the measure of how fast the machine was. Rows that were not
// measured are left out.
func judge(all []directFigures) string {
	var text strings.Builder
	least, most := math.Inf(1), 0.0
	var flows []uint32
	main := map[uint32]float64{}
	for _, f := range all {
		if !f.is(mainForwarding, mainTraffic) {
			continue
		}
		net := f.NetRatio.Median
		least, most = min(least, net), max(most, net)
		flows = append(flows, f.Flows)
		main[f.Flows] = net
		fmt.Fprintf(&text, "%s, %s, %d flows: net is %.2f of front + push (aim: at most %.2f, %s)\n",
			f.Forwarding, trafficNames[f.Traffic], f.Flows, net, aimRatio, verdict(net <= aimRatio))
	}
	for _, f := range all {
		aim, ok := katranAims[f.Flows]
		if ok && f.Katran != nil && f.is(mainForwarding, mainTraffic) {
			fmt.Fprintf(&text, "%s, %s, %d flows: net is %.2f of katran's (aim: at most %.2f, %s)\n",
				f.Forwarding, trafficNames[f.Traffic], f.Flows, f.Katran.OfItsNet.Median, aim, verdict(f.Katran.OfItsNet.Median <= aim))
		}
	}
	if len(flows) > 1 {
		fmt.Fprintf(&text, "%s, %s: numbers of flows from %d to %d differ by %.0f %% (aim: less than %.0f %%, %s)\n", mainForwarding,
			trafficNames[mainTraffic], slices.Min(flows), slices.Max(flows), 100*(most/least-1), 100*aimSpread, verdict(most/least-1 < aimSpread))
	}
	for _, f := range all {
		net, ok := main[f.Flows]
		if !ok || f.Slots != slotsSettled || f.is(mainForwarding, mainTraffic) {
			continue
		}
		fmt.Fprintf(&text, "%s, %s, %d flows: %.2f of %s, %s (aim: at most %.1f, %s)\n", f.Forwarding, trafficNames[f.Traffic], f.Flows,
			f.NetRatio.Median/net, mainForwarding, trafficNames[mainTraffic], aimOthers, verdict(f.NetRatio.Median/net <= aimOthers))
	}
	return text.String()
}
