package daemon

import (
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/metrics"
)

// Sample implements node.Sampler.
func (d *daemon) Sample(s *metrics.Sample) error {
	usage, err := d.views.usage(d.host.Instance)
	if err != nil {
		return err
	}
	snapshot := d.snapshot()
	limits := snapshot.Node.Limits
	s.Balances, s.States, s.SourcePorts = true, status.States, uint64(usage.SourcePorts)
	s.Overrides = countOverrides(d.overrides.writer.Overrides())
	missed := framesMissed(d.plane.interfaces.names(), d.host.Log)
	for _, a := range d.plane.interfaces.list() {
		i := metrics.Interface{Name: a.Interface, Mode: string(a.Mode)}
		if frames, known := missed[a.Interface]; known {
			i.Missed = &frames
		}
		s.Interfaces = append(s.Interfaces, i)
	}
	for _, r := range kernel.Reasons() {
		name := r.String()
		count := usage.Reasons[name]
		s.Reasons = append(s.Reasons, metrics.Reason{Name: name, Packets: count.Packets, Bytes: count.Bytes})
	}
	if s.Sockets, err = d.plane.sockets.outcomes(); err != nil {
		return err
	}
	s.Flows.Limit, s.Remembered.Limit = uint64(limits.Flows), uint64(limits.Remembered)
	if swept := d.pulse.flows.Load(); swept != nil {
		s.Flows.Known, s.Flows.All, s.Flows.Established = true, swept.Flows, swept.Established
	}
	if recalled := d.pulse.remembered.Load(); recalled != nil {
		s.Remembered.Known, s.Remembered.All = true, recalled.Entries-recalled.Expired-recalled.Agreed
	}
	settling := d.applier.reconciler.Settling()
	s.Slots = []metrics.Count{{Of: "transition", Count: uint64(settling.Transition)}, {Of: "marked", Count: uint64(settling.Marked)}}
	s.SourceAddresses = d.applier.addresses.count()
	totals := d.applier.checks.monitor.Totals()
	s.Checks = metrics.Checks{Late: totals.Late, Results: []metrics.Count{{Of: "passed", Count: totals.Passed},
		{Of: "failed", Count: totals.Failed}, {Of: "not_made", Count: totals.NotMade}}}
	sampleServices(s, usage, d.pulse.open.Load(), snapshot.Configured, d.applier.checks.servedLast(), d.applier.checks.monitor.Changes)
	return nil
}

func countOverrides(all []state.Override) (counts []metrics.Count) {
	for _, kind := range []state.Kind{state.KindDrain, state.KindWeight, state.KindHealth} {
		n := uint64(0)
		for _, o := range all {
			if o.Kind == kind {
				n++
			}
		}
		counts = append(counts, metrics.Count{Of: string(kind), Count: n})
	}
	return counts
}

// sampleServices adds services and backends: the configured ones, as they are served, with the packets that
// went through them.
func sampleServices(s *metrics.Sample, usage store.Usage, open *store.OpenByName, configured, served []*model.Service,
	checked func(service string, b model.BackendAddress) (state model.HealthState, changes uint64, checked bool),
) {
	asServed := make(map[string]*model.Service, len(served))
	for i := range served {
		asServed[served[i].Name] = served[i]
	}
	members := 0
	for i := range configured {
		members += len(configured[i].Backends)
	}
	s.Services, s.Backends = make([]metrics.Service, 0, len(configured)), make([]metrics.Backend, 0, members)
	positions := make(map[model.BackendAddress]int, members) // in s.Backends
	for _, service := range configured {
		one := metrics.Service{Name: service.Name, Traffic: metrics.Traffic(usage.Services[service.Name]),
			Members: make([]metrics.Member, 0, len(service.Backends))}
		if one.Counted = open != nil && !service.Forwarding.Direct(); one.Counted {
			one.Open = open.Services[service.Name]
		}
		carried := make(map[model.BackendAddress]*model.Backend, len(service.Backends))
		if now := asServed[service.Name]; now != nil {
			for i := range now.Backends {
				carried[now.Backends[i].BackendAddress] = &now.Backends[i]
			}
		}
		for _, b := range service.Backends {
			position, known := positions[b.BackendAddress]
			if !known {
				position = len(s.Backends)
				positions[b.BackendAddress] = position
				s.Backends = append(s.Backends, metrics.Backend{Address: b.BackendAddress.String(), Traffic: metrics.Traffic(usage.Backends[b.BackendAddress])})
			}
			backend := &s.Backends[position]
			if one.Counted {
				backend.Counted, backend.Open = true, open.Backends[b.BackendAddress]
			}
			m := metrics.Member{Backend: position, Name: b.Name, State: status.StateOut}
			if now := carried[b.BackendAddress]; now != nil { // else the deadline of its drain has passed
				m.State, m.Weight = status.StateOf(*now), float64(now.Share())/100
			}
			state, changes, is := checked(service.Name, b.BackendAddress)
			m.Checked, m.Up, m.Changes = is, state == model.HealthUp, changes
			one.Members = append(one.Members, m)
		}
		s.Services = append(s.Services, one)
	}
}
