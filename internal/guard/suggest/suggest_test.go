package suggest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func lines(t *testing.T, attempts ...judge.Attempt) string {
	t.Helper()
	var b strings.Builder
	for _, a := range attempts {
		if err := json.NewEncoder(&b).Encode(a); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// Programs that were audited are added, and no others; each has its reason.
func TestRead(t *testing.T) {
	folder := t.TempDir()
	file := func(name string) string {
		full := filepath.Join(folder, name)
		if err := os.WriteFile(full, nil, 0o755); err != nil {
			t.Fatal(err)
		}
		return full
	}
	app, rare, shell, listed, known, refused := file("app"), file("rare"), file("dash"), file("listed"), file("known"), file("refused")
	p := policy.Policy{Rules: []policy.Rule{
		{Name: "quiet", Paths: []string{"/quiet"}, Deny: []string{policy.Write}, Mode: policy.Audit},
		{Name: "data", Paths: []string{"/data"}, Deny: policy.Operations, Mode: policy.Audit,
			Trust: policy.Trust{Programs: policy.Programs(known), Children: true, Interpreters: []string{listed}}},
	}}
	did := func(program string, isDenied bool, operation string, rules ...string) judge.Attempt {
		return judge.Attempt{Program: program, Denied: isDenied, Operation: operation, Path: "/data/" + operation, Rules: rules}
	}
	s, err := Read(p, strings.NewReader(lines(t,
		did(rare, false, "write", "data"), did(app, false, "create", "data", "old"), did(app, false, "write", "data"), did(app, true, "write", "data"),
		did(shell, false, "write", "data"), did(listed, false, "write", "data"), did(known, false, "write", "data"), did(refused, true, "write", "data"),
		did(folder+"/gone", false, "write", "data"), did("the kernel", false, "write", "data"), did(folder, false, "write", "data"))+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []policy.Program{{Path: known}, {Path: app}, {Path: rare}}
	if got := s.Policy.Rules[1].Trust.Programs; !slices.Equal(got, want) || len(s.Policy.Rules[0].Trust.Programs) > 0 {
		t.Errorf("trusts %v, want %v", got, want)
	}
	if len(p.Rules[1].Trust.Programs) != 1 {
		t.Error("the policy that was given has changed")
	}
	var b strings.Builder
	if err := s.Print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"data: 9 programs did operations that the rule forbids\n  " + app + "  3 times, create, write, first of /data/create\n    added to trust\n  " + rare + "  1 time,",
		shell + "  1 time, write, first of /data/write\n    not added: it runs any script", listed + "  1 time, write, first of /data/write\n    not added: it is an interpreter of the rule",
		known + "  1 time, write, first of /data/write\n    not added: its path is trusted", refused + "  1 time, write, first of /data/write\n    not added: it was denied",
		"gone  1 time, write, first of /data/write\n    not added: its file is gone", "the kernel  1 time, write, first of /data/write\n    not added: it has no path",
		folder + "  1 time, write, first of /data/write\n    not added: it is not a regular file", "\n1 attempt of rules that this policy does not have"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing:\n%s", want, &b)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	p := policy.Policy{Rules: []policy.Rule{{Name: "data"}}}
	for text, want := range map[string]string{
		"\n{":                          "line 2 is no event of",
		"{}\n":                         "line 1 is no event of `shunt guard run -o json`: it has no operation",
		strings.Repeat(" ", lineMax+1): "read line 1",
	} {
		if _, err := Read(p, strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
	var many []judge.Attempt
	for i := range programsMax + 1 {
		many = append(many, judge.Attempt{Program: "/p" + strings.Repeat("x", i), Operation: "write", Rules: []string{"data"}})
	}
	if _, err := Read(p, strings.NewReader(lines(t, many...))); err == nil || !strings.Contains(err.Error(), "Name fewer paths") {
		t.Errorf("too many programs: %v", err)
	}
}

// For any input, the proposed policy has the rules of the given one, and trusts all programs that the given one trusts.
func FuzzRead(f *testing.F) {
	f.Add(`{"operation":"write","program":"/bin/true","rules":["data"],"path":"/x"}`)
	f.Add(`{"connection":{"operation":"connect","address":"[::1]:80","program":"/x","rules":["net"]}}`)
	f.Add(`{"connection":{"operation":"bind","address":"0.0.0.0:80","program":"/x","rules":["net"]}}`)
	f.Add(`{"operation":"kill","program":"/x","rules":["data","y"],"target":7,"denied":true}` + "\n\n{}")
	p := policy.Policy{Rules: []policy.Rule{{Name: "data", Trust: policy.Trust{Programs: policy.Programs("/usr/bin/app")}}},
		Connections: []policy.Connection{{Name: "net", Program: "/x", Deny: []string{policy.Connect}}}}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Read(p, strings.NewReader(text))
		if err != nil {
			return
		}
		if len(s.Policy.Rules) != 1 || s.Policy.Rules[0].Trust.Programs[0].Path != "/usr/bin/app" {
			t.Errorf("%+v", s.Policy)
		}
		for _, except := range s.Policy.Connections[0].Except {
			if again, problem := policy.ParseTarget(except.String()); problem != "" || again != except {
				t.Errorf("%v is no address that a policy can have: %s", except, problem)
			}
		}
	})
}
