package file

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/settings"
	"github.com/shunt-lb/shunt/internal/value"
)

var update = flag.Bool("update", false, "rewrite golden files")

var compareAddresses = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
}

// golden compares with a file, or rewrites it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatalf("%v; go test -update writes it", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-file +now); go test -update rewrites it:\n%s", name, diff)
	}
}

// write puts files into a directory of the test's and returns it.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func load(t *testing.T, path string) (model.Config, []config.Fault) {
	t.Helper()
	have, faults, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return have, faults
}

// TestFaults reads every file of testdata/bad and compares all its faults.
func TestFaults(t *testing.T) {
	names, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(names) < 10 {
		t.Fatalf("found %d bad files, %v", len(names), err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			_, faults := load(t, name)
			if len(faults) == 0 {
				t.Error("no faults in a bad file")
			}
			checkPositions(t, name, faults)
			var b bytes.Buffer
			if err := config.Render(&b, faults); err != nil {
				t.Fatal(err)
			}
			golden(t, strings.TrimSuffix(name, ".yaml")+".golden", b.Bytes())
		})
	}
}

// checkPositions checks that each fault lies within its file, and that the text is there.
func checkPositions(t *testing.T, name string, faults []config.Fault) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.TrimPrefix(string(data), "\uFEFF")
	lines := strings.Split(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text), "\n")
	last := 0
	for _, f := range faults {
		if f.Line == 0 {
			continue
		}
		if f.Line < last {
			t.Errorf("%s comes after line %d", f, last)
		}
		last = f.Line
		if f.Line > len(lines) {
			t.Errorf("%s: the file has %d lines", f, len(lines))
			continue
		}
		if columns := utf8.RuneCountInString(lines[f.Line-1]); f.Column < 1 || f.Column > columns+1 {
			t.Errorf("%s: the line has %d columns", f, columns)
		}
	}
}

func TestSample(t *testing.T) {
	have, faults := load(t, "sample.yaml")
	for _, f := range faults {
		t.Errorf("fault in the sample: %s", f)
	}
	v4, v6 := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	dns := netip.MustParseAddr("192.0.2.11")
	files4, files6 := netip.MustParseAddr("192.0.2.12"), netip.MustParseAddr("2001:db8::12")
	port := func(n uint16) value.PortRange { return value.PortRange{First: n, Last: n} }
	backend := func(address string, port, weight uint16, name string) model.Backend {
		return model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(address), Port: port}, Weight: weight, Name: name}
	}
	backup := backend("10.0.0.9", 8080, 1, "10.0.0.9:8080")
	backup.Backup = true
	want := model.Config{
		Node: model.Node{
			Interfaces: []model.Interface{{Name: "eth0", Attach: model.AttachAuto}, {Name: "eth1", Attach: model.AttachNative}},
			Timeouts:   model.Timeouts{TCPEstablished: 2*time.Hour + 4*time.Minute, TCPHandshake: 10 * time.Second, TCPClosing: 10 * time.Second, TCPHalfClosed: 4 * time.Minute, UDP: 5 * time.Minute, Settle: 15 * time.Minute},
			Limits:     model.Limits{Flows: 1_000_000, Services: 10_000, Backends: 100_000, Slots: 1 << 22, Remembered: 250_000, Filters: 10_000},
			SNAT: model.SNAT{
				Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("2001:db8:1::1")},
				Ports:     value.PortRange{First: 1024, Last: 32767},
			},
			Encapsulation: model.Encapsulation{
				Sources4: netip.MustParsePrefix("10.9.0.0/24"), Sources6: netip.MustParsePrefix("2001:db8:9::1/128"), GUEPort: 6080,
			},
		},
		Services: []model.Service{
			{
				Name: "web",
				Frontends: []model.Frontend{
					{Address: v4, Ports: port(80), Protocol: model.TCP},
					{Address: v4, Ports: port(443), Protocol: model.TCP},
					{Address: v4, Ports: value.PortRange{First: 8000, Last: 8099}, Protocol: model.TCP},
					{Address: v6, Ports: port(80), Protocol: model.TCP},
					{Address: v6, Ports: port(443), Protocol: model.TCP},
					{Address: v6, Ports: value.PortRange{First: 8000, Last: 8099}, Protocol: model.TCP},
				},
				Forwarding: model.ForwardingNAT, Announce: model.AnnounceL2, Tracking: model.TrackingAuto,
				Backends: []model.Backend{
					backend("10.0.0.2", 8080, 3, "10.0.0.2:8080"),
					backend("10.0.0.3", 8080, 1, "green"),
					backend("2001:db8:1::2", 8080, 1, "[2001:db8:1::2]:8080"),
					backup,
				},
				Health: model.Health{
					Check: model.CheckHTTP, Port: 8080, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3, Jitter: 5,
					SlowStart: 30 * time.Second,
					HTTP:      model.HealthHTTP{Path: "/healthz", Statuses: []model.StatusRange{{First: 200, Last: 200}, {First: 204, Last: 204}}},
				},
			},
			{
				Name: "dns",
				Frontends: []model.Frontend{
					{Address: dns, Ports: port(53), Protocol: model.TCP},
					{Address: dns, Ports: port(53), Protocol: model.UDP},
				},
				Forwarding: model.ForwardingNATDestination, Announce: model.AnnounceNone, TableSize: 1021, Tracking: model.TrackingAuto,
				Policy:   model.Policy{Rejects: true},
				Backends: []model.Backend{backend("10.0.1.2", 0, 1, "10.0.1.2"), backend("10.0.1.3", 0, 1, "10.0.1.3")},
				Health:   model.Health{Check: model.CheckTCP, Interval: 5 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3, Jitter: 5},
			},
			{
				Name: "files",
				Frontends: []model.Frontend{
					{Address: files4, Ports: port(443), Protocol: model.TCP},
					{Address: files6, Ports: port(443), Protocol: model.TCP},
				},
				Forwarding: model.ForwardingDSRIPIP, Announce: model.AnnounceL2,
				Tracking: model.TrackingAuto, AffinityTimeout: 30 * time.Minute,
				Policy:    model.Policy{Rejects: true, SourceRate: 100},
				AllowFrom: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:9::/48")},
				DenyFrom:  []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32")},
				Backends:  []model.Backend{backend("10.0.2.2", 0, 1, "10.0.2.2"), backend("10.0.2.3", 0, 1, "10.0.2.3")},
			},
		},
	}
	if diff := cmp.Diff(want, have, compareAddresses); diff != "" {
		t.Errorf("the sample means something else (-want +got):\n%s", diff)
	}
}

