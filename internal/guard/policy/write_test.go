package policy

import (
	"reflect"
	"strings"
	"testing"
)

// What is written is read as the same.
func TestYAML(t *testing.T) {
	digest := strings.Repeat("0a", 32)
	for _, p := range []Policy{
		{Rules: []Rule{{Name: "data", Paths: []string{"/srv/data"}, Deny: []string{Write}, Mode: Audit}}},
		{IsDegraded: true, Rules: []Rule{
			{Name: "yes", Paths: []string{"/a b", "/c: #d", "/e'\"\\", "/ü<>&"}, Deny: Operations, Mode: Deny, Trust: Trust{
				Programs: []Program{{Path: "/usr/bin/app"}, {"/usr/bin/other, one", digest}}, Children: true, Interpreters: []string{"/bin/dash"}}},
			{Name: "12", Paths: []string{"/x"}, Deny: []string{Mount}, Mode: Audit},
			{Name: "a:b", Program: "/usr/sbin/app", Deny: []string{Kill, Ptrace}, Mode: Deny, Trust: Trust{Programs: Programs("/usr/bin/systemctl")}},
			{Name: "by-its-number", PIDFile: "/run/app.pid", Deny: []string{Memory}, Mode: Audit},
			{Name: "self", IsSelf: true, Deny: ProcessOperations, Trust: Trust{IsInit: true}, Mode: Deny},
		}},
	} {
		text := p.YAML()
		have, faults, bad := load(t, text)
		for i := range have.Rules {
			have.Rules[i].At = ""
		}
		if bad || !reflect.DeepEqual(have, p) {
			t.Errorf("%s\nreads as %+v\nwant     %+v\n%v", text, have, p, faults)
		}
	}
}
