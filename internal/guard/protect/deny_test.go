package protect

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// loadText is a policy as a user writes it; ROOT stands for the bench's disk.
func (b *bench) loadText(text string) policy.Policy {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "guard.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "ROOT", b.Root)), 0o600); err != nil {
		b.t.Fatal(err)
	}
	p, faults, err := policy.Load(file)
	if err != nil || config.HasErrors(faults) {
		b.t.Fatal(faults, err)
	}
	return p
}

// byPrograms denies everything to one program, and allBut to all others; both deny the execution of a file, and that it is opened.
const (
	byPrograms = `guard:
  protect:
    - {name: plugins, paths: [ROOT/plugins], deny: [exec], trust: {programs: [ROOT/trusted]}, mode: deny}
  detect:
    rules:
      - {name: tool, on: exec, if: process.program == "ROOT/tool", action: deny, severity: critical, mitre: T1059.004}
      - {name: secret, on: open, if: file.path == "ROOT/secret" && process.program == "ROOT/other", action: deny}
      - {name: frozen, on: open, if: 'file.write && file.path in ["ROOT/frozen"]', action: deny}
      - {name: machine, on: [mount, module, ptrace], if: process.program == "ROOT/other", action: deny}
      - {name: programs, on: bpf, if: 'process.program in ["ROOT/other"]', action: deny}
`
	allBut = `guard:
  detect:
    rules:
      - {name: tool, on: exec, if: process.program == "ROOT/tool", action: deny, severity: critical, mitre: T1059.004}
      - {name: secret, on: open, if: file.path == "ROOT/secret" && process.program != "ROOT/trusted", action: deny}
      - {name: frozen, on: open, if: 'file.write && file.path == "ROOT/frozen"', action: deny}
      - {name: machine, on: [mount, module, ptrace, bpf], if: '!(process.program in ["ROOT/trusted"])', action: deny}
`
)

// TestDenials has programs try the operations that rules of detection deny, and their harmless relatives, by two
// policies that are loaded from text one after the other.
func TestDenials(t *testing.T) {
	b := newBench(t)
	tool, secret, frozen, folder, other := filepath.Join(b.Root, "tool"), filepath.Join(b.Root, "secret"), filepath.Join(b.Root, "frozen"), filepath.Join(b.Root, "folder"), filepath.Join(b.Root, "free")
	b.Copy(b.Trusted, tool)
	plugin := filepath.Join(b.Root, "plugins", "plugin")
	if err := os.Mkdir(filepath.Dir(plugin), 0o755); err != nil {
		t.Fatal(err)
	}
	b.Copy(b.Trusted, plugin)
	if err := errors.Join(os.WriteFile(secret, []byte("s\n"), 0o644), os.WriteFile(frozen, []byte("f\n"), 0o644), os.WriteFile(other, []byte("o\n"), 0o644), os.Mkdir(folder, 0o755)); err != nil {
		t.Fatal(err)
	}
	g := b.start(b.loadText(byPrograms))
	told := b.listen(g)
	b.Evict()
	b.deniedFiles("by one program", tool, frozen, other)
	b.denials("one program", secret, folder)
	b.Copy(b.Trusted, plugin+"-2") // which the folder labels
	for _, path := range []string{plugin, plugin + "-2"} {
		b.Expect(true, b.Other, "exec-path", path, "in a folder of which programs cannot be executed")
		b.Expect(true, b.Other, "map-code", path, "in a folder of which programs cannot be executed")
		b.Expect(false, b.Trusted, "exec-path", path, "in a folder of which programs cannot be executed")
	}
	if err := g.Apply(b.loadText(allBut)); err != nil { // which loads nothing, and could: shunt's own program may
		t.Fatal(err)
	}
	if _, err := load(nil); err != nil {
		t.Errorf("shunt's own program cannot load programs any more: %v", err)
	}
	b.denials("all but one", secret, folder)
	b.replaced(tool, secret)
	attempts := told()
	for operation, want := range map[string][]string{"exec": {"tool", tool}, "read": {"secret", secret}, "write": {"frozen", frozen}, "mount": {"machine", folder}, "module": {"machine", b.Other},
		"trace": {"machine", ""}, "bpf": {"machine", ""}} {
		is := func(a judge.Attempt) bool {
			return a.Denied && a.Operation == operation && a.Rules[0] == want[0] && strings.HasPrefix(a.Path, want[1]) && a.Program == b.Other && a.Severity != "" && (a.Severity == "critical") == (operation == "exec") &&
				(len(a.Mitre) > 0) == (operation == "exec")
		}
		if !slices.ContainsFunc(attempts, is) {
			t.Errorf("no event says that %s was denied by %v", operation, want)
		}
	}
	for _, a := range attempts {
		if a.Program != b.Other && !(a.Rules[0] == "tool" || a.Rules[0] == "frozen") {
			t.Errorf("another program was denied something: %v", a)
		}
	}
}

