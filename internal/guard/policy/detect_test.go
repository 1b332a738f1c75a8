package policy

import (
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

func TestDetection(t *testing.T) {
	p, faults, bad := load(t, `guard:
  detect:
    enable: temporary-exec
    disable: [bpf-load]
    kill: [reverse-shell]
    stop: memory-write
    rules:
      - {name: nc, on: exec, if: process.name == 'nc', action: log}
`)
	if bad || len(faults) > 0 {
		t.Fatal(faults)
	}
	active := p.Detection.Active()
	action := func(name string) string {
		i := slices.IndexFunc(active, func(r rule.Rule) bool { return r.Name == name })
		if i < 0 {
			return ""
		}
		return active[i].Action
	}
	for name, want := range map[string]string{"temporary-exec": rule.Alert, "bpf-load": "", "reverse-shell": rule.Kill, "memory-write": rule.Stop, "nc": rule.Log,
		"connect-with-low-socket": "", "memfd-exec": rule.Alert} {
		if got := action(name); got != want {
			t.Errorf("%s: action %q, want %q", name, got, want)
		}
	}
	if (Detection{}).Active() != nil {
		t.Error("rules are on without the section")
	}
}

func TestFaultsOfDetection(t *testing.T) {
	const begin = "guard:\n  detect:\n"
	own := func(rest string) string { return begin + "    rules:\n      - {name: a, on: [exec], " + rest + "}\n" }
	for text, want := range map[string]string{
		begin + "    disable: [reverse-shel]\n":                            `3:15: error: guard.detect.disable[0]: there is no built-in rule "reverse-shel"; did you mean "reverse-shell"?`,
		begin + "    kill: [bpf-load]\n    disable: bpf-load\n":            `bpf-load is under disable too; remove it from one of them`,
		begin + "    kill: [bpf-load]\n    stop: bpf-load\n":               `bpf-load is under kill too`,
		begin + "    kill: [temporary-exec]\n":                             `the rule temporary-exec is off by default; write it under enable, too`,
		own("if: process.nam == 'x'"):                                      `4:35: error: guard.detect.rules[0].if: the condition, column 1: there is no field "process.nam"; did you mean process.name?`,
		own("if: file.path == 'x'"):                                        `column 1: file.path belongs to events of type open and memfd, and the rule is on exec; add open or memfd to on`,
		own("if: 'true', tell: '{x}'"):                                     `the text, column 1: there is no field "x"`,
		own("if: 'true', mitre: T1059.099"):                                `"T1059.099" is not a technique of MITRE ATT&CK for Linux; T1059 is Command and Scripting Interpreter: write one of T1059.004`,
		own("if: true"):                                                    `write it in quotes: "true"`,
		own("on: [exce], if: 'true'"):                                      `on`,
		own("iff: 'true'"):                                                 `unknown key "iff"; did you mean "if"?`,
		strings.Replace(own("if: 'true'"), "name: a", "name: bpf-load", 1): `a built-in rule has the name "bpf-load"; choose another name`,
		own("if: 'true'") + "      - {name: a, on: exec, if: 'true'}\n":    `an earlier rule has the name "a", too`,
		strings.Replace(own("if: 'true'"), "[exec]", "[exce]", 1):          `unknown on "exce"`,
	} {
		_, faults, bad := load(t, text)
		if !bad || !strings.Contains(strings.Join(faults, "\n"), want) {
			t.Errorf("%s\nhas no fault %s, but\n%s", text, want, strings.Join(faults, "\n"))
		}
	}
}
