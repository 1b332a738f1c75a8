package reconcile_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/value"
)

// world is a random history: desired states, faults and restarts. rapid prints the seed
// of a history that fails, shortens it, and repeats it with -rapid.seed.
type world struct {
	*rapid.T
	limits  model.Limits
	maps    *fake.Maps
	r       *reconcile.Reconciler
	desired reconcile.Desired
	// flows are the programs' flows to backends, by the position that the backend had when
	// the flow began. A flow may break only when its backend is not wanted.
	flows map[reconcile.BackendRef]model.BackendAddress
	traffic
}

func newWorld(t *rapid.T, limits model.Limits, seed uint64) *world {
	w := &world{T: t, limits: limits, maps: fake.New(limits), flows: map[reconcile.BackendRef]model.BackendAddress{}, traffic: newTraffic(seed)}
	w.restart()
	w.desired = reconcile.Desired{Limits: limits, Settle: settleTime}
	w.attempt = w.desired
	return w
}

func TestRandomHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := roomy
		if rapid.Bool().Draw(t, "tight") {
			limits = model.Limits{Services: 5, Backends: 8, Slots: 2100, Filters: 100}
		}
		w := newWorld(t, limits, rapid.Uint64().Draw(t, "traffic"))
		for range rapid.IntRange(5, 25).Draw(t, "steps") {
			switch rapid.IntRange(0, 19).Draw(t, "step") {
			case 0:
				w.restart()
			case 1, 2: // the same state again
				w.applyAgain(w.drawFault())
			case 3, 4, 5, 6:
				w.now = w.now.Add(rapid.SampledFrom([]time.Duration{time.Second, 4 * time.Minute, 11 * time.Minute, settleTime}).Draw(t, "pass"))
				w.settle(w.drawFault())
			case 7:
				w.apply(w.drawMerge(), w.drawFault(), false)
			case 8, 9, 10, 11: // a small change, so that there are flows to keep
				w.apply(w.drawChange(), w.drawFault(), false)
			case 12:
				w.apply(w.drawRename(), w.drawFault(), false)
			case 13:
				w.apply(w.drawEarlier(), w.drawFault(), false)
			default:
				w.apply(w.drawDesired(), w.drawFault(), false)
			}
			w.send()
		}
		w.applyAgain(nil)
		w.settleAll()
		w.apply(reconcile.Desired{Limits: w.limits}, nil, false)
		contents, _ := w.maps.Contents()
		if n := len(contents.Backends) + len(contents.Services) + len(contents.Frontends) + len(contents.Addresses) + len(contents.Filters); n > 0 {
			t.Errorf("nothing is wanted, but %d records are left:\n%s", n, reconcile.Dump(contents))
		}
	})
}

func (w *world) drawFault() func(string) fake.Fault {
	kind := rapid.SampledFrom([]fake.Fault{fake.None, fake.Before, fake.After, fake.Half}).Draw(w.T, "fault")
	at := rapid.IntRange(0, 12).Draw(w.T, "at")
	only := rapid.SampledFrom([]string{"", "", "put", "delete", "write slots", "put service", "delete backend", "grace", "scan", "write slots", "put filter", "delete filter"}).Draw(w.T, "only")
	if kind == fake.None {
		return nil
	}
	return func(operation string) fake.Fault {
		if !strings.HasPrefix(operation, only) {
			return fake.None
		}
		if at--; at >= 0 {
			return fake.None
		}
		return kind
	}
}

var (
	poolVIPs     = []string{"192.0.2.10", "192.0.2.11", "2001:db8::10"}
	poolBackends = []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.3:81", "10.0.0.4", "10.0.0.5:80",
		"[2001:db8:1::1]:80", "[2001:db8:1::2]:80", "[2001:db8:1::3]:80"}
	poolPorts = []value.PortRange{{First: 80, Last: 80}, {First: 443, Last: 443}, value.AnyPort}
	// One of these at most for each address: they overlap.
	poolRanges = []value.PortRange{{First: 8000, Last: 8099}, {First: 8050, Last: 8199}}
)

