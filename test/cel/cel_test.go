// Package cel compares the conditions of shunt's rules with CEL itself. It is a module of its own, so that nothing else
// compiles cel-go.
package cel

import (
	"strings"
	"testing"

	"cel.dev/cel-go/cel"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// nested are the values of an event as CEL has them: a field a.b is the key b of the map a.
func nested(e *rule.Event) map[string]any {
	all := map[string]any{}
	for _, f := range rule.Fields {
		value := f.Value(e)
		if list, is := value.([]rule.Process); is {
			var maps []map[string]any
			for _, p := range list {
				maps = append(maps, rule.ProcessValues(p))
			}
			value = maps
		}
		group, name, has := strings.Cut(f.Name, ".")
		if !has {
			all[group] = value
			continue
		}
		if all[group] == nil {
			all[group] = map[string]any{}
		}
		all[group].(map[string]any)[name] = value
	}
	return all
}

func environment(t *testing.T) *cel.Env {
	t.Helper()
	seen := map[string]bool{}
	var options []cel.EnvOption
	for _, f := range rule.Fields {
		group, _, has := strings.Cut(f.Name, ".")
		if seen[group] {
			continue
		}
		seen[group] = true
		if has {
			options = append(options, cel.Variable(group, cel.MapType(cel.StringType, cel.DynType)))
		} else {
			options = append(options, cel.Variable(group, cel.ListType(cel.MapType(cel.StringType, cel.DynType))))
		}
	}
	env, err := cel.NewEnv(options...)
	if err != nil {
		t.Fatal(err)
	}
	return env
}

func TestConditionsMeanWhatTheyMeanInCEL(t *testing.T) {
	env := environment(t)
	var conditions []string
	for _, r := range rule.Builtin() {
		conditions = append(conditions, r.If)
	}
	conditions = append(conditions, `-1 < 0x10 && process.pid > -5`, `"a\"b\\" == 'a"b\\'`, `false || true && false`, `(true || false) && false`, `!(process.name in ["sh", 'bash'])`,
		`ancestors.all(a, a.pid > 1)`, `ancestors.exists(a, process.args.exists(x, x == "-i" && a.pid == 1))`, `process.args.size() == 2 && process.name.size() == 4`,
		`process.name > "aaa" && process.name <= "bash"`, `process.pid in [7, 8]`, `!true == false`, `true == false == false`, `process.pid in []|| true`)
	far := rule.Descriptor{Kind: rule.Inet, Direction: rule.Out, Remote: "192.0.2.1", RemotePort: 4444, Inode: 9}
	events := []*rule.Event{{}, {Type: rule.Exec, Path: "/dev/shm/ü", Process: rule.Process{PID: 7, Program: "/usr/bin/bash", Comm: "bash", Args: []string{"bash", "-i"}}, User: rule.User{UID: 1000},
		ParentOuts: 1, Ancestors: []rule.Process{{PID: 6, Program: "/usr/sbin/nginx"}, {PID: 1, Comm: "init"}}, FDs: [4]rule.Descriptor{far, far}},
		{Type: rule.Open, Write: true, Path: "/etc/sudoers.d/x", Process: rule.Process{PID: 8, Program: "/memfd:x"}, Deleted: true},
		{Type: rule.Open, Path: "/etc/shadow", Process: rule.Process{Comm: ".x"}}}
	held := 0
	for _, condition := range conditions {
		ours, ourErr := rule.Compile(condition, rule.Types)
		ast, issues := env.Compile(condition)
		if ourErr != nil {
			t.Logf("%s: shunt refuses it: %v", condition, ourErr)
			continue
		}
		if issues.Err() != nil {
			t.Errorf("%s: CEL refuses it: %v", condition, issues.Err())
			continue
		}
		program, err := env.Program(ast)
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range events {
			out, _, err := program.Eval(nested(e))
			if err != nil || out.Value() != ours.Holds(e) {
				t.Errorf("%s: event %d: CEL says %v, %v, and shunt %v", condition, i, out, err, ours.Holds(e))
			}
			if ours.Holds(e) {
				held++
			}
		}
	}
	if held < 10 {
		t.Errorf("only %d conditions hold: too few to compare", held)
	}
}
