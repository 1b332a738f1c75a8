package command

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// The first line names the operations that are not enforced.
func TestConnectionsStatus(t *testing.T) {
	var out bytes.Buffer
	status := &connect.Status{Way: connect.Cgroup, Enforced: []string{policy.Connect, policy.Bind}, Not: []string{policy.Listen}, Hooks: 7, Denied: 2, Audited: 1, Untracked: 3,
		Rules: []policy.RuleStatus{{Name: "no-mail", Text: "deny: connect of :25 by /usr/sbin/app"}}}
	printConnectionsStatus(&out, status)
	want := "NOT ENFORCED for connections: listen.\nConnections: connect, bind enforced at a cgroup, by 1 rule at 7 hooks; 2 denied, 1 audited.\n" +
		"warning: 3 processes that a program of a rule has started are not under that rule, because there were too many\n  no-mail: deny: connect of :25 by /usr/sbin/app\n"
	if out.String() != want {
		t.Errorf("got %s\nwant %s", &out, want)
	}
	out.Reset()
	printConnectionsStatus(&out, &connect.Status{Way: connect.LSM, Enforced: policy.ConnectionOperations})
	if !strings.HasPrefix(out.String(), "Connections: connect, bind, listen, accept, raw enforced at security hooks (BPF LSM)") {
		t.Errorf("%s", &out)
	}
	out.Reset()
	if printConnectionsStatus(&out, nil); out.Len() > 0 {
		t.Errorf("%s", &out)
	}
}

// check --host fails if the kernel lacks a feature that the policy needs.
func TestCheckOfConnections(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	p := policy.Policy{Connections: []policy.Connection{{Name: "x", Program: "/bin/app", Deny: []string{policy.Connect, policy.Accept}, Mode: policy.Deny}}}
	c := connect.Coverage{Way: connect.Cgroup, Why: "of this"}
	for _, test := range []struct {
		err  error
		want string
		bad  bool
	}{
		{&connect.NotEnforced{Gaps: c.Missing(p.Connections), Coverage: c}, "With degraded: allow in the policy, this is not a failure.\n", true},
		{nil, "why the security hooks are not used: of this.\n", false},
	} {
		var out bytes.Buffer
		err := checkConnections(cli.Streams{Err: &out}, p, func(policy.Policy) (connect.Coverage, error) { return c, test.err })
		if (err != nil) != test.bad || !strings.HasPrefix(out.String(), `NOT ENFORCED: accept in rule "x" for connections: the kernel calls no program of a cgroup for accept.`) || !strings.HasSuffix(out.String(), test.want) {
			t.Errorf("%v: %s", err, &out)
		}
	}
}

func TestExplanationOfConnections(t *testing.T) {
	var out bytes.Buffer
	e := &connect.Explanation{InForce: true, Way: connect.Cgroup, Address: "192.0.2.7:25", PID: 4713, Comm: "app\n", Program: "/usr/sbin/app", Operations: []connect.Answer{
		{Operation: "connect", Audited: []string{"only-inside"}}, {Operation: "bind", Denied: []string{"no-server"}}, {Operation: "listen", Denied: []string{"no-server"}, Gap: "it is so"}, {Operation: "raw"}}}
	if err := printConnectionExplanation(&out, e, ""); err != nil {
		t.Fatal(err)
	}
	want := `This is the kernel's answer, which it gives at a cgroup.
Address: 192.0.2.7:25
Process: 4713 (app?), /usr/sbin/app
Operations:
  connect  allowed, and reported: only-inside is in mode audit
  bind     DENIED by no-server
  listen   DENIED by no-server; NOT ENFORCED: it is so
  raw      allowed: no rule forbids it
`
	if out.String() != want {
		t.Errorf("got %s\nwant %s", &out, want)
	}
	out.Reset()
	e.InForce = false
	if err := printConnectionExplanation(&out, e, "guard.yaml"); err != nil || !strings.HasPrefix(out.String(), "NOT IN FORCE: this is the answer of guard.yaml.") {
		t.Errorf("%v %s", err, &out)
	}
}