// drawHealth returns a backend in a state that health checks may find.
func (w *world) drawHealth(b model.Backend) model.Backend {
	b.Observed = model.BackendObservation{}
	switch rapid.IntRange(0, 7).Draw(w.T, "health") {
	case 0, 1:
		b.Observed.Idle, b.Observed.Down = true, true
	case 2:
		b.Observed.Idle = true
	case 3:
		b.Observed.Ramp = uint8(rapid.IntRange(1, 9).Draw(w.T, "ramp")) * 10
	}
	return b
}

func (w *world) drawDesired() reconcile.Desired {
	d := reconcile.Desired{Limits: w.limits, Settle: settleTime}
	translates := rapid.Bool().Draw(w.T, "all translate") // so that services can be merged
	names := []string{"a", "b", "c"}
	for _, name := range names[:rapid.IntRange(0, 3).Draw(w.T, "services")] {
		s := model.Service{
			Name:            name,
			Forwarding:      rapid.SampledFrom([]model.Forwarding{model.ForwardingDSRIPIP, model.ForwardingNATDestination, model.ForwardingDSRL2}).Draw(w.T, "forwarding"),
			Tracking:        rapid.SampledFrom([]model.Tracking{model.TrackingAuto, model.TrackingAuto, model.TrackingAlways, model.TrackingNone}).Draw(w.T, "tracking"),
			AffinityTimeout: rapid.SampledFrom([]time.Duration{0, 0, time.Hour}).Draw(w.T, "affinity"),
			ClosesDown:      rapid.IntRange(0, 2).Draw(w.T, "closes down") == 0,
			Policy:          model.Policy{Rejects: rapid.Bool().Draw(w.T, "rejects"), HashAddresses: rapid.Bool().Draw(w.T, "hashes addresses"), Draws: rapid.Bool().Draw(w.T, "draws"), FlowsMax: uint32(rapid.IntRange(0, 2).Draw(w.T, "flows max"))},
			Announce:        rapid.SampledFrom([]model.Announce{model.AnnounceL2, model.AnnounceNone}).Draw(w.T, "announce"),
			TableSize:       rapid.SampledFrom([]uint32{251, 509}).Draw(w.T, "size"),
		}
		if translates {
			s.Forwarding = model.ForwardingNATDestination
		}
		s.Policy.Tunnelled = s.Forwarding.Encapsulates() && rapid.Bool().Draw(w.T, "tunnels")
		w.drawLists(&s)
		for _, text := range poolBackends {
			if rapid.IntRange(0, 2).Draw(w.T, "has") == 0 {
				s.Backends = append(s.Backends, w.drawHealth(backend(text, uint16(rapid.IntRange(0, 3).Draw(w.T, "weight")))))
			}
		}
		d.Services = append(d.Services, &s)
	}
	var services [2][]*model.Service // of clients, and of packets between nodes
	for _, s := range d.Services {
		level := 0
		if s.Forwarding == model.ForwardingNATDestination && s.Announce == model.AnnounceNone && rapid.Bool().Draw(w.T, "tunnelled") {
			level = 1
		}
		services[level] = append(services[level], s)
	}
	giveIn := func(level int, address string, ports value.PortRange) {
		owner := rapid.IntRange(-1, len(services[level])-1).Draw(w.T, "owner")
		if owner >= 0 {
			s := services[level][owner]
			s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(address), Ports: ports,
				Protocol: []model.Protocol{model.TCP, model.TCP | model.Tunnelled}[level]})
		}
	}
	give := func(address string, ports value.PortRange) { giveIn(0, address, ports) }
	for _, address := range []string{poolVIPs[0], poolVIPs[2], "0.0.0.0", "::"} {
		giveIn(1, address, poolPorts[0])
	}
	for _, address := range poolVIPs {
		for _, ports := range poolPorts {
			give(address, ports)
		}
		give(address, rapid.SampledFrom(poolRanges).Draw(w.T, "range"))
	}
	own := netip.MustParseAddr(rapid.SampledFrom(poolVIPs).Draw(w.T, "own"))
	d.HostOwn = map[netip.Addr]bool{own: true}
	for _, source := range []string{"10.0.0.254", poolVIPs[0]} {
		if rapid.Bool().Draw(w.T, "source") {
			d.NATSources = append(d.NATSources, netip.MustParseAddr(source))
		}
	}
	return d
}

