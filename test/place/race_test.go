package place_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// steady is a flow that always has a packet to send, so that no settle time is too short for it: it
// may be lost only with its backend.
type steady struct {
	packet
	frame  []byte
	holder byte // the backend's number: the last octet of its address
}

func newSteady(service model.Service, udpToo bool, n int, port uint16) *steady {
	f := &steady{}
	f.frontend = service.Frontends[0] // TCP over IPv4
	client := netip.AddrFrom4([4]byte{198, 51, 100, byte(n)})
	if n%2 == 1 {
		f.frontend, client = service.Frontends[2], netip.AddrFrom16([16]byte{0x20, 1, 0x0d, 0xb8, 5: 9, 15: byte(n)})
	}
	f.kind, f.payload = data, true
	if udpToo && n%3 == 0 {
		f.kind = udp
		f.frontend.Protocol = model.UDP
	}
	f.client = netip.AddrPortFrom(client, port)
	f.frame = f.packet.frame()
	return f
}

// first is the frame of the flow's first packet.
func (f *steady) first() []byte {
	p := f.packet
	if p.kind != udp {
		p.kind, p.payload = syn, false
	}
	return p.frame()
}

// sender is a CPU on which packets come in, one after the other.
type sender struct {
	w      *world
	cpu    int
	hall   *hall
	shared []*steady // by all CPUs, as when the queues of a network card are spread anew
	own    []*steady
	lives  []*life
	rng    *rand.Rand
	rounds atomic.Int64
	sent   int
	tally  livesTally
	lost   []string
}

// number is the backend that a frame leaves to, 0 for none.
func (s *sender) number(frame []byte) (byte, error) {
	verdict, out, err := s.w.d.RunPacket(arm, frame)
	if err != nil || verdict != kernel.XDPTx && verdict != kernel.XDPRedirect {
		return 0, err
	}
	return out[5], nil
}

