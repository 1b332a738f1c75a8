package reconcile_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/value"
)

// settling is a desired state with a settle time.
func settling(services ...model.Service) reconcile.Desired {
	d := desired(services...)
	d.Settle = settleTime
	return d
}

// translated are flows of NAT, each with its backend.
type translated map[fake.Flow]reconcile.BackendRef

// dial begins flows at a frontend.
func (b *bench) dial(at string, count int) translated {
	flows := translated{}
	for i := range count {
		f := fake.Flow{Frontend: frontend(at), Hash: uint32(i) * 0x9e3779b9}
		if flows[f] = b.maps.Translate(f); flows[f] == (reconcile.BackendRef{}) {
			b.Fatalf("flow %v goes nowhere:\n%s", f, b.dump())
		}
	}
	return flows
}

// stay requires that the flows still have their backends.
func (b *bench) stay(what string, flows translated) {
	b.Helper()
	for f, to := range flows {
		service, ok := b.maps.Translated(f)
		if got := b.maps.Translate(f); !ok || got != to {
			b.Fatalf("%s: flow %v of service %+v moves from %v to %v:\n%s", what, f, service, to, got, b.dump())
		}
	}
}

// remnants returns the services that are remnants, each with its receiver.
func (b *bench) remnants() (all []string) {
	contents, _ := b.maps.Contents()
	for _, s := range contents.Services {
		for _, receiver := range contents.Services {
			if s.Remnant() && receiver.Seed == ^s.Seed && !receiver.Remnant() {
				all = append(all, s.Name+" of "+receiver.Name)
			}
		}
	}
	slices.Sort(all)
	return all
}

func (b *bench) wantRemnants(what string, want ...string) {
	b.Helper()
	if got := b.remnants(); !slices.Equal(got, want) {
		b.Errorf("%s: remnants %q, want %q\n%s", what, got, want, b.dump())
	}
}

var (
	web    = service("web", "192.0.2.10:80", threeAlike)
	shop   = service("shop", "192.0.2.10:81", threeAlike)
	merged = service("web", "192.0.2.10:80 192.0.2.10:81", threeAlike)
)

func TestMergeKeepsFlows(t *testing.T) {
	of := func(f model.Forwarding, s model.Service) model.Service {
		s.Forwarding = f
		return s
	}
	ranged := service("web", "192.0.2.10:80", threeAlike)
	ranged.Frontends[0].Ports = value.PortRange{First: 80, Last: 90}
	for _, c := range []struct {
		what          string
		before, after []model.Service
		receiver      string
	}{
		{"into another one", []model.Service{web, shop}, []model.Service{merged}, "web"},
		{"into a new one", []model.Service{web, shop, service("big", "192.0.2.10:82", threeAlike)}, []model.Service{service("new", "192.0.2.10:80 192.0.2.10:81 192.0.2.10:82", threeAlike)}, "new"},
		{"into a range of ports", []model.Service{web, shop}, []model.Service{ranged}, "web"},
		{"nat-destination", []model.Service{of(model.ForwardingNATDestination, web), of(model.ForwardingNATDestination, shop)}, []model.Service{of(model.ForwardingNATDestination, merged)}, "web"},
	} {
		t.Run(c.what, func(t *testing.T) {
			b := newBench(t, roomy)
			b.apply(settling(c.before...))
			flows, first := b.dial("192.0.2.10:81", 50), b.dial("192.0.2.10:80", 50)
			difference, _ := b.apply(settling(c.after...))
			b.stay("after the merge", flows)
			b.stay("after the merge", first)
			if !strings.Contains(difference.String(), "takes over the flows of service shop") {
				t.Errorf("the difference does not say who goes on with the flows:\n%s", difference)
			}
			fresh := fake.Flow{Frontend: frontend("192.0.2.10:81"), Hash: 0xdeadbeef}
			if c.what == "into a range of ports" {
				fresh.Frontend = ranged.Frontends[0]
			}
			b.maps.Translate(fresh)
			if s, ok := b.maps.Translated(fresh); !ok || s.Name != c.receiver || s.Remnant() {
				t.Errorf("a new flow is service %q's", s.Name)
			}
			b.apply(settling(c.after...))
			b.restart()
			b.apply(settling(c.after...))
			b.stay("after a restart", flows)
			b.restart()
			if _, err := b.r.Settle(); err != nil {
				t.Fatal(err)
			}
			b.stay("without a file", flows)
		})
	}
}