// weighing returns every backend that some frontend of its service can reach, and whether it
// has a weight in any service.
func weighing(d reconcile.Desired) map[model.BackendAddress]bool {
	backends := map[model.BackendAddress]bool{}
	for _, s := range d.Services {
		for _, b := range s.Backends {
			if slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return slices.Contains(serving(*s, f.Address.Is6()), b) }) {
				backends[b.BackendAddress] = backends[b.BackendAddress] || b.Share() > 0
			}
		}
	}
	return backends
}

// isDown reports whether the backend is down in all its services.
func isDown(d reconcile.Desired, address model.BackendAddress) bool {
	for _, s := range d.Services {
		for _, b := range s.Backends {
			reached := slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return slices.Contains(serving(*s, f.Address.Is6()), b) })
			if reached && b.BackendAddress == address && !b.Observed.Down {
				return false
			}
		}
	}
	return true
}

// applyAgain applies a state that has been tried before, and so must fit.
func (w *world) applyAgain(fault func(string) fake.Fault) { w.apply(w.desired, fault, true) }

// apply applies d with the fault, and then checks everything that must hold.
func (w *world) apply(d reconcile.Desired, fault func(string) fake.Fault, again bool) {
	before := len(w.maps.Operations)
	plan, planErr := w.r.Plan(d)
	if len(w.maps.Operations) != before {
		w.Fatalf("Plan changed the maps: %q", w.maps.Operations[before:])
	}
	w.begin(d, plan, planErr)
	w.earlier = append(w.earlier, d)
	contents, _ := w.maps.Contents()
	treated, inTraffic := verdicts(contents), w.during(fault)
	w.maps.Fault = func(operation string) fake.Fault {
		w.checkSources(treated, operation)
		return inTraffic(operation)
	}
	difference, err := w.r.Apply(d)
	w.maps.Fault = nil
	operations := w.maps.Operations[before:]
	var capacity *reconcile.CapacityError
	switch {
	case errors.As(err, &capacity):
		// Tables before may take the room of a state that has fitted once.
		if w.limits == roomy || len(operations) > 0 || planErr == nil || again && capacity.What != "slots" {
			w.Fatalf("%v, planned: %v, after operations %q", err, planErr, operations)
		}
	case planErr != nil:
		w.Fatalf("plan: %v", planErr)
	case err != nil && !errors.Is(err, fake.ErrInjected):
		w.Fatal(err)
	default:
		w.desired = d
		if diff := cmp.Diff(plan.String(), difference.String()); diff != "" {
			w.Errorf("Apply does not do what Plan said (-plan +apply):\n%s", diff)
		}
		failedLook := err != nil && failsToLook(operations)
		if operations := withoutStrays(operations); len(operations) > 0 && difference.Empty() && !failedLook {
			w.Errorf("an empty difference took %q", operations)
		}
		w.checkFlows()
	}
	if err == nil {
		w.failed, w.succeeded = nil, true
		w.checkExact()
		w.checkStrays()
	}
	w.checkViolations()
}

func (w *world) checkViolations() {
	w.Helper()
	if len(w.maps.Violations) > 0 {
		w.Fatalf("violations:\n%s\nafter operations:\n%s", strings.Join(w.maps.Violations, "\n"), strings.Join(w.maps.Operations, "\n"))
	}
}

func (w *world) checkFlows() {
	contents, _ := w.maps.Contents()
	alive := weighing(w.desired)
	for ref, address := range w.flows {
		if _, ok := alive[address]; !ok {
			delete(w.flows, ref)
		} else if got := contents.Backends[ref.Index]; got.BackendRef != ref || got.BackendAddress != address {
			w.Fatalf("a flow to %s at %v finds %+v; operations:\n%s", address, ref, got, strings.Join(w.maps.Operations, "\n"))
		}
	}
	for _, record := range contents.Backends {
		if _, ok := alive[record.BackendAddress]; ok {
			w.flows[record.BackendRef] = record.BackendAddress
		}
	}
}

