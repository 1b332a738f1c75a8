package metrics

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shunt-lb/shunt/test/golden"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func pointer(n uint64) *uint64 { return &n }

// example has a value in every field.
func example() *Sample {
	traffic := Traffic{PacketsIn: 10, BytesIn: 1000, PacketsOut: 20, BytesOut: 1 << 60, FlowsCreated: 3}
	return &Sample{
		Balances: true, Version: "1.2.3", GoVersion: "go1.25.0",
		Reloads:         Reloads{Refused: true, Applied: time.Unix(1700000000, 5e8)},
		Conditions:      []Condition{{"no_backend", "error", 2}, {"ports_short", "warning", 0}},
		Overrides:       []Count{{"drain", 1}},
		Interfaces:      []Interface{{"eth0", "native", pointer(7)}, {"eth1", "tcx", nil}},
		Reasons:         []Reason{{"no_service", 5, 500}, {"loop", 0, 0}},
		Sockets:         []Count{{"chosen", 12}, {"no_backend", 0}, {"closed_gone", 3}},
		Flows:           Flows{Limit: 250000, Known: true, All: 9, Established: 4},
		Remembered:      Flows{Limit: 1000, Known: true, All: 8},
		Slots:           []Count{{"transition", 11}, {"marked", 12}},
		SourcePorts:     28232,
		SourceAddresses: []Count{{"ipv4", 1}, {"ipv6", 0}},
		Checks:          Checks{Results: []Count{{"passed", 100}, {"failed", 1}, {"not_made", 0}}, Late: 2},
		States:          []string{"active", "down"},
		Services: []Service{
			{Name: "web", Traffic: traffic, Counted: true, Open: 4, Members: []Member{
				{Backend: 0, Name: `the "big" one`, State: "active", Weight: 0.5, Checked: true, Up: true, Changes: 3},
				{Backend: 1, Name: "[2001:db8::2]:8080", State: "down", Checked: true, Changes: 1}}},
			{Name: "dns", Members: []Member{{Backend: 0, Name: "10.0.0.2:8080", State: "active", Weight: 65535}}},
			{Name: "idle"},
		},
		Lends: true, LeasesRefused: []Count{{"busy", 2}},
		Leases: []Lease{{Name: "feed", Held: true, Given: 2, Resumed: 1, Ended: []Count{{"died", 1}}, Matched: 15, Delivered: 4, Passed: 3, FillEmpty: 2, RingFull: 1, NoSocket: 5,
			Invalid: 11, TxInvalid: 12, Claims: &LeaseClaims{Stale: 13, TxShort: 14, Kicks: 15, Wakeups: 16},
			Queues: []LeaseQueue{{"0", 5, 64, 60}}, Counts: []QueueCounts{{"0", 14, 4, 3, 2, 1, 4}, {"1", 1, 0, 0, 0, 0, 1}}}, {Name: "idle"}},
		Accelerates: true, PodAddresses: []Count{{"qdisc", 1}, {"taken", 2}}, PodNetworks: []Count{{"route", 1}, {"taken", 2}}, PodPackets: []Count{{"nat", 3}, {"taken", 40}}, PodBytes: []Count{{"nat", 300}, {"taken", 4000}},
		PairsSockets: true, SocketsPaired: 4, SocketMessages: []Count{{"full", 3}, {"taken", 90}}, SocketBytes: []Count{{"full", 300}, {"taken", 9000}}, SocketConnections: []Count{{"joined", 2}},
		Pods:     []Pod{{Interface: "cali1", Packets: []Count{{"taken", 40}}, Bytes: []Count{{"taken", 4000}}}, {Interface: "cali2"}},
		Steers:   []Steer{{"dns", "taken", []Count{{"taken", 7}}, []Count{{"taken", 700}}}, {"db", "down", nil, nil}},
		Backends: []Backend{{Address: "10.0.0.2:8080", Traffic: traffic, Counted: true, Open: 4}, {Address: "[2001:db8::2]:8080"}},
		Guard: &Guard{Features: []GuardFeature{
			{Name: "protection", Failed: true, Lost: []Count{{"audited", 0}, {"denied", 0}}},
			{Name: "detection", On: true, Rules: 34, Events: 1000, Missed: 1, Alert: 3, Lost: []Count{{"exec", 0}, {"often", 9}, {"rare", 0}}}},
			SwitchedOff: []string{"decoys", "protection/data"}, Thinned: []GuardThinned{{"open", 0.0625, 150}, {"exec", 1, 4}}, Lines: []GuardLines{{"alert", 3, 0}, {"note", 40, 5}},
			Decoys: []Count{{"stand", 8}, {"changed", 1}}, Connections: []Count{{"denied", 7}, {"audited", 0}}, Enforced: true, Denied: 5, Audited: 6, Unheard: 2, Unexamined: 1, NoRoom: 3,
			Opens: &GuardOpens{Waited: 40, Denied: 3, Audited: 2, Late: 1, Unsure: 6, Unread: 8, Took: 0.25, Files: 7}, MaxCPU: 0.03, Throttled: 12},
	}
}