func affine(s model.Service) model.Service {
	s.AffinityTimeout = time.Hour
	return s
}

// TestMergeWithAffinity: a merge leaves no remnant with affinity on either side, and a remnant goes when its receiver
// gets affinity.
func TestMergeWithAffinity(t *testing.T) {
	site := service("site", "192.0.2.10:81", threeAlike)
	for what, c := range map[string]struct{ before, after []model.Service }{
		"from one with affinity":      {[]model.Service{web, affine(shop)}, []model.Service{merged}},
		"into one with affinity":      {[]model.Service{affine(web), shop}, []model.Service{affine(merged)}},
		"affinity under another name": {[]model.Service{web, affine(shop)}, []model.Service{web, affine(site)}},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBench(t, roomy)
			b.apply(settling(c.before...))
			difference, _ := b.apply(settling(c.after...))
			b.wantRemnants("merged")
			if strings.Contains(difference.String(), "takes over") {
				t.Errorf("difference:\n%s", difference)
			}
		})
	}
	b := newBench(t, roomy)
	b.apply(settling(web, shop))
	b.apply(settling(merged))
	b.wantRemnants("without affinity", "shop of web")
	difference, _ := b.apply(settling(affine(merged)))
	b.wantRemnants("with affinity by now")
	if !slices.Equal(difference.Ended, []string{"shop"}) {
		t.Errorf("ended: %q", difference.Ended)
	}
}

// TestComesAgainWithAffinity: a service that comes again has another position than its remnant, because the remembered
// backends of clients there are too old.
func TestComesAgainWithAffinity(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(settling(web, shop))
	flows := b.dial("192.0.2.10:81", 50)
	b.apply(settling(merged))
	b.apply(settling(web, affine(shop)))
	b.wantRemnants("shop has come again", "shop of web")
	b.stay("shop has come again", flows)
	if s, ok := b.maps.Service(frontend("192.0.2.10:81")); !ok || s.Name != "shop" || s.Remnant() || s.Index == 1 {
		t.Errorf("its frontend is that of %+v", s)
	}
	b.restart()
	b.apply(settling(web, affine(shop)))
	b.stay("after a restart", flows)
}

// TestComesAgainInDoubt: a merge fails when it puts its remnant. Then the service comes again, while the intended receiver
// cannot receive any more. So the service receives for its own remnant.
func TestComesAgainInDoubt(t *testing.T) {
	for _, kind := range []fake.Fault{fake.Before, fake.After} {
		b := newBench(t, roomy)
		b.apply(settling(web, shop))
		flows := b.dial("192.0.2.10:81", 50)
		b.maps.Fault = failing("put service 1/1 shop", kind)
		if _, err := b.r.Apply(settling(merged)); err == nil {
			t.Fatal("no error")
		}
		b.maps.Fault = nil
		difference, _ := b.apply(settling(affine(web), shop))
		b.stay("come again", flows)
		b.wantRemnants("come again", "shop of shop")
		if len(difference.Ended) > 0 {
			t.Errorf("ended: %q", difference.Ended)
		}
		b.restart()
		b.apply(settling(affine(web), shop))
		b.stay("after a restart", flows)
	}
}

// TestNoHeirByAFrontendInDoubt: a service that wants a frontend which could not be put before does not become an heir by
// it. Clients of the other frontends, which go, would meet the heir's lists of sources.
func TestNoHeirByAFrontendInDoubt(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(settling(web))
	b.maps.Fault = failing("put frontend tcp 192.0.2.10:81", fake.Before)
	if _, err := b.r.Apply(settling(merged)); err == nil {
		t.Fatal("no error")
	}
	b.maps.Fault = nil
	_, operations := b.apply(settling(shop))
	if slices.ContainsFunc(operations, func(o string) bool { return strings.HasPrefix(o, "put service 0/1 shop") }) {
		t.Errorf("the service has the position of one whose frontends it does not take over: %q", operations)
	}
}

