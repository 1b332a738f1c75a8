package policy

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

const someConnections = `guard:
  degraded: allow
  connections:
    - name: no-mail
      program: /usr/sbin/../sbin/app
      children: true
      deny: [connect]
      to: [':25', 10.0.0.0/8, 192.0.2.1, '192.0.2.2:80-90', '[2001:db8::/32]:443', '2001:db8:1::1', '[::1]']
      mode: audit
    - {name: quiet, program: /usr/sbin/app, deny: [bind, listen, accept, raw], except: [':8080', '[2001:db8::1]:25'], mode: deny}
`

func TestConnections(t *testing.T) {
	have, faults, _ := load(t, someConnections)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	again, faults, _ := load(t, have.YAML())
	if len(faults) > 0 {
		t.Fatal(faults, have.YAML())
	}
	for _, p := range []*Policy{&have, &again} {
		for i := range p.Connections {
			if !strings.Contains(p.Connections[i].At, "guard.yaml:") {
				t.Errorf("it is at %q", p.Connections[i].At)
			}
			p.Connections[i].At = ""
		}
	}
	all := func(text string) Target { return Target{netip.MustParsePrefix(text), 0, 65535} }
	want := Policy{IsDegraded: true, Connections: []Connection{
		{Name: "no-mail", Program: "/usr/sbin/app", Children: true, Deny: []string{Connect}, Mode: Audit, To: []Target{
			{First: 25, Last: 25}, all("10.0.0.0/8"), all("192.0.2.1/32"), {netip.MustParsePrefix("192.0.2.2/32"), 80, 90}, {netip.MustParsePrefix("2001:db8::/32"), 443, 443}, all("2001:db8:1::1/128"), all("::1/128")}},
		{Name: "quiet", Program: "/usr/sbin/app", Deny: []string{Bind, Listen, Accept, Raw}, Mode: Deny, Except: []Target{{First: 8080, Last: 8080}, {netip.MustParsePrefix("2001:db8::1/128"), 25, 25}}},
	}}
	if !reflect.DeepEqual(have, want) || !reflect.DeepEqual(again, want) {
		t.Errorf("have %+v\nagain %+v\nwant %+v", have, again, want)
	}
	if got := have.Connections[0].String(); got != "audit: connect of :25, 10.0.0.0/8, 192.0.2.1, 192.0.2.2:80-90, [2001:db8::/32]:443, 2001:db8:1::1, ::1 by /usr/sbin/app and what it starts" {
		t.Error(got)
	}
	if got := have.Connections[1].String(); got != "deny: bind, listen, accept, raw but not of :8080, [2001:db8::1]:25 by /usr/sbin/app" {
		t.Error(got)
	}
	if have.IsEmpty() || !have.Watches() {
		t.Error("it asks for nothing")
	}
}

func TestFaultsOfConnections(t *testing.T) {
	rule := func(text string) string { return "guard:\n  connections:\n    - {name: x, " + text + "}\n" }
	to := func(text string) string {
		return rule("program: /bin/app, mode: deny, deny: connect, to: ['" + text + "']")
	}
	for name, c := range map[string]struct{ text, want string }{
		"no program":      {rule("deny: connect, mode: deny"), "program"},
		"no operation":    {rule("program: /bin/app, mode: deny"), "deny"},
		"of files":        {rule("program: /bin/app, deny: write, mode: deny"), "write"},
		"relative":        {rule("program: app, deny: connect, mode: deny"), "is not absolute"},
		"raw to":          {rule("program: /bin/app, deny: raw, mode: deny, to: 10.0.0.0/8"), "the destination of a raw socket is not known"},
		"raw except":      {rule("program: /bin/app, deny: raw, mode: deny, except: 10.0.0.0/8"), "the destination of a raw socket is not known"},
		"a name excepted": {rule("program: /bin/app, deny: connect, mode: deny, except: example.org"), "names are not looked up"},
		"twice":           {rule("program: /bin/app, deny: connect, mode: deny") + "    - {name: x, program: /bin/app, deny: bind, mode: deny}\n", `an earlier rule has the name "x", too`},
		"as of files":     {"guard:\n  protect: [{name: x, paths: /srv, deny: write, mode: audit}]\n  connections: [{name: x, program: /bin/app, deny: bind, mode: deny}]\n", `an earlier rule has the name "x", too`},
		"nowhere":         {rule("program: /bin/app, deny: connect, mode: deny, to: []"), "to"},
		"a name":          {to("example.org"), "names are not looked up"},
		"a name and port": {to("example.org:80"), "names are not looked up"},
		"bits":            {to("10.0.0.1/8"), "write 10.0.0.0/8"},
		"mapped":          {to("::ffff:10.0.0.1"), "write 10.0.0.1 as IPv4"},
		"zone":            {to("fe80::1%eth0"), "is no IP address"},
		"port":            {to("10.0.0.1:65536"), "no number from 1 to 65535"},
		"port 0":          {to(":0"), "no number from 1 to 65535"},
		"ports":           {to("10.0.0.1:90-80"), "end before they begin"},
		"no ports":        {to("10.0.0.1:"), "is no IP address"},
		"brackets":        {to("[2001:db8::1"), "is no IP address"},
		"only brackets":   {to("[]"), "there is no address"},
	} {
		_, faults, bad := load(t, c.text)
		if !bad || !strings.Contains(strings.Join(faults, "\n"), c.want) {
			t.Errorf("%s: %v, want %s", name, faults, c.want)
		}
	}
	if _, faults, bad := load(t, rule("program: /usr/bin/python3, deny: connect, mode: deny")); bad || len(faults) != 1 || !strings.Contains(faults[0], "runs any script") {
		t.Errorf("an interpreter: %v", faults)
	}
}

func TestTargetHas(t *testing.T) {
	for _, c := range []struct {
		of, other string
		want      bool
	}{
		{":25", "10.0.0.1:25", true}, {":25", ":25", true}, {":25", ":24-25", false}, {"10.0.0.1:25", ":25", false}, {"10.0.0.0/8", "10.0.0.1:25", true}, {"10.0.0.0/8", "10.0.0.0/7", false},
		{"10.0.0.0/8", "11.0.0.1", false}, {"0.0.0.0/0", "::1", false}, {"::/0", "10.0.0.1", false}, {"10.0.0.1:1-9", "10.0.0.1:9", true}, {"10.0.0.1:1-9", "10.0.0.1", false},
	} {
		of, problem := ParseTarget(c.of)
		other, alsoProblem := ParseTarget(c.other)
		if problem+alsoProblem != "" || of.Has(other) != c.want {
			t.Errorf("%+v: %v %s%s", c, of.Has(other), problem, alsoProblem)
		}
	}
}

// A target that is written as text is read as the same target.
func FuzzTarget(f *testing.F) {
	for _, text := range []string{":25", "10.0.0.0/8", "[2001:db8::/32]:443-444", "[::1]", "::", "[:1", "1:1-", "[]:1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		one, problem := ParseTarget(text)
		if problem != "" {
			return
		}
		if again, problem := ParseTarget(one.String()); problem != "" || again != one {
			t.Errorf("%q: %+v is written %q, and read %+v %s", text, one, one, again, problem)
		}
	})
}
