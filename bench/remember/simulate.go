package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// sample counts flows at a moment.
type sample struct {
	at    time.Duration
	alive int // flows
	// tracked counts the flows of a table of all flows by the same rules: the living, the flows whose
	// client closed less than 4 min ago, and the flows that ended without a FIN less than 2 h 4 min ago.
	tracked    int
	remembered int // entries of sh_remembered
	// Of the entries: in slots in transition …
	agreeing  int // with the slot's current backend
	differing int // from it
	elsewhere int // in other slots, where only flows that differ are kept
	over      int // of all, of flows that have ended
	overOpen  int // of those, without a note that the client has closed

	transition, marked int // slots
}

// result is the result of a run in one manner.
type result struct {
	manner  manner
	samples []sample
	packets int
	made    uint64 // flows
	reset   int    // flows whose backend was removed
	moved   int    // other flows that reached another backend: must be 0
	first   string // the first of them
	excused int    // flows that had been idle for longer than the settle time
	slots   float64
	reasons map[string]uint64
}

// simulation is a run in one manner.
type simulation struct {
	options
	*world
	*crowd
	flows   []*flow
	alive   map[clientID]bool
	closed  []time.Duration // when flows were closed, in order of steps
	silent  []time.Duration // when flows ended without a FIN
	removed map[uint32]bool // backends
	frames  struct{ syn, ack, data, fin frame }
	room    []byte
	result  *result
}

// simulateManner runs one manner in a world of its own.
func simulateManner(ctx context.Context, o options, m manner) (*result, error) {
	r := &result{manner: m}
	err := inWorld(m.name, o, func(w *world) error {
		s := &simulation{options: o, world: w, crowd: newCrowd(o.seed, o.flows), alive: map[clientID]bool{},
			removed: map[uint32]bool{}, room: make([]byte, 256), result: r}
		s.frames.syn = newFrame("S", packet.Sequence(1000, 0))
		s.frames.ack = newFrame("A", packet.Sequence(1001, 2001))
		s.frames.data = newFrame("PA", packet.Sequence(1001, 2001), packet.Data("simulated"))
		s.frames.fin = newFrame("FA", packet.Sequence(1010, 2001))
		return s.run(ctx)
	})
	return r, err
}

// run goes through simulated time in steps: reloads and the settling of slots happen at
// their beginning, and the order of different flows' packets within one does not matter.
func (s *simulation) run(ctx context.Context) error {
	if err := s.apply(s.options, s.result.manner.backends(0)); err != nil {
		return err
	}
	for range s.options.flows {
		if err := s.start(s.present(), 0); err != nil {
			return err
		}
	}
	changes := s.result.manner.changes(s.options)
	_, replaced := replacing(s.options)
	end := replaced + after
	start := s.now
	for at := time.Duration(0); at < end; at += step {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("stopped after %s of %s simulated: %w", at, end, err)
		}
		s.now = start.Add(at)
		for ; len(changes) > 0 && changes[0].at <= at; changes = changes[1:] {
			if err := s.change(changes[0]); err != nil {
				return err
			}
		}
		settling, err := s.reconciler.Settle()
		if err != nil {
			return err
		}
		if err := s.traffic(at + step); err != nil {
			return fmt.Errorf("after %s simulated: %w", at, err)
		}
		if err := errors.Join(s.table.age(at+step), s.d.Heartbeat()); err != nil {
			return err
		}
		if _, err := s.d.Recall(); err != nil { // as the daemon does every 10 s
			return err
		}
		if (at+step)%sampling == 0 {
			if err := s.sample(at+step, settling); err != nil {
				return err
			}
		}
	}
	return s.count()
}

// change carries out one reload.
func (s *simulation) change(c change) error {
	if c.removed.IsValid() {
		address := c.removed.As4()
		s.removed[binary.BigEndian.Uint32(address[:])] = true
	}
	before, err := s.d.Contents()
	if err != nil {
		return err
	}
	if err := s.apply(s.options, c.backends); err != nil {
		return err
	}
	now, err := s.d.Contents()
	if err != nil {
		return err
	}
	changed, all := 0, 0
	for index, slots := range now.Slots {
		for i, slot := range slots.All() {
			all++
			if slot.Current != before.Slots[index].At(i).Current {
				changed++
			}
		}
	}
	s.result.slots += float64(changed) / float64(all)
	if s.progress {
		fmt.Fprintf(os.Stderr, "%-5s %8s  %6d flows alive, %d of %d slots get another backend\n",
			s.result.manner.name, c.at, len(s.flows), changed, all)
	}
	return nil
}

// traffic sends the flows' packets until a time.
func (s *simulation) traffic(until time.Duration) error {
	kept := s.flows
	s.flows = make([]*flow, 0, len(kept)+64)
	for _, f := range kept {
		if err := s.proceed(f, until); err != nil {
			return err
		}
	}
	for ; s.arrival < until; s.arrival += s.exponential(s.between) {
		if err := s.begun(s.newborn(), s.arrival, until); err != nil {
			return err
		}
	}
	return nil
}

