package demo

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"text/tabwriter"
)

const (
	// spreadFlows is the number of new flows that each frontend gets.
	spreadFlows = 800
	// spreadWorkers is the number of flows that are opened at once.
	spreadWorkers = 8
	// UDP flows have source ports in a row, from a random one on, all below the kernel's own
	// range, which begins at 32768.
	spreadPortFirst = 21000
	spreadPortLast  = 31000
	// askPort is the source port of the very first UDP flow.
	askPort = 19998
	// chanceMin is the least probable distance from the weights that still counts as
	// chance: of a million right runs four fail, one for each frontend.
	chanceMin = 1e-6
)

// spread opens many flows and counts the backends that answer.
func (d *demo) spread(ctx context.Context) error {
	total := 0
	for _, w := range weights {
		total += w
	}
	if err := d.askAround(ctx); err != nil {
		return err
	}
	d.Say("  %d new flows to each VIP, each from a source port of its own:\n\n", spreadFlows)
	var why []string
	for _, to := range targets {
		t := d.openMany(ctx, to, spreadFlows)
		if err := ctx.Err(); err != nil {
			return err
		}
		d.made[to.service] += t.flows
		s := Spread{Service: to.service, Protocol: to.network, Family: to.family, VIP: to.vip.String(), Flows: t.flows, Failed: t.failed}
		for i, host := range d.top.Backends {
			s.Backends = append(s.Backends, Share{Name: host.Name(), Weight: weights[i], Flows: t.on[host.Name()],
				Expected: float64(t.flows*weights[i]) / float64(total)})
		}
		s.ChiSquare, s.Chance = distance(s.Backends)
		d.facts.Spread = append(d.facts.Spread, s)
		d.facts.Counted.made(d, to, t.on)
		why = append(why, t.why())
	}
	d.showSpread(total)
	for i, to := range targets {
		s := d.facts.Spread[i]
		d.Claim(s.Failed == 0, "%s to %s: %d of %d answered%s", to, to.vip, s.Flows, s.Flows+s.Failed, why[i])
		d.Claim(s.Chance >= chanceMin, "%s: the spread follows the weights; chance alone deviates more in %s runs", to, odds(s.Chance))
	}
	return nil
}

// askAround shows one answer of each kind.
func (d *demo) askAround(ctx context.Context) error {
	for _, to := range targets {
		port := 0
		if to.network == "udp" {
			port = askPort
		}
		answer, err := d.once(ctx, to, port)
		if err != nil {
			return fmt.Errorf("first request of %s: %w", to, err)
		}
		d.made[to.service]++
		d.facts.Counted.made(d, to, map[string]int{answer.Backend: 1})
		d.Say("  %-15s client asks %s, %s answers; it saw the request come from %s\n", to, to.vip, answer.Backend, answer.Remote)
	}
	d.Say("\n")
	return nil
}

// openMany opens flows, a few at a time, and asks once on each.
func (d *demo) openMany(ctx context.Context, to target, count int) *tally {
	t := &tally{on: map[string]int{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	first := spreadPortFirst + rand.IntN(spreadPortLast-spreadPortFirst)
	for worker := range spreadWorkers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := worker; n < count && ctx.Err() == nil; n += spreadWorkers {
				port := 0
				if to.network == "udp" {
					port = first + n
				}
				answer, err := d.once(ctx, to, port)
				mu.Lock()
				t.add(answer, err)
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	return t
}

// openWeb opens 100 connections to each of the web's VIPs, and asks once on each.
func (d *demo) openWeb(ctx context.Context) (*tally, error) {
	all := &tally{on: map[string]int{}}
	for _, to := range targets[:2] {
		t := d.openMany(ctx, to, 100)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		d.made[to.service] += t.flows
		all.flows += t.flows
		all.failed += t.failed
		for backend, n := range t.on {
			all.on[backend] += n
		}
	}
	return all, nil
}

// distance returns Pearson's chi-square of counts against the expected counts, and the probability of a
// distance at least as large. With three backends there are two degrees of freedom, where that probability is
// exactly exp(-x/2).
func distance(shares []Share) (chiSquare, chance float64) {
	for _, s := range shares {
		if s.Expected == 0 {
			return math.MaxFloat64, 0
		}
		chiSquare += (float64(s.Flows) - s.Expected) * (float64(s.Flows) - s.Expected) / s.Expected
	}
	return chiSquare, math.Exp(-chiSquare / 2)
}

// odds is a probability for a reader: "3 of 10", "1 of 2000".
func odds(p float64) string {
	switch {
	case p >= 0.1:
		return fmt.Sprintf("%.0f of 10", p*10)
	case p >= chanceMin:
		return fmt.Sprintf("1 of %.0f", 1/p)
	}
	return "fewer than 1 of a million"
}

func (d *demo) showSpread(total int) {
	w := tabwriter.NewWriter(d.Out, 0, 0, 3, ' ', 0)
	fmt.Fprint(w, "  BACKEND\tWEIGHT\tSHARE")
	for _, to := range targets {
		fmt.Fprintf(w, "\t%s", to)
	}
	fmt.Fprintln(w)
	for i, host := range d.top.Backends {
		fmt.Fprintf(w, "  %s\t%d\t%.1f %%", host.Name(), weights[i], 100*float64(weights[i])/float64(total))
		for _, s := range d.facts.Spread {
			fmt.Fprintf(w, "\t%d (%.1f %%)", s.Backends[i].Flows, 100*float64(s.Backends[i].Flows)/float64(max(s.Flows, 1)))
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush() // a reader who has gone is noticed elsewhere
	d.Say("\n")
}
