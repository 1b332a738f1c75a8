package daemon

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/value"
)

// fieldChanges has a change of each field of the configuration, keyed as the schema has it: the text
// before, the text after, and words that the reload has to print about it. The text goes to the field's
// place: the top, the interface, the service, its health or the backend.
var fieldChanges = map[string][3]string{
	"interfaces":    {"", "", "+ interface eth1: attach auto"}, // see oneFile
	"services":      {"", "", "+ service mail: 1 frontend, 1 backend"},
	"defaults":      {"", "defaults: {forwarding: nat-destination}", "forwarding from nat to nat-destination"},
	"timeouts":      {"", "timeouts: {udp: 3m}", "~ timeouts.udp: 5m -> 3m"},
	"limits":        {"", "limits: {flows: 3000}", "limits.flows from 250000 to 3000 needs restart"},
	"snat":          {"", "snat: {addresses: 10.0.0.1}", "~ snat.addresses: addresses of the interface to the backend -> 10.0.0.1"},
	"encapsulation": {"", "encapsulation: {gue_port: 7}", "~ encapsulation.gue_port: 6080 -> 7"},

	"decapsulation": {"", "decapsulation: {from: 10.0.0.0/24}", "~ decapsulation.from: none -> 10.0.0.0/24"},

	"sockets": {"", "sockets: {cgroup: /sys/fs/cgroup}", "~ sockets.cgroup: none -> /sys/fs/cgroup"},

	"stamp_probes": {"", "stamp_probes: true", "~ stamp_probes: false -> true"},

	"pools": {"", "", "backend 10.0.0.3 added"}, // see poolFile

	"interface.name":   {"name: eth0", "name: eth2", "+ interface eth2: attach auto"},
	"interface.attach": {"", "attach: tc", "~ interface eth0: attach auto -> attach tc"},

	"defaults.forwarding": {"", "defaults: {forwarding: dsr-l2}", "forwarding from nat to dsr-l2"},
	"defaults.announce":   {"", "defaults: {announce: none}", "announce from l2 to none"},
	"defaults.health":     {"", "defaults: {health: {tcp: {}}}", "health from none to tcp"},

	"service.name":                     {"name: web", "name: www", "- service web: 1 frontend, 1 backend"},
	"service.address":                  {"address: 192.0.2.10", "address: 192.0.2.11", "frontend tcp 192.0.2.11:80 added"},
	"service.port":                     {"port: 80", "port: 81", "frontend tcp 192.0.2.10:81 added"},
	"service.protocol":                 {"", "protocol: udp", "frontend udp 192.0.2.10:80 added"},
	"service.forwarding":               {"", "forwarding: dsr-ipip", "forwarding from nat to dsr-ipip"},
	"service.tracking":                 {"affinity: client-ip", "affinity: client-ip, tracking: none", "tracking from auto to none"},
	"service.affinity":                 {"", "affinity: client-ip", "affinity_timeout from none to 3h"},
	"service.affinity_timeout":         {"affinity: client-ip", "affinity: client-ip, affinity_timeout: 5m", "affinity_timeout from 3h to 5m"},
	"service.hash":                     {"", "hash: addresses", "hash from flow to addresses"},
	"service.announce":                 {"", "announce: none", "announce from l2 to none"},
	"service.on_down":                  {"", "on_down: close", "on_down from keep to close"},
	"service.on_no_backend":            {"on_no_backend: drop", "on_no_backend: reject", "on_no_backend from drop to reject"},
	"service.allow_from":               {"", "allow_from: 10.0.0.0/8", "allow_from: 1 added"},
	"service.deny_from":                {"", "deny_from: 10.0.0.0/8", "deny_from: 1 added"},
	"service.max_new_flows_per_source": {"", "max_new_flows_per_source: 10/s", "max_new_flows_per_source from none to 10/s"},
	"service.max_flows":                {"", "max_flows: 10", "max_flows from none to 10"},
	"service.tcp_mss":                  {"", "tcp_mss: 1300", "tcp_mss from none to 1300"},
	"service.table_size":               {"", "table_size: 251", "table resized from 4093 to 251 slots"},
	"service.backends":                 {"", "", "backend 10.0.0.3 added"}, // see oneFile
	"service.pool":                     {"", "", "pool from one to two"},   // see poolFile
	"service.health":                   {"", "health: {tcp: {}}", "health from none to tcp"},

	"pool.name":     {"", "", "pool from one to two"}, // see poolFile
	"pool.backends": {"", "", "backend 10.0.0.3 added"},
	"pool.health":   {"", "", "health from none to tcp"},

	"backend.address": {"address: 10.0.0.2", "address: 10.0.0.4", "backend 10.0.0.4 added"},
	"backend.dns":     {"dns: a.example.org", "dns: b.example.org", "dns from a.example.org (weight 1, max 16) to b.example.org (weight 1, max 16)"},
	"backend.max":     {"dns: a.example.org", "dns: a.example.org, max: 3", "dns from a.example.org (weight 1, max 16) to a.example.org (weight 1, max 3)"},
	"backend.port":    {"", "port: 8080", "backend 10.0.0.2:8080 added"},
	"backend.weight":  {"", "weight: 5", "weight of 10.0.0.2 from 1 to 5"},
	"backend.backup":  {"", "backup: true", "backend 10.0.0.2: backup from false to true"},
	"backend.health":  {"", "health: {port: 9}", "backend 10.0.0.2: health.port from that of the service's health to 9"},
	"backend.name":    {"name: blue", "name: green", "backend 10.0.0.2: name from blue to green"},

	"checkAt.address": {"health: {address: 10.9.0.2}", "health: {address: 10.9.0.3}", "backend 10.0.0.2: health.address from 10.9.0.2 to 10.9.0.3"},
	"checkAt.port":    {"health: {address: 10.9.0.2}", "health: {address: 10.9.0.2, port: 7}", "backend 10.0.0.2: health.port from that of the service's health to 7"},

	"health.enabled":    {"tcp: {}", "enabled: false", "health from tcp to none"},
	"health.tcp":        {"grpc: {}", "tcp: {}", "health from grpc to tcp"},
	"health.http":       {"tcp: {}", "http: {}", "health from tcp to http"},
	"health.https":      {"tcp: {}", "https: {}", "health from tcp to https"},
	"health.grpc":       {"tcp: {}", "grpc: {}", "health from tcp to grpc"},
	"health.udp":        {"tcp: {}", "udp: {send: ping}", "health from tcp to udp"},
	"health.exec":       {"tcp: {}", "exec: {command: /bin/true}", "health from tcp to exec"},
	"health.interval":   {"tcp: {}", "tcp: {}, interval: 5s", "health.interval from 2s to 5s"},
	"health.timeout":    {"tcp: {}", "tcp: {}, timeout: 500ms", "health.timeout from 1s to 500ms"},
	"health.fall":       {"tcp: {}", "tcp: {}, fall: 7", "health.fall from 3 to 7"},
	"health.rise":       {"tcp: {}", "tcp: {}, rise: 7", "health.rise from 2 to 7"},
	"health.jitter":     {"tcp: {}", "tcp: {}, jitter: 7%", "health.jitter from 5% to 7%"},
	"health.slow_start": {"tcp: {}", "tcp: {}, slow_start: 7s", "health.slow_start from none to 7s"},
	"health.panic":      {"tcp: {}", "tcp: {}, panic: 7%", "health.panic from 0% to 7%"},

	"tcpCheck.port":          {"tcp: {}", "tcp: {port: 81}", "health.tcp.port from the backend's to 81"},
	"httpCheck.port":         {"http: {}", "http: {port: 81}", "health.http.port from the backend's to 81"},
	"httpCheck.path":         {"http: {}", "http: {path: /up}", "health.http.path from / to /up"},
	"httpCheck.host":         {"http: {}", "http: {host: a.example}", "health.http.host from address and port to a.example"},
	"httpCheck.status":       {"http: {}", "http: {status: [200, 301-302]}", "health.http.status from 200-399 to 200, 301-302"},
	"httpCheck.body":         {"http: {}", "http: {body: ready}", `health.http.body from anything to "ready"`},
	"httpsCheck.port":        {"https: {}", "https: {port: 81}", "health.https.port from the backend's to 81"},
	"httpsCheck.path":        {"https: {}", "https: {path: /up}", "health.https.path from / to /up"},
	"httpsCheck.host":        {"https: {}", "https: {host: a.example}", "health.https.host from address and port to a.example"},
	"httpsCheck.status":      {"https: {}", "https: {status: 200}", "health.https.status from 200-399 to 200"},
	"httpsCheck.body":        {"https: {}", "https: {body: ready}", `health.https.body from anything to "ready"`},
	"httpsCheck.server_name": {"https: {}", "https: {server_name: a.example}", "health.https.server_name from that of host to a.example"},
	"httpsCheck.verify":      {"https: {}", "https: {verify: false}", "health.https.verify from true to false"},
	"httpsCheck.ca_file":     {"https: {}", "https: {ca_file: /etc/ca.pem}", "health.https.ca_file from the machine's to /etc/ca.pem"},
	"grpcCheck.port":         {"grpc: {}", "grpc: {port: 81}", "health.grpc.port from the backend's to 81"},
	"grpcCheck.service":      {"grpc: {}", "grpc: {service: shop}", "health.grpc.service from the server as a whole to shop"},
	"udpCheck.port":          {"udp: {send: ping}", "udp: {send: ping, port: 81}", "health.udp.port from the backend's to 81"},
	"udpCheck.send":          {"udp: {send: ping}", "udp: {send: pong}", `health.udp.send from "ping" to "pong"`},
	"udpCheck.expect":        {"udp: {send: ping}", "udp: {send: ping, expect: pong}", `health.udp.expect from anything to "pong"`},
	"udpCheck.silence":       {"udp: {send: ping}", "udp: {send: ping, silence: pass}", "health.udp.silence from fail to pass"},
	"execCheck.command":      {"exec: {command: /bin/true}", "exec: {command: [/bin/true, x]}", `health.exec.command from ["/bin/true"] to ["/bin/true" "x"]`},

	"timeouts.tcp_established": {"", "timeouts: {tcp_established: 3h}", "~ timeouts.tcp_established: 2h4m -> 3h"},
	"timeouts.tcp_handshake":   {"", "timeouts: {tcp_handshake: 5s}", "~ timeouts.tcp_handshake: 10s -> 5s"},
	"timeouts.tcp_half_closed": {"", "timeouts: {tcp_half_closed: 1h}", "~ timeouts.tcp_half_closed: 4m -> 1h"},
	"timeouts.tcp_closing":     {"", "timeouts: {tcp_closing: 5s}", "~ timeouts.tcp_closing: 10s -> 5s"},
	"timeouts.udp":             {"", "timeouts: {udp: 150s}", "~ timeouts.udp: 5m -> 2m30s"},
	"timeouts.settle":          {"", "timeouts: {settle: 1m}", "~ timeouts.settle: 15m -> 1m"},

	"limits.flows":      {"", "limits: {flows: 3000}", "limits.flows from 250000 to 3000 needs restart"},
	"limits.services":   {"", "limits: {services: 30}", "limits.services from 1000 to 30 needs restart"},
	"limits.backends":   {"", "limits: {backends: 3000}", "limits.backends from 4096 to 3000 needs restart"},
	"limits.slots":      {"", "limits: {slots: 30000}", "limits.slots from 4194304 to 30000 needs restart"},
	"limits.remembered": {"", "limits: {remembered: 3000}", "limits.remembered from 250000 to 3000 needs restart"},
	"limits.filters":    {"", "limits: {filters: 3000}", "limits.filters from 10000 to 3000 needs restart"},

	"snat.addresses": {"snat: {addresses: 10.0.0.1}", "snat: {addresses: 10.0.0.9}", "~ snat.addresses: 10.0.0.1 -> 10.0.0.9"},
	"snat.ports":     {"", "snat: {ports: 1024-9999}", "~ snat.ports: ports outside net.ipv4.ip_local_port_range -> 1024-9999"},

	"sockets.cgroup": {"sockets: {cgroup: /sys/fs/cgroup}", "sockets: {cgroup: /sys/fs/cgroup/a}", "~ sockets.cgroup: /sys/fs/cgroup -> /sys/fs/cgroup/a"},

	"decapsulation.from": {"decapsulation: {from: 10.0.0.0/24}", "decapsulation: {from: [10.0.0.2, 10.0.0.3]}", "~ decapsulation.from: 10.0.0.0/24 -> 10.0.0.2/32, 10.0.0.3/32"},

	"encapsulation.source":   {"", `encapsulation: {source: [10.9.0.0/24, "2001:db8::1"]}`, "~ encapsulation.source: addresses of the interface to the backend -> 10.9.0.0/24, 2001:db8::1/128"},
	"encapsulation.gue_port": {"", "encapsulation: {gue_port: 6081}", "~ encapsulation.gue_port: 6080 -> 6081"},
}

