package place_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

type byRapid struct{ *rapid.T }

func (b byRapid) choose(n int, label string) int { return rapid.IntRange(0, n-1).Draw(b.T, label) }

// soakTime ends a long run: each history takes about 15 ms of one core.
const soakTime = 6 * time.Minute

// TestRandomHistories: only flows that the document gives up are lost.
func TestRandomHistories(t *testing.T) {
	check(t, newWorld(t, 4096), removed, idledThrough, idledOver, twoSYNs, untracked, drainedUDP, otherHash)
}

// TestRandomHistoriesWithLittleRoom is the same with room to remember a few dozen flows.
func TestRandomHistoriesWithLittleRoom(t *testing.T) {
	w := newWorld(t, 24)
	w.tight = true
	check(t, w, removed, notRemembered)
}

// check plays histories, in which flows must be lost by each of the causes.
func check(t *testing.T, w *world, causes ...cause) {
	count := newTally()
	begin := time.Now()
	rapid.Check(t, func(t *rapid.T) {
		if time.Since(begin) > soakTime {
			return
		}
		if trace, err := run(w, byRapid{t}, count, breakage{}); err != nil {
			t.Fatalf("%v\nhistory, by time in quanta:\n%s", err, trace)
		}
	})
	// A rare cause may not have come up by chance: then there are more histories.
	missing := func(c cause) bool { return count.losses[c] == 0 }
	for seed := uint64(0); seed < 300 && !t.Failed() && slices.ContainsFunc(causes, missing); seed++ {
		if trace, err := run(w, byNumber{rand.New(rand.NewPCG(seed, 2))}, count, breakage{}); err != nil {
			t.Fatalf("history %d: %v\nhistory, by time in quanta:\n%s", seed, err, trace)
		}
	}
	t.Log(count)
	if i := slices.IndexFunc(causes, missing); i >= 0 && !t.Failed() {
		t.Errorf("no flow was lost because of %q: the test does not test it", causes[i])
	}
}

// run plays one history to its end.
func run(w *world, c chooser, count *tally, breaks breakage) (trace string, err error) {
	var h *history
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(failure)
			if !ok {
				panic(r)
			}
			err = f.error
		}
		if h != nil {
			for _, line := range h.trace {
				trace += line + "\n"
			}
		}
	}()
	h = newHistory(w, c, count, breaks)
	h.play()
	return trace, nil
}

func (h *history) rng(label string) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(h.choose(1<<30, label)), 0))
}

// historyLength bounds the simulated time: the program's ticks are 16 bits.
const historyLength = 40000 * time.Second

func (h *history) play() {
	for n := range 1 + h.choose(3, "services") {
		h.desired.Services = append(h.desired.Services, model.Shared([]model.Service{h.newService(n)})...)
	}
	h.apply()
	h.lateRolls = h.rng("late")
	h.traffic(h.rng("first"), 25)
	for range 5 + h.choose(15, "steps") {
		switch h.choose(10, "step") {
		case 0:
			h.log("restart")
			h.count.events["restart"]++
			h.restart()
		case 1, 2, 3:
			h.pass(1 + h.choose(4, "quanta"))
		case 4:
			h.pass(8 + h.choose(5, "quanta"))
		default:
			h.change()
		}
		h.traffic(h.rng("traffic"), h.choose(8, "newcomers"))
		if h.now() > historyLength {
			break
		}
	}
	for range 4 { // until all slots are settled or marked
		h.apply()
		h.pass(12)
	}
	if left := h.settle(); left.Transition > 0 {
		h.fail("%d slots never leave their transition", left.Transition)
	}
}

// pass lets quanta go by, with traffic after each.
func (h *history) pass(quanta int) {
	h.log("%d quanta pass", quanta)
	for range quanta {
		h.advance(quantum)
		if h.choose(10, "late settle") > 0 {
			h.drawFault(6)
			h.settle()
		}
		h.traffic(h.rng("traffic"), h.choose(3, "newcomers"))
	}
}

func (h *history) drawFault(rarity int) {
	if h.choose(rarity, "faulty") == 0 {
		h.fault.strike([]fault{before, after, half}[h.choose(3, "fault")], h.choose(15, "at"))
	}
}

func (h *history) newService(n int) model.Service {
	s := model.Service{
		Name: string(rune('a' + n)), Frontends: frontends(n), TableSize: h.tableSize(),
		Forwarding: h.forwarding(), Tracking: h.tracking(), AffinityTimeout: h.affinity(),
	}
	for range 1 + h.choose(4, "backends") {
		h.addBackend(&s)
	}
	return repaired(s)
}

