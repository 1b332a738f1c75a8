package reconcile_test

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
)

// Flows of NAT in a history. Each stays with its backend as long as a service of any name that translates in the same
// way has its frontend and its backend.

const nattedCount = 30

type nattedFlow struct {
	fake.Flow
	to reconcile.BackendRef
}

// drawMerge returns the last attempt with one service merged into another one that forwards alike, if there are two.
func (w *world) drawMerge() reconcile.Desired {
	d := w.attempt
	for i, into := range d.Services {
		for j, from := range d.Services {
			if i == j || into.Forwarding != from.Forwarding || len(from.Frontends) == 0 || !takes(into, from) || rapid.Bool().Draw(w.T, "not these") {
				continue
			}
			merged := *into
			merged.Frontends = slices.Concat(into.Frontends, from.Frontends)
			if rapid.Bool().Draw(w.T, "with its backends") {
				for _, b := range from.Backends {
					if !slices.ContainsFunc(merged.Backends, func(o model.Backend) bool { return o.BackendAddress == b.BackendAddress }) {
						merged.Backends = append(slices.Clone(merged.Backends), b)
					}
				}
			}
			d.Services = slices.Clone(d.Services)
			d.Services[i] = &merged
			d.Services = slices.Delete(d.Services, j, j+1)
			return d
		}
	}
	return w.drawDesired()
}

// takes reports whether a service may have another one's frontends: those of clients and those of packets between nodes have different services.
func takes(into, from *model.Service) bool {
	tunnelled := from.Frontends[0].Tunnelled()
	return (len(into.Frontends) == 0 || into.Frontends[0].Tunnelled() == tunnelled) && (!tunnelled || into.Announce == model.AnnounceNone)
}

// drawRename returns the last attempt with another name for one service, or with two names exchanged.
func (w *world) drawRename() reconcile.Desired {
	d := w.attempt
	if len(d.Services) == 0 {
		return w.drawDesired()
	}
	at := rapid.IntRange(0, len(d.Services)-1).Draw(w.T, "renamed")
	renamed := *d.Services[at]
	renamed.Name = rapid.SampledFrom([]string{"a", "b", "c"}).Draw(w.T, "new name")
	d.Services = slices.Clone(d.Services)
	for i, s := range d.Services {
		if s.Name == renamed.Name && i != at {
			other := *s
			other.Name = d.Services[at].Name
			d.Services[i] = &other
		}
	}
	d.Services[at] = &renamed
	return d
}

// drawEarlier undoes the last attempts, some or all of them.
func (w *world) drawEarlier() reconcile.Desired {
	if len(w.earlier) == 0 {
		return w.drawDesired()
	}
	return w.earlier[len(w.earlier)-1-min(rapid.IntRange(0, 4).Draw(w.T, "how long ago"), len(w.earlier)-1)]
}

// someNAT sends a packet of a flow, or begins one.
func (w *world) someNAT() {
	if n := len(w.natted); n > 0 && w.random.IntN(2) == 0 {
		at := w.random.IntN(n)
		f := w.natted[at]
		if got := w.maps.Translate(f.Flow); got != f.to {
			contents, _ := w.maps.Contents()
			service, _ := w.maps.Translated(f.Flow)
			w.Fatalf("flow %v moved from %v to %v, of service %+v; operations:\n%s\ncontents:\n%s", f.Flow, f.to, got, service, strings.Join(w.maps.Operations, "\n"), reconcile.Dump(contents))
		}
		if w.random.IntN(30) == 0 {
			w.maps.EndTranslated(f.Flow)
			w.natted = slices.Delete(w.natted, at, at+1)
		}
		return
	}
	if len(w.natted) >= nattedCount || len(w.attempt.Services) == 0 {
		return
	}
	s := w.attempt.Services[w.random.IntN(len(w.attempt.Services))]
	if s.Forwarding.Direct() || len(s.Frontends) == 0 {
		return
	}
	f := fake.Flow{Frontend: s.Frontends[w.random.IntN(len(s.Frontends))], Hash: w.random.Uint32()}
	if record, ok := w.maps.Service(f.Frontend); !ok || record.Name != s.Name {
		return // before the change, or a failed one
	}
	if to := w.maps.Translate(f); to != (reconcile.BackendRef{}) && w.succeeded {
		w.natted = append(w.natted, nattedFlow{f, to})
	}
}

// keepNAT gives up flows unless keeps says that they must go on.
func (w *world) keepNAT(keeps func(f fake.Flow, to reconcile.BackendRef, of reconcile.ServiceRecord) bool) {
	w.natted = slices.DeleteFunc(w.natted, func(f nattedFlow) bool {
		of, ok := w.maps.Translated(f.Flow)
		kept := ok && keeps(f.Flow, f.to, of)
		if !kept {
			w.maps.EndTranslated(f.Flow)
		}
		return !kept
	})
}

