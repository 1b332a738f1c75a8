package metrics

import (
	"slices"
	"strings"
	"time"
)

// Kind is the type of a family, as Prometheus names it.
type Kind string

// The kinds.
const (
	Counter Kind = "counter" // grows, and begins anew at 0
	Gauge   Kind = "gauge"   // goes up and down
)

// Family is a metric: samples that differ in their labels.
type Family struct {
	Name   string
	Kind   Kind
	Labels []string
	Help   string
	write  func(e *exposition, s *Sample)
}

// The labels of one sample of traffic.
const (
	in  = `direction="in"`
	out = `direction="out"`
)

// Families is every metric of shunt's own, in the order of the answer. docs/reference/metrics.md is made from it.
var Families = slices.Concat(nodeFamilies, balancerFamilies, udpFamilies, podFamilies, socketFamilies, guardFamilies)

// nodeFamilies are present with any products.
var nodeFamilies = []Family{
	{"shunt_build_info", Gauge, []string{"version", "go_version"}, "1. The labels say which shunt runs.",
		func(e *exposition, s *Sample) {
			e.whole(labels("version", s.Version, "go_version", s.GoVersion), 1)
		}},
	{"shunt_config_last_reload_successful", Gauge, nil, "1 if the file was applied when it was last read, 0 if it was refused.",
		func(e *exposition, s *Sample) { e.whole("", flag(!s.Reloads.Refused)) }},
	{"shunt_config_last_reload_success_timestamp_seconds", Gauge, nil, "When a configuration was last applied, in Unix time.",
		func(e *exposition, s *Sample) { e.number("", unix(s.Reloads.Applied)) }},
	{"shunt_conditions", Gauge, []string{"code", "severity"}, "Conditions that hold now, as shunt status shows them.",
		func(e *exposition, s *Sample) {
			for _, c := range s.Conditions {
				e.whole(labels("code", c.Code, "severity", c.Severity), c.Count)
			}
		}},
}

