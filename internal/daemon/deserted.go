package daemon

import (
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/reconcile"
)

// nameDeserted keeps a condition for every service, or one family of it, without a backend that
// takes new flows. services are those in force, drains included. The caller holds d.applying.
func (d *daemon) nameDeserted(services []model.Service) {
	now := desertedServices(services)
	for subject := range d.deserted {
		if _, still := now[subject]; !still {
			d.conditions.Clear(condition.NoBackend, subject)
		}
	}
	for _, subject := range slices.Sorted(maps.Keys(now)) {
		d.conditions.Raise(condition.Condition{Code: condition.NoBackend, Subject: subject, Text: now[subject]})
	}
	d.deserted = now
}

// desertedServices names services without a backend that takes new flows, and says what
// becomes of their clients.
func desertedServices(services []model.Service) map[string]string {
	deserted := map[string]string{}
	for _, s := range services {
		without := reconcile.Deserted(s)
		if len(without) == 0 || slices.ContainsFunc(s.Backends, waits) {
			continue
		}
		subject := s.Name
		if both := slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address.Is4() == (without[0] == "IPv6") }); len(without) == 1 && both {
			subject += " (" + without[0] + ")"
		}
		text := "no backend takes new flows: "
		if slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Down }) {
			text = "no backend is up: "
		}
		if len(s.Backends) == 0 {
			text = "it has no backend: "
		}
		if s.Policy.Rejects {
			text += "clients are refused at once (on_no_backend: reject)"
		} else {
			text += "clients get no answer (on_no_backend: drop)"
		}
		deserted[subject] = text
	}
	return deserted
}

// waits reports whether a backend is still to show that it is up, which its first check is about
// to say. A backup that is not needed waits for nothing, but then another one lives.
func waits(b model.Backend) bool { return b.Idle && !b.Down && b.Weight > 0 }
