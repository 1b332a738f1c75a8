package net

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/api/v1/shuntv1connect"
	"github.com/shunt-lb/shunt/internal/lab"
)

// scraped is the answer to a scrape.
type scraped map[string]*dto.MetricFamily

// scrape fetches the metrics, on the balancer itself.
func (b *bed) scrape(address string) (scraped, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	answer, err := b.Balancer.HTTPClient(false).Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %s: %s: %w", answer.Status, text, err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	return parser.TextToMetricFamilies(strings.NewReader(string(text)))
}

// value is the value of the sample with these labels, as in `service="web"`, in any order; ok reports whether it
// exists.
func (s scraped) value(name string, labels ...string) (value float64, ok bool) {
	slices.Sort(labels)
	for _, m := range s[name].GetMetric() {
		var have []string
		for _, l := range m.Label {
			have = append(have, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
		}
		slices.Sort(have)
		if strings.Join(have, ",") == strings.Join(labels, ",") {
			return m.GetCounter().GetValue() + m.GetGauge().GetValue(), true
		}
	}
	return 0, false
}

// wants compares samples, written as "name{labels}", with values.
func (s scraped) wants(want map[string]float64) error {
	for sample, value := range want {
		name, rest, _ := strings.Cut(sample, "{")
		var labels []string
		if rest = strings.TrimSuffix(rest, "}"); rest != "" {
			labels = strings.Split(rest, ",")
		}
		if got, ok := s.value(name, labels...); !ok || got != value {
			return fmt.Errorf("%s is %v (there: %t), want %v", sample, got, ok, value)
		}
	}
	return nil
}

// watch begins a Watch of the API.
func (b *bed) watch(t *testing.T) (events chan *shuntv1.WatchResponse) {
	t.Helper()
	client := shuntv1connect.NewStatusServiceClient(b.http(), "http://shunt")
	stream, err := client.Watch(t.Context(), connect.NewRequest(&shuntv1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	events = make(chan *shuntv1.WatchResponse, 1000)
	go func() {
		defer close(events)
		for stream.Receive() {
			events <- stream.Msg()
		}
	}()
	if first := <-events; first.GetEvent() != "watching" {
		t.Fatalf("the stream begins with %v", first)
	}
	return events
}

// TestMetrics: a scrape has the figures of status, follows the backends' states, and moves with a reload; each
// change of health is an event, too.
func TestMetrics(t *testing.T) {
	b, w := healthBed(t)
	one := b.Backends[0]
	first, second := "127.0.0.1:9470", netip.AddrPortFrom(b.Balancer.Addr4(), 9471).String()
	file := b.healthFile("", "")
	b.write(file + "metrics: {listen: \"" + first + "\"}\n")
	b.start()
	b.isServed(t, "at start", b.Backends...)
	events := b.watch(t)

	var s scraped
	eventually(t, 30*time.Second, "counted flows", func() (err error) {
		if s, err = b.scrape(first); err != nil {
			return err
		}
		return s.wants(map[string]float64{`shunt_service_flows_open{service="web"}`: 0})
	})
	for _, service := range b.status().Services {
		label := fmt.Sprintf("service=%q", service.Name)
		if err := s.wants(map[string]float64{
			"shunt_service_packets_total{direction=\"in\"," + label + "}": float64(service.PacketsIn),
			"shunt_service_flows_created_total{" + label + "}":            float64(service.FlowsCreated),
			"shunt_service_backends{" + label + ",state=\"active\"}":      4, // two backends, of both families
		}); err != nil {
			t.Error(err)
		}
	}
	if err := s.wants(map[string]float64{
		"shunt_config_last_reload_successful":                      1,
		"shunt_metrics_services_left_out":                          0,
		"shunt_flows_limit":                                        10000,
		`shunt_reason_packets_total{reason="martian"}`:             0,
		`shunt_conditions{code="config_refused",severity="error"}`: 0,
		`shunt_conditions{code="attach_failed",severity="error"}`:  0,
		`shunt_health_checks_total{result="not_made"}`:             0,
		`shunt_overrides{kind="drain"}`:                            0,
		`shunt_slots_unsettled{state="transition"}`:                0,
		`shunt_source_addresses{family="ipv4"}`:                    1,
		`shunt_interface_info{interface="eth0",mode="native"}`:     1,
		`shunt_service_backends{service="web",state="down"}`:       0,
	}); err != nil {
		t.Error(err)
	}

	w.shut(t, one)
	backend := at(one.Addr4(), 8080)
	member := fmt.Sprintf(`{backend=%q,name=%q,service="web"}`, backend, backend)
	eventually(t, 20*time.Second, "a backend that is down in the metrics", func() error {
		s, err := b.scrape(first)
		if err != nil {
			return err
		}
		if failed, _ := s.value("shunt_health_checks_total", `result="failed"`); failed < 2 {
			return fmt.Errorf("%v checks have failed", failed)
		}
		return s.wants(map[string]float64{
			"shunt_service_backend_active" + member:               0,
			"shunt_service_backend_weight" + member:               0,
			"shunt_service_backend_health" + member:               0,
			"shunt_service_backend_health_changes_total" + member: 2, // from waiting, and from up
			`shunt_service_backends{service="web",state="down"}`:  2,
		})
	})
	for event := range events {
		if h := event.GetHealth(); h.GetService() == "web" && h.GetBackend() == backend {
			if event.Event != "health" || h.From != "up" || h.To != "down" || h.Cause != "tcp connect: connection refused" || h.Results != 2 {
				t.Errorf("event %v", event)
			}
			break
		}
	}

	// Another address, and one in use.
	b.reload(file + "metrics: {listen: \"" + second + "\"}\n")
	if _, err := b.scrape(second); err != nil {
		t.Errorf("after a reload: %v", err)
	}
	if _, err := b.scrape(first); err == nil {
		t.Error("the address before is still answered")
	}
	taken, err := b.Balancer.Listen("tcp", first)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	b.write(file + "metrics: {listen: \"" + first + "\"}\n")
	code, out := b.shunt("reload", "--socket", b.socket)
	if code != 1 || !strings.Contains(out, "open metrics.listen, "+first+": address already in use; stop the program that listens there") {
		t.Errorf("a reload to an address that is taken: exit code %d:\n%s", code, out)
	}
	if s, err := b.scrape(second); err != nil {
		t.Errorf("after a reload that was refused: %v", err)
	} else if err := s.wants(map[string]float64{"shunt_config_last_reload_successful": 0}); err != nil {
		t.Error(err)
	}
	b.reload(file)
	if _, err := b.scrape(second); err == nil {
		t.Error("metrics are answered, though the file has none")
	}
}

// TestMetricsAddressTaken: a start that cannot open the address fails with a message, and leaves nothing.
func TestMetricsAddressTaken(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	taken, err := b.Balancer.Listen("tcp", "127.0.0.1:9470")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	b.write(b.file(settings{}) + "metrics: {listen: \"127.0.0.1:9470\"}\n")
	code, out := b.shunt("run", "--config", b.path, "--instance", b.instance, "--socket", b.socket)
	if code != 1 || !strings.Contains(out, "open metrics.listen, 127.0.0.1:9470: address already in use") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	if code, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket); code == 0 {
		t.Errorf("something is left:\n%s", out)
	}
}
