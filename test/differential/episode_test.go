package differential_test

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

// episodeSize is the number of packets before the tables are emptied: enough to fill a service and
// to use up a narrow pool of ports, and few enough to read.
const episodeSize = 400

// episodeTime bounds an episode: ports of closed connections rest for 2 s, and the way to a client
// is looked up again after one. Later packets are not judged.
const episodeTime = time.Second

// refillEvery is the number of packets after which the limits of our own packets are lifted. 100
// ICMP errors may be sent at once (bpf/lb/icmp.h), and each packet causes one at most.
const refillEvery = 50

// episode is a run of packets from empty tables.
type episode struct {
	*run
	seed      uint64
	careful   bool // reads all counters after each packet
	played    []done
	judged    int
	late      bool
	undecided bool
	failure   *failure
}

// failure is a packet for which program and model disagree.
type failure struct {
	seed   uint64
	before []step // up to the one that failed
	arm    int
	in     []byte
	text   string
}

func (f *failure) String() string {
	return fmt.Sprintf("program and model disagree; again: go test ./test/differential -run TestDifferential -differential.seed=%d -differential.packets=1\n"+
		"packet %d of the episode\n%s\n%s", f.seed, f.before[len(f.before)-1].number, describe(f.arm, f.in), f.text)
}

// narrowPool is the index in pools of the pool that is soon used up.
const narrowPool = 1

// poolOf returns the index of an episode's pool.
func poolOf(seed uint64) int {
	if seed%4 == 0 {
		return narrowPool
	}
	return 0
}

// stepsOf are the steps of an episode: the step that each goes on with is drawn here.
func stepsOf(seed uint64) []step {
	g := newGenerator(^seed)
	steps := make([]step, episodeSize)
	for n := range steps {
		steps[n] = step{n, g.next(n)}
	}
	return steps
}

// play plays the steps, up to the first failure.
func (r *run) play(seed uint64, steps []step, careful bool) *episode {
	e := &episode{run: r, seed: seed, careful: careful, played: make([]done, episodeSize)}
	pool := pools[poolOf(seed)]
	r.world.renew(pool)
	r.oracle.renew(pool)
	_ = r.world.whatElse()
	g, begin := newGenerator(seed), time.Now()
	if g.removed.IsValid() {
		defer r.world.bringBack(g.removed)
	}
	for i, s := range steps {
		var of *done
		if s.of >= 0 {
			if of = &e.played[s.of]; of.in == nil {
				continue // it was left out
			}
		}
		if i%refillEvery == refillEvery-1 {
			r.world.unlimit()
		}
		if g.removed.IsValid() && s.number >= g.removedAt && r.oracle.removed != g.removed {
			r.world.remove(g.removed)
			r.oracle.removed = g.removed
		}
		arm, frame := g.at(seed, s.number).frame(of)
		said := e.judge(arm, frame, &e.played[s.number])
		if e.late = time.Since(begin) > episodeTime; e.late {
			return e
		}
		if e.undecided = r.oracle.undecided; e.undecided {
			return e
		}
		e.judged++
		if said != "" {
			e.failure = &failure{seed, steps[:i+1], arm, frame, said}
			return e
		}
	}
	if extra := r.world.whatElse(); len(extra) > 0 && len(steps) > 0 {
		last := e.played[steps[len(steps)-1].number]
		e.failure = &failure{seed, steps, last.arm, last.in, fmt.Sprintf("after all packets, one of which was counted beyond its reasons: %v\n", extra)}
	}
	return e
}

// judge runs one frame through both, and describes the differences.
func (e *episode) judge(arm int, frame []byte, d *done) string {
	d.arm, d.in, d.out = arm, frame, nil
	verdict, got, err := e.world.run(arm, frame)
	if err != nil {
		return err.Error()
	}
	want, fault := e.oracle.step(arm, frame, verdict, got)
	var said strings.Builder
	if fault != "" {
		fmt.Fprintf(&said, "%s\n", fault)
	}
	if verdict != want.verdict {
		fmt.Fprintf(&said, "verdict: want %s, got %s\n", verdictName(want.verdict), verdictName(verdict))
	}
	e.countReasons(&said, want)
	expected := want.frame
	if want.verdict == kernel.XDPPass {
		expected = frame
	}
	if want.verdict != kernel.XDPDrop && verdict != kernel.XDPDrop && !bytes.Equal(expected, got) {
		said.WriteString(difference(expected, got))
	}
	if e.careful || said.Len() > 0 {
		for r, n := range e.world.whatElse() {
			fmt.Fprintf(&said, "reason: %s was counted %d times\n", r, n)
		}
	}
	if want.frame != nil && said.Len() == 0 {
		d.out, d.outArm = bytes.Clone(got), armOf(got)
	}
	return said.String()
}

// countReasons checks that each reason of a packet was counted once.
func (e *episode) countReasons(said *strings.Builder, want want) {
	e.counts[want.reason]++
	if want.reason != none {
		if n := e.world.more(want.reason); n != 1 {
			fmt.Fprintf(said, "reason: want %s counted once, got it %d times\n", want.reason, n)
		}
	}
	for _, note := range want.notes {
		if note == none {
			return
		}
		e.counts[note]++
		if n := e.world.more(note); n != 1 {
			fmt.Fprintf(said, "note: want %s counted once, got it %d times\n", note, n)
		}
	}
}

// armOf is the arm that a frame leaves by.
func armOf(frame []byte) int {
	for i, a := range arms {
		if bytes.Equal(frame[6:12], a.mac) {
			return i
		}
	}
	return 0
}

func verdictName(v uint32) string {
	switch v {
	case kernel.XDPDrop:
		return "drop"
	case kernel.XDPPass:
		return "pass"
	case kernel.XDPTx:
		return "send back"
	case kernel.XDPRedirect:
		return "redirect"
	}
	return strconv.Itoa(int(v))
}

// difference lists the different fields if both frames can be read, and in any case the bytes
// around the first difference.
func difference(want, got []byte) string {
	out := ""
	w, err1 := packet.Parse(want)
	g, err2 := packet.Parse(got)
	if err1 == nil && err2 == nil {
		out = packet.Diff(w, g)
	}
	at := 0
	for at < min(len(want), len(got)) && want[at] == got[at] {
		at++
	}
	return out + fmt.Sprintf("byte %d differs; want %d bytes, got %d:\nwant … %x\ngot  … %x\n", at, len(want), len(got), around(want, at), around(got, at))
}

// around returns a few bytes before and behind a position.
func around(b []byte, at int) []byte { return b[max(0, min(at-8, len(b))):min(at+24, len(b))] }

func describe(arm int, frame []byte) string {
	text := "a frame that cannot be read"
	if p, err := packet.Parse(frame); err == nil {
		text = p.String()
	}
	return fmt.Sprintf("%s: %s\n      %x", arms[arm].name, text, frame)
}