// TestReloadShowsEveryField changes each field of the schema, and requires a line about the change,
// or one that the daemon has to be restarted for it.
func TestReloadShowsEveryField(t *testing.T) {
	fields := schemaFields(t)
	for _, field := range slices.Sorted(maps.Keys(fieldChanges)) {
		if !fields[field] {
			t.Errorf("%s is not in the schema", field)
		}
	}
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		t.Run(field, func(t *testing.T) {
			change, ok := fieldChanges[field]
			if !ok {
				t.Fatal("nobody has said what a reload shows when this field changes: add it to fieldChanges")
			}
			before, after := oneFile(t, field, change[0], false), oneFile(t, field, change[1], true)
			settings := value.DifferentSettings(before.Node.Settings(), after.Node.Settings())
			shown := differenceOf(t, before, after).String()
			if refused := limitsRefused(settings); refused != nil {
				shown = refused.Error()
			}
			for _, s := range settings {
				shown += "\n" + s.String()
			}
			if !strings.Contains(shown, change[2]) {
				t.Errorf("the reload shows\n%s\nwant %q", shown, change[2])
			}
			if same := differenceOf(t, after, after); !same.Empty() {
				t.Errorf("without a change it shows %s", same)
			}
		})
	}
}

// schemaFields returns the fields that may be written, as in "service.name"; fields of a whole file are
// without a dot.
func schemaFields(t *testing.T) map[string]bool {
	type mapping struct {
		Properties map[string]struct {
			Not bool `json:"not"` // the name is known, and refused
		} `json:"properties"`
	}
	var schema struct {
		mapping
		Defs map[string]mapping `json:"$defs"`
	}
	if err := json.Unmarshal(config.NewFormat(file.Part).Schema("a test"), &schema); err != nil {
		t.Fatal(err)
	}
	fields := map[string]bool{}
	add := func(prefix string, m mapping) {
		for name, property := range m.Properties {
			if !property.Not {
				fields[prefix+name] = true
			}
		}
	}
	add("", schema.mapping)
	for name, def := range schema.Defs {
		add(name+".", def)
	}
	if len(fields) < 50 {
		t.Fatalf("the schema has only the fields %v", fields)
	}
	return fields
}

