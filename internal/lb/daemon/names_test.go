package daemon

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// dns is a follower that knows some addresses, and never any others.
type dns struct {
	knows    map[string]string // by name, the IPv4 address
	followed []string
	waited   time.Duration
	saved    int
}

func (d *dns) Follow(questions []resolve.Question) {
	d.followed = nil
	for _, q := range questions {
		d.followed = append(d.followed, q.String())
	}
	slices.Sort(d.followed)
	d.followed = slices.Compact(d.followed)
}

func (d *dns) Await(ctx context.Context, questions []resolve.Question) {
	begin := time.Now()
	for _, q := range questions {
		if d.knows[q.Name] == "" {
			<-ctx.Done()
		}
	}
	d.waited = time.Since(begin)
}

func (d *dns) Answer(q resolve.Question) (a resolve.Answer) {
	if known := d.knows[q.Name]; known != "" {
		a.Addresses = []netip.Addr{netip.MustParseAddr(known)}
	}
	return a
}

func (d *dns) Changed() <-chan struct{} { return nil }
func (d *dns) Save()                    { d.saved++ }
func (d *dns) Close()                   {}

// named is a service with one backend for each name.
func named(name, vip string, backends ...string) model.Service {
	s := model.Service{Name: name, Frontends: []model.Frontend{{Address: netip.MustParseAddr(vip), Protocol: model.TCP}}}
	for _, b := range backends {
		s.Names = append(s.Names, model.BackendName{DNS: b, Port: 80, Weight: 1, Max: 16})
	}
	return s
}

func backendsOf(s model.Service) (all []string) {
	for _, b := range s.Backends {
		all = append(all, b.String())
	}
	return all
}

type namesBench struct {
	*testing.T
	dns        *dns
	conditions *condition.Set
	names      *names
}

func newNamesBench(t *testing.T, vips ...string) namesBench {
	b := namesBench{T: t, dns: &dns{knows: map[string]string{"a.test": "10.0.0.1", "b.test": "10.0.0.2", "vip.test": "192.0.2.9"}}, conditions: &condition.Set{}}
	b.names = newNames(b.dns, b.conditions, func(string) map[netip.Addr]bool {
		all := map[netip.Addr]bool{}
		for _, v := range vips {
			all[netip.MustParseAddr(v)] = true
		}
		return all
	})
	return b
}

// declare makes a declaration the source's own, as a change does.
func (b namesBench) declare(d state.Declaration) state.Declaration {
	b.Helper()
	with, keep := b.names.expanded(b.Context(), []state.Declaration{d})
	keep()
	return with[0]
}

func (b namesBench) follows(when string, want ...string) {
	b.Helper()
	if !slices.Equal(b.dns.followed, want) {
		b.Errorf("%s: the names that are followed are %v, want %v", when, b.dns.followed, want)
	}
}

// TestNamesBecomeBackends: a declaration gets the addresses of its names, and the source's own copy stays without them.
func TestNamesBecomeBackends(t *testing.T) {
	b := newNamesBench(t)
	declared := state.Declaration{Source: "file", Services: []model.Service{named("web", "192.0.2.1", "a.test", "b.test"), named("plain", "192.0.2.2")}}
	with := b.declare(declared)
	if got := backendsOf(with.Services[0]); !slices.Equal(got, []string{"10.0.0.1:80", "10.0.0.2:80"}) {
		t.Errorf("web has the backends %v", got)
	}
	if got := backendsOf(with.Services[1]); len(got) != 0 {
		t.Errorf("a service without names has the backends %v", got)
	}
	if len(declared.Services[0].Backends) != 0 {
		t.Error("the source's own declaration has changed")
	}
	b.follows("after the declaration", "a.test (A)", "b.test (A)")
	if b.dns.saved != 1 {
		t.Errorf("the addresses were saved %d times", b.dns.saved)
	}
	// Later answers are applied to the declaration without addresses, and to services with names alone.
	again := b.names.declaration("file")
	if len(again.Services) != 1 || !again.Part || len(again.Services[0].Backends) != 0 {
		t.Errorf("for new answers the declaration is %+v", again)
	}
}