// beginNAT gives up the flows that d does not promise to keep.
func (w *world) beginNAT(d reconcile.Desired, plan reconcile.Difference) {
	w.keepNAT(func(f fake.Flow, to reconcile.BackendRef, of reconcile.ServiceRecord) bool {
		if of.Remnant() && slices.Contains(plan.Ended, of.Name) && w.limits != roomy {
			return false
		}
		owner := ownerOf(d, f.Frontend)
		if owner == nil || owner.Forwarding != of.Forwarding {
			return false
		}
		if (of.Remnant() || of.Name != owner.Name) && of.AffinityTimeout+owner.AffinityTimeout > 0 {
			return false
		}
		at := w.maps.Backend(to.Index).BackendAddress
		ipv6 := f.Address.Is6()
		if !slices.ContainsFunc(serving(*owner, ipv6), func(b model.Backend) bool { return b.BackendAddress == at && !closed(owner, b) }) {
			return false
		}
		if !of.Remnant() && w.mayBeAnothers(of.Name, ipv6) && !allGoOn(d, of, ipv6) {
			return false
		}
		if of.Name == owner.Name {
			return true
		}
		now, _ := w.maps.Service(f.Frontend)
		stays := func(name string) *model.Service { return halfOf(d, name, ipv6) }
		switch {
		case of.Remnant() && ^of.Seed == seedOf(owner.Name, ipv6):
			return true
		case of.Remnant():
			return ^of.Seed == now.Seed && stays(now.Name) == nil && now.Forwarding == of.Forwarding && now.AffinityTimeout == 0
		case stays(of.Name) == nil:
			return now.Index == of.Index
		}
		lender := stays(of.Name)
		return now.Index == of.Index && lender.Forwarding == of.Forwarding && lender.AffinityTimeout == 0
	})
}

// mayBeAnothers reports whether the reconciler may know a service that has this name in the maps by another name: a change that
// took over its position has failed, and is executed before all other operations of the next one.
func (w *world) mayBeAnothers(name string, ipv6 bool) bool {
	if w.succeeded {
		return false
	}
	return slices.ContainsFunc(append(slices.Clone(w.failed), w.attempt), func(d reconcile.Desired) bool { return halfOf(d, name, ipv6) == nil })
}

// allGoOn reports whether flows of a service can be those of all services with frontends of the family.
func allGoOn(d reconcile.Desired, of reconcile.ServiceRecord, ipv6 bool) bool {
	return !slices.ContainsFunc(d.Services, func(s *model.Service) bool {
		return halfOf(d, s.Name, ipv6) != nil && (s.Forwarding != of.Forwarding || s.AffinityTimeout+of.AffinityTimeout > 0)
	})
}

// halfOf returns the service with this name, if it has frontends of the family.
func halfOf(d reconcile.Desired, name string, ipv6 bool) *model.Service {
	i := slices.IndexFunc(d.Services, func(s *model.Service) bool {
		return s.Name == name && slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address.Is6() == ipv6 })
	})
	if i < 0 {
		return nil
	}
	return d.Services[i]
}

// restartNAT gives up the flows that a daemon does not know when it starts: flows of frontends that have gone from a service
// that stays, and flows of a change that has failed.
func (w *world) restartNAT() {
	w.keepNAT(func(f fake.Flow, _ reconcile.BackendRef, of reconcile.ServiceRecord) bool {
		now, ok := w.maps.Service(f.Frontend)
		return ok && w.succeeded && (now.Index == of.Index || of.Remnant() && ^of.Seed == now.Seed)
	})
}

func ownerOf(d reconcile.Desired, f model.Frontend) *model.Service {
	i := slices.IndexFunc(d.Services, func(s *model.Service) bool { return slices.Contains(s.Frontends, f) })
	if i < 0 {
		return nil
	}
	return d.Services[i]
}

func seedOf(name string, ipv6 bool) uint32 {
	if ipv6 {
		return maglev.Seed(name + "/6")
	}
	return maglev.Seed(name)
}

// TestHistoryOfARenameThatFails was found by a random history: the maps have a service's former name, and in the next
// change the service with the new name forwards otherwise, or not.
func TestHistoryOfARenameThatFails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, roomy, rapid.Uint64().Draw(t, "traffic"))
		w.apply(settling(web), nil, false)
		w.send()
		w.apply(settling(service("site", "192.0.2.10:80", threeAlike)), failing("put service 0/1 site", fake.Before), false)
		rest := service("site", "192.0.2.10:81", "10.0.0.9")
		if rapid.Bool().Draw(t, "direct") {
			rest = direct(rest)
		}
		begun := len(w.natted)
		w.apply(settling(web, rest), nil, false)
		if kept := len(w.natted); begun == 0 || (kept == 0) != rest.Forwarding.Direct() {
			t.Fatalf("of %d flows, the model promises %d", begun, kept)
		}
		w.send()
	})
}
