package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
)

func load(t *testing.T, text string) (Policy, []string, bool) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "guard.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p, faults, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range faults {
		lines = append(lines, strings.TrimPrefix(f.String(), filepath.Dir(file)+"/"))
	}
	return p, lines, config.HasErrors(faults)
}

// The two tables of a well-known product's manual: /test/ trusts the programs in /test/bin, and
// /test/bin/ trusts nobody.
const twoTables = `guard:
  protect:
    - name: data
      paths: [/test/]
      deny: [write, create, delete, rename, link, chmod, mount]
      trust: {programs: [/test/bin/app, /test/bin/../bin/backup], children: true, interpreters: /bin/dash}
      mode: deny
    - name: programs
      paths: /test/bin/
      deny: [write, delete]
      mode: audit
`

func TestPolicy(t *testing.T) {
	have, faults, _ := load(t, twoTables)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	for i := range have.Rules {
		if !strings.HasSuffix(have.Rules[i].At, []string{"guard.yaml:3:7", "guard.yaml:8:7"}[i]) {
			t.Errorf("rule %d is at %s", i, have.Rules[i].At)
		}
		have.Rules[i].At = ""
	}
	want := Policy{Rules: []Rule{
		{Name: "data", Paths: []string{"/test"}, Deny: Operations, Trust: Trust{Programs: Programs("/test/bin/app", "/test/bin/backup"), Children: true, Interpreters: []string{"/bin/dash"}}, Mode: Deny},
		{Name: "programs", Paths: []string{"/test/bin"}, Deny: []string{Write, Delete}, Mode: Audit},
	}}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
	if got := have.Rules[1].String(); got != "audit: write, delete of /test/bin by all" {
		t.Error(got)
	}
}