func (h *history) forwarding() model.Forwarding {
	return []model.Forwarding{model.ForwardingDSRIPIP, model.ForwardingDSRL2, model.ForwardingDSRGUE}[h.choose(3, "forwarding")]
}

func (h *history) tracking() model.Tracking {
	return []model.Tracking{model.TrackingAuto, model.TrackingAuto, model.TrackingAuto, model.TrackingAuto, model.TrackingAlways, model.TrackingNone}[h.choose(6, "tracking")]
}

func (h *history) affinity() time.Duration {
	return []time.Duration{0, 0, 0, affinityShort, affinityLong}[h.choose(5, "affinity")]
}

func (h *history) addBackend(s *model.Service) {
	address := pool[h.choose(len(pool), "backend")]
	if !slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.BackendAddress == address }) {
		s.Backends = append(s.Backends, model.Backend{BackendAddress: address, Weight: uint16(1 + h.choose(3, "weight"))})
	}
}

// repaired is the service with at least one backend for new flows in each family.
func repaired(s model.Service) model.Service {
	for _, ipv6 := range []bool{false, true} {
		sum, first := 0, -1
		for i, b := range s.Backends {
			if b.Address.Is6() == ipv6 {
				sum += int(b.Weight)
				if first < 0 {
					first = i
				}
			}
		}
		if sum == 0 && first >= 0 {
			s.Backends[first].Weight = 1
		}
	}
	return s
}

// change changes the configuration in one way and applies it.
func (h *history) change() {
	h.past = append(h.past, h.desired)
	rng := h.rng("just before")
	for range min(6, 6*len(h.desired.Services)) {
		h.open(rng, true)
	}
	d := h.desired
	d.Services = slices.Clone(d.Services)
	what := h.choose(14, "change")
	switch {
	case what < 4:
		d = h.past[max(0, len(h.past)-1-h.choose(4, "back"))]
		h.count.events["rollback"]++
		h.log("rollback")
	case what == 4 && h.choose(6, "service") == 0:
		h.toggleService(&d)
	default:
		if len(d.Services) == 0 {
			h.toggleService(&d)
			break
		}
		i := h.choose(len(d.Services), "of service")
		changed := *d.Services[i]
		s := &changed
		d.Services[i] = s
		s.Backends = slices.Clone(s.Backends)
		said := h.changeService(s, what)
		if h.choose(6, "all drain") > 0 {
			*s = repaired(*s)
		}
		h.count.events[said]++
		h.log("%s of %s: %s", said, s.Name, describe(*s))
	}
	h.desired = d
	h.drawFault(5)
	h.apply()
}

func describe(s model.Service) string {
	out := fmt.Sprintf("%s %s, affinity %.1f, size %d:", s.Forwarding, s.Tracking, float64(s.AffinityTimeout)/float64(quantum), s.TableSize)
	for _, b := range s.Backends {
		out += fmt.Sprintf(" %s*%d", b.BackendAddress, b.Weight)
	}
	return out
}

func (h *history) toggleService(d *reconcile.Desired) {
	n := h.choose(3, "n")
	name := string(rune('a' + n))
	if i := slices.IndexFunc(d.Services, func(s *model.Service) bool { return s.Name == name }); i >= 0 {
		h.log("service %s goes", name)
		h.count.events["service goes"]++
		d.Services = slices.Delete(d.Services, i, i+1)
		return
	}
	h.log("service %s comes", name)
	h.count.events["service comes"]++
	d.Services = append(d.Services, model.Shared([]model.Service{h.newService(n)})...)
}

func (h *history) changeService(s *model.Service, what int) string {
	at := h.choose(len(s.Backends), "at")
	switch what {
	case 5:
		s.TableSize = h.tableSize()
		return "table size"
	case 6:
		s.Tracking = h.tracking()
		return "tracking"
	case 7:
		s.AffinityTimeout = h.affinity()
		return "affinity"
	case 8:
		s.Forwarding = h.forwarding()
		return "forwarding"
	case 9:
		h.addBackend(s)
		return "add"
	case 10:
		if len(s.Backends) > 1 {
			s.Backends = slices.Delete(s.Backends, at, at+1)
		}
		return "remove"
	case 11:
		s.Backends[at].Weight = 0
		return "drain"
	case 12:
		s.Backends[at].Weight = max(s.Backends[at].Weight, 1)
		return "undrain"
	}
	s.Backends[at].Weight = uint16(h.choose(4, "weight"))
	return "weight"
}