// TestDefaults reads the smallest file there is.
func TestDefaults(t *testing.T) {
	dir := write(t, map[string]string{"shunt.yaml": "interfaces: [{name: eth0}]\nservices: [{name: web, address: 192.0.2.10, port: any, backends: [{address: 10.0.0.2}]}]\n"})
	have, faults := load(t, filepath.Join(dir, "shunt.yaml"))
	if len(faults) != 0 {
		t.Fatal(faults)
	}
	want := model.Config{
		Node: model.Node{
			Interfaces:    []model.Interface{{Name: "eth0", Attach: "auto"}},
			Timeouts:      model.Timeouts{TCPEstablished: 124 * time.Minute, TCPHandshake: 10 * time.Second, TCPClosing: 10 * time.Second, TCPHalfClosed: 4 * time.Minute, UDP: 5 * time.Minute, Settle: 15 * time.Minute},
			Limits:        model.Limits{Flows: 250_000, Services: 1000, Backends: 4096, Slots: 1 << 22, Remembered: 250_000, Filters: 10_000},
			Encapsulation: model.Encapsulation{GUEPort: 6080},
		},
		Services: []model.Service{{
			Name: "web", Forwarding: "nat", Announce: "l2", Tracking: "auto",
			Policy:    model.Policy{Rejects: true},
			Frontends: []model.Frontend{{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.AnyPort, Protocol: model.TCP}},
			Backends:  []model.Backend{{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.2")}, Weight: 1, Name: "10.0.0.2"}},
		}},
	}
	if diff := cmp.Diff(want, have, compareAddresses, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestPrecedence has overlaps that are allowed.
func TestPrecedence(t *testing.T) {
	dir := write(t, map[string]string{"shunt.yaml": `
interfaces: [{name: eth0}]
services:
  - {name: exact, address: 192.0.2.10, port: [80, 90], backends: [{address: 10.0.0.2}]}
  - {name: range, address: 192.0.2.10, port: ["80-89", "90-99"], backends: [{address: 10.0.0.2}]}
  - {name: any, address: 192.0.2.10, port: any, backends: [{address: 10.0.0.2}]}
  - {name: other, address: 192.0.2.10, port: any, protocol: udp, backends: [{address: 10.0.0.2}]}
  - {name: both, address: 192.0.2.11, port: [80, "1-65535", any], backends: [{address: 10.0.0.2}]}
`})
	if _, faults := load(t, filepath.Join(dir, "shunt.yaml")); len(faults) != 0 {
		t.Errorf("an overlap with a precedence is a fault: %v", faults)
	}
}

func TestDirectory(t *testing.T) {
	const service = "services: [{name: %, address: 192.0.2.#, port: 80, backends: [{address: 10.0.0.2}]}]\n"
	named := func(name, host string) string { return strings.NewReplacer("%", name, "#", host).Replace(service) }
	t.Run("merged", func(t *testing.T) {
		dir := write(t, map[string]string{
			"20-b.yaml": named("b", "11") + "snat: {addresses: 10.0.0.8}\ntimeouts: {udp: 3m}\n",
			"10-a.yaml": named("a", "10") + "interfaces: [{name: eth0}]\nsnat: {addresses: [10.0.0.9]}\ntimeouts: {tcp_closing: 1s}\n",
			"00.yaml":   "# nothing\n", ".hidden.yaml": "nonsense", "README.md": "nonsense",
		})
		have, faults := load(t, dir)
		if len(faults) != 0 {
			t.Fatal(faults)
		}
		if len(have.Services) != 2 || have.Services[0].Name != "a" || have.Services[1].Name != "b" {
			t.Errorf("services are %v, want a and b", have.Services)
		}
		if len(have.SNAT.Addresses) != 2 || have.Timeouts.UDP != 3*time.Minute || have.Timeouts.TCPClosing != time.Second {
			t.Errorf("merged to %+v", have)
		}
	})
	t.Run("conflicts", func(t *testing.T) {
		dir := write(t, map[string]string{
			"a.yaml": named("a", "10") + "interfaces: [{name: eth0}]\ntimeouts: {udp: 3m}\n",
			"b.yaml": named("a", "10") + "interfaces: [{name: eth0}]\ntimeouts: {udp: 3m}\n",
			"c.yaml": "services: [\n", "d.yml": "interfaces: []\n",
		})
		_, faults := load(t, dir)
		var b bytes.Buffer
		for _, f := range faults {
			b.WriteString(strings.ReplaceAll(f.String(), dir, "DIR") + "\n")
		}
		golden(t, "testdata/conflicts.golden", b.Bytes())
	})
	t.Run("without files", func(t *testing.T) {
		_, faults := load(t, t.TempDir())
		if len(faults) != 1 || faults[0].Line != 0 || !config.HasErrors(faults) {
			t.Errorf("faults are %v, want one about the directory", faults)
		}
	})
}

func TestUnreadable(t *testing.T) {
	if _, _, err := Load(filepath.Join(t.TempDir(), "none.yaml")); err == nil {
		t.Error("a file that is not there can be loaded")
	}
}

func TestFaultJSON(t *testing.T) {
	text, err := json.Marshal(config.Fault{File: "a", Line: 1, Column: 2, Severity: config.SeverityError, Path: "p", Text: "t", Message: "m", Suggestion: "s"})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"file":"a","line":1,"column":2,"severity":"error","path":"p","text":"t","message":"m","suggestion":"s"}`
	if string(text) != want {
		t.Errorf("a fault is %s, want %s", text, want)
	}
}

func TestMemory(t *testing.T) {
	limits := model.Limits{Flows: 250_000, Services: 1000, Backends: 4096, Slots: 1 << 22, Remembered: 250_000, Filters: 10_000}
	bytes, lines := DefaultEntrySizes.Memory(limits, 2)
	const want = 2*312_500*160 + 312_500*48 + 32<<20 + 4096*40 + 1000*16 + 2*5096*40 + 250_000*104 + 10_000*144 + 65536*104
	if bytes != want {
		t.Errorf("the limits cost %d bytes, want %d", bytes, want)
	}
	golden(t, "testdata/memory.golden", []byte(strings.Join(lines, "\n")+"\n"))
}

// FuzzLoad checks that no text makes Load panic, or report a position outside of the text.
func FuzzLoad(f *testing.F) {
	for _, pattern := range []string{"testdata/bad/*.yaml", "sample.yaml"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		name := filepath.Join(t.TempDir(), "shunt.yaml")
		if err := os.WriteFile(name, text, 0o644); err != nil {
			t.Fatal(err)
		}
		have, faults := load(t, name)
		checkPositions(t, name, faults)
		if err := config.Render(&bytes.Buffer{}, faults); err != nil {
			t.Fatal(err)
		}
		if !config.HasErrors(faults) && (len(have.Services) == 0 || len(have.Interfaces) == 0) {
			t.Errorf("no errors, but the configuration is %+v", have)
		}
	})
}

// TestServicesFromElsewhere: beside another source, a file needs no services; it needs interfaces all the same.
func TestServicesFromElsewhere(t *testing.T) {
	for text, want := range map[string]string{
		"interfaces: [{name: eth0}]\n":               "",
		"interfaces: [{name: eth0}]\nservices: []\n": "",
		"timeouts: {udp: 3m}\n":                      `there is no key "interfaces"`,
		"api: {group: staff}\n":                      `there is no key "interfaces"`,
	} {
		c, err := config.NewFormat(PartBesideSources, settings.Part).Read(filepath.Join(write(t, map[string]string{"a.yaml": text}), "a.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range c.Faults.Sorted() {
			got = append(got, f.Message)
		}
		if strings.Join(got, "; ") != want {
			t.Errorf("%q: the faults are %q, want %q", text, got, want)
		}
	}
}

// TestManyFaults has more faults than a user reads: reading ends, and says so, and errors are
// shown before warnings.
func TestManyFaults(t *testing.T) {
	var text strings.Builder
	text.WriteString("interfaces: [{name: eth0}]\ntimeouts: {udp: 1s}\nservices:\n") // the timeout is a warning
	for i := range 3000 {
		fmt.Fprintf(&text, "- {name: s%d, address: 192.0.2.1, port: 80, portt: 80, backends: [{address: 10.0.0.2}]}\n", i)
	}
	_, faults := load(t, filepath.Join(write(t, map[string]string{"a.yaml": text.String()}), "a.yaml"))
	read := slices.DeleteFunc(slices.Clone(faults), func(f config.Fault) bool { return !strings.Contains(f.Message, "unknown key") })
	if len(read) != config.FaultsMax {
		t.Errorf("%d entries were read, want %d", len(read), config.FaultsMax)
	}
	if !strings.Contains(faults[0].String(), "stops reading after 1000 faults, at services[999].backends") {
		t.Errorf("the first fault is %s", faults[0])
	}
	var out strings.Builder
	if err := config.Render(&out, faults); err != nil {
		t.Fatal(err)
	}
	if shown := strings.Count(out.String(), ": error: "); shown != config.RenderedMax || strings.Contains(out.String(), "warning: ") {
		t.Errorf("%d faults are shown, want %d errors:\n%s", shown, config.RenderedMax, out.String())
	}
	if want := fmt.Sprintf("... and more: errors %d, warnings 1; ", len(faults)-config.RenderedMax-1); !strings.Contains(out.String(), want) {
		t.Errorf("want %q at the end of\n%s", want, out.String())
	}
}

// TestExpansion has aliases that double forty times: reading has to end, with a fault.
func TestExpansion(t *testing.T) {
	var b strings.Builder
	b.WriteString("x-0: &a0 {name: eth0}\n")
	for i := 1; i <= 40; i++ {
		fmt.Fprintf(&b, "x-%d: &a%d {<<: [*a%d, *a%d]}\n", i, i, i-1, i-1)
	}
	b.WriteString("interfaces: [*a40]\n")
	_, faults := load(t, filepath.Join(write(t, map[string]string{"a.yaml": b.String()}), "a.yaml"))
	if !slices.ContainsFunc(faults, func(f config.Fault) bool { return strings.Contains(f.Message, "expand to more than") }) {
		t.Errorf("faults are %v, want one about the aliases", faults)
	}
}

// TestLarge has a thousand services, each written out: size is not depth.
func TestLarge(t *testing.T) {
	var b strings.Builder
	b.WriteString("interfaces: [{name: eth0}]\nservices:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - name: s%d\n    address: 10.%d.%d.1\n    port: [80, 443]\n    backends:\n", i, i/250, i%250)
		for j := range 5 {
			fmt.Fprintf(&b, "      - {address: 10.9.%d.%d, port: 8080, weight: 3}\n", i%250, j+1)
		}
	}
	b.WriteString("limits: {slots: 8186000}\n") // 1000 tables of 4093, twice
	have, faults := load(t, filepath.Join(write(t, map[string]string{"a.yaml": b.String()}), "a.yaml"))
	if len(faults) != 0 || len(have.Services) != 1000 {
		t.Errorf("%d services, faults are %v", len(have.Services), faults)
	}
}

// TestDepth has nesting that would exhaust the parser's stack without a limit.
func TestDepth(t *testing.T) {
	for _, piece := range []string{"[", "{", "- ", "? ", "!a ", "&a ", "[{a: "} {
		dir := write(t, map[string]string{"a.yaml": strings.Repeat(piece, 100_000)})
		if _, faults := load(t, filepath.Join(dir, "a.yaml")); len(faults) != 1 || !config.HasErrors(faults) {
			t.Errorf("100000 times %q: faults are %v, want one", piece, faults)
		}
	}
}