// reasons are the reasons that packets were counted for.
func (s *sender) reasons() string {
	counts, err := s.w.d.ReasonCounts()
	if err != nil {
		return err.Error()
	}
	var all []string
	for reason, count := range counts {
		if count.Packets > 0 {
			all = append(all, fmt.Sprintf("%s: %d", reason, count.Packets))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// run sends until stop is set: the shared flows, and in each round some new ones.
func (s *sender) run(service model.Service, stop *atomic.Bool) error {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := errors.Join(netns.Set(s.w.space), pin(s.cpu)); err != nil {
		return err
	}
	for port := uint16(1024); !stop.Load(); port += 2 * newcomers {
		if err := s.round(service, port); err != nil {
			return err
		}
		s.rounds.Add(1)
	}
	return nil
}

// newcomers is the number of flows of either kind that begin in a round, with ports of their own.
const newcomers = 6

// round makes all flows send, and some begin.
func (s *sender) round(service model.Service, port uint16) error {
	s.hall.RLock()
	defer s.hall.RUnlock()
	begin := func(n uint16) *steady { return newSteady(service, true, 100+2*s.cpu+int(n)%2, port+n) }
	for n := range uint16(newcomers) {
		f := begin(n)
		to, err := s.number(f.first())
		if err != nil {
			return err
		}
		if f.holder = to; to == 0 {
			s.lost = append(s.lost, fmt.Sprintf("round %d, CPU %d: the first packet of %s went to nobody; counted are %s", s.rounds.Load(), s.cpu, f.packet, s.reasons()))
		} else {
			s.own = append(s.own, f)
		}
		s.lives = append(s.lives, s.begin(begin(newcomers+n).packet))
	}
	for i, l := range s.lives {
		var err error
		if s.lives[i], err = s.turn(l); err != nil {
			return err
		}
	}
	if err := errors.Join(s.steadily(s.own), s.steadily(s.shared)); err != nil {
		return err
	}
	s.lives = slices.DeleteFunc(s.lives, func(l *life) bool { return l == nil })
	s.lives = s.lives[max(0, len(s.lives)-400):]
	s.own = s.own[max(0, len(s.own)-200):]
	return nil
}

// steadily makes flows send a packet each. They may be lost only with their backends.
func (s *sender) steadily(flows []*steady) error {
	for _, f := range flows {
		to, err := s.number(f.frame)
		if err != nil {
			return err
		}
		if s.sent++; to != f.holder && !s.hall.gone[f.holder].Load() {
			s.lost = append(s.lost, fmt.Sprintf("round %d, CPU %d: %s is on %d, its packet went to %d", s.rounds.Load(), s.cpu, f.packet, f.holder, to))
		}
	}
	return nil
}

// TestTwoCPUsWhileTablesChange makes two CPUs send packets of hundreds of flows, the same on both
// and new ones on each, while tables change, settle and are given up, with the real grace periods
// in between. A flow that goes on is only lost with its backend, and one that pauses, sends its SYN
// again or is closed by half only for the document's reasons.
func TestTwoCPUsWhileTablesChange(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs: runs packets on both at once")
	}
	changes := 60
	if os.Getenv("SHUNT_SOAK") != "" {
		changes = 3000
	}
	w := newWorld(t, 1<<16)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	all := &hall{}
	witness := newWitness(w, w.d)
	witness.grace = w.d.Grace
	r := reconcile.New(witness, reconcile.Clock(func() time.Time { return epoch.Add(all.now) }))
	desired := reconcile.Desired{Limits: w.options.Limits, Settle: settle, Services: model.Shared([]model.Service{web("21 22 23")})}
	apply := func() {
		t.Helper()
		must(t, w.d.Heartbeat())
		all.begun.Add(1)
		_, err := r.Apply(desired)
		must(t, err)
		all.ended.Add(1)
	}
	apply()
	shared := make([]*steady, 300)
	senders := []*sender{{cpu: 0}, {cpu: 1}}
	for i := range shared {
		shared[i] = newSteady(*desired.Services[0], true, 1+i%60, uint16(30000+i))
	}
	for _, s := range senders {
		s.w, s.hall, s.shared, s.tally.losses = w, all, shared, map[cause]int{}
		s.rng = rand.New(rand.NewPCG(seed, uint64(1+s.cpu)))
	}
	for _, f := range shared {
		var err error
		f.holder, err = senders[0].number(f.first())
		must(t, err)
	}
	var stop atomic.Bool
	var running sync.WaitGroup
	failed := make(chan error, len(senders))
	for _, s := range senders {
		running.Go(func() {
			if err := s.run(*desired.Services[0], &stop); err != nil {
				failed <- err
			}
		})
	}
	// Two rounds may be under way; once they have ended, every flow has sent once.
	everybodySends := func() {
		t.Helper()
		for _, s := range senders {
			for until := s.rounds.Load() + 2; s.rounds.Load() < until; {
				select {
				case err := <-failed:
					t.Fatal(err)
				default:
					runtime.Gosched()
				}
			}
		}
	}
	marked := 0
	for range changes {
		desired.Services = model.Shared([]model.Service{otherWeb(rng, all)})
		apply()
		if rng.IntN(3) == 0 { // a second change before the first has settled, at once
			desired.Services = model.Shared([]model.Service{otherWeb(rng, all)})
			apply()
		}
		everybodySends()
		for range rng.IntN(3) { // UDP that goes on must not expire, but two are more than the settle time
			all.pass(w, quanta(4))
			everybodySends()
		}
		left, err := r.Settle()
		must(t, err)
		marked = max(marked, left.Marked)
	}
	stop.Store(true)
	running.Wait()
	packets := 0
	for _, s := range senders {
		packets += s.sent
		t.Logf("CPU %d: %s", s.cpu, &s.tally)
		if s.tally.retransmitted == 0 || s.tally.halfClosed == 0 || s.tally.paused == 0 {
			t.Errorf("CPU %d had none of one kind: the test tests too little", s.cpu)
		}
		if len(s.lost) > 0 {
			t.Errorf("CPU %d: %d packets went astray, the first: %s", s.cpu, len(s.lost), s.lost[0])
		}
	}
	t.Logf("%d changes, %d packets, at most %d slots marked", changes, packets, marked)
	if marked == 0 {
		t.Errorf("no slot was ever marked: the test tests too little")
	}
}

// otherWeb is the service with other weights and another size. Backends 21 and 22 always have
// weight; 23 and 24 come and go, and a removed one never comes back.
func otherWeb(rng *rand.Rand, all *hall) model.Service {
	backends := fmt.Sprintf("21*%d 22*%d", 1+rng.IntN(3), 1+rng.IntN(3))
	for n := 23; n <= 24; n++ {
		if rng.IntN(4) > 0 {
			backends += fmt.Sprintf(" %d*%d", n, 1+rng.IntN(3))
		} else {
			all.gone[n].Store(true)
		}
	}
	size := maglev.Sizes[0]
	if rng.IntN(4) == 0 {
		size = maglev.Sizes[1]
	}
	return web(backends, func(s *model.Service) { s.TableSize = size })
}
