package health

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// serving keeps the last answer of Serve for each service, so that Serve recomputes only the services that may
// have changed.
type serving struct {
	list, said []*model.Service // the last arguments and results, by the same index
	known      map[string]answer
	doubted    map[string]bool      // services whose answer may differ now
	ramps      map[string]time.Time // when a weight of a service rises next by itself
	panics     map[string]bool      // services whose health is not believed
}

// answer is a service as it is served.
type answer struct{ service, served *model.Service }

func newServing() serving {
	return serving{known: map[string]answer{}, doubted: map[string]bool{}, ramps: map[string]time.Time{}, panics: map[string]bool{}}
}

// doubt makes Serve recompute services.
func (v *serving) doubt(services []string) {
	for _, name := range services {
		v.doubted[name] = true
	}
}

// forget drops the answer for a service.
func (v *serving) forget(name string) {
	delete(v.known, name)
	delete(v.ramps, name)
	delete(v.panics, name)
}

// Serve returns the services with the results of their checks: which backends take no new flows, are
// down, or have part of their weight. A backend that Update has not received waits. lost
// reports that a backend's address is known to be out of reach, with direct return or without. It is called
// for services that differ from the last call's, or whose checks have new results; with all, for all services. If
// nothing changed for a service, the result is the same pointer as before; if no check changes it, its own pointer.
func (m *Monitor) Serve(services []*model.Service, all bool, lost func(direct bool, backend netip.Addr) bool) []*model.Service {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, now := &m.serving, time.Now()
	gone, _ := model.Changed(v.list, services)
	for _, s := range gone {
		v.forget(s.Name)
	}
	for name, next := range v.ramps {
		v.doubted[name] = v.doubted[name] || !next.After(now)
	}
	said := make([]*model.Service, len(services))
	for i, s := range services {
		doubted := all || len(v.doubted) > 0 && v.doubted[s.Name]
		if !doubted && i < len(v.list) && v.list[i] == s {
			said[i] = v.said[i]
		} else if known := v.known[s.Name]; !doubted && known.service == s {
			said[i] = known.served
		} else {
			said[i] = m.serve(s, now, lost)
		}
	}
	v.list, v.said = services, said
	clear(v.doubted)
	m.ramps = time.Time{}
	for _, next := range v.ramps {
		if m.ramps.IsZero() || next.Before(m.ramps) {
			m.ramps = next
		}
	}
	notify(m.wake)
	return said
}

// serve computes how one service is served.
func (m *Monitor) serve(s *model.Service, now time.Time, lost func(direct bool, backend netip.Addr) bool) *model.Service {
	v, direct := &m.serving, s.Forwarding.Direct()
	known := v.known[s.Name]
	v.forget(s.Name)
	if s.Health.Check == "" && !slices.ContainsFunc(s.Backends, func(b model.Backend) bool {
		return b.Backup || b.Override.Health != "" || b.Observed != (model.BackendObservation{}) || lost(direct, b.Address)
	}) {
		v.known[s.Name] = answer{s, s}
		return s
	}
	of := func(b model.Backend) found {
		if s.Health.Check == "" {
			return found{state: model.HealthUp}
		}
		c := m.members[member{s.Name, b.BackendAddress}]
		if c == nil {
			return found{state: model.HealthWaiting}
		}
		f := found{state: c.machine.state}
		if f.state == model.HealthUp {
			percent, next := rampOf(c.machine.ramps, now, s.Health.SlowStart)
			f.ramp = percent
			if before := v.ramps[s.Name]; !next.IsZero() && (before.IsZero() || next.Before(before)) {
				v.ramps[s.Name] = next
			}
		}
		return f
	}
	with, panics := serve(*s, of, func(a netip.Addr) bool { return lost(direct, a) })
	if panics {
		v.panics[s.Name] = true
	}
	served := &with
	switch {
	case served.Equal(s):
		served = s
	case known.served != nil && served.Equal(known.served):
		served = known.served
	}
	v.known[s.Name] = answer{s, served}
	return served
}

// Panics lists the services whose health is not believed, as of the last Serve.
func (m *Monitor) Panics() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.serving.panics))
}

// Doubt makes Serve recompute all services: new knowledge may exist of which backends can be reached.
func (m *Monitor) Doubt(services []*model.Service) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range services {
		m.serving.doubted[s.Name] = true
	}
}