// TestRefusedNamesAreForgotten: after a change that was refused, the names of the change before are followed again.
func TestRefusedNamesAreForgotten(t *testing.T) {
	b := newNamesBench(t)
	b.declare(state.Declaration{Source: "file", Services: []model.Service{named("web", "192.0.2.1", "a.test")}})
	b.names.expanded(t.Context(), []state.Declaration{{Source: "file", Services: []model.Service{named("web", "192.0.2.1", "b.test")}}})
	b.follows("while the change is under way", "a.test (A)", "b.test (A)")
	b.names.forget() // without keep
	b.follows("after the refusal", "a.test (A)")
}

// TestPartOfNames: a part changes the services that it names, a whole declaration all services of its source, and
// neither changes services of other sources.
func TestPartOfNames(t *testing.T) {
	b := newNamesBench(t)
	b.declare(state.Declaration{Source: "file", Services: []model.Service{named("web", "192.0.2.1", "a.test")}})
	b.declare(state.Declaration{Source: "other", Services: []model.Service{named("one", "192.0.2.2", "b.test"), named("two", "192.0.2.3", "c.test")}})
	b.declare(state.Declaration{Source: "other", Part: true, Withdrawn: []string{"one"}, Services: []model.Service{named("three", "192.0.2.4", "d.test")}})
	if got := slices.Sorted(maps.Keys(b.names.declared["other"])); !slices.Equal(got, []string{"three", "two"}) {
		t.Errorf("the services with names are %v", got)
	}
	b.follows("after a part", "a.test (A)", "c.test (A)", "d.test (A)")
	b.declare(state.Declaration{Source: "other", Part: true, Services: []model.Service{named("three", "192.0.2.4")}})
	b.follows("after a service has lost its names", "a.test (A)", "c.test (A)")
	b.declare(state.Declaration{Source: "other"})
	b.follows("after all is withdrawn", "a.test (A)")
	if _, known := b.names.declared["other"]; known {
		t.Error("a source without names is known still")
	}
}

// TestNamesThatCannotBeUsed: an address that is a VIP becomes no backend, but a condition, which ends with its cause.
func TestNamesThatCannotBeUsed(t *testing.T) {
	b := newNamesBench(t, "192.0.2.9")
	tells := func(when string, want bool) {
		t.Helper()
		told := false
		for _, c := range b.conditions.All() {
			told = told || c.Code == condition.NameUnusable && strings.Contains(c.Subject, "vip.test")
		}
		if told != want {
			t.Errorf("%s: the condition is there: %v, want %v", when, told, want)
		}
	}
	with := b.declare(state.Declaration{Source: "other", Part: true, Services: []model.Service{named("web", "192.0.2.1", "a.test", "vip.test")}})
	if got := backendsOf(with.Services[0]); !slices.Equal(got, []string{"10.0.0.1:80"}) {
		t.Errorf("the backends are %v", got)
	}
	tells("with a VIP as an address", true)
	b.declare(state.Declaration{Source: "file", Services: []model.Service{named("mail", "192.0.2.2", "b.test")}})
	tells("after another source's change", true)
	b.declare(state.Declaration{Source: "other", Part: true, Services: []model.Service{named("web", "192.0.2.1", "a.test")}})
	tells("without the name", false)
}

// TestChangeWaitsForNamesOnlySoLong: addresses that are unknown after the wait come later.
func TestChangeWaitsForNamesOnlySoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newNamesBench(t)
		with := b.declare(state.Declaration{Source: "file", Services: []model.Service{named("web", "192.0.2.1", "a.test", "slow.test")}})
		if b.dns.waited != namesAwait {
			t.Errorf("the change waited %v, want %v", b.dns.waited, namesAwait)
		}
		if got := backendsOf(with.Services[0]); !slices.Equal(got, []string{"10.0.0.1:80"}) {
			t.Errorf("the backends are %v", got)
		}
	})
}