// begun starts a flow and lets it go on until a time.
func (s *simulation) begun(class int, at, until time.Duration) error {
	if err := s.start(class, at); err != nil {
		return err
	}
	f := s.flows[len(s.flows)-1]
	s.flows = s.flows[:len(s.flows)-1]
	return s.proceed(f, until)
}

// start sends a flow's handshake.
func (s *simulation) start(class int, at time.Duration) error {
	f := s.begin(class, at)
	s.flows = append(s.flows, f)
	s.alive[f.client] = true
	var err error
	if f.backend, err = s.send(f, s.frames.syn); err != nil {
		return err
	}
	if s.removed[f.backend] {
		return fmt.Errorf("the new flow of %s went to a backend that was removed", f.client)
	}
	f.next += s.gap(f)
	_, err = s.deliver(f, s.frames.ack, at)
	return err
}

// proceed sends a flow's packets until a time, and keeps it in the list while it lives.
func (s *simulation) proceed(f *flow, until time.Duration) error {
	for f.next < until && f.next < f.end {
		gone, err := s.deliver(f, s.frames.data, f.next)
		if err != nil {
			return err
		}
		if gone {
			return s.begun(f.class, f.next, until)
		}
		f.next += s.gap(f)
	}
	if f.end >= until {
		s.flows = append(s.flows, f)
		return nil
	}
	gone, err := s.deliver(f, s.frames.fin, f.end)
	if gone || err != nil {
		return err
	}
	if gone, err = s.deliver(f, s.frames.ack, f.end); gone || err != nil {
		return err // the last acknowledgement, of the backend's FIN
	}
	delete(s.alive, f.client)
	s.closed = append(s.closed, f.end)
	return nil
}

// deliver sends a packet of a flow and judges where it went. A flow whose backend was
// removed is gone: the next backend resets it, past the balancer.
func (s *simulation) deliver(f *flow, p frame, at time.Duration) (gone bool, err error) {
	backend, err := s.send(f, p)
	idle := at - f.last
	f.last = at
	if err != nil || backend == f.backend {
		return false, err
	}
	switch {
	case s.removed[f.backend]:
		s.result.reset++
	case idle > s.options.settle:
		s.result.excused++
	default:
		if s.result.moved++; s.result.moved == 1 {
			s.result.first = fmt.Sprintf("flow of %s, after %s, from backend %08x to %08x, idle for %s before", f.client, at, f.backend, backend, idle)
		}
	}
	delete(s.alive, f.client)
	s.silent = append(s.silent, at)
	return true, nil
}

// send runs the program on a packet and returns the backend it left for.
func (s *simulation) send(f *flow, p frame) (uint32, error) {
	s.result.packets++
	verdict, out, err := s.d.RunPacket(iface, p.from(f.client, s.room))
	if err != nil {
		return 0, err
	}
	if verdict != kernel.XDPTx && verdict != kernel.XDPRedirect {
		return 0, fmt.Errorf("a packet of %s was not sent on (verdict %d)", f.client, verdict)
	}
	return outerDestination(out)
}

// sample counts the flows and the entries of this moment.
func (s *simulation) sample(at time.Duration, settling reconcile.Settling) error {
	recent := func(times []time.Duration, span time.Duration) []time.Duration {
		return slices.DeleteFunc(times, func(t time.Duration) bool { return t < at-span })
	}
	s.closed = recent(s.closed, halfClosed)
	s.silent = recent(s.silent, timeouts(0).TCPEstablished)
	one := sample{at: at, alive: len(s.flows), transition: settling.Transition, marked: settling.Marked}
	one.tracked = one.alive + len(s.closed) + len(s.silent)
	contents, err := s.d.Contents()
	if err != nil {
		return err
	}
	var slots reconcile.Table
	for _, slots = range contents.Slots { // there is one service
	}
	err = s.table.all(func(e entry) {
		one.remembered++
		slot := slots.At(int(uint64(e.hash) * uint64(len(slots)) >> 32))
		switch {
		case slot.State != reconcile.Transition:
			one.elsewhere++
		case e.backend == slot.Current.Index|uint32(slot.Current.Generation)<<20:
			one.agreeing++
		default:
			one.differing++
		}
		if !s.alive[e.client] {
			one.over++
			if !e.closed {
				one.overOpen++
			}
		}
	})
	s.result.samples = append(s.result.samples, one)
	return err
}

// count reads the program's counters at the end.
func (s *simulation) count() error {
	counters, err := s.d.Counters()
	if err != nil {
		return err
	}
	s.result.made, s.result.reasons = s.made, map[string]uint64{}
	for name, c := range counters.Reasons {
		s.result.reasons[name] = c.Packets
	}
	return nil
}
