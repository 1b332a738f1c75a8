package route

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// bench is Routes between a data plane that records its writes and a resolver that finds
// the hops that a test names.
type bench struct {
	*testing.T
	*Routes
	written    []string // since the last wrote
	fails      error    // of every write
	failsAt    uint32   // if set, only writes to the backend at this index fail
	wanted     []netip.Addr
	silent     map[netip.Addr]bool // the addresses that Wait does not see resolved
	waitedFor  []netip.Addr
	configured []netip.Addr
	own        map[netip.Addr]bool // the host's addresses
	now        time.Time
	retries    int
	log        bytes.Buffer
}

func newBench(t *testing.T) *bench {
	b := &bench{T: t, silent: map[netip.Addr]bool{}}
	b.Routes = newRoutes(Options{
		DataPlane: b, Log: slog.New(slog.NewTextHandler(&b.log, nil)),
		Configured:        func() []netip.Addr { return b.configured },
		NATSourcesChanged: func() { b.retries++ },
	})
	b.resolver = finder{b}
	return b
}

func (b *bench) SetHop(r reconcile.BackendRef, hop store.Hop) error {
	b.written = append(b.written, fmt.Sprintf("%d hop %d %s", r.Index, hop.Interface, hop.MAC))
	return b.failing(r)
}

func (b *bench) SetNATSources(r reconcile.BackendRef, sources []netip.Addr) error {
	b.written = append(b.written, fmt.Sprintf("%d sources %v", r.Index, sources))
	return b.failing(r)
}

func (b *bench) failing(r reconcile.BackendRef) error {
	if b.failsAt != 0 && b.failsAt != r.Index {
		return nil
	}
	return b.fails
}

// finder is the bench as the resolver: two of its methods have the names of methods of Routes.
type finder struct{ *bench }

func (f finder) Want(addresses []netip.Addr) { f.wanted = addresses }

func (f finder) Wait(_ context.Context, addresses []netip.Addr) []netip.Addr {
	f.waitedFor = addresses
	return slices.DeleteFunc(slices.Clone(addresses), func(a netip.Addr) bool { return !f.silent[a] })
}

func (f finder) Review()                       {}
func (f finder) Unreachable(a netip.Addr) bool { return f.silent[a] }
func (f finder) Changed() <-chan struct{}      { return nil }
func (f finder) Close(bool) error              { return nil }

// wrote compares the writes since its last call, in any order.
func (b *bench) wrote(want ...string) {
	b.Helper()
	slices.Sort(b.written)
	slices.Sort(want)
	if !slices.Equal(b.written, want) {
		b.Errorf("written: %q\nwant: %q", b.written, want)
	}
	b.written = nil
}

// sources compares the result of NATSources for a service of NAT with the backends, beside a service of direct
// return with another one.
func (b *bench) sources(backends []netip.Addr, want ...netip.Addr) {
	b.Helper()
	nat, direct := services(backends...), services(three)
	direct[0].Name, direct[0].Forwarding = "direct", model.ForwardingDSRL2
	b.Follow(append(nat, direct...))
	if got := b.NATSources(b.own, b.now); !slices.Equal(got, want) {
		b.Errorf("sources %v, want %v", got, want)
	}
}

// retried compares the number of reports that sources have changed, since its last call.
func (b *bench) retried(want int) {
	b.Helper()
	if b.retries != want {
		b.Errorf("told %d times that sources have changed, want %d", b.retries, want)
	}
	b.retries = 0
}

var (
	one, two, three = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	six             = netip.MustParseAddr("2001:db8::6")
	ours, other     = netip.MustParseAddr("10.0.0.100"), netip.MustParseAddr("10.0.0.101")
	oursSix         = netip.MustParseAddr("2001:db8::100")
	mac             = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	anotherMAC      = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

func record(index uint32, address netip.Addr, port uint16) reconcile.BackendRecord {
	return reconcile.BackendRecord{BackendRef: reconcile.BackendRef{Index: index, Generation: 1},
		BackendAddress: model.BackendAddress{Address: address, Port: port}}
}

// services returns one service of NAT with backends at these addresses.
func services(backends ...netip.Addr) []*model.Service {
	s := model.Service{Name: "web", Forwarding: model.ForwardingNAT}
	for _, a := range backends {
		s.Backends = append(s.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: a}})
	}
	return []*model.Service{&s}
}

