package file

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
)

// TestDirectFamilies has every shape of families that a service of direct return may have.
func TestDirectFamilies(t *testing.T) {
	const both = "[192.0.2.10, \"2001:db8::10\"]"
	const backend4, backend6 = "{address: 10.0.0.2}", "{address: \"2001:db8:1::2\"}"
	for _, c := range []struct{ address, backends, unused string }{
		{"192.0.2.10", backend4, ""},
		{"192.0.2.10", backend6, ""},
		{"\"2001:db8::10\"", backend4, ""},
		{"\"2001:db8::10\"", backend6, ""},
		{both, backend4, ""},
		{both, backend6, ""},
		{both, backend4 + ", " + backend6, ""},
		{"192.0.2.10", backend4 + ", " + backend6, "2001:db8:1::2"},
		{"\"2001:db8::10\"", backend4 + ", " + backend6, "10.0.0.2"},
	} {
		for _, forwarding := range []string{"dsr-l2", "dsr-ipip", "dsr-gue"} {
			text := fmt.Sprintf("interfaces: [{name: eth0}]\nservices: [{name: web, address: %s, port: 80, forwarding: %s, backends: [%s]}]\n", c.address, forwarding, c.backends)
			_, faults := load(t, filepath.Join(write(t, map[string]string{"a.yaml": text}), "a.yaml"))
			switch {
			case config.HasErrors(faults):
				t.Errorf("%s\nis refused: %v", text, faults)
			case c.unused == "" && len(faults) != 0:
				t.Errorf("%s\nhas %v, want no faults", text, faults)
			case c.unused != "" && (len(faults) != 1 || !strings.Contains(faults[0].Message, "backend "+c.unused+" gets no traffic")):
				t.Errorf("%s\nhas %v, want a warning about %s", text, faults, c.unused)
			}
		}
	}
}
