package command

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
)

// degraded is a policy of which a kernel without BPF LSM enforces a part.
func degraded() policy.Policy {
	return policy.Policy{IsDegraded: true, Rules: []policy.Rule{
		{Name: "data", Paths: []string{"/srv/data"}, Deny: []string{policy.Write, policy.Delete, policy.Mount}, Mode: policy.Deny},
		{Name: "app", Program: "/usr/sbin/app", Deny: []string{policy.Kill}, Mode: policy.Deny}}}
}

const firstOfDegraded = "NOT ENFORCED on this kernel, which has no BPF LSM: rule data: delete, mount; rule app: kill.\n"

// The first line of check --host names the operations that are not enforced, also where opens are.
func TestCheckHostOfADegradedPolicy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	refuses := func() error { return &protect.Refusal{Reason: "it is too old", Remedy: "Boot another one"} }
	var out bytes.Buffer
	err := checkHost(cli.Streams{Err: &out}, degraded(), refuses)
	want := firstOfDegraded + "Enforced when a file is opened, by fanotify, as long as `shunt guard run` is running: write (truncating by path passes, and so do earlier descriptors and mappings).\n" +
		"why: it is too old\nwhat to do: Boot another one.\n"
	if err != nil || out.String() != want {
		t.Errorf("%v:\n%s", err, out.String())
	}
}

// The first line of status names the operations that are not enforced, or the time when protection ended.
func TestStatusOfOpens(t *testing.T) {
	now := time.Now()
	s := &gate.Status{PID: 7, Began: now.Add(-time.Minute), Objects: 3, Rules: []policy.RuleStatus{{Name: "data", Text: "deny: write"}}, Gaps: gate.Missing(degraded().Rules), Waited: 8, Took: 0.002, Denied: 2, Late: 1, Unsure: 4, Unread: 5}
	running := &agent.Status{Features: []agent.Feature{{Name: "protection", On: true, Opens: s}}}
	if at, err := opensOf(running, t.TempDir()); at != s || err != nil {
		t.Errorf("%+v %v", at, err)
	}
	var out bytes.Buffer
	printOpens(&out, s, now)
	printAllStatus(&out, nil, running, now)
	for _, want := range []string{"Opens of 3 inodes wait for process 7, for 1m0s; 2 denied, 0 audited.\n", "8 opens waited, 250µs each on average.\n", "For 4 opens it was unknown", "warning: 1 opens were allowed without a judgement", "warning: shunt could not read 5 new files", "  data: deny: write\n"} {
		if !strings.HasPrefix(out.String(), firstOfDegraded) || !strings.Contains(out.String(), want) || strings.Contains(out.String(), "Nothing is protected") {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	for killed, how := range map[bool]string{true: "was killed", false: "was ended"} {
		out.Reset()
		s.Ended, s.Killed = now.Add(-time.Minute), killed
		if printOpens(&out, s, now); !strings.HasPrefix(out.String(), "PROTECTION ENDED at "+s.Ended.Format(time.DateTime)+", 1m0s ago: process 7") || !strings.Contains(out.String(), how) {
			t.Error(out.String())
		}
	}
	if at, err := opensOf(nil, t.TempDir()); at != nil || err != nil {
		t.Errorf("with no note: %+v %v", at, err)
	}
}
