package daemon

import (
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// desertions are the services without a backend that takes new flows. Its zero value contains no service.
type desertions struct {
	services model.Differ
	found    map[string][]condition.Condition // by service
}

// follow keeps a condition for every service, or one family of it, without a backend that takes new flows. The
// condition says how the service's clients are treated. services are the services in force, drains included. A
// call costs as much as the changed services.
func (d *desertions) follow(services []*model.Service) (all []condition.Condition) {
	if d.found == nil {
		d.found = map[string][]condition.Condition{}
	}
	gone, come := d.services.Next(services)
	for _, s := range gone {
		delete(d.found, s.Name)
	}
	for _, s := range come {
		if found := deserted(s); len(found) > 0 {
			d.found[s.Name] = found
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.found)) {
		all = append(all, d.found[name]...)
	}
	return all
}

// deserted returns the conditions of one service.
func deserted(s *model.Service) []condition.Condition {
	without := reconcile.Deserted(s)
	if len(without) == 0 || slices.ContainsFunc(s.Backends, waits) {
		return nil
	}
	subject := s.Name
	if both := slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address.Is4() == (without[0] == "IPv6") }); len(without) == 1 && both {
		subject += " (" + without[0] + ")"
	}
	text := "no backend takes new flows: "
	if slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Observed.Down }) {
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
	return []condition.Condition{{Subject: subject, Text: text}}
}

// waits reports whether a backend has yet to pass its first check. A backup that is not needed waits for
// nothing, but then another backend is up.
func waits(b model.Backend) bool {
	return b.Observed.Idle && !b.Observed.Down && b.EffectiveWeight() > 0
}
