package policy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func denyRule(on, condition string) string {
	return fmt.Sprintf("guard:\n  detect:\n    rules:\n      - {name: a, on: %s, if: '%s', action: deny, severity: high, mitre: T1059}\n", on, condition)
}

// A rule that the kernel can decide beforehand becomes a rule that it enforces.
func TestDenialsOfRules(t *testing.T) {
	for _, c := range []struct {
		on, condition string
		want          Rule
		text          string
	}{
		{"exec", `process.program == "/usr/bin/nc"`, Rule{Paths: []string{"/usr/bin/nc"}, Deny: []string{Exec}}, "deny: exec of /usr/bin/nc by all"},
		{"exec", `process.program in ["/a", "/b/../b"]`, Rule{Paths: []string{"/a", "/b"}, Deny: []string{Exec}}, "deny: exec of /a, /b by all"},
		{"open", `file.path == "/etc/shadow"`, Rule{Paths: []string{"/etc/shadow"}, Deny: []string{Read, Write}}, "deny: read, write of /etc/shadow by all"},
		{"open", `!file.write && file.path == "/etc/shadow" && !(process.program in ["/bin/a"])`, Rule{Paths: []string{"/etc/shadow"}, Deny: []string{Read}, Trust: Trust{Programs: Programs("/bin/a")}},
			"deny: read of /etc/shadow by all but /bin/a"},
		{"open", `file.path == "/etc/shadow" && (file.write && process.program == "/bin/a")`, Rule{Paths: []string{"/etc/shadow"}, Deny: []string{Write}, By: []string{"/bin/a"}}, "deny: write of /etc/shadow by /bin/a"},
		{"[mount, module, bpf, ptrace]", `true`, Rule{Deny: []string{AnyMount, Module, BPF, AnyTrace}}, "deny: any mount, module, bpf, any trace by all"},
		{"mount", `process.program != "/bin/mount"`, Rule{Deny: []string{AnyMount}, Trust: Trust{Programs: Programs("/bin/mount")}}, "deny: any mount by all but /bin/mount"},
		{"bpf", `process.program == "/a"`, Rule{Deny: []string{BPF}, By: []string{"/a"}}, "deny: bpf by /a"},
	} {
		p, faults, bad := load(t, denyRule(c.on, c.condition))
		if bad || len(faults) > 0 || len(p.Denials()) != 1 {
			t.Errorf("on %s if %s: %v", c.on, c.condition, faults)
			continue
		}
		got := p.Denials()[0]
		if c.want.Name, c.want.Mode, c.want.IsDetected, c.want.Severity, c.want.Mitre, c.want.At = "a", Deny, true, "high", []string{"T1059"}, got.At; !reflect.DeepEqual(got, c.want) || got.String() != c.text {
			t.Errorf("on %s if %s: %+v\nwant %+v\n%s", c.on, c.condition, got, c.want, got)
		}
		if !p.MustEnforce() || len(p.Enforced()) != 1 || p.Enforced()[0].IsOfProcesses() {
			t.Errorf("on %s if %s: it need not be enforced", c.on, c.condition)
		}
		again, faults, bad := load(t, p.YAML())
		if bad || len(again.Denials()) != 1 || again.Denials()[0].String() != c.text {
			t.Errorf("written again: %v\n%s", faults, p.YAML())
		}
		p.IsDenialOff = true
		if p.MustEnforce() || len(p.Enforced()) > 0 {
			t.Error("what is switched off is enforced")
		}
	}
}

// A condition that the kernel cannot decide is refused, with the part of the rule and an alternative.
func TestDenialsThatCannotBe(t *testing.T) {
	for _, c := range []struct{ on, condition, want string }{
		{"connect", "true", "action deny: the kernel has no check for connect before it happens; write a rule of connections"},
		{"accept", "true", "no check for accept"},
		{"dup", "true", "no check for dup before it happens; use action: kill"},
		{"setuid", "true", "no check for setuid"},
		{"[bpf, memfd]", "true", "guard.detect.rules[0].on[1]: action deny: the kernel has no check for memfd before it happens; use action: kill"},
		{"[exec, bpf]", `process.program == "/a"`, "a rule on exec can deny only if it is on that type alone, and this rule is on more; write a rule of its own for exec"},
		{"[open, mount]", `file.path == "/a"`, "write a rule of its own for open"},
		{"exec", "true", `the condition names no file: the kernel decides by the file's inode; add process.program == '/a/file'`},
		{"open", `process.program == "/a"`, "add file.path == '/a/file'"},
		{"exec", `process.name == "nc"`, `the condition, column 1: process.name == "nc" cannot be decided before the operation; any program can have this name: write process.program == '/the/whole/path'`},
		{"exec", `exec.path == "/usr/bin/nc"`, `column 1: exec.path == "/usr/bin/nc" cannot be decided`},
		{"exec", `process.program == "/a" && parent.name == "b"`, `column 28: parent.name == "b" cannot be decided before the operation; write it with process.program ==`},
		{"exec", `process.program != "/a"`, "name the files that are denied"},
		{"exec", `process.program == "/a" && process.program == "/b"`, `column 28: process.program == "/b" cannot be decided`},
		{"exec", `process.program == "/a" && process.args.exists(a, a == "-e")`, `column 28: process.args.exists(a, a == "-e") cannot be decided`},
		{"exec", `process.program == "/a" || process.program == "/b"`, "write a rule for each side, or in [...]"},
		{"exec", `process.program.startsWith("/tmp/")`, `column 1: process.program.startsWith("/tmp/") cannot be decided`},
		{"exec", `process.program == "nc"`, `the path "nc" is not absolute`},
		{"exec", `process.program == "/a" && process.uid != 0`, `column 28: process.uid != 0 cannot be decided`},
		{"exec", `process.program == "/a" && process.deleted`, `column 28: process.deleted cannot be decided`},
		{"open", `file.name == "shadow"`, `write file.path == '/the/whole/path'`},
		{"open", `file.path.matches("^/etc/")`, "or protect the folder (protect:)"},
		{"open", `file.path != "/a"`, "name the files that are denied"},
		{"open", `file.path == "/proc/kcore"`, "belongs to the kernel"},
		{"open", `file.path == "/a" && file.write && !file.write`, `column 22: file.write cannot be decided`},
		{"mount", `mount.target == "/etc"`, `column 1: mount.target == "/etc" cannot be decided before the operation; write it with process.program ==, !=, in, or use action: kill`},
		{"module", `module.name == "x"`, `module.name == "x" cannot be decided`},
		{"ptrace", `ptrace.request == "attach"`, `ptrace.request == "attach" cannot be decided`},
		{"bpf", `process.program == "/a" && process.program != "/b"`, `column 28: process.program != "/b" cannot be decided`},
		{"bpf", `false`, `column 1: false cannot be decided`},
	} {
		p, faults, bad := load(t, denyRule(c.on, c.condition))
		if all := strings.Join(faults, "\n"); !bad || len(p.Denials()) > 0 || !strings.Contains(all, c.want) || strings.Contains(all, "names no file:") != strings.Contains(c.want, "/a/file") {
			t.Errorf("on %s if %s\nhas no fault %s, but\n%s", c.on, c.condition, c.want, strings.Join(faults, "\n"))
		}
	}
	text := denyRule("bpf", "true") + "  processes:\n    - {name: a, program: /a, deny: kill, mode: deny}\n"
	if _, faults, bad := load(t, text); !bad || !strings.Contains(strings.Join(faults, "\n"), `the rule "a" of detect denies, and a rule of protect or processes has the same name`) {
		t.Error(faults)
	}
}
