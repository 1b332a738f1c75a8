package daemon

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// lossHold is how long the end of flows stays a condition.
const lossHold = 10 * time.Minute

// closed names the backends of a service that are down and whose flows it ends.
func closed(s *model.Service) (all []model.BackendAddress) {
	if !s.ClosesDown {
		return nil
	}
	for _, b := range s.Backends {
		if b.Observed.Down {
			all = append(all, b.BackendAddress)
		}
	}
	return all
}

// newlyClosed returns, by service, the backends whose flows end when the services change from one list to the
// other.
func newlyClosed(before, after []*model.Service) map[string][]model.BackendAddress {
	was := map[string][]model.BackendAddress{}
	for _, s := range before {
		if all := closed(s); len(all) > 0 {
			was[s.Name] = all
		}
	}
	now := map[string][]model.BackendAddress{}
	for _, s := range after {
		for _, b := range closed(s) {
			if !slices.Contains(was[s.Name], b) {
				now[s.Name] = append(now[s.Name], b)
			}
		}
	}
	return now
}

// closings returns a condition for each service that ends flows of backends.
func closings(ends map[string][]model.BackendAddress, services []*model.Service, open store.OpenByName) (all []condition.Condition) {
	for _, s := range services {
		var parts []string
		for _, b := range ends[s.Name] {
			flows := "flows"
			if !s.Forwarding.Direct() {
				if open.Backends[b] == 0 {
					continue
				}
				flows = value.Counted(int(open.Backends[b]), "open flow")
			}
			parts = append(parts, fmt.Sprintf("backend %s is down, and %s ended with it", b, flows))
		}
		if len(parts) > 0 {
			all = append(all, condition.Condition{Code: condition.FlowsClosed, Severity: condition.Warning, Subject: s.Name,
				Text: strings.Join(parts, "; ") + ": on_down is close"})
		}
	}
	return all
}

// closing counts the flows that end because backends of services are down. The returned function raises the
// conditions, after the flows have ended.
func (l *losses) closing(before, services []*model.Service) (tell func(now time.Time)) {
	ends := newlyClosed(before, services)
	if len(ends) == 0 {
		return func(time.Time) {}
	}
	open, err := l.count()
	if err != nil {
		l.log.Warn("cannot count the flows of backends that are down", "error", err)
	}
	conditions := closings(ends, services, open)
	return func(now time.Time) {
		for _, c := range conditions {
			l.closed.See(c, now)
		}
	}
}

// foreseeClosing counts the flows that would end because backends of services are down.
func (l *losses) foreseeClosing(before, services []*model.Service) (all []reconcile.Cut) {
	ends := newlyClosed(before, services)
	if len(ends) == 0 {
		return nil
	}
	open, err := l.count()
	if err != nil {
		l.log.Warn("cannot count the flows of backends that are down", "error", err)
		return nil
	}
	for _, c := range closings(ends, services, open) {
		all = append(all, reconcile.Cut{Service: c.Subject, Text: "service " + c.Subject + ": " + c.Text})
	}
	return all
}