// checkExact compares the maps with the desired state, worked out anew, and
// applies it again, which must do nothing.
func (w *world) checkExact() {
	contents, _ := w.maps.Contents()
	want, got := wanted(w.desired), found(contents)
	if diff := cmp.Diff(want, got); diff != "" {
		w.Fatalf("the maps are not as desired (-want +got):\n%s", diff)
	}
	w.checkPrevious(contents)
	before := len(w.maps.Operations)
	difference, err := w.r.Apply(w.desired)
	if err != nil || !difference.Empty() || len(w.maps.Operations) != before {
		w.Fatalf("a second Apply: %v, %v, operations %q", difference, err, w.maps.Operations[before:])
	}
}

// serving returns the backends for frontends of a family: the backends of the same family, or all of them with direct
// return and none of that family.
func serving(s model.Service, ipv6 bool) []model.Backend {
	same := slices.DeleteFunc(slices.Clone(s.Backends), func(b model.Backend) bool { return b.Address.Is6() != ipv6 })
	if len(same) == 0 && s.Forwarding.Direct() {
		return s.Backends
	}
	return same
}

// wanted returns the desired state as sorted lines, with backends by address.
func wanted(d reconcile.Desired) []string {
	var lines []string
	addresses := map[netip.Addr]reconcile.AddressRecord{}
	for b, weighs := range weighing(d) {
		lines = append(lines, fmt.Sprintf("backend %s draining %v down %v", b, !weighs, isDown(d, b)))
	}
	for _, shared := range d.Services {
		s := *shared
		tracking := s.Tracking
		if tracking == "" || !s.Forwarding.Direct() && s.AffinityTimeout == 0 {
			tracking = model.TrackingAuto
		}
		for _, ipv6 := range []bool{false, true} {
			seed, members, backends, weight, frontends := maglev.Seed(s.Name), []maglev.Member{}, []string{}, 0, 0
			if ipv6 {
				seed = maglev.Seed(s.Name + "/6")
			}
			for _, f := range s.Frontends {
				if f.Address.Is6() == ipv6 {
					frontends++
					lines = append(lines, fmt.Sprintf("frontend %s: %s %d", f, s.Name, seed))
					if f.Tunnelled() {
						continue
					}
					record := addresses[f.Address]
					record.VIP = true
					record.Announce = record.Announce || s.Announce == model.AnnounceL2
					record.Direct = record.Direct || s.Forwarding.Direct()
					addresses[f.Address] = record
				}
			}
			for _, b := range serving(s, ipv6) {
				weight += int(b.Share())
				members = append(members, maglev.Member{Key: maglev.Key(b), Weight: b.Share()})
				backends = append(backends, b.BackendAddress.String())
			}
			if frontends == 0 {
				continue
			}
			var slots []string
			if weight > 0 {
				size := s.TableSize
				if size == 0 {
					size = maglev.SizeFor(len(members))
				}
				for _, member := range maglev.Table(size, seed, members) {
					slots = append(slots, backends[member])
				}
			}
			filters, some := wantedFilters(s, seed, ipv6)
			lines = append(lines, filters...)
			s.Policy.Filters = some
			lines = append(lines, fmt.Sprintf("service %s %d %s %s %s %+v %s", s.Name, seed, s.Forwarding, tracking, s.AffinityTimeout, s.Policy, slots))
		}
	}
	for address := range addresses {
		var there []*model.Service
		for _, s := range d.Services {
			if slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address == address && !f.Tunnelled() }) {
				there = append(there, s)
			}
		}
		if len(there) == 1 && there[0].Forwarding.Direct() && there[0].Policy.HashAddresses {
			seed := maglev.Seed(there[0].Name)
			if address.Is6() {
				seed = maglev.Seed(there[0].Name + "/6")
			}
			f := model.Frontend{Address: address, Protocol: model.TCP | model.Fragments}
			lines = append(lines, fmt.Sprintf("frontend %s: %s %d", f, there[0].Name, seed))
		}
	}
	for _, source := range d.NATSources {
		record := addresses[source]
		record.Source, record.Announce = true, true
		addresses[source] = record
	}
	for address, record := range addresses {
		if d.HostOwn[address] {
			record.HostOwn, record.Announce = true, false
		}
		record.Address = address
		lines = append(lines, fmt.Sprintf("address %+v", record))
	}
	slices.Sort(lines)
	return lines
}

