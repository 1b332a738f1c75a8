package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/metrics"
)

// beside is a chain of eth0 with a program before shunt's, in which so many packets took so long.
func beside(id uint32, packets uint64, before, own float64) datapath.Chain {
	return datapath.Chain{Interface: "eth0",
		Before: &datapath.Chained{ID: id, Name: "filter", Time: &datapath.RunTime{Packets: packets, PerPacketN: before}},
		Shunt:  &datapath.Chained{ID: 2, Name: "sh_xdp", Time: &datapath.RunTime{Packets: packets, PerPacketN: own}}}
}

func TestSlowProgramIsACondition(t *testing.T) {
	conditions := &condition.Set{}
	w := newChainedWatch(conditions, slog.New(slog.DiscardHandler))
	require := func(when string, wanted ...string) {
		t.Helper()
		var got []string
		for _, c := range conditions.List() {
			got = append(got, fmt.Sprintf("%s (%s): %s", c.Code, c.Subject, c.Text))
		}
		if !slices.Equal(got, wanted) {
			t.Errorf("%s: %q, want %q", when, got, wanted)
		}
	}
	said := func(least string) string {
		return `chained_program_slow (before shunt on eth0): the program "filter" (program 7) takes more than ` + least + " for a packet"
	}
	for _, step := range []struct {
		when        string
		packets     uint64
		before, own float64
		want        []string
	}{
		{"fast", 1000, 999, 100, nil},
		{"slow, and shunt too: the machine is", 1000, 5000, 2501, nil},
		{"slow, of a few packets", 29, 5000, 100, nil},
		{"slow", 30, 5000, 100, []string{said("1µs")}},
		{"slower", 30, 9999, 100, []string{said("1µs")}},
		{"much slower", 30, 230_000, 100, []string{said("100µs")}},
		{"fast, of a few packets", 29, 10, 100, []string{said("100µs")}},
		{"no packets", 0, 0, 0, []string{said("100µs")}},
		{"fast again", 30, 10, 100, nil},
	} {
		w.note([]datapath.Chain{beside(7, step.packets, step.before, step.own)}, nil, time.Now())
		require(step.when, step.want...)
	}
	w.note([]datapath.Chain{beside(7, 30, 5000, 100)}, nil, time.Now())
	require("slow once more", said("1µs"))
	for _, err := range []error{errors.New("none"), fmt.Errorf("measure: %w", datapath.ErrMeasured)} {
		w.note(nil, err, time.Now())
		require("not measured", said("1µs"))
	}
	w.note(nil, nil, time.Now())
	require("cleared from the chain")
}

// What was measured when packets last came is shown, of the programs that are there.
func TestChainedProgramsAreShown(t *testing.T) {
	w := newChainedWatch(nil, slog.New(slog.DiscardHandler))
	require := func(wanted string) {
		t.Helper()
		attached := []*shuntv1.Attachment{{Interface: "eth0"}, {Interface: "eth1"}}
		w.show(attached)
		var got []string
		for _, p := range attached[0].Chain {
			got = append(got, fmt.Sprintf("%s %s %d: %d, %.0f, %d s", p.Position, p.Name, p.Id, p.Packets, p.NsPerPacket, p.Measured.Seconds))
		}
		if got := strings.Join(got, "; "); got != wanted || attached[1].Chain != nil {
			t.Errorf("shown are %q and %v, want %q", got, attached[1].Chain, wanted)
		}
	}
	require("")
	w.note([]datapath.Chain{beside(7, 0, 0, 0)}, nil, time.Unix(1, 0))
	require("before filter 7: 0, 0, 1 s; shunt sh_xdp 2: 0, 0, 1 s")
	if got := w.sample("eth0"); got != nil {
		t.Errorf("the metrics of programs without packets are %v", got)
	}
	w.note([]datapath.Chain{beside(7, 10, 2000, 100)}, nil, time.Unix(2, 0))
	w.note([]datapath.Chain{beside(7, 0, 0, 0)}, nil, time.Unix(3, 0))
	require("before filter 7: 10, 2000, 2 s; shunt sh_xdp 2: 10, 100, 2 s")
	if got, want := w.sample("eth0"), []metrics.Chained{{Position: "before", Program: "filter", Seconds: 2e-6}, {Position: "shunt", Program: "sh_xdp", Seconds: 1e-7}}; !slices.Equal(got, want) {
		t.Errorf("the metrics are %v, want %v", got, want)
	}
	w.note([]datapath.Chain{beside(8, 0, 0, 0)}, nil, time.Unix(4, 0))
	require("before filter 8: 0, 0, 4 s; shunt sh_xdp 2: 0, 0, 4 s")
	w.note(nil, nil, time.Unix(5, 0))
	require("")
}