// deniedFiles tries the operations that are denied to every program, and other files.
func (b *bench) deniedFiles(when, tool, frozen, free string) {
	b.t.Helper()
	for _, program := range []string{b.Other, b.Trusted} {
		b.Expect(true, program, "exec-path", tool, when)
		b.Expect(true, program, "map-code", tool, when)
		b.Expect(true, program, "map-then-code", tool, when)
		b.Expect(false, program, "read-path", tool, when)
		b.Expect(false, program, "exec-path", b.Guarded, when)
		b.Expect(false, program, "map-code", b.Guarded, when)
		b.Expect(true, program, "write-path", frozen, when)
		b.Expect(false, program, "read-path", frozen, when)
		b.Expect(false, program, "read-path", free, when)
		b.Expect(false, program, "write-path", free, when)
	}
}

// denials tries the operations that are denied to the other program, and not to the trusted one.
func (b *bench) denials(when, secret, folder string) {
	b.t.Helper()
	for _, program := range []string{b.Other, b.Trusted} {
		isOther := program == b.Other
		b.Expect(isOther, program, "read-path", secret, when)
		for _, operation := range []string{"mount-anywhere", "change-propagation", "mount-by-descriptor", "load-module", "load-module-from-memory", "load-bpf", "trace-child"} {
			b.Expect(isOther, program, operation, folder, when)
		}
	}
}

// replaced puts other files in the place of denied ones, as upgrades and editors do.
func (b *bench) replaced(tool, secret string) {
	b.t.Helper()
	const when = "after the file was replaced"
	b.Expect(false, b.Trusted, "replace-path", secret, when)
	b.Expect(true, b.Other, "read-path", secret, when)
	b.Expect(false, b.Trusted, "replace-path", tool, when) // by text, which nothing can execute: it is refused before that is found out
	b.Expect(true, b.Other, "exec-path", tool, when)
}

// A kernel that loads the programs, and has no room at one of their hooks, would leave a rule out that the agent believes to be enforced.
func TestEnforcesAsksToAttach(t *testing.T) {
	needLSM(t)
	if err := Enforces(); err != nil {
		t.Fatal(err)
	}
	var links []link.Link
	end := func() {
		for _, l := range links {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
		links = nil
	}
	defer end()
	for range 38 { // BPF_MAX_TRAMP_LINKS of linux/bpf.h: of a function, on x86
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.LSM, AttachType: ebpf.AttachLSMMac, AttachTo: "file_send_sigiotask", License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close() //nolint:errcheck // of a test
		l, err := kernel.AttachLSM(p, "full")
		if err != nil {
			t.Fatal(err)
		}
		links = append(links, l)
	}
	if err := Enforces(); !errors.Is(err, unix.E2BIG) {
		t.Errorf("with no room at a hook: %v", err)
	}
	end()
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // the kernel releases links later
		err := Enforces()
		if err == nil {
			break
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
}
