package products

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/test/golden"
	"go.yaml.in/yaml/v4"
)

func TestSchema(t *testing.T) {
	golden.Require(t, "testdata/schema.golden.json", string(Schema()))
	schema := decodeSchema(t)
	if faults := schema.check(schema.root, decodeYAML(t, file.Sample), ""); len(faults) != 0 {
		t.Errorf("the schema refuses the sample: %s", strings.Join(faults, "\n"))
	}
}

// faultsOf reads a file and returns its faults.
func faultsOf(t *testing.T, text string) []config.Fault {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	read, err := Format().Read(path)
	if err != nil {
		t.Fatal(err)
	}
	return read.Faults.Sorted()
}

func TestGuide(t *testing.T) {
	golden.Require(t, "../../docs/guide/configuration.md", string(Guide()))
}

// TestSchemaRefuses has one fault in each file, with the place that the schema has to name.
func TestSchemaRefuses(t *testing.T) {
	const service = "interfaces: [{name: eth0}]\nservices: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]%s}]\n%s"
	const lent = "udp: [{name: feed, interface: eth1, address: 192.0.2.11, port: 5000, allow: {user: root}"
	schema := decodeSchema(t)
	for _, c := range []struct{ inService, atTop, Where string }{
		{", portt: 80", "", ".services[0].portt"},
		{", forwarding: dsr", "", ".services[0].forwarding"},
		{", tracking: all", "", ".services[0].tracking"},
		{", affinity: client", "", ".services[0].affinity"},
		{", health: {tcp: {port: 0}}", "", ".services[0].health.tcp.port"},
		{", health: {tcp: {}, jitter: 5}", "", ".services[0].health.jitter"},
		{", health: {http: {status: 2xx}}", "", ".services[0].health.http.status"},
		{", health: {http: {path: /, statuses: 200}}", "", ".services[0].health.http.statuses"},
		{", health: {https: {verify: 1}}", "", ".services[0].health.https.verify"},
		{", health: {udp: {}}", "", ".services[0].health.udp.send"},
		{", health: {exec: {command: [1]}}", "", ".services[0].health.exec.command"},
		{", protocol: [tcp, icmp]", "", ".services[0].protocol"},
		{", table_size: 1000", "", ".services[0].table_size"},
		{"", "timeouts: {udp: 10}", ".timeouts.udp"},
		{"", "timeouts: {udp: 10d}", ".timeouts.udp"},
		{"", "limits: {flows: 1}", ".limits.flows"},
		{"", "metrics: {}", ".metrics.listen"},
		{"", "encapsulation: {source: 10}", ".encapsulation.source"},
		{"", "encapsulation: {gue_port: 0}", ".encapsulation.gue_port"},
		{"", "snat: {ports: any}", ".snat.ports"},
		{"", lent + ", queues: dedicated}]", ".udp[0].queues"},
		{"", lent + ", wait: block}]", ".udp[0].wait"},
		{"", lent + ", on_no_socket: reject}]", ".udp[0].on_no_socket"},
		{"", lent + ", expected_rate: 1G}]", ".udp[0].expected_rate"},
		{"", lent + ", max_queue_delay: 100}]", ".udp[0].max_queue_delay"},
		{"", "udp: [{name: feed, interface: eth1, address: 192.0.2.11, port: 5000}]", ".udp[0].allow"},
	} {
		text := fmt.Sprintf(service, c.inService, c.atTop)
		faults := schema.check(schema.root, decodeYAML(t, []byte(text)), "")
		if len(faults) != 1 || !strings.HasPrefix(faults[0], c.Where+":") {
			t.Errorf("%s\nthe schema says %q, want one fault at %s", text, faults, c.Where)
		}
		if own := faultsOf(t, text); len(own) != 1 {
			t.Errorf("%s\nReading says %v, want one fault", text, own)
		}
	}
	const whole = lent + ", queues: [0, 1], mode: copy, max_queue_delay: 100us, expected_rate: 2500k, tx: true, timestamps: true, on_no_socket: drop, wait: adaptive}]\nudp_socket: /run/udp.sock"
	if faults := append(schema.check(schema.root, decodeYAML(t, []byte(whole)), ""), schema.check(schema.root, decodeYAML(t, []byte(strings.Replace(lent, "user: root", "user: [1000, root], cgroup: /a", 1)+", queues: all, expected_rate: 5}]")), "")...); len(faults) != 0 {
		t.Errorf("of files without faults the schema says %q", faults)
	}
	if faults := schema.check(schema.root, map[string]any{"timeouts": map[string]any{}}, ""); len(faults) != 2 {
		t.Errorf("of a file with timeouts alone the schema says %q, want two missing keys", faults)
	}
}

