package source

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// measures are metrics of kube-proxy that have the same meaning here, with its names and buckets
// (pkg/proxy/metrics/metrics.go there). They have no label ip_family: one step carries out both families.
type measures struct {
	step, programming                 prometheus.Histogram
	queued, done                      prometheus.Gauge
	servicesPending, endpointsPending prometheus.Gauge
	services, endpoints               prometheus.Counter
}

func newMeasures() *measures {
	const space = "kubeproxy"
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: space, Name: name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: space, Name: name, Help: help})
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: space, Name: name, Help: help, Buckets: buckets})
	}
	long := []float64{0.25, 0.5}
	for _, part := range [][]float64{prometheus.LinearBuckets(1, 1, 59), prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7)} {
		long = append(long, part...)
	}
	return &measures{
		step:             histogram("sync_proxy_rules_duration_seconds", "Time of one step that applies changes of Services and endpoints, with their translation.", prometheus.ExponentialBuckets(0.001, 2, 15)),
		programming:      histogram("network_programming_duration_seconds", "Time from the change of a pod or a Service that the control plane has noted in an EndpointSlice until it is in force on this node. It contains the difference of the two clocks.", long),
		queued:           gauge("sync_proxy_rules_last_queued_timestamp_seconds", "When the last change was received, in Unix time."),
		done:             gauge("sync_proxy_rules_last_timestamp_seconds", "When changes were last applied, in Unix time."),
		servicesPending:  gauge("sync_proxy_rules_service_changes_pending", "Services with a change that has not been applied."),
		endpointsPending: gauge("sync_proxy_rules_endpoint_changes_pending", "Services with a change of endpoints that has not been applied."),
		services:         counter("sync_proxy_rules_service_changes_total", "Changes of Services that were received."),
		endpoints:        counter("sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices that were received."),
	}
}

// Collectors returns the source's metrics.
func (s *Source) Collectors() []prometheus.Collector {
	m := s.measures
	return []prometheus.Collector{m.step, m.programming, m.queued, m.done, m.servicesPending, m.endpointsPending, m.services, m.endpoints}
}

// note counts a change.
func (m *measures) note(object any) {
	switch object.(type) {
	case *corev1.Service:
		m.services.Inc()
	case *discoveryv1.EndpointSlice:
		m.endpoints.Inc()
	}
	m.queued.SetToCurrentTime()
}

// wait counts a Service if more of its parts wait than before.
func (m *measures) wait(before, now dirt) {
	if now.service && !before.service {
		m.servicesPending.Inc()
	}
	if now.endpoints && !before.endpoints {
		m.endpointsPending.Inc()
	}
}

// waitNoMore records that all waiting Services are being translated.
func (m *measures) waitNoMore() {
	m.servicesPending.Set(0)
	m.endpointsPending.Set(0)
}

// carriedOut records the end of a step, with its beginning and the times of the changes that triggered it.
func (m *measures) carriedOut(begin time.Time, triggers []time.Time) {
	m.done.SetToCurrentTime()
	m.step.Observe(time.Since(begin).Seconds())
	for _, t := range triggers {
		m.programming.Observe(time.Since(t).Seconds())
	}
}

// trigger returns when an EndpointSlice was last changed, as the control plane has recorded it.
func trigger(object any) (at time.Time, known bool) {
	slice, is := object.(*discoveryv1.EndpointSlice)
	if !is {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, slice.Annotations[corev1.EndpointsLastChangeTriggerTime])
	return at, err == nil
}