func TestFaultsOfPolicies(t *testing.T) {
	const rule = "guard:\n  protect:\n    - {name: data, paths: [/srv], deny: [write], mode: deny}\n"
	for name, c := range map[string]struct {
		text string
		want []string // each a part of a line
		bad  bool
	}{
		"empty":              {"", []string{"the configuration is empty"}, true},
		"another key":        {"gaurd: {}\n", []string{`unknown key "gaurd"; did you mean "guard"?`}, true},
		"no policy":          {"x-a: {}\n", []string{`error: there is no key "guard"`}, true},
		"nothing":            {"\n", []string{"error: the configuration is empty; it needs at least guard"}, true},
		"decoys everywhere":  {"guard: {decoys: [{folders: [/, /srv/../..]}]}\n", []string{"the root is no folder for decoys", "the root"}, true},
		"decoys twice":       {"guard: {decoys: [{folders: /srv}, {folders: /srv/}]}\n", []string{"/srv is in an earlier part of decoys"}, true},
		"decoys of /proc":    {"guard: {decoys: [{folders: /proc/1}]}\n", []string{"belongs to the kernel"}, true},
		"decoys too deep":    {"guard: {decoys: [{folders: /srv, depth: 9}]}\n", []string{"out of range"}, true},
		"decoys that deny":   {"guard: {decoys: [{folders: /srv, action: deny}]}\n", []string{"deny"}, true},
		"decoys with digest": {"guard: {decoys: [{folders: /srv, trust: {programs: ['/bin/a@sha256:00']}}]}\n", []string{"do not check a program's digest"}, true},
		"decoys trust sh":    {"guard: {decoys: [{folders: /srv, trust: {programs: [/bin/sh]}}]}\n", []string{"runs any script"}, false},
		"no rules":           {"guard: {protect: []}\n", []string{"1:8: error: guard: the policy has no rules"}, true},
		"unknown operation":  {strings.Replace(rule, "[write]", "[wirte]", 1), []string{`unknown deny "wirte"`, `did you mean "write"?`}, true},
		"useless updaters":   {rule + "  updaters: [/usr/bin/dpkg]\n", []string{"no rule has programs that updaters could renew"}, false},
		"updater of scripts": {strings.Replace(rule, "mode:", "trust: {programs: [/a]}, mode:", 1) + "  updaters: [/usr/bin/python3]\n", []string{"every script could make any file a trusted program"}, true},
		"updaters twice":     {strings.NewReplacer("data", "updaters", "mode:", "trust: {programs: [/a]}, mode:").Replace(rule) + "  updaters: [/usr/bin/dpkg]\n", []string{`an earlier rule has the name "updaters", too`}, true},
		"user alone":         {strings.Replace(rule, "mode:", "trust: {user: app}, mode:", 1), []string{"user without programs trusts no program"}, true},
		"cgroup alone":       {strings.Replace(rule, "mode:", "trust: {cgroup: /a}, mode:", 1), []string{"cgroup without programs trusts no program"}, true},
		"no user":            {strings.Replace(rule, "mode:", "trust: {programs: [/a], user: 'a:b'}, mode:", 1), []string{`"a:b" is no user; write a name`}, true},
		"no user's number":   {strings.Replace(rule, "mode:", "trust: {programs: [/a], user: '4294967295'}, mode:", 1), []string{`"4294967295" is no user`}, true},
		"user's number":      {strings.Replace(rule, "mode:", "trust: {programs: [/a], user: '4294967294', cgroup: /a//b/}, mode:", 1), nil, false},
		"relative cgroup":    {strings.Replace(rule, "mode:", "trust: {programs: [/a], cgroup: a/b}, mode:", 1), []string{`the cgroup "a/b" is not absolute`}, true},
		"root's cgroup":      {strings.Replace(rule, "mode:", "trust: {programs: [/a], cgroup: /a/..}, mode:", 1), []string{"all processes are in the cgroup /"}, true},
		"folder of cgroup":   {strings.Replace(rule, "mode:", "trust: {programs: [/a], cgroup: /sys/fs/cgroup/a}, mode:", 1), []string{"write it as /proc/PID/cgroup has it"}, true},
		"deep cgroup":        {strings.Replace(rule, "mode:", "trust: {programs: [/a], cgroup: /1/2/3/4/5/6/7/8/9}, mode:", 1), []string{"the cgroup is 9 deep, and at most 8"}, true},
		"long cgroup":        {strings.Replace(rule, "mode:", "trust: {programs: [/a], cgroup: /"+strings.Repeat("x", 95)+"}, mode:", 1), []string{"has 95 bytes"}, true},
		"useless trust":      {strings.Replace(rule, "mode:", "trust: {interpreters: /bin/dash}, mode:", 1), []string{"interpreters has no effect without children"}, true},
		"short digest":       {strings.Replace(rule, "mode:", "trust: {programs: '/a@sha256:12'}, mode:", 1), []string{`"12" is not a SHA-256`}, true},
		"process twice":      {"guard:\n  processes:\n    - {name: app, program: /a, pid-file: /b, deny: [kill], mode: deny}\n", []string{"3:7: error: guard.processes[0]: a rule of processes names them by one of program, pid-file and cgroup; write program, pid-file or cgroup"}, true},
		"no process":         {"guard:\n  processes:\n    - {name: app, deny: [kill], mode: deny}\n", []string{"by one of program, pid-file and cgroup"}, true},
		"process's cgroup":   {"guard:\n  processes:\n    - {name: app, cgroup: /a//b/, deny: [kill], mode: deny}\n", nil, false},
		"cgroup and program": {"guard:\n  processes:\n    - {name: app, cgroup: /a, program: /b, deny: [kill], mode: deny}\n", []string{"by one of program, pid-file and cgroup"}, true},
		"move":               {"guard:\n  processes:\n    - {name: app, cgroup: /a, deny: [kill, move], mode: deny}\n", nil, false},
		"move of a program":  {"guard:\n  processes:\n    - {name: app, program: /a, deny: [kill, move], mode: deny}\n", []string{"the rule denies move, which needs a cgroup, and names none; leave move out, or name the cgroup"}, true},
		"all processes":      {"guard:\n  processes:\n    - {name: app, cgroup: /., deny: [kill], mode: deny}\n", []string{"all processes are in the cgroup /; name a cgroup below it"}, true},
		"self twice":         {strings.Replace(rule, "data", "self", 1) + "  self: true\n", []string{`an earlier rule has the name "self", too`}, true},
		"no mode":            {strings.Replace(rule, ", mode: deny", "", 1), []string{`"mode"`}, true},
		"relative":           {strings.Replace(rule, "/srv", "srv", 1), []string{`3:28: error: guard.protect[0].paths[0]: the path "srv" is not absolute; begin it with /`}, true},
		"root":               {strings.Replace(rule, "/srv", "/srv/..", 1), []string{"the root cannot be protected"}, true},
		"proc":               {strings.Replace(rule, "/srv", "/proc/1", 1), []string{"/proc/1 belongs to the kernel"}, true},
		"same name":          {rule + "    - {name: data, paths: [/etc], deny: [write], mode: audit}\n", []string{`4:14: error: guard.protect[1].name: an earlier rule has the name "data", too`}, true},
		"empty lists":        {strings.NewReplacer("[/srv]", "[]", "[write]", "[]").Replace(rule), []string{"paths is an empty list", "deny is an empty list"}, true},
		"twice":              {strings.NewReplacer("/srv", "/srv, /srv/", "write", "write, write").Replace(rule), []string{"warning: guard.protect[0].paths[1]: /srv is there twice", "deny has write twice"}, false},
		"interpreter":        {strings.Replace(rule, "mode:", "trust: {programs: [/usr/bin/python3.11]}, mode:", 1), []string{"warning: guard.protect[0].trust.programs[0]: /usr/bin/python3.11 runs any script"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			_, faults, bad := load(t, c.text)
			if bad != c.bad {
				t.Errorf("has errors: %v, want %v", bad, c.bad)
			}
			all := strings.Join(faults, "\n")
			for _, want := range c.want {
				if !strings.Contains(all, want) {
					t.Errorf("%q is not in:\n%s", want, all)
				}
			}
		})
	}
	many := "guard:\n  protect:\n"
	for i := range RulesMax + 1 {
		many += "    - {name: r" + strings.Repeat("x", i%60) + string(rune('a'+i/60)) + ", paths: [/srv], deny: [write], mode: deny}\n"
	}
	if _, faults, bad := load(t, many); !bad || !strings.Contains(strings.Join(faults, "\n"), "65 rules, and at most 64 are possible") {
		t.Error(faults)
	}
}