// nameScheme is the rule for names that Prometheus' parser applies.
const nameScheme = model.LegacyValidation

// parse reads an answer as Prometheus does.
func parse(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(nameScheme)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("the answer is not Prometheus' text format: %v\n%s", err, text)
	}
	return families
}

func TestText(t *testing.T) {
	text := string(example().Text(nil))
	golden.Require(t, "testdata/example.golden", text)
	families := parse(t, text)
	for _, f := range Families {
		if got := families[f.Name]; got == nil {
			t.Errorf("%s has no sample", f.Name)
		} else if strings.ToLower(got.GetType().String()) != string(f.Kind) || got.GetHelp() != f.Help {
			t.Errorf("%s is read as %s %q", f.Name, got.GetType(), got.GetHelp())
		}
	}
	if name := families["shunt_service_backend_weight"].Metric[0].Label[2].GetValue(); name != `the "big" one` {
		t.Errorf("a name with quotes is read as %s", name)
	}
}

// TestNotKnown: an unknown value has no sample, and is not 0.
func TestNotKnown(t *testing.T) {
	families := parse(t, string((&Sample{Balances: true, Interfaces: []Interface{{Name: "eth0"}}, Services: []Service{{Members: []Member{{}}}}, Backends: []Backend{{}}}).Text(nil)))
	for _, name := range []string{"shunt_flows", "shunt_flows_established", "shunt_remembered_flows", "shunt_interface_missed_frames_total",
		"shunt_service_flows_open", "shunt_backend_flows_open", "shunt_service_backend_health", "shunt_service_backend_health_changes_total"} {
		if got := families[name].GetMetric(); len(got) > 0 {
			t.Errorf("%s is %v", name, got)
		}
	}
}

// TestNoBalancer: a node without a balancer has no samples of the balancer's families.
func TestNoBalancer(t *testing.T) {
	families := parse(t, string((&Sample{Version: "1.2.3", GoVersion: "go1.25.0", Conditions: []Condition{{"no_backend", "error", 2}}}).Text(nil)))
	if len(families) != len(nodeFamilies) || families["shunt_build_info"] == nil {
		t.Errorf("there are %d families, want %d: %v", len(families), len(nodeFamilies), families)
	}
}