// balancerFamilies are present while the balancer runs.
var balancerFamilies = []Family{
	{"shunt_overrides", Gauge, []string{"kind"}, "Overrides that operators have set: drain, weight and health of backends.",
		func(e *exposition, s *Sample) { counts(e, "kind", s.Overrides) }},
	{"shunt_interface_info", Gauge, []string{"interface", "mode"}, "1. An interface that shunt is attached to, and how: native, generic, tcx or clsact.",
		func(e *exposition, s *Sample) {
			for _, i := range s.Interfaces {
				e.whole(labels("interface", i.Name, "mode", i.Mode), 1)
			}
		}},
	{"shunt_interface_missed_frames_total", Counter, []string{"interface"}, "Frames for which the receive ring of the interface had no room, so that no program saw them. Absent if shunt cannot read the number.",
		func(e *exposition, s *Sample) {
			for _, i := range s.Interfaces {
				if i.Missed != nil {
					e.whole(labels("interface", i.Name), *i.Missed)
				}
			}
		}},
	{"shunt_reason_packets_total", Counter, []string{"reason"}, "Packets that were not simply forwarded, by reason.",
		func(e *exposition, s *Sample) {
			for _, r := range s.Reasons {
				e.whole(labels("reason", r.Name), r.Packets)
			}
		}},
	{"shunt_reason_bytes_total", Counter, []string{"reason"}, "Bytes of the packets in shunt_reason_packets_total.",
		func(e *exposition, s *Sample) {
			for _, r := range s.Reasons {
				e.whole(labels("reason", r.Name), r.Bytes)
			}
		}},
	{"shunt_socket_calls_total", Counter, []string{"outcome"}, "Outcomes of calls of sockets that are served (sockets in the file), by outcome: connect() and datagrams that name their destination, bind() and others; and of sockets that were closed, closed_gone and so on. Absent where none are served.",
		func(e *exposition, s *Sample) { counts(e, "outcome", s.Sockets) }},
	{"shunt_flows", Gauge, nil, "Flows under NAT in the flow table, including flows in handshake and flows whose port is not free yet. Counted every 10 seconds.",
		func(e *exposition, s *Sample) { counted(e, s.Flows, s.Flows.All) }},
	{"shunt_flows_established", Gauge, nil, "Flows under NAT that are in use. Counted every 10 seconds.",
		func(e *exposition, s *Sample) { counted(e, s.Flows, s.Flows.Established) }},
	{"shunt_flows_limit", Gauge, nil, "The most flows under NAT that the flow table has room for (limits.flows).",
		func(e *exposition, s *Sample) { e.whole("", s.Flows.Limit) }},
	{"shunt_remembered_flows", Gauge, nil, "Flows with direct return and clients with affinity that are remembered. Counted every 10 seconds.",
		func(e *exposition, s *Sample) { counted(e, s.Remembered, s.Remembered.All) }},
	{"shunt_remembered_flows_limit", Gauge, nil, "The most flows and clients that can be remembered (limits.remembered).",
		func(e *exposition, s *Sample) { e.whole("", s.Remembered.Limit) }},
	{"shunt_slots_unsettled", Gauge, []string{"state"}, "Slots of Maglev tables whose flows are looked up: in transition after a change, or marked because older flows are elsewhere.",
		func(e *exposition, s *Sample) { counts(e, "state", s.Slots) }},
	{"shunt_source_ports", Gauge, nil, "Source ports that NAT may use, for each source address, backend and protocol.",
		func(e *exposition, s *Sample) { e.whole("", s.SourcePorts) }},
	{"shunt_source_addresses", Gauge, []string{"family"}, "Source addresses that NAT uses, over all interfaces.",
		func(e *exposition, s *Sample) { counts(e, "family", s.SourceAddresses) }},
	{"shunt_health_checks_total", Counter, []string{"result"}, "Health checks that have ended: passed, failed, or not made because this machine could not.",
		func(e *exposition, s *Sample) { counts(e, "result", s.Checks.Results) }},
	{"shunt_health_checks_late_total", Counter, nil, "Health checks that began a quarter of a second late, or later.",
		func(e *exposition, s *Sample) { e.whole("", s.Checks.Late) }},

	{"shunt_service_packets_total", Counter, []string{"service", "direction"}, "Packets of a service: in is from clients, out is to clients. With direct return backends answer by themselves, and out stays 0.",
		services(func(e *exposition, s *Service) { e.pair(s.labels, s.PacketsIn, s.PacketsOut) })},
	{"shunt_service_bytes_total", Counter, []string{"service", "direction"}, "Bytes of the packets in shunt_service_packets_total, as whole frames.",
		services(func(e *exposition, s *Service) { e.pair(s.labels, s.BytesIn, s.BytesOut) })},
	{"shunt_service_flows_created_total", Counter, []string{"service"}, "Flows that a service has begun.",
		services(func(e *exposition, s *Service) { e.whole(s.labels, s.FlowsCreated) })},
	{"shunt_service_flows_open", Gauge, []string{"service"}, "Flows of a service that are in use. Counted every 10 seconds. Absent with direct return, which does not know them.",
		services(func(e *exposition, s *Service) {
			if s.Counted {
				e.whole(s.labels, s.Open)
			}
		})},
	{"shunt_service_backends", Gauge, []string{"service", "state"}, "Backends of a service by state, as shunt backend list shows it; active ones take new flows.",
		func(e *exposition, s *Sample) {
			for i := range s.Services {
				for _, state := range s.States {
					n := uint64(0)
					for _, m := range s.Services[i].Members {
						if m.State == state {
							n++
						}
					}
					e.whole(s.Services[i].labels+`,state="`+state+`"`, n)
				}
			}
		}},

	{"shunt_backend_packets_total", Counter, []string{"backend", "direction"}, "Packets to (in) and from (out) a backend, over all its services.",
		backends(func(e *exposition, b *Backend) { e.pair(b.labels, b.PacketsIn, b.PacketsOut) })},
	{"shunt_backend_bytes_total", Counter, []string{"backend", "direction"}, "Bytes of the packets in shunt_backend_packets_total, as whole frames.",
		backends(func(e *exposition, b *Backend) { e.pair(b.labels, b.BytesIn, b.BytesOut) })},
	{"shunt_backend_flows_created_total", Counter, []string{"backend"}, "Flows that a backend has been given, over all its services.",
		backends(func(e *exposition, b *Backend) { e.whole(b.labels, b.FlowsCreated) })},
	{"shunt_backend_flows_open", Gauge, []string{"backend"}, "Flows that a backend has in use, over all its services. Counted every 10 seconds. Absent where only services with direct return have it.",
		backends(func(e *exposition, b *Backend) {
			if b.Counted {
				e.whole(b.labels, b.Open)
			}
		})},

	{"shunt_service_backend_active", Gauge, []string{"service", "backend", "name"}, "1 if a backend takes new flows of a service, else 0.",
		members(func(e *exposition, m *Member) { e.whole(m.labels, flag(m.Weight > 0)) })},
	{"shunt_service_backend_weight", Gauge, []string{"service", "backend", "name"}, "The weight of a backend in a service as it counts now: 0 if it takes no new flows, a part of it during slow start.",
		members(func(e *exposition, m *Member) { e.number(m.labels, m.Weight) })},
	{"shunt_service_backend_health", Gauge, []string{"service", "backend", "name"}, "1 if the checks say that a backend is up, else 0. Absent without health checks.",
		members(func(e *exposition, m *Member) {
			if m.Checked {
				e.whole(m.labels, flag(m.Up))
			}
		})},
	{"shunt_service_backend_health_changes_total", Counter, []string{"service", "backend", "name"}, "Changes of a backend's state by its checks. Absent without health checks.",
		members(func(e *exposition, m *Member) {
			if m.Checked {
				e.whole(m.labels, m.Changes)
			}
		})},

	{"shunt_metrics_series", Gauge, nil, "Series that services and backends may have in this answer, as metrics.max_series counts them.",
		func(e *exposition, s *Sample) { e.whole("", s.series) }},
	{"shunt_metrics_series_left_out", Gauge, nil, "Series that metrics.max_series keeps out of this answer.",
		func(e *exposition, s *Sample) { e.whole("", s.seriesLeftOut) }},
	{"shunt_metrics_services_left_out", Gauge, nil, "Services without series in this answer, because of metrics.max_series: the last ones of the configuration.",
		func(e *exposition, s *Sample) { e.whole("", s.servicesLeftOut) }},
}

