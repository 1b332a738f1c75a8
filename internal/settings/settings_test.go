package settings

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/value"
)

// read is the settings of a file, with its faults.
func read(t *testing.T, text string) (Settings, *config.Contents) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.NewFormat(Part).Read(path)
	if err != nil {
		t.Fatal(err)
	}
	s, ok := Of(c)
	if !ok {
		t.Fatalf("%q has no settings", text)
	}
	return s, c
}

// TestEveryFieldIsASetting changes each key of the schema, and requires that it is among the differences.
func TestEveryFieldIsASetting(t *testing.T) {
	var schema struct {
		Defs map[string]struct{ Properties map[string]any } `json:"$defs"`
	}
	if err := json.Unmarshal(config.NewFormat(Part).Schema("a test"), &schema); err != nil {
		t.Fatal(err)
	}
	before, _ := read(t, "api: {}")
	changes := map[string][2]string{
		"api.socket":         {"api: {socket: /run/a.sock}", "~ api.socket: /run/shunt/shunt.sock -> /run/a.sock"},
		"api.group":          {"api: {group: admin}", "~ api.group: root only -> admin"},
		"api.read_group":     {"api: {read_group: staff}", "~ api.read_group: root only -> staff"},
		"metrics.listen":     {"metrics: {listen: 127.0.0.1:9470}", "~ metrics.listen: nowhere -> 127.0.0.1:9470"},
		"metrics.max_series": {"metrics: {listen: 127.0.0.1:9470, max_series: 5000}", "~ metrics.max_series: 200000 -> 5000"},
	}
	found := 0
	for mapping, def := range schema.Defs {
		for key := range def.Properties {
			found++
			change, known := changes[mapping+"."+key]
			after, c := read(t, change[0])
			if faults := c.Faults.Sorted(); len(faults) > 0 {
				t.Fatal(faults)
			}
			var lines []string
			for _, d := range value.DifferentSettings(before.List(), after.List()) {
				lines = append(lines, d.String())
			}
			if text := strings.Join(lines, "\n"); !known || !strings.Contains(text, change[1]) {
				t.Errorf("%s.%s: the difference is %q, want %q", mapping, key, text, change[1])
			}
		}
	}
	if found != len(changes) {
		t.Errorf("the schema has %d keys, want %d", found, len(changes))
	}
}

// TestCheckHost: a group and an address that this machine lacks are faults at their positions.
func TestCheckHost(t *testing.T) {
	_, c := read(t, "api: {group: staff, read_group: guests}\nmetrics: {listen: '192.0.2.1:9470'}\n")
	CheckHost(c, config.SeverityWarning, Host{
		HasGroup:  func(name string) bool { return name == "staff" },
		CanListen: func(addr netip.Addr) error { return errors.New(addr.String() + " is not here") },
	})
	faults := c.Faults.Sorted()
	want := []string{
		`shunt.yaml:1:33: warning: api.read_group: this machine has no group "guests", and the daemon does not start without it; create it with ` + "`groupadd --system guests`",
		"shunt.yaml:2:19: warning: metrics.listen: no process can listen at 192.0.2.1 on this machine: 192.0.2.1 is not here; `ip address` lists the machine's addresses; 0.0.0.0 and [::] mean all addresses",
	}
	if len(faults) != len(want) {
		t.Fatalf("the faults are %v", faults)
	}
	for i, fault := range faults {
		if !strings.HasSuffix(fault.String(), want[i]) {
			t.Errorf("fault %d is\n%s, want\n%s", i, fault, want[i])
		}
	}
}

func TestLocalHost(t *testing.T) {
	if hasGroup("no-such-group") || !hasGroup("root") || !hasGroup("12345") {
		t.Error("a group that does not exist does, or one that does not")
	}
	for _, here := range []string{"127.0.0.1", "0.0.0.0"} {
		if err := canListen(netip.MustParseAddr(here)); err != nil {
			t.Errorf("at %s: %v", here, err)
		}
	}
	if err := canListen(netip.MustParseAddr("192.0.2.1")); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("at an address that is not here: %v", err)
	}
}