// TestMergeOfDirectReturn: a merge leaves no remnant, because slots alone decide about its flows.
func TestMergeOfDirectReturn(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(settling(direct(web), direct(shop)))
	difference, _ := b.apply(settling(direct(merged)))
	b.wantRemnants("direct return")
	if strings.Contains(difference.String(), "takes over") {
		t.Errorf("difference %q", difference)
	}
	b.apply(settling(direct(web), shop))
	b.apply(settling(direct(merged)))
	b.wantRemnants("into direct return")
}

func TestRemnantGoesWithItsFlows(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(settling(web, shop))
	flows := b.dial("192.0.2.10:81", 3)
	b.apply(settling(merged))
	b.wantRemnants("merged", "shop of web")
	for range 5 {
		left, _ := b.pass(settleTime)
		if left.Next.IsZero() || !left.Next.After(b.now) || left.Next.After(b.now.Add(settleTime)) {
			t.Fatalf("at %v the next look is at %v", b.now, left.Next)
		}
		b.stay("later", flows)
	}
	for f := range flows {
		b.maps.EndTranslated(f)
	}
	b.maps.Fault = failing("delete service", fake.After)
	b.now = b.now.Add(settleTime)
	if _, err := b.r.Settle(); err == nil {
		t.Fatal("no error")
	}
	b.maps.Fault = nil
	b.pass(settleTime)
	b.wantRemnants("when its flows have ended")
	if left, _ := b.settle(); left != (reconcile.Settling{}) {
		t.Errorf("left %+v", left)
	}

	// A young one stays: unanswered flows are not counted.
	b.apply(settling(web, shop))
	b.apply(settling(merged))
	b.pass(settleTime / 2)
	b.wantRemnants("young", "shop of web")
	b.pass(settleTime)
	b.wantRemnants("old")
}

func TestMergeIsUndone(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(settling(web, shop))
	flows := b.dial("192.0.2.10:81", 50)
	for i := range 100 {
		if i%3 == 2 {
			b.restart()
		}
		b.apply(settling(merged))
		b.wantRemnants("merged", "shop of web")
		b.stay("merged", flows)
		young := b.dial("192.0.2.10:81", 60)
		b.apply(settling(web, shop))
		b.wantRemnants("undone")
		b.stay("undone", flows)
		b.stay("begun in between", young)
	}
	contents, _ := b.maps.Contents()
	if len(contents.Services) != 2 {
		t.Errorf("%d services", len(contents.Services))
	}
}

// TestMergeOfMerges merges, renames and removes receivers.
func TestMergeOfMerges(t *testing.T) {
	b := newBench(t, roomy)
	other := service("other", "192.0.2.11:80", threeAlike)
	b.apply(settling(web, shop, other))
	flows := b.dial("192.0.2.10:81", 50)
	b.apply(settling(merged, other))
	b.apply(settling(service("site", "192.0.2.10:80 192.0.2.10:81", threeAlike), other))
	b.stay("the receiver has another name", flows)
	b.wantRemnants("the receiver has another name", "shop of site")
	all := service("other", "192.0.2.11:80 192.0.2.10:80 192.0.2.10:81", threeAlike)
	b.apply(settling(all))
	b.stay("the receiver is merged", flows)
	b.wantRemnants("the receiver is merged", "shop of other", "site of other")
	b.restart()
	b.apply(settling(all))
	b.stay("after a restart", flows)
	difference, _ := b.apply(settling(service("last", "192.0.2.12:80", threeAlike)))
	b.wantRemnants("the receiver is removed")
	if !slices.Equal(difference.Ended, []string{"shop", "site"}) {
		t.Errorf("ended: %q", difference.Ended)
	}
}

