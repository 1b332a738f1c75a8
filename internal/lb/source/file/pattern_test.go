package file

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestInterfacePatterns: a pattern stands for interfaces of pods, at tc alone. It need not match an existing interface,
// and an interface that it matches counts as listed for the backends behind it.
func TestInterfacePatterns(t *testing.T) {
	for interfaces, want := range map[string]string{
		`[{name: eth0, attach: tc}, {name: "eth?", attach: tc}]`:                                "",
		`[{name: eth0, attach: tc}, {name: "x*", attach: tc}]`:                                  "backend 10.0.0.2 is behind eth1, which is not under interfaces: its answers would not pass shunt",
		`[{name: eth0, attach: tc}, {name: "e*"}]`:                                              `"e*" is a pattern, which stands for the interfaces of this machine's pods, and these are served at tc alone`,
		`[{name: eth0, attach: tc}, {name: "e*", attach: native}]`:                              `"e*" is a pattern, which stands for the interfaces of this machine's pods, and these are served at tc alone`,
		`[{name: eth0, attach: tc}, {name: "e[th]*", attach: tc}]`:                              `"e[th]*" cannot be an interface's name`,
		`[{name: eth0, attach: tc}, {name: "e*", attach: tc}, {name: "e*", attach: tc}]`:        `interface "e*" is listed twice, first at `,
		`[{name: eth0, attach: tc}, {name: "eth1*", attach: tc}, {name: eth1, attach: native}]`: "",
	} {
		text := "interfaces: " + interfaces + "\nservices: [{name: web, address: 198.51.100.10, port: 80, backends: [{address: 10.0.0.2}]}]\n"
		p, err := Read(filepath.Join(write(t, map[string]string{"shunt.yaml": text}), "shunt.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Faults) == 0 {
			p.CheckHost(fakeHost{}, true)
		}
		var got []string
		for _, f := range p.Faults {
			if f.Severity == config.SeverityError {
				got = append(got, f.Message)
			}
		}
		if len(got) > 1 || (len(got) == 0) != (want == "") || want != "" && !strings.HasPrefix(got[0], want) {
			t.Errorf("%s: the errors are %q, want %q", interfaces, got, want)
		}
	}
	for _, c := range []struct {
		entry, name string
		means       bool
	}{{"veth*", "veth1a2b", true}, {"veth*", "eth0", false}, {"veth?", "veth12", false}, {"eth0", "eth0", true}, {"eth0", "eth01", false}} {
		if got := (model.Interface{Name: c.entry}).Means(c.name); got != c.means {
			t.Errorf("%s means %s: %v", c.entry, c.name, got)
		}
	}
}
