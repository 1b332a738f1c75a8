package daemon

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// cuts returns the flows in use that a change ends together with a service or a backend. before and services
// are the services before and after the change, and open are the flow counts before it. Flows of a backend that
// leaves only one of its services cannot be told apart, and are not counted.
func cuts(change reconcile.Difference, before, services []*model.Service, open store.OpenByName) (all []reconcile.Cut) {
	kept, stay := map[string]bool{}, map[string]bool{}
	for _, s := range change.Services {
		for _, name := range s.TakesOver {
			kept[name] = true
		}
	}
	for _, s := range services {
		for _, b := range s.Backends {
			stay[b.BackendAddress.String()] = true
		}
	}
	byBackend := map[string]uint64{}
	for b, n := range open.Backends {
		byBackend[b.String()] = n
	}
	for _, name := range change.Ended {
		switch n := open.Services[name]; {
		case n == 0:
		case serviceOf(before, name) != nil: // both have flows under the name
			all = append(all, reconcile.Cut{Service: name, Text: fmt.Sprintf("of %s of service %s, the flows from before its merge into another service end", value.Counted(int(n), "open flow"), name)})
		default:
			all = append(all, reconcile.Cut{Service: name, OpenFlows: n, Text: fmt.Sprintf("%s of service %s, which was merged into another one, end with it", value.Counted(int(n), "open flow"), name)})
		}
	}
	told := map[string]bool{}
	for _, s := range change.Services {
		if s.Change == reconcile.Removed && !kept[s.Name] {
			if n := open.Services[s.Name]; n > 0 {
				all = append(all, reconcile.Cut{Service: s.Name, OpenFlows: n, Text: fmt.Sprintf("%s of service %s end with it", value.Counted(int(n), "open flow"), s.Name)})
			} else if text := placedAnew(serviceOf(before, s.Name), services); text != "" {
				all = append(all, reconcile.Cut{Service: s.Name, Text: text})
			}
			continue
		}
		if n := open.Services[s.Name]; s.Change == reconcile.Removed && n > 0 {
			for _, text := range leftOut(serviceOf(before, s.Name), services, byBackend) {
				all = append(all, reconcile.Cut{Service: s.Name, Text: fmt.Sprintf("of %s of service %s, %s", value.Counted(int(n), "open flow"), s.Name, text)})
			}
		}
		if n := open.Services[s.Name]; s.Change == reconcile.Changed && n > 0 {
			if lost := sharedLost(serviceOf(before, s.Name), serviceOf(services, s.Name), services, s.BackendsRemoved, byBackend); len(lost) > 0 {
				all = append(all, reconcile.Cut{Service: s.Name, Text: fmt.Sprintf("of %s of service %s, the flows with backend %s may end, because the service no longer has it",
					value.Counted(int(n), "open flow"), s.Name, strings.Join(lost, ", "))})
			}
		}
		for _, b := range s.BackendsRemoved {
			if n := byBackend[b]; n > 0 && !stay[b] && !told[b] {
				told[b] = true
				all = append(all, reconcile.Cut{Backend: b, OpenFlows: n, Text: fmt.Sprintf("%s of backend %s end with it", value.Counted(int(n), "open flow"), b)})
			}
		}
	}
	return all
}

// leftOut says which flows end when a service goes and its other flows continue: flows of frontends that no
// service takes over or whose flows cannot belong to another service, and flows with backends that the services
// which take over do not have, although other services do.
func leftOut(was *model.Service, services []*model.Service, open map[string]uint64) (texts []string) {
	if was == nil {
		return nil
	}
	nobody, unfit, has, named := []string{}, []string{}, map[string]bool{}, map[string]bool{}
	for _, f := range was.Frontends {
		i := slices.IndexFunc(services, func(s *model.Service) bool {
			return slices.ContainsFunc(s.Frontends, func(g model.Frontend) bool { return g.Covers(f) })
		})
		switch {
		case i < 0:
			nobody = append(nobody, f.String())
		case services[i].Forwarding != was.Forwarding || services[i].AffinityTimeout > 0:
			unfit = append(unfit, f.String())
		default:
			for _, b := range services[i].Backends {
				has[b.BackendAddress.String()] = true
			}
		}
	}
	for _, s := range services {
		for _, b := range s.Backends {
			named[b.BackendAddress.String()] = true
		}
	}
	lacks := []string{}
	for _, b := range was.Backends {
		if name := b.BackendAddress.String(); !has[name] && named[name] && open[name] > 0 {
			lacks = append(lacks, name)
		}
	}
	for _, part := range []struct {
		of   []string
		text string
	}{
		{nobody, "the flows to %s end with it"},
		{unfit, "the flows to %s may end, because the service that takes it over has affinity or another forwarding"},
		{lacks, "the flows with backend %s end, because the service that takes them over does not have it"},
	} {
		if len(part.of) > 0 {
			texts = append(texts, fmt.Sprintf(part.text, strings.Join(part.of, ", ")))
		}
	}
	return texts
}

