package main

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/spread"
)

// Without BPF LSM, opens of protected files wait for the guard. No CPU works in that time, but for waking two threads. So it is measured by
// the clock, and not as CPU time.

// opening is a file that is opened, to read and to write, and the policy then. A deed opens the file "file" of its folder.
type opening struct {
	name    string
	policy  string // "": no guard
	isUnder bool   // the folder is that of the policy's file, and the policy trusts the program
}

const (
	waitsIn = "{degraded: allow, protect: [{name: data, paths: [%IN/file], deny: [write], trust: {programs: [%TRUSTED]}, mode: deny}]}"
	waitsBy = "{degraded: allow, protect: [{name: data, paths: [%IN/one], deny: [write], trust: {programs: [%TRUSTED]}, mode: deny}]}"
)

var openings = []opening{
	{"no guard", "", true},
	{"any other file", waitsIn, false},
	{"a file beside it, in the same folder", waitsBy, true},
	{"a protected file", waitsIn, true},
}

// opens are the deeds.
var opens = []string{"open", "open-write"}

// waitTimes is the number of opens in a piece of a round.
const waitTimes = 300

// waitOnce measures a round. Where security hooks decide, no open waits, and there is nothing to measure.
func (r *report) waitOnce(b *bed) error {
	for _, o := range openings {
		isWaiting, err := r.waitAt(b, o)
		if err != nil || !isWaiting {
			return err
		}
	}
	return nil
}

// waitAt measures one. isWaiting is false if there is a policy, and no open waits.
func (r *report) waitAt(b *bed, o opening) (isWaiting bool, err error) {
	if o.policy != "" {
		a, end, err := b.start(o.policy)
		if err != nil {
			return false, err
		}
		defer func() { err = errors.Join(err, end()) }()
		if a.Gate() == nil {
			return false, nil
		}
	}
	for _, d := range opens {
		took, err := r.clock(b, d, o.isUnder)
		if err != nil {
			return false, err
		}
		if r.waits[o.name] == nil {
			r.waits[o.name] = map[string][]float64{}
		}
		r.waits[o.name][d] = append(r.waits[o.name][d], took)
	}
	return true, nil
}

// clock is the time of one, in nanoseconds: the least of the pieces.
func (r *report) clock(b *bed, name string, isUnder bool) (float64, error) {
	n := max(waitTimes/r.share, 2)
	w, folder := b.workers[isUnder], b.folder(isUnder)
	if _, err := w.Do(name, 2, folder, false); err != nil { // caches are filled
		return 0, err
	}
	least := time.Duration(math.MaxInt64)
	for range r.pieces {
		began := time.Now()
		if _, err := w.Do(name, n, folder, false); err != nil {
			return 0, err
		}
		least = min(least, time.Since(began))
	}
	return float64(least.Nanoseconds()) / float64(n), nil
}

// tableOfWaits has microseconds of the clock.
func (r *report) tableOfWaits(b *strings.Builder) {
	if r.waits[openings[len(openings)-1].name] == nil {
		return
	}
	fmt.Fprintf(b, "Opening and closing a file where opens wait for the guard, because the kernel has no BPF LSM (`degraded: allow`): time by the clock of one, in microseconds, medians of %d rounds, with the least and the most; of each round the least of its %d pieces. The rule denies `write`, and trusts the program.\n\n", r.rounds, r.pieces)
	b.WriteString("| | to read | to write |\n|---|---:|---:|\n")
	for _, o := range openings {
		fmt.Fprintf(b, "| %s |", o.name)
		for _, d := range opens {
			var all []float64
			for _, ns := range r.waits[o.name][d] {
				all = append(all, ns/1000)
			}
			fmt.Fprintf(b, " %s |", spread.Of(all).Text("%.1f"))
		}
		b.WriteString("\n")
	}
}
