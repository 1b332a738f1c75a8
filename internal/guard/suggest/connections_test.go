package suggest

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// told are lines of `shunt guard run -o json`.
func told(t *testing.T, attempts ...connect.Attempt) string {
	t.Helper()
	var b strings.Builder
	for _, a := range attempts {
		a.Program = "/usr/sbin/app"
		if err := json.NewEncoder(&b).Encode(map[string]any{"connection": a}); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// Each audited connection becomes an exception, and nothing else does; each exception has its reason.
func TestConnections(t *testing.T) {
	known, problem := policy.ParseTarget("10.0.0.0/24:443")
	if problem != "" {
		t.Fatal(problem)
	}
	p := policy.Policy{Connections: []policy.Connection{
		{Name: "quiet", Program: "/bin/quiet", Deny: []string{policy.Connect}, Mode: policy.Audit},
		{Name: "out", Program: "/usr/sbin/app", Deny: []string{policy.Connect, policy.Raw}, Except: []policy.Target{known}, Mode: policy.Audit},
		{Name: "in", Program: "/usr/sbin/app", Deny: []string{policy.Bind, policy.Listen, policy.Accept}, Mode: policy.Audit},
		{Name: "both", Program: "/usr/sbin/app", Deny: []string{policy.Connect, policy.Bind}, Mode: policy.Audit},
	}}
	did := func(rule, operation, address string) connect.Attempt {
		return connect.Attempt{Operation: operation, Address: address, Protocol: "TCP", Rules: []string{rule}}
	}
	refused := did("out", policy.Connect, "192.0.2.9:25")
	refused.Denied = true
	mptcp := did("out", policy.Connect, "")
	mptcp.Protocol = "MPTCP"
	s, err := Read(p, strings.NewReader(told(t,
		did("out", policy.Connect, "192.0.2.7:25"), did("out", policy.Connect, "[2001:db8::7]:25"), did("out", policy.Connect, "[2001:db8::7]:25"), refused, mptcp,
		did("out", policy.Connect, "0.0.0.0:80"), did("out", policy.Raw, ""), did("out", policy.Connect, "10.0.0.8:443"), did("out", policy.Connect, "nowhere"),
		did("in", policy.Bind, "0.0.0.0:8080"), did("in", policy.Bind, "[::]:8080"), did("in", policy.Accept, "192.0.2.1:8080"), did("in", policy.Listen, "192.0.2.1:9090"), did("in", policy.Bind, "0.0.0.0:0"),
		did("both", policy.Connect, "192.0.2.7:25"), did("both", policy.Bind, "192.0.2.1:25"), did("gone", policy.Bind, "192.0.2.1:25"))))
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Connections[1].Except) != 1 || len(s.Policy.Connections) != 4 || len(s.Connections) != 3 || s.Unknown != 1 {
		t.Errorf("%+v", s)
	}
	for i, want := range []string{"", "10.0.0.0/24:443 [2001:db8::7]:25 192.0.2.7:25 127.0.0.1:80 [::1]:80", ":8080 192.0.2.1:9090", ""} {
		var have []string
		for _, target := range s.Policy.Connections[i].Except {
			have = append(have, target.String())
		}
		if strings.Join(have, " ") != want {
			t.Errorf("%s excepts %v, want %s", s.Policy.Connections[i].Name, have, want)
		}
	}
	var b strings.Builder
	if err := s.Print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"out: its program attempted 8 operations that the rule forbids\n  connect of [2001:db8::7]:25  2 times\n    added to except: [2001:db8::7]:25\n",
		"  connect of 192.0.2.9:25  1 time\n    not excepted: it was denied in each case, and never audited\n",
		"  connect of MPTCP  1 time\n    not excepted: it is a socket of MPTCP, whose addresses are not known",
		"  connect of 0.0.0.0:80  1 time\n    added to except: 127.0.0.1:80, [::1]:80\n",
		"  raw of TCP  1 time\n    not excepted: a raw socket has no address",
		"  connect of 10.0.0.8:443  1 time\n    not excepted: the policy excepts it already",
		"  connect of nowhere  1 time\n    not excepted: it is not an address",
		"  bind of 0.0.0.0:8080  1 time\n    added to except: :8080\n", "  bind of [::]:8080  1 time\n    excepted\n", "  accept of 192.0.2.1:8080  1 time\n    excepted\n",
		"  bind of 0.0.0.0:0  1 time\n    not excepted: it asks for any free port",
		"  connect of 192.0.2.7:25  1 time\n    not excepted: the rule denies more than connect", "  bind of 192.0.2.1:25  1 time\n    not excepted: the rule denies connect, too",
		"\n1 attempt of rules that this policy does not have",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing:\n%s", want, &b)
		}
	}
}

// A policy has room for so many addresses, and a rule with attempts at too many addresses is refused.
func TestTooManyConnections(t *testing.T) {
	p := policy.Policy{Connections: []policy.Connection{{Name: "out", Deny: []string{policy.Connect}, Mode: policy.Audit}, {Name: "more", Deny: []string{policy.Connect}, Mode: policy.Audit}}}
	attempts := func(rule string, n int) (all []connect.Attempt) {
		for i := range n {
			all = append(all, connect.Attempt{Operation: policy.Connect, Address: fmt.Sprintf("10.0.%d.%d:443", i/256, i%256), Rules: []string{rule}})
		}
		return all
	}
	s, err := Read(p, strings.NewReader(told(t, append(attempts("out", operationsMax), attempts("more", 100)...)...)))
	if err != nil {
		t.Fatal(err)
	}
	if a, b := len(s.Policy.Connections[0].Except), len(s.Policy.Connections[1].Except); a != operationsMax || b != policy.TargetsMax-operationsMax {
		t.Errorf("%d and %d exceptions", a, b)
	}
	if last := s.Connections[1].Operations[99]; !strings.Contains(last.Not, "a policy can name 1024 addresses") {
		t.Errorf("%+v", last)
	}
	if _, err := Read(p, strings.NewReader(told(t, attempts("out", operationsMax+1)...))); err == nil || !strings.Contains(err.Error(), "line 1001 is one too many: read the attempts under rule \"out\": there are more than 1000 addresses") {
		t.Error(err)
	}
}