// TestHopsReachTheRecords: the route is written when both hop and record are there, in either order; a record
// for each port gets it, and a record that is gone is not written to.
func TestHopsReachTheRecords(t *testing.T) {
	b := newBench(t)
	b.Follow(services(one, two))
	b.hopChanged(&neighbour.Hop{Address: one, Interface: 3, MAC: mac, Resolved: true})
	b.wrote()
	b.Add([]reconcile.BackendRecord{record(1, one, 80), record(2, two, 80)})
	b.wrote("1 hop 3 02:00:00:00:00:01")
	b.Add([]reconcile.BackendRecord{record(3, one, 443)})
	b.wrote("3 hop 3 02:00:00:00:00:01")
	b.hopChanged(&neighbour.Hop{Address: one, Interface: 3, MAC: anotherMAC, Resolved: true})
	b.wrote("1 hop 3 02:00:00:00:00:02", "3 hop 3 02:00:00:00:00:02")
	b.hopChanged(&neighbour.Hop{Address: two, Interface: 4}) // no host has answered yet
	b.wrote()
	b.hopChanged(&neighbour.Hop{Address: two, Interface: 4, MAC: mac}) // the host that answered before does not now
	b.wrote("2 hop 4 02:00:00:00:00:01")
	b.Change([]reconcile.BackendRecord{record(2, two, 80), record(4, two, 443)}, []reconcile.BackendRecord{record(1, one, 80)})
	b.wrote("2 hop 4 02:00:00:00:00:01", "4 hop 4 02:00:00:00:00:01")
	b.Change(nil, nil)
	b.wrote()
	b.Review()
	b.wrote()
	b.Change(nil, nil)
	b.wrote("2 hop 4 02:00:00:00:00:01", "4 hop 4 02:00:00:00:00:01", "3 hop 3 02:00:00:00:00:02")
	b.hopChanged(&neighbour.Hop{Address: one, Interface: 3, MAC: mac, Resolved: true})
	b.wrote("3 hop 3 02:00:00:00:00:01")
}

// TestSources: the configured addresses, of the backend's family, else the route's source, else
// its last source.
func TestSources(t *testing.T) {
	b := newBench(t)
	backends := []netip.Addr{one, six}
	b.Change([]reconcile.BackendRecord{record(1, one, 80), record(6, six, 80)}, nil)
	b.sources(backends)
	b.hopChanged(&neighbour.Hop{Address: three, Source: other})
	b.sources(backends) // with direct return packets keep their source
	b.retries = 0
	b.hopChanged(&neighbour.Hop{Address: one, Source: ours})
	b.wrote("1 sources [10.0.0.100]")
	b.retried(1) // none was known at the last call
	b.hopChanged(&neighbour.Hop{Address: six, Source: oursSix})
	b.wrote("6 sources [2001:db8::100]")
	b.sources(backends, ours, oursSix)
	b.sources([]netip.Addr{one}, ours)
	b.sources(backends, ours, oursSix)
	b.retries = 0

	b.hopChanged(&neighbour.Hop{Address: one, Source: ours, Interface: 3, MAC: mac})
	b.wrote("1 sources [10.0.0.100]", "1 hop 3 02:00:00:00:00:01")
	b.retried(0)
	b.hopChanged(&neighbour.Hop{Address: one, Source: other})
	b.wrote("1 sources [10.0.0.101]")
	b.retried(1)
	b.sources(backends, other, oursSix)
	b.hopChanged(&neighbour.Hop{Address: one, Err: "no route"})
	b.wrote()
	b.retried(0)
	b.sources(backends, other, oursSix)

	b.configured = []netip.Addr{ours, three}
	b.sources(backends, three, ours)
	b.Change(nil, nil)
	b.wrote("1 sources [10.0.0.100 10.0.0.3]")
	b.Change(nil, nil)
	b.wrote()
	b.Rewrite()
	b.wrote("1 sources [10.0.0.100 10.0.0.3]")
	b.configured = nil
	b.hopChanged(&neighbour.Hop{Address: one, Source: other})
	b.wrote("1 sources [10.0.0.101]")
	b.sources(backends, other, oursSix)
}

// TestSourcesStay: an address that flows are sent from stays a source as long as the host has it, and a
// moment longer; a start takes over the earlier sources. An address of a family without backends of NAT is none.
func TestSourcesStay(t *testing.T) {
	b := newBench(t)
	b.now = time.Now()
	backends := []netip.Addr{one, six}
	old := netip.MustParseAddr("10.0.0.77")
	b.Adopt([]netip.Addr{old, oursSix})
	b.own = map[netip.Addr]bool{ours: true, other: true, oursSix: true}
	b.sources(backends, old, oursSix)
	b.put([]reconcile.BackendRecord{record(1, one, 80)})
	b.hopChanged(&neighbour.Hop{Address: one, Source: ours})
	b.sources(backends, old, ours, oursSix)
	b.now = b.now.Add(away - 1)
	b.sources(backends, old, ours, oursSix)
	if b.Expires(b.now) {
		t.Error("a source is over too early")
	}
	b.now = b.now.Add(1)
	if !b.Expires(b.now) {
		t.Error("a source that is gone is not over")
	}
	b.sources(backends, ours, oursSix)
	if b.Expires(b.now) {
		t.Error("a source that is none any more is over again")
	}

	b.hopChanged(&neighbour.Hop{Address: one, Source: other})
	b.now = b.now.Add(time.Hour)
	b.sources(backends, ours, other, oursSix)
	b.sources([]netip.Addr{one}, ours, other)      // no backend of IPv6
	b.sources([]netip.Addr{one, six}, ours, other) // and nothing comes back
	b.own = map[netip.Addr]bool{other: true}
	b.sources(backends, ours, other)
	b.now = b.now.Add(away / 2)
	b.own[ours] = true // it comes back
	b.sources(backends, ours, other)
	b.now = b.now.Add(away)
	b.sources(backends, ours, other)

	b.configured = []netip.Addr{three} // the host does not have it
	b.sources(backends, three, ours, other)
	b.now = b.now.Add(2 * away)
	if b.Expires(b.now) {
		t.Error("a configured source is over")
	}
	b.configured = nil
	b.sources(backends, ours, other) // no host answers for it any more
}