// TestLint has the checks of `promtool check metrics`.
func TestLint(t *testing.T) {
	problems, err := promlint.New(strings.NewReader(string(example().Text(nil)))).Lint()
	must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestLabels: each sample has the labels that the reference page names, and each label value once.
func TestLabels(t *testing.T) {
	families := parse(t, string(example().Text(nil)))
	for _, f := range Families {
		seen := map[string]bool{}
		for _, m := range families[f.Name].GetMetric() {
			var names []string
			for _, l := range m.Label {
				names = append(names, l.GetName())
			}
			if fmt.Sprint(names) != fmt.Sprint(f.Labels) {
				t.Errorf("a sample of %s has the labels %v, want %v", f.Name, names, f.Labels)
			}
			if key := fmt.Sprint(m.Label); seen[key] {
				t.Errorf("%s has two samples of %s", f.Name, key)
			} else {
				seen[key] = true
			}
		}
	}
}

// seriesOf counts the series of services and backends.
func seriesOf(families map[string]*dto.MetricFamily) (n uint64) {
	for name, f := range families {
		if strings.HasPrefix(name, "shunt_service_") || strings.HasPrefix(name, "shunt_backend_") {
			n += uint64(len(f.Metric))
		}
	}
	return n
}

// full is so many services, of which each has so many backends of its own and one that all share.
func full(services, backends int) *Sample {
	s := &Sample{Balances: true, States: []string{"active", "down"}, Backends: []Backend{{Address: "shared", Counted: true}}}
	for i := range services {
		one := Service{Name: fmt.Sprint("service", i), Counted: true, Members: []Member{{Name: "shared", Checked: true}}}
		for j := range backends {
			address := fmt.Sprintf("%d.%d", i, j)
			one.Members = append(one.Members, Member{Backend: len(s.Backends), Name: address, Checked: true})
			s.Backends = append(s.Backends, Backend{Address: address, Counted: true})
		}
		s.Services = append(s.Services, one)
	}
	return s
}

// TestSeriesMax: services are left out from the end until the bound holds, with the backends that no
// other service has, and the answer counts both.
func TestSeriesMax(t *testing.T) {
	all := full(4, 2)
	each := seriesOf(parse(t, string(all.Text(nil))))
	if all.series != each || all.servicesLeftOut != 0 {
		t.Errorf("without a bound: counted %d series, there are %d, and %d services are left out", all.series, each, all.servicesLeftOut)
	}
	for bound := uint64(1); bound <= each; bound++ {
		s := full(4, 2)
		s.SeriesMax = bound
		families := parse(t, string(s.Text(nil)))
		got := seriesOf(families)
		if got > bound || got != s.series || got+s.seriesLeftOut != each {
			t.Fatalf("bound %d of %d: %d series, counted %d, left out %d", bound, each, got, s.series, s.seriesLeftOut)
		}
		if left := 4 - len(families["shunt_service_flows_created_total"].GetMetric()); uint64(left) != s.servicesLeftOut {
			t.Errorf("bound %d: %d services are left out, counted %d", bound, left, s.servicesLeftOut)
		}
		have := len(families["shunt_backend_flows_created_total"].GetMetric())
		if want := len(s.Services)*2 + min(len(s.Services), 1); have != want {
			t.Errorf("bound %d: %d services and %d backends, want %d", bound, len(s.Services), have, want)
		}
	}
}

// TestReference makes the reference page of the metrics from Families.
func TestReference(t *testing.T) {
	var out strings.Builder
	out.WriteString("# Metrics\n\nWhat `metrics.listen` answers at `/metrics`. Names, types, units and labels [stay](../guide/compatibility.md).\n" +
		"Beside these there are the usual `go_` and `process_` metrics of the daemon. [How to use them](../guide/metrics.md).\n\n" +
		"This page is made from `internal/metrics/families.go` by `go test ./internal/metrics -update`.\n\n" +
		"`shunt guard run --metrics` answers those whose names begin with `shunt_guard_`, with `shunt_build_info` and `shunt_config_`.\n\n" +
		"| name | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range Families {
		if strings.ContainsAny(f.Help, "\\\n|") {
			t.Errorf("the help of %s has a character that the format, or the page, would take for its own", f.Name)
		}
		labels := ""
		if len(f.Labels) > 0 {
			labels = "`" + strings.Join(f.Labels, "`, `") + "`"
		}
		fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", f.Name, f.Kind, labels, f.Help)
	}
	golden.Require(t, "../../docs/reference/metrics.md", out.String())
}

// TestGuide: the guide names no metric that does not exist.
func TestGuide(t *testing.T) {
	guide, err := os.ReadFile("../../docs/guide/metrics.md")
	must(t, err)
	known := map[string]bool{}
	for _, f := range Families {
		known[f.Name] = true
	}
	for _, word := range strings.FieldsFunc(string(guide), func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }) {
		if strings.HasPrefix(word, "shunt_") && !known[word] {
			t.Errorf("docs/guide/metrics.md names %s, which does not exist", word)
		}
	}
}

func BenchmarkText(b *testing.B) {
	b.ReportAllocs()
	size := 0
	whole := full(1000, 10)
	for b.Loop() {
		s := *whole
		size = len(s.Text(make([]byte, 0, size)))
	}
	b.SetBytes(int64(size))
}
