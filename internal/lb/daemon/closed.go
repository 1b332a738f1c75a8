package daemon

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// closed are the backends of a service whose flows it ends, because they are down.
func closed(s *model.Service) (all []model.BackendAddress) {
	if !s.ClosesDown {
		return nil
	}
	for _, b := range s.Backends {
		if b.Down {
			all = append(all, b.BackendAddress)
		}
	}
	return all
}

// newlyClosed are, by service, the backends whose flows end when services take the place of others.
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

// closings is a condition for each service that ends flows of backends.
func closings(ends map[string][]model.BackendAddress, services []*model.Service, open datapath.OpenByName) (all []condition.Condition) {
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

// closing counts the flows that end when the data plane gets services, for backends of theirs that are down; what it returns
// tells of them, once they have. The caller holds d.applying.
func (d *daemon) closing(services []*model.Service) (tell func()) {
	ends := newlyClosed(d.checks.servedLast(), services)
	if len(ends) == 0 {
		return func() {}
	}
	open, err := d.datapath.CountOpen()
	if err != nil {
		d.log.Warn("cannot count the flows of backends that are down", "error", err)
	}
	conditions := closings(ends, services, open)
	return func() {
		for _, c := range conditions {
			d.closed.See(c, time.Now())
		}
	}
}