// services writes a family that has samples for each service.
func services(write func(*exposition, *Service)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Services {
			write(e, &s.Services[i])
		}
	}
}

// backends writes a family that has samples for each backend.
func backends(write func(*exposition, *Backend)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Backends {
			if !s.Backends[i].leftOut {
				write(e, &s.Backends[i])
			}
		}
	}
}

// members writes a family that has a sample for each backend of each service.
func members(write func(*exposition, *Member)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Services {
			for j := range s.Services[i].Members {
				write(e, &s.Services[i].Members[j])
			}
		}
	}
}

// counts writes a sample for each value of one label.
func counts(e *exposition, label string, all []Count) {
	for _, c := range all {
		e.whole(labels(label, c.Of), c.Count)
	}
}

// counted writes the results of a walk through a table, once there has been one.
func counted(e *exposition, f Flows, value uint64) {
	if f.Known {
		e.whole("", value)
	}
}

func flag(is bool) uint64 {
	if is {
		return 1
	}
	return 0
}

// unix returns a time as Prometheus needs it, 0 for none.
func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

var escaper = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// labels returns pairs of a name and a value, as in a sample.
func labels(pairs ...string) string {
	length := 0
	for i, word := range pairs {
		if length += len(word); i%2 == 0 {
			length += len(`,=""`)
		}
	}
	text := make([]byte, 0, length)
	for i := 0; i < len(pairs); i += 2 {
		if i > 0 {
			text = append(text, ',')
		}
		text = append(append(text, pairs[i]...), `="`...)
		text = append(append(text, escaper.Replace(pairs[i+1])...), '"')
	}
	return string(text)
}
