package memleak

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/golden"
)

// TestOutput has each field and each line that there can be.
func TestOutput(t *testing.T) {
	moment := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	interval := Interval{Time: moment, Seconds: 30, Sample: 1, Live: 700, Bytes: 20 << 20, Backing: 5 << 20, Growing: 1, Hidden: 2, Confidence: 99.5,
		Rows: []Row{
			{Kind: Slab, Cache: "a b\x1b[2J", State: Growing, Live: 500, Bytes: 500_000, Growth: 12.5, Rate: 12_500, Oldest: 29.5, Unfreed: 3, Stack: []string{"leaks+0x1", "call+0x2"},
				Cgroups:   []Share{{"/a.slice", 400, 400_000}, {"/b.slice", 60, 60_000}, {"/", 30, 30_000}, {"77", 10, 10_000}},
				Addresses: []Live{{"0xffff888100000000", 1000, 29.5, 12}}, Untold: 499},
			{Kind: Percpu, State: Steady, Live: 1, Bytes: 64, Stack: []string{}, Cgroups: []Share{{"/", 1, 64}}},
		}, Counts: Counts{}}
	for i, kind := range Kinds {
		n := uint64(i)
		interval.Counts[kind] = &Count{100 + n, 90 + n, 7, 1, 2, 3, 4, 5, 6, 8, 9, 0, 0}
	}
	sampled := interval
	sampled.Sample, sampled.Growing, sampled.Hidden = 4, 2, 0
	sampled.Spending = &sensor.Spending{Percent: 4.25, Change: "the sensors took too much"}
	sampled.Rows = []Row{{Kind: Pages, State: Growing, Live: 100, Bytes: 409_600, Estimate: &Scaled{400, 68, 1_638_400, 278_528}, Growth: 8, Rate: 32_768, Oldest: 9,
		Stack: []string{"leaks+0x1"}, Cgroups: []Share{{"/", 100, 409_600}}}}
	for path, asJSON := range map[string]bool{"testdata/memleak.txt": false, "testdata/memleak.json": true} {
		var out bytes.Buffer
		p := newPrinter(&out, asJSON)
		err := errors.Join(p.start(beginning{[]sensor.Result{{Sensor: sensors()[4]}}, "a file", errors.New("addresses are hidden"), nil}),
			p.interval(interval), p.interval(sampled), p.summary(interval))
		if err != nil {
			t.Fatal(err)
		}
		golden.Require(t, path, out.String())
	}
}

// TestOutputOfAProcess has the output that only a process has.
func TestOutputOfAProcess(t *testing.T) {
	of := &watchedProcess{pid: 12, comm: "app", libraries: []*symbol.File{{Path: "/lib/libc.so.6"}, {Path: "/opt/lib\x1bjemalloc.so"}}}
	ended := Interval{Time: time.Unix(0, 0).UTC(), Seconds: 9, Sample: 1, Live: 3, Bytes: 300, Confidence: 100, Ended: true, Counts: Counts{Malloc: {Allocs: 5, Frees: 2}},
		Rows: []Row{{Kind: Malloc, State: Early, Live: 3, Bytes: 300, Oldest: 8, Stack: []string{"leaks+0x1 (app)"}, Cgroups: []Share{{"/", 3, 300}}}}}
	for path, asJSON := range map[string]bool{"testdata/process.txt": false, "testdata/process.json": true} {
		var out bytes.Buffer
		p := newPrinter(&out, asJSON)
		if err := errors.Join(p.start(beginning{process: of, btf: "a file"}), p.summary(ended)); err != nil {
			t.Fatal(err)
		}
		golden.Require(t, path, out.String())
	}
}