// oneFile returns the configuration of a file with this text for one field. A list has one item more
// after its change.
func oneFile(t *testing.T, field, written string, changed bool) model.Config {
	within, _, inside := strings.Cut(field, ".")
	// with returns a mapping's keys, and the text if the field is in that mapping.
	with := func(mapping, keys string) string {
		if within != mapping || !inside || written == "" {
			return keys
		}
		all := strings.Split(keys, ", ")
		key, _, _ := strings.Cut(written, ":")
		all = slices.DeleteFunc(all, func(k string) bool { return strings.HasPrefix(k, key+":") })
		return strings.Join(append(all, written), ", ")
	}
	service, atTop := with("service", "name: web, address: 192.0.2.10, port: 80"), ""
	switch {
	case within == "health" || strings.HasSuffix(within, "Check"):
		service += ", health: {" + written + "}"
	case !inside || !slices.Contains([]string{"interface", "service", "backend"}, within):
		atTop = written
	}
	backend := with("backend", "address: 10.0.0.2")
	if strings.HasPrefix(written, "dns:") { // instead of an address
		backend = written
	}
	if within == "checkAt" {
		backend, atTop = "address: 10.0.0.2, "+written, ""
	}
	more := func(list, item string) string {
		if changed && field == list {
			return item
		}
		return ""
	}
	text := fmt.Sprintf("interfaces: [{%s}%s]\nservices:\n- {%s, backends: [{%s}%s]}%s\n%s\n",
		with("interface", "name: eth0"), more("interfaces", ", {name: eth1}"),
		service, backend, more("service.backends", ", {address: 10.0.0.3}"),
		more("services", "\n- {name: mail, address: 192.0.2.20, port: 25, backends: [{address: 10.0.0.2}]}"), atTop)
	if field == "pools" || within == "pool" || field == "service.pool" {
		text = poolFile(field, changed)
	}
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	loaded, faults, err := file.Load(path)
	if err != nil || config.HasErrors(faults) {
		t.Fatalf("%s\n%v %v", text, faults, err)
	}
	return loaded
}