// TestLostSource: the last source towards a backend without a route is given up when the host has lost
// it, and comes back with the route.
func TestLostSource(t *testing.T) {
	b := newBench(t)
	b.now = time.Now()
	b.own = map[netip.Addr]bool{ours: true}
	b.put([]reconcile.BackendRecord{record(1, one, 80)})
	b.hopChanged(&neighbour.Hop{Address: one, Source: ours})
	b.wrote("1 sources [10.0.0.100]")
	b.sources([]netip.Addr{one}, ours)
	b.own = nil
	b.hopChanged(&neighbour.Hop{Address: one, Err: "no route"})
	b.sources([]netip.Addr{one}, ours)
	b.Rewrite()
	b.wrote()
	for range 3 {
		b.now = b.now.Add(away)
		b.sources([]netip.Addr{one})
	}
	b.Rewrite()
	b.wrote("1 sources []")
	b.own = map[netip.Addr]bool{ours: true}
	b.hopChanged(&neighbour.Hop{Address: one, Source: ours})
	b.wrote("1 sources [10.0.0.100]")
	b.sources([]netip.Addr{one}, ours)
}

// TestNothingIsTriedAgainBeforeTheFirstChange: the first change's own plan asks for the sources.
func TestNothingIsTriedAgainBeforeTheFirstChange(t *testing.T) {
	b := newBench(t)
	b.Follow(services(one, two))
	b.hopChanged(&neighbour.Hop{Address: one, Source: ours})
	b.retried(0)
	b.sources([]netip.Addr{one}, ours)
	b.hopChanged(&neighbour.Hop{Address: two, Source: ours})
	b.retried(0) // it is one of our addresses already
}

// TestAwait: a change waits for backends that it brings and that take flows, each once.
func TestAwait(t *testing.T) {
	b := newBench(t)
	web := func(backends ...model.Backend) []*model.Service {
		return []*model.Service{{Name: "web", Backends: backends}, {Name: "mail", Backends: backends}}
	}
	at := func(a netip.Addr) model.Backend {
		return model.Backend{BackendAddress: model.BackendAddress{Address: a}}
	}
	down := func(a netip.Addr) model.Backend {
		b := at(a)
		b.Observed.Down = true
		return b
	}
	await := func(services []*model.Service, want ...netip.Addr) {
		t.Helper()
		b.waitedFor = nil
		if due := b.Due(services); len(due) > 0 {
			b.Wait(t.Context(), due)
		}
		b.Follow(services)
		b.Brought()
		if !slices.Equal(b.waitedFor, want) {
			t.Errorf("it waited for %v, want %v", b.waitedFor, want)
		}
	}
	await(web(at(one), down(two)), one)
	if slices.SortFunc(b.wanted, netip.Addr.Compare); !slices.Equal(b.wanted, []netip.Addr{one, two}) {
		t.Errorf("it has %v looked up: one that is down, too", b.wanted)
	}
	await(web(at(one), down(two)))
	await(web(down(one), at(two)), two)
	await(web(at(one), at(two))) // it was waited for while it was up
	b.silent[three] = true
	await(web(at(one), at(three)), three)
	if !strings.Contains(b.log.String(), "10.0.0.3") {
		t.Errorf("the log does not name the backend that is silent: %s", b.log.String())
	}
	await(web(at(one), at(three)))
	await(web(at(one)))
	await(web(at(one), at(two)), two) // it was gone in between
	b.Follow(web(at(one), at(three))) // a check has found it well, and no change waits for that
	await(web(at(one), down(three)))
	await(web(at(one), at(three)), three)
}

