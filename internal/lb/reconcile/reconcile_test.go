package reconcile_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/value"
)

var roomy = model.Limits{Services: 100, Backends: 1000, Slots: 100_000, Filters: 1000}

func backend(text string, weight uint16) model.Backend {
	b := model.Backend{Weight: weight}
	if ap, err := netip.ParseAddrPort(text); err == nil {
		b.Address, b.Port = ap.Addr(), ap.Port()
	} else {
		b.Address = netip.MustParseAddr(text)
	}
	return b
}

// frontend reads "192.0.2.10:80" or "[2001:db8::10]:80".
func frontend(text string) model.Frontend {
	ap := netip.MustParseAddrPort(text)
	return model.Frontend{Address: ap.Addr(), Ports: value.PortRange{First: ap.Port(), Last: ap.Port()}, Protocol: model.TCP}
}

// service returns a service with frontends and backends from texts; a backend may end in "*weight". Its table is small.
func service(name, frontends, backends string) model.Service {
	s := model.Service{Name: name, Forwarding: model.ForwardingNAT, Announce: model.AnnounceL2, TableSize: 251}
	for _, text := range strings.Fields(frontends) {
		s.Frontends = append(s.Frontends, frontend(text))
	}
	for _, text := range strings.Fields(backends) {
		weight := 1
		if at := strings.Index(text, "*"); at >= 0 {
			if _, err := fmt.Sscan(text[at+1:], &weight); err != nil {
				panic(err)
			}
			text = text[:at]
		}
		s.Backends = append(s.Backends, backend(text, uint16(weight)))
	}
	return s
}

// sized returns the service with a table of that many slots.
func sized(size uint32, s model.Service) model.Service {
	s.TableSize = size
	return s
}

func desired(services ...model.Service) reconcile.Desired {
	return reconcile.Desired{Services: model.Shared(services), Limits: roomy}
}

// weighed returns the desired state with other weights of the backends of one of its services.
func weighed(d reconcile.Desired, service int, weights ...uint16) reconcile.Desired {
	d.Services = slices.Clone(d.Services)
	s := *d.Services[service]
	s.Backends = slices.Clone(s.Backends)
	for i, weight := range weights {
		s.Backends[i].Weight = weight
	}
	d.Services[service] = &s
	return d
}

// bench is a reconciler over fake maps.
type bench struct {
	*testing.T
	maps *fake.Maps
	r    *reconcile.Reconciler
	now  time.Time
}

func newBench(t *testing.T, limits model.Limits) *bench {
	maps := fake.New(limits)
	b := &bench{t, maps, nil, time.Unix(0, 0)}
	b.restart()
	t.Cleanup(func() {
		for _, violation := range maps.Violations {
			t.Errorf("violation: %s", violation)
		}
	})
	return b
}

// restart forgets everything but the maps.
func (b *bench) restart() {
	b.r = reconcile.New(b.maps, reconcile.Clock(func() time.Time { return b.now }))
}

// failing makes every operation with this prefix fail in this way.
func failing(prefix string, kind fake.Fault) func(string) fake.Fault {
	return func(operation string) fake.Fault {
		if strings.HasPrefix(operation, prefix) {
			return kind
		}
		return fake.None
	}
}

// withoutStrays returns the operations without the look for strays at their end, and the wait for it: an
// Apply that does not know the state before it has one, and it is no difference.
func withoutStrays(operations []string) []string {
	n := len(operations)
	if n == 0 || operations[n-1] != fake.EndStrays {
		return operations
	}
	if n--; n > 0 && operations[n-1] == "grace" {
		n--
	}
	last := n
	for n > 0 && strings.HasPrefix(operations[n-1], fake.Forget) {
		n--
	}
	if n < last && n > 0 && operations[n-1] == "grace" {
		n--
	}
	return operations[:n]
}

// failsToLook reports whether the operations, the last of which failed, belong to the look for strays alone.
func failsToLook(operations []string) bool {
	return !slices.ContainsFunc(operations, func(o string) bool { return o != "grace" && !strings.HasPrefix(o, fake.Forget) })
}

