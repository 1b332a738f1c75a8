package metrics

import (
	"bytes"
	"io"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// samples gives the samples of a text to client_golang's registry, as a program with that library would.
type samples []sample

type sample struct {
	family *prometheus.Desc
	kind   prometheus.ValueType
	value  float64
	labels []string
}

// samplesOf has the samples of all families; a label that one sample of a family has, all have.
func samplesOf(families map[string]*dto.MetricFamily) (all samples) {
	for name, f := range families {
		var family *prometheus.Desc
		for _, m := range f.Metric {
			var names []string
			s := sample{kind: prometheus.GaugeValue, value: m.GetGauge().GetValue()}
			if f.GetType() == dto.MetricType_COUNTER {
				s.kind, s.value = prometheus.CounterValue, m.GetCounter().GetValue()
			}
			for _, label := range m.Label {
				names = append(names, label.GetName())
				s.labels = append(s.labels, label.GetValue())
			}
			if family == nil {
				family = prometheus.NewDesc(name, f.GetHelp(), names, nil)
			}
			s.family = family
			all = append(all, s)
		}
	}
	return all
}

func (samples) Describe(chan<- *prometheus.Desc) {}

func (all samples) Collect(to chan<- prometheus.Metric) {
	for _, s := range all {
		to <- prometheus.MustNewConstMetric(s.family, s.kind, s.value, s.labels...)
	}
}

// BenchmarkRegistry writes the samples of BenchmarkText with client_golang's registry and encoder
// (docs/design/23-metrics.md has both figures).
func BenchmarkRegistry(b *testing.B) {
	b.ReportAllocs()
	parser := expfmt.NewTextParser(nameScheme)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(full(1000, 10).Text(nil)))
	if err != nil {
		b.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(samplesOf(families))
	for b.Loop() {
		gathered, err := registry.Gather()
		if err != nil {
			b.Fatal(err)
		}
		encoder := expfmt.NewEncoder(io.Discard, expfmt.NewFormat(expfmt.TypeTextPlain))
		for _, f := range gathered {
			if err := encoder.Encode(f); err != nil {
				b.Fatal(err)
			}
		}
	}
}