// TestDue: while a change waits, the findings of health about the earlier services are applied, and the
// change's own backends are looked up all the same.
func TestDue(t *testing.T) {
	b := newBench(t)
	looksUp := func(when string, want ...netip.Addr) {
		t.Helper()
		if slices.SortFunc(b.wanted, netip.Addr.Compare); !slices.Equal(b.wanted, want) {
			t.Errorf("%s: it has %v looked up, want %v", when, b.wanted, want)
		}
	}
	due := func(services []*model.Service, want ...netip.Addr) {
		t.Helper()
		if is := b.Due(services); !slices.Equal(is, want) {
			t.Errorf("due are %v, want %v", is, want)
		}
	}
	before, after := services(one), services(one, two)
	b.Follow(before)
	due(after, one, two)
	looksUp("due", one, two)
	b.Follow(before)
	looksUp("before, meanwhile", one, two)
	b.Follow(after)
	b.Brought()
	looksUp("applied", one, two)
	due(after)
	b.Brought()
	b.Follow(before)
	looksUp("gone again", one)
	due(after, two)
	b.Follow(before)
	b.Brought()
	looksUp("given up", one)
	due(after, two) // it was not brought, so the next change waits for it
}

// TestWhatIsGoneIsForgotten: a backend that comes back is looked up anew. Backends in the maps are
// followed, whether a service names them or not.
func TestWhatIsGoneIsForgotten(t *testing.T) {
	b := newBench(t)
	wants := func(want ...netip.Addr) {
		t.Helper()
		slices.SortFunc(b.wanted, netip.Addr.Compare)
		if !slices.Equal(b.wanted, want) {
			t.Errorf("wanted %v, want %v", b.wanted, want)
		}
	}
	b.Follow(services(one, two))
	wants(one, two)
	b.hopChanged(&neighbour.Hop{Address: one, Interface: 3, MAC: mac, Source: ours})
	b.hopChanged(&neighbour.Hop{Address: two, Interface: 3, MAC: mac, Source: ours})
	b.Change([]reconcile.BackendRecord{record(1, one, 80), record(2, one, 443)}, nil)
	b.wrote("1 hop 3 02:00:00:00:00:01", "1 sources [10.0.0.100]", "2 hop 3 02:00:00:00:00:01", "2 sources [10.0.0.100]")
	b.Follow(nil)
	wants(one)
	b.Change(nil, []reconcile.BackendRecord{record(1, one, 80)})
	wants(one)
	b.Follow(services(two))
	wants(one, two)
	b.Add([]reconcile.BackendRecord{record(3, two, 80)})
	b.wrote()
	b.Change(nil, []reconcile.BackendRecord{record(2, one, 443), record(3, two, 80)})
	wants(two)
	b.Follow(nil)
	wants()
	if len(b.hops)+len(b.Routes.sources)+len(b.records)+len(b.named)+len(b.Routes.wanted) > 0 {
		t.Errorf("without a backend it keeps %v, %v, %v, %v and %v", b.hops, b.Routes.sources, b.records, b.named, b.Routes.wanted)
	}
}

// TestFailedWrites: a failed write is reported, unless the backend went in the meantime.
func TestFailedWrites(t *testing.T) {
	b := newBench(t)
	b.Follow(services(one))
	b.Change([]reconcile.BackendRecord{record(1, one, 80)}, nil)
	for _, c := range []struct {
		err  error
		told bool
	}{{fmt.Errorf("write it: %w", store.ErrGone), false}, {errors.New("the map is on fire"), true}} {
		b.log.Reset()
		b.fails = c.err
		b.hopChanged(&neighbour.Hop{Address: one, Interface: 3, MAC: mac, Source: ours})
		if told := strings.Count(b.log.String(), "10.0.0.1:80"); told != 2 && c.told || told != 0 && !c.told {
			t.Errorf("%v: the log has %s", c.err, b.log.String())
		}
	}
	b.fails, b.written = nil, nil
	b.Change(nil, nil) // which tries again
	b.wrote("1 hop 3 02:00:00:00:00:01", "1 sources [10.0.0.100]")
	b.Change(nil, nil)
	b.wrote()
}

// TestOneFailureCostsOne: a backend that cannot be written, as behind an interface without programs,
// does not make each change write the others.
func TestOneFailureCostsOne(t *testing.T) {
	b := newBench(t)
	b.Follow(services(one, two))
	for _, a := range []netip.Addr{one, two} {
		b.hopChanged(&neighbour.Hop{Address: a, Interface: 3, MAC: mac})
	}
	b.fails, b.failsAt = errors.New("no program is there"), 1
	b.Change([]reconcile.BackendRecord{record(1, one, 80), record(2, two, 80)}, nil)
	b.written = nil
	for range 2 {
		b.Change(nil, nil)
		b.wrote("1 hop 3 02:00:00:00:00:01")
	}
	b.fails = nil
	b.Change(nil, nil)
	b.wrote("1 hop 3 02:00:00:00:00:01")
	b.Change(nil, nil)
	b.wrote()
}
