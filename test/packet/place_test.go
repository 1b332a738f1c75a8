package packet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// cell is one cell of the table in docs/design/13-just-enough-tracking.md.
type cell struct {
	slot   slotSpec
	packet string // TCP flags, or "udp"
	entry  rune   // the backend of an existing entry, or 0
	want   string // the backend; "" means dropped
	memory string // afterwards
}

var (
	settledAB      = slotSpec{state: reconcile.Settled, current: 'B', previous: 'A'}
	transitionAB   = slotSpec{state: reconcile.Transition, current: 'B', previous: 'A'}
	transitionB    = slotSpec{state: reconcile.Transition, current: 'B'}
	transitionXB   = slotSpec{state: reconcile.Transition, current: 'B', previous: 'X'}
	transitionDB   = slotSpec{state: reconcile.Transition, current: 'B', previous: 'A', drains: true}
	transitionXDB  = slotSpec{state: reconcile.Transition, current: 'B', previous: 'X', drains: true}
	transitionAA   = slotSpec{state: reconcile.Transition, current: 'A', previous: 'A'}
	transitionA    = slotSpec{state: reconcile.Transition, previous: 'A'}
	closingAB      = slotSpec{state: reconcile.Closing, current: 'B', previous: 'A'}
	closingDB      = slotSpec{state: reconcile.Closing, current: 'B', previous: 'A', drains: true}
	markedAB       = slotSpec{state: reconcile.Marked, current: 'B', previous: 'A'}
	transitionFore = slotSpec{state: reconcile.Transition, current: 'B', before: true}
)

// autoCells are cells without affinity, with tracking auto.
var autoCells = []cell{
	{settledAB, "S", 0, "B", ""}, {settledAB, "A", 0, "B", ""}, {settledAB, "udp", 0, "B", ""},
	{settledAB, "S", 'C', "B", "flow C syn"}, {settledAB, "A", 'C', "B", "flow C syn"}, {settledAB, "udp", 'C', "B", "flow C"},

	{transitionAB, "S", 'C', "C", "flow C syn"}, {transitionAB, "A", 'C', "C", "flow C"}, {transitionAB, "udp", 'C', "C", "flow C"},
	{transitionAB, "R", 'C', "C", "flow C syn reset"}, {transitionAB, "FA", 'C', "C", "flow C fin"},
	{transitionAB, "S", 0, "B", "flow B syn"}, {transitionAB, "S+", 0, "B", "flow B syn"},
	{transitionAB, "A", 0, "A", "flow A"}, {transitionAB, "A+", 0, "A", "flow A"}, {transitionAB, "FA", 0, "A", "flow A fin"},
	{transitionAB, "SA", 0, "A", "flow A"}, {transitionAB, "R", 0, "A", ""}, {transitionAB, "RA", 0, "A", ""},
	{transitionAB, "udp", 0, "A", "flow A"},

	{transitionB, "S", 0, "B", "flow B syn"}, {transitionB, "A", 0, "B", "flow B"}, {transitionB, "R", 0, "B", ""}, {transitionB, "udp", 0, "B", "flow B"},
	{transitionXB, "S", 0, "B", "flow B syn"}, {transitionXB, "A", 0, "B", "flow B"}, {transitionXB, "udp", 0, "B", "flow B"},
	{transitionDB, "S", 0, "B", "flow B syn"}, {transitionDB, "A", 0, "A", "flow A"}, {transitionDB, "udp", 0, "B", "flow B"},
	{transitionDB, "udp", 'C', "C", "flow C"}, {transitionDB, "S", 'C', "C", "flow C syn"},
	{transitionXDB, "S", 0, "B", "flow B syn"}, {transitionXDB, "A", 0, "B", "flow B"}, {transitionXDB, "udp", 0, "B", "flow B"},
	// A to B and back: connections opened meanwhile are with B, although the slot names A
	// twice.
	{transitionAA, "S", 'C', "C", "flow C syn"}, {transitionAA, "A", 'C', "C", "flow C"}, {transitionAA, "S", 0, "A", "flow A syn"}, {transitionAA, "A", 0, "A", "flow A"},
	// No backend takes new flows, and the old ones go on.
	{transitionA, "S", 0, "", ""}, {transitionA, "A", 0, "A", "flow A"}, {transitionA, "A", 'C', "C", "flow C"}, {transitionA, "udp", 0, "A", "flow A"},

	{closingAB, "S", 'C', "C", "flow C syn"}, {closingAB, "A", 'C', "C", "flow C"}, {closingAB, "udp", 'C', "C", "flow C"},
	{closingAB, "S", 0, "B", ""}, {closingAB, "A", 0, "B", ""}, {closingAB, "udp", 0, "B", ""}, {closingDB, "udp", 0, "B", ""}, {closingDB, "A", 0, "B", ""},
	{markedAB, "S", 'C', "C", "flow C syn"}, {markedAB, "A", 'C', "C", "flow C"}, {markedAB, "udp", 'C', "C", "flow C"},
	{markedAB, "S", 0, "B", ""}, {markedAB, "A", 0, "B", ""}, {markedAB, "udp", 0, "B", ""},
}