// poolFile returns a file whose service has its backends from a pool.
func poolFile(field string, changed bool) string {
	pool, health, backends := "one", "", "{address: 10.0.0.2}"
	if changed {
		switch field {
		case "pool.name", "service.pool":
			pool = "two"
		case "pool.health":
			health = ", health: {tcp: {}}"
		default:
			backends += ", {address: 10.0.0.3}"
		}
	}
	return fmt.Sprintf("interfaces: [{name: eth0}]\npools: [{name: %s%s, backends: [%s]}]\nservices: [{name: web, address: 192.0.2.10, port: 80, pool: %s}]\n",
		pool, health, backends, pool)
}

// differenceOf returns the difference for the data plane.
func differenceOf(t *testing.T, before, after model.Config) reconcile.Difference {
	limits := before.Limits
	limits.Slots = min(limits.Slots, 100_000) // the fake has them all in memory
	desired := func(c model.Config) reconcile.Desired {
		return reconcile.Desired{Services: model.Shared(c.Services), NATSources: c.SNAT.Addresses, Limits: limits, Settle: c.Timeouts.Settle}
	}
	r := reconcile.New(fake.New(limits))
	_, err := r.Apply(desired(before))
	difference, failed := r.Plan(desired(after))
	if err := cmp.Or(err, failed); err != nil {
		t.Fatal(err)
	}
	return difference
}
