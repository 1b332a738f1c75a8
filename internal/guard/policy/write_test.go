package policy

import (
	"reflect"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// forget keeps only the parts of rules that are written in the file.
func forget(p *Policy) {
	for i, r := range p.Detection.Rules {
		p.Detection.Rules[i] = rule.Rule{Name: r.Name, Doc: r.Doc, On: r.On, If: r.If, Severity: r.Severity, Mitre: r.Mitre, Action: r.Action, Tell: r.Tell}
	}
}

// A policy that YAML writes is read as the same policy.
func TestYAML(t *testing.T) {
	digest := strings.Repeat("0a", 32)
	for _, p := range []Policy{
		{Rules: []Rule{{Name: "data", Paths: []string{"/srv/data"}, Deny: []string{Write}, Mode: Audit}}},
		{IsDegraded: true, Rules: []Rule{
			{Name: "yes", Paths: []string{"/a b", "/c: #d", "/e'\"\\", "/ü<>&"}, Deny: Operations, Mode: Deny, Trust: Trust{
				Programs: []Program{{Path: "/usr/bin/app"}, {"/usr/bin/other, one", digest}}, Children: true, Interpreters: []string{"/bin/dash"}}},
			{Name: "12", Paths: []string{"/x"}, Deny: []string{Mount, Read, Exec}, Mode: Audit},
			{Name: "a:b", Program: "/usr/sbin/app", Deny: []string{Kill, Ptrace}, Mode: Deny, Trust: Trust{Programs: Programs("/usr/bin/systemctl"), User: "0", Cgroup: "/system.slice/a b.service"}},
			{Name: "by-its-cgroup", Cgroup: "/system.slice/a b.service", Deny: []string{Kill, Move}, Mode: Deny},
			{Name: "by-its-number", PIDFile: "/run/app.pid", Deny: []string{Memory}, Mode: Audit},
			{Name: "self", IsSelf: true, Deny: ProcessOperations, Trust: Trust{IsInit: true}, Mode: Deny},
			{Name: "updaters", IsUpdaters: true, Mode: Deny, Trust: Trust{Programs: Programs("/usr/bin/dpkg", "/usr/bin/rpm")}},
		}},
		{Detection: Detection{IsOn: true}},
		{Decoys: []Decoys{{Folders: []string{"/srv/data", "/home/a b"}, Depth: 3, Action: rule.Stop, Trust: []string{"/usr/bin/restic"}}, {Folders: []string{"/opt"}, Action: rule.Log}}},
		{Rules: []Rule{{Name: "data", Paths: []string{"/srv/data"}, Deny: []string{Write}, Mode: Audit}}, Detection: Detection{IsOn: true, Enable: []string{"temporary-exec"}, Disable: []string{"bpf-load"},
			Kill: []string{"reverse-shell"}, Stop: []string{"memory-write"}, Rules: []rule.Rule{
				{Name: "a:b", Doc: "a:b", On: []string{rule.Exec, rule.Open}, If: `process.name == "x" || file.write`, Severity: "low", Action: rule.Stop, Mitre: []string{"T1014"}, Tell: "{process.pid}: #"}}}},
	} {
		text := p.YAML()
		have, faults, bad := load(t, text)
		for i := range have.Rules {
			have.Rules[i].At = ""
		}
		for i := range have.Decoys {
			have.Decoys[i].At = ""
		}
		forget(&have)
		forget(&p)
		if bad || !reflect.DeepEqual(have, p) {
			t.Errorf("%s\nreads as %+v\nwant     %+v\n%v", text, have, p, faults)
		}
	}
}