// validator knows the keywords that Schema uses, and fails on others.
type validator struct {
	t    *testing.T
	root map[string]any
}

func decodeSchema(t *testing.T) *validator {
	t.Helper()
	v := &validator{t: t}
	if err := json.Unmarshal(Schema(), &v.root); err != nil {
		t.Fatal(err)
	}
	return v
}

// decodeYAML is a file as JSON would have it.
func decodeYAML(t *testing.T, text []byte) any {
	t.Helper()
	var raw any
	if err := yaml.Unmarshal(text, &raw); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(raw)
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := json.Unmarshal(asJSON, &value); err != nil {
		t.Fatal(err)
	}
	return value
}

// check returns the schema's faults of a value.
func (v *validator) check(schema any, value any, at string) (faults []string) {
	refuse := func(keyword string) { faults = append(faults, fmt.Sprintf("%s: %s", at, keyword)) }
	if allowed, isBool := schema.(bool); isBool {
		if !allowed {
			refuse("false")
		}
		return faults
	}
	s := schema.(map[string]any)
	number, isNumber := value.(float64)
	text, isText := value.(string)
	items, isList := value.([]any)
	_, isBoolean := value.(bool)
	for keyword, want := range s {
		ok := true
		switch keyword {
		case "$schema", "$defs", "title", "description", "default", "examples", "format", "patternProperties", "additionalProperties":
		case "$ref":
			name := strings.TrimPrefix(want.(string), "#/$defs/")
			faults = append(faults, v.check(v.root["$defs"].(map[string]any)[name], value, at)...)
		case "type":
			_, isMapping := value.(map[string]any)
			ok = map[string]bool{"string": isText, "array": isList, "object": isMapping, "integer": isNumber && number == float64(int64(number)), "boolean": isBoolean}[want.(string)]
		case "dependentRequired":
			if mapping, isMapping := value.(map[string]any); isMapping {
				for key, others := range want.(map[string]any) {
					if _, there := mapping[key]; there {
						faults = append(faults, v.checkMapping(map[string]any{"required": others}, "required", value, at)...)
					}
				}
			}
		case "properties", "required":
			faults = append(faults, v.checkMapping(s, keyword, value, at)...)
		case "items":
			for i, item := range items {
				faults = append(faults, v.check(want, item, fmt.Sprintf("%s[%d]", at, i))...)
			}
		case "anyOf":
			ok = false
			for _, choice := range want.([]any) {
				ok = ok || len(v.check(choice, value, at)) == 0
			}
		case "not":
			ok = len(v.check(want, value, at)) != 0
		case "enum":
			ok = false
			for _, choice := range want.([]any) {
				ok = ok || choice == value
			}
		case "minimum":
			ok = !isNumber || number >= want.(float64)
		case "maximum":
			ok = !isNumber || number <= want.(float64)
		case "minLength":
			ok = !isText || len(text) >= int(want.(float64))
		case "maxLength":
			ok = !isText || len(text) <= int(want.(float64))
		case "minItems":
			ok = !isList || len(items) >= int(want.(float64))
		case "pattern":
			ok = !isText || regexp.MustCompile(want.(string)).MatchString(text)
		default:
			v.t.Fatalf("%s: the test does not know the schema's keyword %q", at, keyword)
		}
		if !ok {
			refuse(keyword)
		}
	}
	return faults
}

// checkMapping is the part of check for the keywords about keys.
func (v *validator) checkMapping(s map[string]any, keyword string, value any, at string) (faults []string) {
	mapping, isMapping := value.(map[string]any)
	if !isMapping {
		return nil
	}
	if keyword == "required" {
		for _, key := range s[keyword].([]any) {
			if _, has := mapping[key.(string)]; !has {
				faults = append(faults, fmt.Sprintf("%s.%s: required", at, key))
			}
		}
		return faults
	}
	patterns, _ := s["patternProperties"].(map[string]any)
next:
	for key, inner := range mapping {
		if schema, known := s[keyword].(map[string]any)[key]; known {
			faults = append(faults, v.check(schema, inner, at+"."+key)...)
			continue
		}
		for pattern, schema := range patterns {
			if regexp.MustCompile(pattern).MatchString(key) {
				faults = append(faults, v.check(schema, inner, at+"."+key)...)
				continue next
			}
		}
		faults = append(faults, v.check(s["additionalProperties"], inner, at+"."+key)...)
	}
	return faults
}