// apply applies a state and returns the operations, without a look for strays.
func (b *bench) apply(d reconcile.Desired) (reconcile.Difference, []string) {
	b.Helper()
	before := len(b.maps.Operations)
	difference, err := b.r.Apply(d)
	if err != nil {
		b.Fatal(err)
	}
	operations := withoutStrays(b.maps.Operations[before:])
	again := len(b.maps.Operations)
	second, err := b.r.Apply(d)
	if err != nil || !second.Empty() || len(b.maps.Operations) != again {
		b.Errorf("a second Apply: %v, %v, operations %q", second, err, b.maps.Operations[again:])
	}
	return difference, operations
}

func (b *bench) dump() string {
	contents, err := b.maps.Contents()
	if err != nil {
		b.Fatal(err)
	}
	return reconcile.Dump(contents)
}

func (b *bench) want(what, got, want string) {
	b.Helper()
	if diff := cmp.Diff(strings.TrimSpace(want), strings.TrimSpace(got)); diff != "" {
		b.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestFirstApply(t *testing.T) {
	b := newBench(t, roomy)
	d := desired(service("web", "192.0.2.10:80", "10.0.0.2:8080*2 10.0.0.3:8080"))
	d.NATSources = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	d.HostOwn = map[netip.Addr]bool{d.NATSources[0]: true}
	difference, operations := b.apply(d)
	b.want("difference", difference.String(), `
+ service web: 1 frontend, 2 backends, table of 251 slots
+ address 10.0.0.1: source, host-own
+ address 192.0.2.10: vip, announce`)
	b.want("operations", strings.Join(operations, "\n"), `
put address 10.0.0.1 vip false source true
put backend 1/1 10.0.0.2:8080
put backend 2/1 10.0.0.3:8080
write slots 0+251
put service 0/1 web slots 0+251
put frontend tcp 192.0.2.10:80 service 0
put address 192.0.2.10 vip true source false`)
	b.want("contents", b.dump(), `
backend 1 generation 1: 10.0.0.2:8080
backend 2 generation 1: 10.0.0.3:8080
service 0 generation 1: web, nat, seed 0x0fd9bc91, slots 0 to 250
  backend 1 generation 1: 168 slots
  backend 2 generation 1: 83 slots
  placement 0x37ef3a1ec871294b
frontend tcp 192.0.2.10:80: service 0
address 10.0.0.1: source, host-own
address 192.0.2.10: vip, announce`)
}

func TestRemovalOrder(t *testing.T) {
	b := newBench(t, roomy)
	web := service("web", "192.0.2.10:80", "10.0.0.2:8080 10.0.0.3:8080 10.0.0.4:8080")
	web.TableSize = 251
	b.apply(desired(web))
	web.Backends = web.Backends[:2]
	difference, operations := b.apply(desired(web))
	b.want("difference", difference.String(), "~ service web: backend 10.0.0.4:8080 removed, 86 of 251 slots moved")
	for _, operation := range operations[:len(operations)-2] {
		if !strings.HasPrefix(operation, "write slots ") || strings.HasSuffix(operation, "+251") {
			t.Errorf("want runs of slots only, got %q", operation)
		}
	}
	b.want("the end", strings.Join(operations[len(operations)-2:], "\n"), "grace\ndelete backend 3/1")

	web.Backends = append(web.Backends, backend("10.0.0.5:8080", 1))
	b.apply(desired(web))
	difference, operations = b.apply(desired())
	b.want("difference", difference.String(), `
- service web: 1 frontend, 3 backends
- address 192.0.2.10: vip, announce`)
	b.want("operations", strings.Join(operations, "\n"), `
delete address 192.0.2.10
delete frontend tcp 192.0.2.10:80
delete service 0/1
grace
delete backend 1/1
delete backend 2/1
delete backend 4/1`)
}

func TestReuse(t *testing.T) {
	b := newBench(t, model.Limits{Services: 1, Backends: 2, Slots: 251})
	small := func(name, backends string) reconcile.Desired {
		d := desired(service(name, "192.0.2.10:80", backends))
		d.Limits = model.Limits{Services: 1, Backends: 2, Slots: 251}
		return d
	}
	for round := range 600 {
		b.apply(small("web", fmt.Sprintf("10.0.%d.%d:80", round/250, round%250)))
	}
	contents, _ := b.maps.Contents()
	// Backends alternate between two positions: 600 backends are 300 at each, and
	// generation 256 is 1 again.
	for index, record := range contents.Backends {
		if record.Generation != 300-255 {
			t.Errorf("backend %d has generation %d, want %d", index, record.Generation, 300-255)
		}
	}
	b.apply(reconcile.Desired{})
	_, operations := b.apply(small("other", "10.0.0.2:80"))
	if !slices.Contains(operations, "put service 0/2 other slots 0+251") || !slices.Contains(operations, "grace") {
		t.Errorf("want the position and slots again after a grace, with generation 2: %q", operations)
	}
}

// direct returns the service with direct return.
func direct(s model.Service) model.Service {
	s.Forwarding, s.Tracking = model.ForwardingDSRIPIP, model.TrackingNone
	return s
}

func TestRenameTakesOverWithoutAGap(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(desired(service("old", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80")))
	difference, operations := b.apply(desired(service("new", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80")))
	b.want("difference", difference.String(), `
+ service new: 1 frontend, 2 backends, takes over the flows of service old, 110 of 251 slots moved
- service old: 1 frontend, 2 backends`)
	operations = slices.DeleteFunc(operations, func(o string) bool { return strings.HasPrefix(o, "write slots") })
	b.want("operations but for slots", strings.Join(operations, "\n"), `
put service 0/1 new slots 0+251`)
}

// TestRenamedTableIsThatOfTheNewName: a service with the position of one with another name has the same table as in a
// daemon that never knew the other name, although nothing but the name has changed.
func TestRenamedTableIsThatOfTheNewName(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(desired(service("old", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80")))
	after := desired(service("new", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
	b.apply(after)
	contents, _ := b.maps.Contents()
	if diff := cmp.Diff(wanted(after), found(contents)); diff != "" {
		t.Errorf("after the change of the name (-want +got):\n%s", diff)
	}
	b.restart()
	if _, operations := b.apply(after); slices.ContainsFunc(operations, func(o string) bool { return strings.HasPrefix(o, "write slots") }) {
		t.Errorf("a daemon that starts then moves slots: %q", operations)
	}
}

// TestDirectRenameTakesOverWithoutAGap: with direct return, all flows have other slots under another name.
func TestDirectRenameTakesOverWithoutAGap(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(desired(direct(service("old", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))))
	_, operations := b.apply(desired(direct(service("new", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))))
	b.want("operations", strings.Join(operations, "\n"), `
write slots 251+251
put service 1/1 new slots 251+251
put frontend tcp 192.0.2.10:80 service 1
delete service 0/1`)
}

// TestSplitKeepsFlows: a service is split into two with other names, and one of its backends goes to the one that does not
// take its place. Flows of that backend stay, until it leaves both.
func TestSplitKeepsFlows(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(desired(service("web", "192.0.2.10:80 192.0.2.10:81 192.0.2.10:82", "10.0.0.2:80 10.0.0.3:80"), service("other", "192.0.2.11:80", "10.0.0.3:80")))
	split := func(second string) reconcile.Desired {
		return desired(service("a", "192.0.2.10:80 192.0.2.10:81", "10.0.0.2:80"), service("b", "192.0.2.10:82", second), service("other", "192.0.2.11:80", "10.0.0.3:80"))
	}
	_, operations := b.apply(split("10.0.0.3:80"))
	if !slices.ContainsFunc(operations, func(o string) bool { return strings.HasPrefix(o, "put service 0/1 a ") }) || slices.Contains(operations, "delete service 0/1") {
		t.Errorf("the larger part does not take the place of the service: %q", operations)
	}
	contents, _ := b.maps.Contents()
	index := map[string]uint32{}
	for i, s := range contents.Services {
		index[s.Name] = i
	}
	if index["a"] != 0 || len(index) != 3 {
		t.Errorf("services %v", index)
	}
	b.apply(split("10.0.0.2:80"))
	b.apply(desired(service("b", "192.0.2.10:82", "10.0.0.2:80"), service("other", "192.0.2.11:80", "10.0.0.3:80")))
	b.apply(desired(service("c", "192.0.2.10:82", "10.0.0.2:80"), service("other", "192.0.2.11:80", "10.0.0.3:80")))
}

func TestARestartOwesAGrace(t *testing.T) {
	b := newBench(t, model.Limits{Services: 2, Backends: 9, Slots: 502})
	for _, name := range []string{"first", "second", "third"} {
		d := desired(direct(service(name, "192.0.2.10:80", "10.0.0.2:80"))) // no heir has its position
		d.Limits = model.Limits{Services: 2, Backends: 9, Slots: 502}
		_, operations := b.apply(d)
		// The third has the position of the first, which the second run gave up
		// without waiting.
		if slices.Contains(operations, "grace") != (name == "third") {
			t.Errorf("%s: operations %q", name, operations)
		}
		if name == "second" {
			b.r = reconcile.New(b.maps)
		}
	}
}

func TestResizeAndWeights(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80")))
	difference, operations := b.apply(desired(sized(509, service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80"))))
	if got := difference.String(); !strings.HasPrefix(got, "~ service web: backend 10.0.0.4:80 added, table resized from 251 to 509 slots, ") {
		t.Errorf("difference %q", got)
	}
	b.want("operations", strings.Join(operations, "\n"), `
put backend 3/1 10.0.0.4:80
write slots 251+509
put service 0/1 web slots 251+509`)
	difference, operations = b.apply(desired(sized(509, service("web", "192.0.2.10:80", "10.0.0.2:80*2 10.0.0.3:80*2 10.0.0.4:80*2"))))
	b.want("proportional weights", difference.String(),
		"~ service web: weight of 10.0.0.2:80 from 1 to 2, weight of 10.0.0.3:80 from 1 to 2, weight of 10.0.0.4:80 from 1 to 2")
	if len(operations) != 0 {
		t.Errorf("proportional weights took %q", operations)
	}
	difference, operations = b.apply(desired(service("web", "192.0.2.10:80", "10.0.0.2:80*0 10.0.0.3:80*0 10.0.0.4:80*0")))
	b.want("operations", strings.Join(operations, "\n"), `
put backend 1/1 10.0.0.2:80 draining
put backend 2/1 10.0.0.3:80 draining
put backend 3/1 10.0.0.4:80 draining
put service 0/1 web slots 0+0`)
	if got := difference.String(); !strings.HasSuffix(got, "no backend left for new flows") {
		t.Errorf("difference %q", got)
	}
}

func TestFamiliesHaveTheirOwnTables(t *testing.T) {
	b := newBench(t, roomy)
	d := desired(service("web", "192.0.2.10:80 [2001:db8::10]:80", "10.0.0.2:80 10.0.0.3:80 [2001:db8:1::2]:80"))
	difference, _ := b.apply(d)
	b.want("difference", difference.String(), `
+ service web: 2 frontends, 3 backends, IPv4: table of 251 slots, IPv6: table of 251 slots
+ address 192.0.2.10: vip, announce
+ address 2001:db8::10: vip, announce`)
	contents, _ := b.maps.Contents()
	for f, index := range contents.Frontends {
		for i, slot := range contents.Slots[index].All() {
			if got := contents.Backends[slot.Current.Index].Address; got.Is6() != f.Address.Is6() {
				t.Fatalf("slot %d of %s names %s", i, f, got)
			}
		}
	}
	// After adoption, the halves are still told apart.
	b.r = reconcile.New(b.maps)
	if difference, operations := b.apply(d); !difference.Empty() || len(operations) > 0 {
		t.Errorf("after adoption: %s\n%q", difference, operations)
	}
}

func TestAdoption(t *testing.T) {
	b := newBench(t, roomy)
	web := sized(509, service("web", "192.0.2.10:80", "10.0.0.2:80*2 10.0.0.3:80 10.0.0.9:80*0"))
	dns := service("dns", "192.0.2.10:53", "10.0.0.3:80")
	b.apply(desired(web, dns))
	before := b.dump()
	b.r = reconcile.New(b.maps)
	if difference, operations := b.apply(desired(web, dns)); !difference.Empty() || len(operations) > 0 {
		t.Errorf("the same configuration after a restart: %s\n%q", difference, operations)
	}
	b.want("contents", b.dump(), before)

	b.r = reconcile.New(b.maps)
	web.Backends = web.Backends[:1]
	difference, err := b.r.Plan(desired(sized(251, web)))
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(difference)
	if err != nil {
		t.Fatal(err)
	}
	b.want("plan", string(text), `{"services":[`+
		`{"name":"web","change":"changed","backends_removed":["10.0.0.3:80"],`+
		`"tables":[{"family":"ipv4","slots_before":509,"slots":251,"slots_moved":83}]},`+
		`{"name":"dns","change":"removed","frontends_removed":["tcp 192.0.2.10:53"],"backends_removed":["10.0.0.3:80"]}]}`)
	b.want("a plan changes nothing", b.dump(), before)
	b.apply(desired(web))
	if strings.Contains(b.dump(), "10.0.0.9") {
		t.Errorf("the backend without slots is still there:\n%s", b.dump())
	}
}

func TestAdoptionRefusesNonsense(t *testing.T) {
	record := func(index, offset uint32) reconcile.ServiceRecord {
		return reconcile.ServiceRecord{Index: index, Generation: 1, Name: fmt.Sprint(index), Offset: offset, Size: 2}
	}
	for name, contents := range map[string]reconcile.Contents{
		"shared slots": {
			Services: map[uint32]reconcile.ServiceRecord{0: record(0, 0), 1: record(1, 1)},
			Slots:    map[uint32]reconcile.Table{0: make(reconcile.Table, 2), 1: make(reconcile.Table, 2)},
		},
		"missing slots": {Services: map[uint32]reconcile.ServiceRecord{0: record(0, 0)}},
	} {
		if _, err := reconcile.New(contentsOnly{contents: contents}).Adopt(); err == nil {
			t.Errorf("%s: adopted", name)
		}
	}
}

type contentsOnly struct {
	reconcile.Maps
	contents reconcile.Contents
}

func (c contentsOnly) Contents() (reconcile.Contents, error) { return c.contents, nil }

func TestCapacityIsCheckedFirst(t *testing.T) {
	limits := model.Limits{Services: 2, Backends: 4, Slots: 800}
	for what, next := range map[string][]model.Service{
		"services": {service("a", "192.0.2.10:1", "10.0.0.2:80"), service("b", "192.0.2.10:2", "10.0.0.2:80"), service("c", "192.0.2.10:3", "10.0.0.2:80")},
		"backends": {service("web", "192.0.2.10:80", "10.0.0.4:80 10.0.0.5:80 10.0.0.6:80")},
		"slots":    {sized(509, service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80")), service("b", "192.0.2.10:2", "10.0.0.2:80")},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBench(t, limits)
			first := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
			first.Limits = limits
			b.apply(first)
			before := len(b.maps.Operations)
			second := desired(next...)
			second.Limits = limits
			_, err := b.r.Apply(second)
			var capacity *reconcile.CapacityError
			if !errors.As(err, &capacity) || capacity.What != what || capacity.Need <= capacity.Limit {
				t.Errorf("got %v", err)
			}
			t.Log(err)
			if len(b.maps.Operations) != before {
				t.Errorf("refused after %q", b.maps.Operations[before:])
			}
		})
	}
}

func TestContradictionsAreRefused(t *testing.T) {
	bad := service("web", "192.0.2.10:80", "10.0.0.2:80")
	bad.TableSize = 252
	for name, services := range map[string][]model.Service{
		"name twice":     {service("a", "192.0.2.10:1", "10.0.0.2:80"), service("a", "192.0.2.10:2", "10.0.0.2:80")},
		"frontend twice": {service("a", "192.0.2.10:1", "10.0.0.2:80"), service("b", "192.0.2.10:1", "10.0.0.2:80")},
		"backend twice":  {service("a", "192.0.2.10:1", "10.0.0.2:80 10.0.0.2:80*2")},
		"size":           {bad},
	} {
		b := newBench(t, roomy)
		if _, err := b.r.Apply(desired(services...)); err == nil || len(b.maps.Operations) > 0 {
			t.Errorf("%s: %v, operations %q", name, err, b.maps.Operations)
		}
	}
}

func TestRangesThatShareParts(t *testing.T) {
	b := newBench(t, roomy)
	ranged := func(last uint16) reconcile.Desired {
		s := service("web", "192.0.2.10:80", "10.0.0.2:80")
		s.Frontends[0].Ports = value.PortRange{First: 8000, Last: last}
		return desired(s)
	}
	b.apply(ranged(8099))
	_, operations := b.apply(ranged(8199))
	b.want("operations", strings.Join(operations, "\n"), `
delete frontend tcp 192.0.2.10:8000-8099
put frontend tcp 192.0.2.10:8000-8199 service 0`)
}

func TestAddressRoles(t *testing.T) {
	b := newBench(t, roomy)
	address := netip.MustParseAddr("192.0.2.10")
	both := desired(service("web", "192.0.2.10:80", "10.0.0.2:80"))
	both.NATSources = []netip.Addr{address}
	_, operations := b.apply(both)
	if first, last := operations[0], operations[len(operations)-1]; first != "put address 192.0.2.10 vip false source true" ||
		last != "put address 192.0.2.10 vip true source true" {
		t.Errorf("source first and VIP last: %q", operations)
	}
	only := desired(service("web", "192.0.2.10:80", "10.0.0.2:80"))
	_, operations = b.apply(only)
	b.want("no source any more", strings.Join(operations, "\n"), "put address 192.0.2.10 vip true source false")
	only.HostOwn = map[netip.Addr]bool{netip.MustParseAddr("192.0.2.10"): true}
	difference, _ := b.apply(only)
	b.want("the host has it", difference.String(), "~ address 192.0.2.10: vip, announce -> vip, host-own")
}

// TestBackendChanges: changes of backends are known without reading the maps, even if a removal or a put
// failed, and each is reported once.
func TestBackendChanges(t *testing.T) {
	b := newBench(t, roomy)
	told := func(put, gone string) {
		t.Helper()
		words := func(records []reconcile.BackendRecord) string {
			var all []string
			for _, r := range records {
				text := fmt.Sprintf("%d/%d %s", r.Index, r.Generation, r.BackendAddress)
				if r.Draining {
					text += " drains"
				}
				all = append(all, text)
			}
			return strings.Join(all, ", ")
		}
		if isPut, isGone := b.r.BackendChanges(); words(isPut) != put || words(isGone) != gone {
			t.Errorf("put %q, gone %q; want %q, %q", words(isPut), words(isGone), put, gone)
		}
	}
	told("", "")
	first := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
	b.apply(first)
	told("1/1 10.0.0.2:80, 2/1 10.0.0.3:80", "")
	told("", "")
	b.apply(weighed(first, 0, 0, 1))
	told("1/1 10.0.0.2:80 drains", "")
	b.apply(weighed(first, 0, 5, 7))
	told("1/1 10.0.0.2:80", "")
	b.apply(first)
	told("", "")
	b.maps.Fault = failing("delete backend", fake.Before)
	other := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.4:80"))
	if _, err := b.r.Apply(other); !errors.Is(err, fake.ErrInjected) {
		t.Fatal(err)
	}
	told("3/1 10.0.0.4:80", "")
	b.maps.Fault = nil
	b.apply(other)
	told("", "2/1 10.0.0.3:80")
	// A backend is gone and there again, and in between another one has its position.
	one := desired(service("web", "192.0.2.10:80", "10.0.0.2:80"))
	one.Limits.Backends = 3
	b.apply(one)
	other.Limits.Backends = 3
	other.Services = append(other.Services, model.Shared([]model.Service{service("mail", "192.0.2.11:80", "10.0.0.5:80")})...)
	b.apply(other)
	told("2/2 10.0.0.4:80, 3/2 10.0.0.5:80", "3/1 10.0.0.4:80")
	again := reconcile.New(b.maps)
	if _, err := again.Adopt(); err != nil {
		t.Fatal(err)
	}
	b.r = again
	told("1/1 10.0.0.2:80, 2/2 10.0.0.4:80, 3/2 10.0.0.5:80", "")
}

func TestSlotsOfASettledTableWaitForAGrace(t *testing.T) {
	b := newBench(t, roomy)
	two := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
	three := desired(sized(509, service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80")))
	b.apply(two)
	b.maps.Fault = failing("put service", fake.Before)
	if _, err := b.r.Apply(three); !errors.Is(err, fake.ErrInjected) {
		t.Fatal(err)
	}
	b.maps.Fault = nil
	_, operations := b.apply(two)
	b.want("operations", strings.Join(operations, "\n"), `
put service 0/1 web slots 251+509
grace
write slots 0+251
put service 0/1 web slots 0+251
grace
delete backend 3/1`)
}

// A deletion that is reported as failed may have happened: the service's slots wait, like a deleted
// service's, before they are written again.
func TestSlotsOfAServiceThatComesBackWaitForAGrace(t *testing.T) {
	b := newBench(t, roomy)
	two := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
	b.apply(two)
	b.maps.Fault = failing("delete service", fake.After)
	if _, err := b.r.Apply(desired()); !errors.Is(err, fake.ErrInjected) {
		t.Fatal(err)
	}
	b.maps.Fault = nil
	_, operations := b.apply(weighed(two, 0, 0, 1))
	if n := len(operations); n < 3 || !slices.Equal(operations[:3], []string{"grace", "put service 0/1 web slots 0+251", "put backend 1/1 10.0.0.2:80 draining"}) {
		t.Errorf("want a grace, and then the service again, got\n%s", strings.Join(operations, "\n"))
	}
}

func TestASmallLimitDoesNotTrapLeftovers(t *testing.T) {
	limits := model.Limits{Services: 1, Backends: 4, Slots: 800}
	b := newBench(t, limits)
	with := func(size uint32, backends string) reconcile.Desired {
		d := desired(service("web", "192.0.2.10:80", backends))
		d.Services[0].TableSize, d.Limits = size, limits
		return d
	}
	b.apply(with(251, "10.0.0.1:80 10.0.0.2:80"))
	for _, prefix := range []string{"write slots", "put service", "grace", "put backend"} {
		b.maps.Fault = failing(prefix, fake.After)
		// Neither pair has a backend in common with the present or half-written ones.
		for _, pair := range []string{"10.0.0.3:80 10.0.0.4:80", "10.0.0.5:80 10.0.0.6:80"} {
			if _, err := b.r.Apply(with(509, pair)); !errors.Is(err, fake.ErrInjected) {
				t.Errorf("failing %q: %v", prefix, err)
			}
		}
		b.maps.Fault = nil
		b.apply(with(251, "10.0.0.7:80 10.0.0.8:80"))
		b.apply(with(251, "10.0.0.1:80 10.0.0.2:80"))
	}
}

// TestTheLastFrontendOfAVIPGoesLast: between a VIP's last frontend and its next, clients must not
// find an address that answers for nothing.
func TestTheLastFrontendOfAVIPGoesLast(t *testing.T) {
	b := newBench(t, roomy)
	old, fresh := service("old", "192.0.2.10:80", "10.0.0.2:80"), service("new", "192.0.2.10:80", "10.0.0.3:80")
	fresh.Frontends[0].Protocol = model.UDP
	b.apply(desired(old))
	b.apply(desired(fresh))
}

// A service that begins to remember flows may remember some with a backend that leaves it in the
// same change, while slots still name the backend.
func TestStraysOfAServiceThatBeginsToRemember(t *testing.T) {
	b := newBench(t, roomy)
	state := func(tracking model.Tracking, backends string) reconcile.Desired {
		d := desired(service("web", "192.0.2.10:80", backends), service("other", "192.0.2.11:80", "10.0.0.2:80"))
		d.Services[0].Forwarding, d.Services[0].Tracking = model.ForwardingDSRIPIP, tracking
		return d
	}
	b.apply(state(model.TrackingNone, "10.0.0.2:80 10.0.0.3:80"))
	for _, c := range []struct {
		what     string
		tracking model.Tracking
		backends string
		ends     bool
	}{
		{"nothing is remembered", model.TrackingNone, "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80", false},
		{"a backend leaves, and nothing is remembered", model.TrackingNone, "10.0.0.2:80 10.0.0.3:80", false},
		{"flows are remembered from now on, and a backend leaves", model.TrackingAlways, "10.0.0.3:80", true},
		{"a backend joins", model.TrackingAlways, "10.0.0.2:80 10.0.0.3:80", false},
		{"flows are remembered no more", model.TrackingNone, "10.0.0.2:80 10.0.0.3:80", true},
		{"flows are remembered again", model.TrackingAlways, "10.0.0.2:80 10.0.0.3:80", false},
	} {
		before := len(b.maps.Operations)
		b.apply(state(c.tracking, c.backends))
		if ends := slices.Contains(b.maps.Operations[before:], fake.EndStrays); ends != c.ends {
			t.Errorf("%s: a look for strays %v, want %v", c.what, ends, c.ends)
		}
	}
}

// While a resized table settles, flows without an entry are found by the table before. A backend that has
// left the service, and is another's still, must not be found there.
func TestTableBeforeForgetsWhoLeaves(t *testing.T) {
	b := newBench(t, roomy)
	state := func(size uint32, backends string) reconcile.Desired {
		d := desired(service("web", "192.0.2.10:80", backends), service("other", "192.0.2.11:80", "10.0.0.2:80"))
		d.Services[0].Forwarding, d.Services[0].Tracking, d.Services[0].TableSize = model.ForwardingDSRIPIP, model.TrackingAuto, size
		d.Settle = settleTime
		return d
	}
	leading := func() (all []string) {
		contents, err := b.maps.Contents()
		if err != nil {
			t.Fatal(err)
		}
		for _, before := range contents.BeforeSlots {
			for _, slot := range before.All() {
				if backend, ok := contents.Backends[slot.Current.Index]; ok && slot.State != reconcile.Transition {
					all = append(all, backend.BackendAddress.String())
				}
			}
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	b.apply(state(251, "10.0.0.2:80 10.0.0.3:80"))
	b.apply(state(509, "10.0.0.2:80 10.0.0.3:80"))
	if got := leading(); !slices.Equal(got, []string{"10.0.0.2:80", "10.0.0.3:80"}) {
		t.Fatalf("the table before leads to %v", got)
	}
	for _, how := range []fake.Fault{fake.Before, fake.Half, fake.After} { // of the last write
		b.maps.Fault = failing(fake.Forget, how)
		if _, err := b.r.Apply(state(509, "10.0.0.3:80")); !errors.Is(err, fake.ErrInjected) || !strings.Contains(err.Error(), "table before") {
			t.Errorf("writing fails: %v", err)
		}
	}
	b.maps.Fault = nil
	b.apply(state(509, "10.0.0.3:80"))
	if got := leading(); !slices.Equal(got, []string{"10.0.0.3:80"}) {
		t.Errorf("after 10.0.0.2 has left, the table before leads to %v", got)
	}
	// In one step, and adopted by another process.
	b.apply(state(251, "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80"))
	b.apply(state(1021, "10.0.0.3:80 10.0.0.4:80"))
	if got := leading(); slices.Contains(got, "10.0.0.2:80") {
		t.Errorf("after a resize without 10.0.0.2 the table before leads to %v", got)
	}
}