// found returns the contents in the same lines.
func found(c reconcile.Contents) []string {
	var lines []string
	for b := range maps.Values(c.Backends) {
		lines = append(lines, fmt.Sprintf("backend %s draining %v down %v", b.BackendAddress, b.Draining, b.Down))
	}
	for index, s := range c.Services {
		if s.Remnant() {
			continue
		}
		var slots []string
		for _, slot := range c.Slots[index].All() {
			if slot.Current != (reconcile.BackendRef{}) {
				slots = append(slots, c.Backends[slot.Current.Index].BackendAddress.String())
			}
		}
		lines = append(lines, fmt.Sprintf("service %s %d %s %s %s %+v %s", s.Name, s.Seed, s.Forwarding, s.Tracking, s.AffinityTimeout, s.Policy, slots))
	}
	for f, index := range c.Frontends {
		lines = append(lines, fmt.Sprintf("frontend %s: %s %d", f, c.Services[index].Name, c.Services[index].Seed))
	}
	for f, allow := range c.Filters {
		s := c.Services[f.Service]
		if s.Generation != f.Generation {
			s = reconcile.ServiceRecord{Name: "of nobody"}
		}
		lines = append(lines, fmt.Sprintf("filter %s: %s %d allow %v", f.Prefix, s.Name, s.Seed, allow))
	}
	for _, record := range c.Addresses {
		lines = append(lines, fmt.Sprintf("address %+v", record))
	}
	slices.Sort(lines)
	return lines
}

// TestEveryFaultOnce lets each operation of a rich change fail once, in every way, and
// then applies the same state, the state before, or one that renames everything.
func TestEveryFaultOnce(t *testing.T) {
	first := desired(
		service("web", "192.0.2.10:80 [2001:db8::10]:80", "10.0.0.2:80 10.0.0.3:80 [2001:db8:1::2]:80"),
		service("dns", "192.0.2.11:53", "10.0.0.3:80 10.0.0.4:80"),
		service("old", "192.0.2.12:1", "10.0.0.7:80"))
	first.NATSources = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	second := desired(
		service("web", "192.0.2.10:80 192.0.2.10:81", "10.0.0.9:80 10.0.0.10:80 10.0.0.5:80"),
		service("name", "192.0.2.11:53", "10.0.0.3:80 10.0.0.4:80 10.0.0.6:80"))
	second.NATSources = []netip.Addr{netip.MustParseAddr("10.0.0.8")}
	third := desired(
		service("x", "192.0.2.10:80 [2001:db8::10]:80 192.0.2.12:1", "10.0.0.11:80 [2001:db8:1::3]:80"),
		service("y", "192.0.2.11:53", "10.0.0.12:80"))
	for _, kind := range []fake.Fault{fake.Before, fake.After, fake.Half} {
		for name, next := range map[string]reconcile.Desired{"first": first, "second": second, "third": third} {
			for _, restart := range []bool{false, true} {
				operations := 0
				for faultOnce(t, first, second, next, kind, operations, restart) {
					operations++
				}
				if operations < 20 {
					t.Errorf("then %s: the change took only %d operations", name, operations)
				}
			}
		}
	}
}

// faultOnce applies first, then second with a fault at one operation, then next. It returns
// false if there are fewer operations.
func faultOnce(t *testing.T, first, second, next reconcile.Desired, kind fake.Fault, at int, restart bool) bool {
	b := newBench(t, roomy)
	b.apply(first)
	countdown := at
	b.maps.Fault = func(string) fake.Fault {
		if countdown--; countdown == -1 {
			return kind
		}
		return fake.None
	}
	_, err := b.r.Apply(second)
	b.maps.Fault = nil
	if err == nil {
		return false
	}
	if restart {
		b.r = reconcile.New(b.maps)
	}
	b.apply(next)
	contents, _ := b.maps.Contents()
	if diff := cmp.Diff(wanted(next), found(contents)); diff != "" {
		t.Errorf("fault %d of kind %d, restart %v (-want +got):\n%s", at, kind, restart, diff)
	}
	return true
}