// TestMergeLosesABackend: flows with a backend that the receiver lacks end, whether another service has it or not.
func TestMergeLosesABackend(t *testing.T) {
	for _, later := range []bool{false, true} {
		b := newBench(t, roomy)
		other := service("other", "192.0.2.11:80", threeAlike)
		b.apply(settling(web, shop, other))
		flows := b.dial("192.0.2.10:81", 60)
		if later {
			b.apply(settling(merged, other))
			b.stay("merged", flows)
		}
		b.apply(settling(service("web", "192.0.2.10:80 192.0.2.10:81", "10.0.0.2:80 10.0.0.3:80"), other))
		kept := translated{}
		for f, to := range flows {
			if b.maps.Backend(to.Index).Address.String() != "10.0.0.4" {
				kept[f] = to
			} else if _, ok := b.maps.Translated(f); ok {
				t.Errorf("later %v: a flow with the backend that has left goes on", later)
			}
		}
		b.stay("with the others", kept)
	}
}

func TestRemnantsGiveTheirPositions(t *testing.T) {
	small := model.Limits{Services: 3, Backends: 9, Slots: 2100, Filters: 100}
	b := newBench(t, small)
	apply := func(services ...model.Service) reconcile.Difference {
		t.Helper()
		d := settling(services...)
		d.Limits = small
		difference, _ := b.apply(d)
		return difference
	}
	apply(web, shop, service("more", "192.0.2.10:82", threeAlike))
	old := b.dial("192.0.2.10:81", 50)
	apply(merged, service("more", "192.0.2.10:82", threeAlike))
	b.now = b.now.Add(time.Second)
	young := b.dial("192.0.2.10:82", 50)
	all := service("web", "192.0.2.10:80 192.0.2.10:81 192.0.2.10:82", threeAlike)
	apply(all)
	b.stay("with room", old)
	b.stay("with room", young)
	first := service("first", "192.0.2.20:80", threeAlike)
	if difference := apply(all, first); !slices.Equal(difference.Ended, []string{"shop"}) {
		t.Errorf("ended: %q", difference.Ended)
	}
	b.stay("with room for one", young)
	if difference := apply(all, first, service("second", "192.0.2.21:80", threeAlike)); !slices.Equal(difference.Ended, []string{"more"}) {
		t.Errorf("ended: %q", difference.Ended)
	}
	b.wantRemnants("without room")
}

// TestMergeThatFails: a merge that stops at any operation keeps the flows, if it is tried again.
func TestMergeThatFails(t *testing.T) {
	for _, kind := range []fake.Fault{fake.Before, fake.After, fake.Half} {
		for at := 0; ; at++ {
			b := newBench(t, roomy)
			b.apply(settling(web, shop))
			flows := b.dial("192.0.2.10:81", 50)
			countdown := at
			b.maps.Fault = func(string) fake.Fault {
				if countdown--; countdown == -1 {
					return kind
				}
				return fake.None
			}
			_, err := b.r.Apply(settling(merged))
			b.maps.Fault = nil
			b.apply(settling(merged))
			b.stay("after a failure", flows)
			b.wantRemnants("after a failure", "shop of web")
			if err == nil {
				break
			}
		}
	}
}

// TestRenameThatFails: a service gets another name, and its record cannot be put, or may have been. Its flows belong to
// the new name all the same: they go on if the rename is undone or tried again, or if the service gives its frontend
// back and still translates.
func TestRenameThatFails(t *testing.T) {
	site := service("site", "192.0.2.10:80", threeAlike)
	rest := service("site", "192.0.2.10:81", "10.0.0.9")
	for _, kind := range []fake.Fault{fake.Before, fake.After} {
		for _, c := range []struct {
			what  string
			then  []model.Service
			stays bool
		}{
			{"undone", []model.Service{web}, true},
			{"tried again", []model.Service{site}, true},
			{"given back", []model.Service{web, rest}, true},
			{"given back by direct return", []model.Service{web, direct(rest)}, false},
		} {
			b := newBench(t, roomy)
			b.apply(settling(web))
			flows := b.dial("192.0.2.10:80", 50)
			b.maps.Fault = failing("put service 0/1 site", kind)
			if _, err := b.r.Apply(settling(site)); err == nil {
				t.Fatal("no error")
			}
			b.maps.Fault = nil
			b.apply(settling(c.then...))
			if c.stays {
				b.stay(c.what, flows)
				continue
			}
			for f := range flows {
				if s, ok := b.maps.Translated(f); ok {
					t.Fatalf("%s: flow %v of service %+v goes on:\n%s", c.what, f, s, b.dump())
				}
			}
		}
	}
}