// alwaysCells: the table is looked up in every state, and every flow remembered.
var alwaysCells = []cell{
	{settledAB, "S", 0, "B", "flow B syn"}, {settledAB, "A", 0, "B", "flow B"}, {settledAB, "udp", 0, "B", "flow B"}, {settledAB, "R", 0, "B", ""},
	{settledAB, "S", 'C', "C", "flow C syn"}, {settledAB, "A", 'C', "C", "flow C"}, {settledAB, "udp", 'C', "C", "flow C"},
	{transitionAB, "S", 0, "B", "flow B syn"}, {transitionAB, "A", 0, "A", "flow A"}, {transitionAB, "udp", 0, "A", "flow A"}, {transitionAB, "A", 'C', "C", "flow C"},
	{closingAB, "S", 0, "B", "flow B syn"}, {closingAB, "A", 0, "B", "flow B"}, {closingAB, "udp", 0, "B", "flow B"}, {closingAB, "A", 'C', "C", "flow C"},
	{markedAB, "S", 0, "B", "flow B syn"}, {markedAB, "A", 0, "B", "flow B"}, {markedAB, "udp", 0, "B", "flow B"}, {markedAB, "A", 'C', "C", "flow C"},
}

// noneCells: nothing is looked up, and nothing remembered.
var noneCells = func() (cells []cell) {
	for _, slot := range []slotSpec{settledAB, transitionAB, transitionDB, closingAB, markedAB} {
		for _, packet := range []string{"S", "A", "udp"} {
			before := "flow C syn"
			if packet == "udp" {
				before = "flow C"
			}
			cells = append(cells, cell{slot, packet, 0, "B", ""}, cell{slot, packet, 'C', "B", before})
		}
	}
	return cells
}()

// affinityCells: slot and entry are the client's.
var affinityCells = []cell{
	{settledAB, "S", 0, "B", ""}, {settledAB, "A", 0, "B", ""}, {settledAB, "udp", 0, "B", ""}, {settledAB, "S", 'C', "B", "client C"},
	{transitionAB, "S", 'C', "C", "client C"}, {transitionAB, "A", 'C', "C", "client C"}, {transitionAB, "udp", 'C', "C", "client C"}, {transitionAB, "R", 'C', "C", "client C"},
	{transitionAB, "S", 0, "A", "client A"}, {transitionAB, "A", 0, "A", "client A"}, {transitionAB, "udp", 0, "A", "client A"}, {transitionAB, "R", 0, "A", ""},
	{transitionB, "S", 0, "B", "client B"}, {transitionB, "A", 0, "B", "client B"}, {transitionB, "udp", 0, "B", "client B"},
	{transitionXB, "S", 0, "B", "client B"}, {transitionXB, "A", 0, "B", "client B"}, {transitionXB, "udp", 0, "B", "client B"},
	{transitionDB, "S", 0, "B", "flow B syn"}, {transitionDB, "udp", 0, "B", "flow B"}, {transitionDB, "A", 0, "A", "client A"}, {transitionDB, "A", 'C', "C", "client C"},
	{transitionAA, "S", 'C', "C", "client C"}, {transitionAA, "S", 0, "A", "client A"},
	{closingAB, "S", 'C', "C", "client C"}, {closingAB, "A", 'C', "C", "client C"}, {closingAB, "udp", 'C', "C", "client C"},
	{closingAB, "S", 0, "B", ""}, {closingAB, "A", 0, "B", ""}, {closingAB, "udp", 0, "B", ""},
	{markedAB, "S", 'C', "C", "client C"}, {markedAB, "A", 'C', "C", "client C"}, {markedAB, "udp", 'C', "C", "client C"},
	{markedAB, "S", 0, "B", ""}, {markedAB, "A", 0, "B", ""}, {markedAB, "udp", 0, "B", ""},
}

const affinity = 10 * time.Minute

// TestPlace sends one packet for each cell of the table, and checks the entries.
func TestPlace(t *testing.T) {
	t.Parallel()
	for _, table := range []struct {
		name     string
		tracking model.Tracking
		affinity time.Duration
		cells    []cell
	}{
		{"auto", model.TrackingAuto, 0, autoCells},
		{"always", model.TrackingAlways, 0, alwaysCells},
		{"none", model.TrackingNone, 0, noneCells},
		{"affinity", model.TrackingAuto, affinity, affinityCells},
	} {
		p := newWorld(t).place(portMoving)
		for _, c := range table.cells {
			for _, six := range []bool{false, true} {
				name := fmt.Sprintf("%s/%s/%s, entry %c/IPv6 %v", table.name, c.slot, c.packet, max(c.entry, '-'), six)
				client := p.newClient()
				t.Run(name, func(t *testing.T) {
					p.on(t).cell(c, six, client, table.tracking, table.affinity)
				})
			}
		}
	}
}

// cell plays a cell and expects no flow of NAT and, if nothing failed, no note.
func (p *placed) cell(c cell, six bool, client int, tracking model.Tracking, affinity time.Duration) {
	p.Helper()
	k, first, flags := kind{six: six}, "S", c.packet
	if c.packet == "udp" {
		k.udp, first, flags = true, "", ""
	}
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, affinity })
	if c.entry != 0 {
		p.remember(k, client, 40000, c.entry, first)
	}
	p.tracked(tracking)
	p.write(c.slot)
	in := p.packet(k, client, 40000, flags)
	before := p.reasons()
	if got := p.follow(in); got != c.want {
		p.Errorf("it went to %q, want %q", got, c.want)
	}
	if got := p.memory(in); got != c.memory {
		p.Errorf("remembered is %q, want %q", got, c.memory)
	}
	moved := p.moved(before)
	if c.want == "" && moved["no_backend"] == 1 {
		delete(moved, "no_backend")
	}
	if len(moved) > 0 {
		p.Errorf("counted %v", moved)
	}
}
