package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/metrics"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// chainedInterval is how often the programs of others beside shunt's are measured, and
	// chainedLength for how long. Meanwhile a packet takes some tens of nanoseconds longer, and so
	// the average packet less than one.
	chainedInterval = 5 * time.Second
	chainedLength   = 100 * time.Millisecond
	// slowMin is from when on a program is slow, on average: it alone keeps a CPU from taking a million
	// packets a second. slowRatio allows for slow machines: so many times what shunt takes.
	slowMin   = time.Microsecond
	slowRatio = 2
	// slowPackets are the least of which an average says something.
	slowPackets = 30
)

// chainedWatch knows how long the programs of others beside shunt's take, and turns slow ones into
// conditions. Its methods may be called at any time.
type chainedWatch struct {
	conditions *condition.Set
	log        *slog.Logger

	mu      sync.Mutex
	last    map[string]measuredChain // by interface
	slow    map[string]bool          // subjects of conditions
	failing string                   // why it was not measured the last time
}

// measuredChain is what was measured when packets last came, or nothing if none came yet.
type measuredChain struct {
	datapath.Chain
	at time.Time
}

func newChainedWatch(conditions *condition.Set, log *slog.Logger) *chainedWatch {
	return &chainedWatch{conditions: conditions, log: log, last: map[string]measuredChain{}, slow: map[string]bool{}}
}

// measureOthers measures from time to time, until ctx ends. It is beside the loop, because it waits.
func (d *daemon) measureOthers(ctx context.Context) {
	tick := time.NewTicker(chainedInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			all, err := d.datapath.MeasureOthers(ctx, chainedLength)
			d.chained.note(all, err, time.Now())
		}
	}
}

// note takes a measurement of all interfaces with programs of others.
func (w *chainedWatch) note(all []datapath.Chain, err error, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if errors.Is(err, datapath.ErrMeasured) {
		return // an operator measures
	}
	if err != nil {
		if text := err.Error(); text != w.failing {
			w.failing = text
			w.log.Warn("cannot measure the programs that run before and after shunt's; trying again", "error", err)
		}
		return // what was measured before may still be so
	}
	w.failing = ""
	last, slow := map[string]measuredChain{}, map[string]bool{}
	for _, c := range all {
		shown := measuredChain{c, at}
		if before, known := w.last[c.Interface]; known && shown.packets() == 0 && before.sameAs(shown) {
			shown = before
		}
		last[c.Interface] = shown
		for _, place := range shown.programs() {
			w.judge(shown, place, slow)
		}
	}
	for subject := range w.slow {
		if !slow[subject] {
			w.conditions.Clear(condition.ChainedProgramSlow, subject)
		}
	}
	w.last, w.slow = last, slow
}

// judge raises the condition of a slow program. One that few packets have met since is as it was.
func (w *chainedWatch) judge(c measuredChain, place datapath.Place, slow map[string]bool) {
	if place.Position == datapath.PositionShunt {
		return
	}
	subject := fmt.Sprintf("%s shunt on %s", place.Position, c.Interface)
	took := place.Program.Time
	if took.Packets < slowPackets {
		slow[subject] = w.slow[subject]
		return
	}
	if took.PerPacketN < max(float64(slowMin), slowRatio*c.Shunt.Time.PerPacketN) {
		return
	}
	least := slowMin // in steps, so that it is told again only when much has changed
	for float64(10*least) <= took.PerPacketN {
		least *= 10
	}
	slow[subject] = true
	w.conditions.Raise(condition.Condition{Code: condition.ChainedProgramSlow, Subject: subject,
		Text:   fmt.Sprintf("the program %s takes more than %s for a packet", place.Program, least),
		Remedy: fmt.Sprintf("`shunt chain list --measure 5s` measures it again; make the program faster, or remove it with `shunt chain clear --interface %s --position %s`", c.Interface, place.Position)})
}

// programs are all, in a packet's order.
func (c measuredChain) programs() []datapath.Place {
	return slices.DeleteFunc(c.Places(), func(p datapath.Place) bool { return p.Program == nil })
}

// packets are those that came to the first program.
func (c measuredChain) packets() uint64 { return c.programs()[0].Program.Time.Packets }

// sameAs is whether the programs are those of another chain.
func (c measuredChain) sameAs(other measuredChain) bool {
	return slices.EqualFunc(c.programs(), other.programs(), func(a, b datapath.Place) bool {
		return a.Position == b.Position && a.Program.ID == b.Program.ID
	})
}

// show adds the programs to what a status shows.
func (w *chainedWatch) show(attached []*shuntv1.Attachment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range attached {
		c, known := w.last[a.Interface]
		if !known {
			continue
		}
		for _, place := range c.programs() {
			p := place.Program
			a.Chain = append(a.Chain, &shuntv1.ChainedProgram{Position: string(place.Position), Name: p.Name, Id: p.ID,
				Packets: p.Time.Packets, NsPerPacket: p.Time.PerPacketN, Measured: timestamppb.New(c.at)})
		}
	}
}

// sample is what metrics tell: programs that have got packets.
func (w *chainedWatch) sample(iface string) (all []metrics.Chained) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, known := w.last[iface]
	if !known {
		return nil
	}
	for _, place := range c.programs() {
		if p := place.Program; p.Time.Packets > 0 {
			all = append(all, metrics.Chained{Position: string(place.Position), Program: p.Name, Seconds: p.Time.PerPacketN / 1e9})
		}
	}
	return all
}
