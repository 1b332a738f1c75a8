package lab

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDraw(t *testing.T) {
	for _, c := range []struct {
		options Options
		want    string
	}{
		{Options{VIPOnLink: true}, `
client ──────────── switch ────┬─ lb     10.0.0.1   2001:db8:1::1
10.0.0.100                     ├─ b1     10.0.0.2   2001:db8:1::2
2001:db8:1::100                └─ b2     10.0.0.3   2001:db8:1::3
VIPs 192.0.2.10 and 2001:db8::10: on no host, on the link before lb
`},
		{Options{Layout: TwoArm, Router: true, Backends: 1}, `
client ────────── router ──────────── lb ────────────── switch ────── b1     10.0.0.2   2001:db8:1::2
198.51.100.7      198.51.100.1        10.9.0.1
2001:db8:c::7     2001:db8:c::1       2001:db8:9::1
                  10.9.0.254          10.0.0.1
                  2001:db8:9::254     2001:db8:1::1
VIPs 192.0.2.10 and 2001:db8::10: on no host, routed to 10.9.0.1 and 2001:db8:9::1
`},
		{Options{Layout: Direct}, `
client ────────── lb ───────────────┬─ b1     10.0.1.2   2001:db8:1:1::2
198.51.100.7      198.51.100.1      └─ b2     10.0.2.2   2001:db8:1:2::2
2001:db8:c::7     2001:db8:c::1
VIPs 192.0.2.10 and 2001:db8::10: on no host, routed to 198.51.100.1 and 2001:db8:c::1
`},
	} {
		got := "\n" + build(t, c.options).Draw()
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: (-want +got)\n%s\n%s", c.options.Layout, d, got)
		}
	}
}