func TestProcesses(t *testing.T) {
	digest := strings.Repeat("0a", 32)
	have, faults, _ := load(t, "guard:\n  degraded: allow\n  self: true\n  processes:\n    - {name: app, program: /usr/sbin//app, deny: [kill, ptrace], trust: {programs: '/usr/bin/stop@sha256:"+strings.ToUpper(digest)+"'}, mode: deny}\n"+
		"    - {name: db, pid-file: /run/db.pid, deny: memory, mode: audit}\n"+
		"    - {name: web, cgroup: /system.slice/web.service/, deny: [kill, ptrace, memory], mode: deny}\n")
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	var lines []string
	for _, r := range have.Rules {
		lines = append(lines, r.Name+": "+r.String())
	}
	want := []string{"app: deny: kill, ptrace of processes of /usr/sbin/app by all but /usr/bin/stop", "db: audit: memory of the process of /run/db.pid by all",
		"web: deny: kill, ptrace, memory of processes in cgroup /system.slice/web.service by all",
		"self: deny: kill, ptrace, memory of the guard's process by all but process 1"}
	if !slices.Equal(lines, want) || !have.IsDegraded {
		t.Errorf("%q", lines)
	}
	if have.Rules[0].Trust.Programs[0] != (Program{"/usr/bin/stop", digest}) {
		t.Errorf("%+v", have.Rules[0].Trust)
	}
}

func TestUpdaters(t *testing.T) {
	const rule = "    - {name: %s, paths: [/srv], deny: [write], trust: {programs: ['%s']}, mode: %s}\n"
	digest := "@sha256:" + strings.Repeat("0a", 32)
	for _, mode := range []string{Audit, Deny} {
		p, faults, _ := load(t, "guard:\n  updaters: [/usr/bin/dpkg]\n  protect:\n"+fmt.Sprintf(rule, "a", "/a", mode)+fmt.Sprintf(rule, "b", "/b"+digest, Audit)+
			"    - {name: c, paths: [/etc], deny: [write], mode: audit}\n  processes:\n    - {name: d, program: /d, deny: [kill], mode: audit}\n")
		if len(faults) > 0 || len(p.Rules) != 5 {
			t.Fatal(faults, p.Rules)
		}
		if by, renewed := Renewed(p.Rules); by != 1<<4 || renewed != 1<<0|1<<3|1<<4 {
			t.Errorf("%b renews %b", by, renewed)
		}
		if got, want := p.Rules[4].String(), mode+": writing to /usr/bin/dpkg by others, and tracing it. Programs that it replaces stay trusted"; got != want || p.Rules[4].IsOfProcesses() {
			t.Errorf("%s, want %s", got, want)
		}
		if by, renewed := Renewed([]Rule{{By: []string{"/a"}}, {}, p.Rules[4]}); by != 4 || renewed != 5 {
			t.Errorf("of a rule that denies to a program, %b renews %b", by, renewed)
		}
		if by, renewed := Renewed(p.Rules[:4]); by != 0 || renewed != 0 {
			t.Errorf("without updaters %b renews %b", by, renewed)
		}
	}
}

// For any file: a policy without errors has rules that can be written into the programs' maps.
func FuzzLoad(f *testing.F) {
	f.Add(twoTables)
	f.Add("guard: {protect: [{name: a, paths: /a//b/, deny: write, mode: deny}]}")
	f.Add("guard: {protect: [{name: a, paths: [], trust: {programs: 1}}]}")
	f.Add("guard: [")
	f.Add("{}")
	f.Fuzz(func(t *testing.T, text string) {
		p, _, bad := load(t, text)
		if bad {
			return
		}
		names := map[string]bool{}
		for _, r := range p.Rules {
			objects := len(r.Paths) + len(r.Program) + len(r.PIDFile)
			if r.Name == "" || names[r.Name] || objects == 0 && !r.IsSelf && !r.IsUpdaters || len(r.Deny) == 0 && !r.IsUpdaters || r.Mode != Audit && r.Mode != Deny {
				t.Fatalf("a rule %+v without a fault", r)
			}
			names[r.Name] = true
			all := slices.Concat(r.Paths, r.Trust.Interpreters)
			for _, program := range r.Trust.Programs {
				all = append(all, program.Path)
			}
			for _, path := range all {
				if path != filepath.Clean(path) || !filepath.IsAbs(path) || path == "/" {
					t.Fatalf("the path %q without a fault", path)
				}
			}
		}
		if len(p.Rules) == 0 || len(p.Rules) > RulesMax {
			t.Fatalf("%d rules without a fault", len(p.Rules))
		}
	})
}

func TestSchemaNamesTheOperations(t *testing.T) {
	text := string(Schema())
	for _, word := range append(Operations, Audit, Deny, "trust", "programs") {
		if !strings.Contains(text, `"`+word+`"`) {
			t.Errorf("the schema lacks %q", word)
		}
	}
}