// sharedLost returns the backends in use that a service loses and that other services have. Its flows with them
// continue if it has given a frontend to a service that has the backend and both services translate, without
// affinity.
func sharedLost(was, now *model.Service, services []*model.Service, removed []string, open map[string]uint64) (lost []string) {
	if was == nil || now == nil {
		return nil
	}
	alone := func(s *model.Service) bool { return !s.Forwarding.Direct() && s.AffinityTimeout == 0 }
	has := func(s *model.Service, name string) bool {
		return slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.BackendAddress.String() == name })
	}
	given := func(s *model.Service) bool {
		return s != now && alone(s) && alone(now) && slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return slices.Contains(was.Frontends, f) })
	}
	for _, name := range removed {
		others := slices.ContainsFunc(services, func(s *model.Service) bool { return has(s, name) })
		if others && open[name] > 0 && !slices.ContainsFunc(services, func(s *model.Service) bool { return given(s) && has(s, name) }) {
			lost = append(lost, name)
		}
	}
	return lost
}

func serviceOf(services []*model.Service, name string) *model.Service {
	i := slices.IndexFunc(services, func(s *model.Service) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return services[i]
}

// placedAnew describes how flows of a service with direct return move when the service goes and another one
// takes its frontends over; "" if there is nothing to say. The flows are not counted. Under another name every
// flow has another slot, so a flow meets its backend again with a probability that is the backend's share.
func placedAnew(was *model.Service, services []*model.Service) string {
	if was == nil || !was.Forwarding.Direct() {
		return ""
	}
	for _, s := range services {
		if !slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return slices.Contains(was.Frontends, f) }) {
			continue
		}
		return fmt.Sprintf("flows of service %s are placed anew by service %s, because direct return places them by the service's name: about %.0f %% of them move, and end",
			was.Name, s.Name, 100*(1-stays(was, s)))
	}
	return fmt.Sprintf("the flows of service %s end with it; with direct return they are not counted", was.Name)
}

// stays returns the largest share of flows that two independent tables place alike.
func stays(before, after *model.Service) (part float64) {
	shares := func(s *model.Service) map[model.BackendAddress]float64 {
		total := 0.0
		for _, b := range s.Backends {
			total += float64(b.Share())
		}
		shares := map[model.BackendAddress]float64{}
		for _, b := range s.Backends {
			if total > 0 {
				shares[b.BackendAddress] = float64(b.Share()) / total
			}
		}
		return shares
	}
	now := shares(after)
	for b, share := range shares(before) {
		part += share * now[b]
	}
	return part
}

// losses counts the flows that end because of a change, and reports them. One caller at a time may use it.
type losses struct {
	count  func() (store.OpenByName, error) // the flows that are open
	closed condition.Lasting                // services whose backends went down, with the flows that ended
	log    *slog.Logger
}

func newLosses(count func() (store.OpenByName, error), conditions *condition.Set, log *slog.Logger) *losses {
	return &losses{count: count, closed: condition.Lasting{Set: conditions, Hold: lossHold}, log: log}
}

// cuts counts the flows that a change will end. before are the services in force, and services are the services
// after the change.
func (l *losses) cuts(change reconcile.Difference, before, services []*model.Service) []reconcile.Cut {
	open, err := l.count()
	if err != nil {
		l.log.Warn("cannot count the flows that a change ends", "error", err)
		return nil
	}
	return cuts(change, before, services, open)
}

// announce does the same as cuts, and logs a line for each cut.
func (l *losses) announce(change reconcile.Difference, before, services []*model.Service) []reconcile.Cut {
	all := l.cuts(change, before, services)
	for _, cut := range all {
		l.log.Warn("about to change the services: " + cut.Text)
	}
	return all
}
