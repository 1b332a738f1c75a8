package daemon

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
)

// read is a file's settings and faults, without the file's name.
func read(t *testing.T, text string, check func(*parsed)) (p *parsed, said []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.NewFormat(Product().Part).Read(path)
	if err != nil {
		t.Fatal(err)
	}
	p, _ = c.Settings[Name].(*parsed)
	if check != nil {
		check(p)
	}
	for _, f := range c.Faults.Sorted() {
		_, what, _ := strings.Cut(f.String(), "a.yaml:")
		said = append(said, what)
	}
	return p, said
}

func TestSettings(t *testing.T) {
	for text, want := range map[string]settings{
		"accelerate: {}": {[]string{"all"}, shortcut.Checked, true, nil},
		`accelerate: {interfaces: ["cali*", veth1], mode: bypass}`: {[]string{"cali*", "veth1"}, shortcut.Bypass, true, nil},
		"accelerate: {interfaces: all, same_node: false}":          {[]string{"all"}, shortcut.Checked, false, nil},
		"accelerate: {uplinks: [eth0, eth1]}":                      {[]string{"all"}, shortcut.Checked, true, []string{"eth0", "eth1"}},
	} {
		p, said := read(t, text, nil)
		if len(said) > 0 || !reflect.DeepEqual(p.settings, want) {
			t.Errorf("%s: %+v, %q; want %+v", text, p, said, want)
		}
	}
}

func TestFaults(t *testing.T) {
	for text, want := range map[string]string{
		"accelerate: {interfaces: [all, veth1]}":      `1:27: error: accelerate.interfaces[0]: interfaces are all, or names and patterns; write interfaces: all, or leave all out`,
		"accelerate: {interfaces: veth/1}":            `1:26: error: accelerate.interfaces: "veth/1" cannot be an interface's name or a pattern; in a pattern, * stands for any characters and ? for one`,
		`accelerate: {interfaces: "veth[12]"}`:        `1:26: error: accelerate.interfaces: "veth[12]" cannot be an interface's name or a pattern; in a pattern, * stands for any characters and ? for one`,
		"accelerate: {interfaces: [veth1, veth1]}":    `1:34: error: accelerate.interfaces[1]: interface veth1 is here twice; remove one of them`,
		"accelerate: {mode: fast}":                    `1:20: error: accelerate.mode: `,
		"accelerate: {across_nodes: true}":            `1:14: error: accelerate.across_nodes: `,
		"accelerate: {uplinks: \"eth*\"}":             `1:23: error: accelerate.uplinks: "eth*" cannot be an interface's name; name each uplink, as `,
		"accelerate: {uplinks: [eth0, eth0]}":         `1:30: error: accelerate.uplinks[1]: interface eth0 is here twice; remove one of them`,
		"accelerate: {interfaces: a, uplinks: a}":     `1:38: error: accelerate.uplinks: interface a is among accelerate's interfaces, too`,
		"accelerate: {same_node: false, uplinks: a}":  `1:41: error: accelerate.uplinks: same_node: false switches all of the pod shortcut off`,
		"accelerate: {interface: veth1}":              `1:14: error: accelerate.interface: `,
		"accelerate: {interfaces: [], mode: checked}": `1:26: error: accelerate.interfaces: `,
	} {
		if _, said := read(t, text, nil); len(said) != 1 || !strings.HasPrefix(said[0], want) {
			t.Errorf("%s: %q; want %q", text, said, want)
		}
	}
}

// What this machine lacks is a warning, and an error of `shunt check --host`.
func TestCheckHost(t *testing.T) {
	for strict, word := range map[bool]string{false: "warning", true: "error"} {
		_, said := read(t, "accelerate: {interfaces: [no-such-veth, lo, \"no-such-*\"], uplinks: [lo2]}", func(p *parsed) { p.checkHost(node.HostCheck{Strict: strict}) })
		said = slices.DeleteFunc(said, func(s string) bool { return strings.Contains(s, "no conntrack") }) // of the machine
		if len(said) != 3 || !strings.Contains(said[0], word+": accelerate.interfaces[0]: this machine's interface no-such-veth cannot be used") ||
			!strings.Contains(said[1], word+": accelerate.interfaces[1]: this machine's interface lo is of kind device, and a pod is behind a veth") ||
			!strings.Contains(said[2], word+": accelerate.uplinks[0]: this machine's interface lo2 cannot be used") {
			t.Errorf("strict %v: %q", strict, said)
		}
	}
}
