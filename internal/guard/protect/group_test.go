package protect

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// groupTry is an operation on a process of one cgroup by a process of another.
type groupTry struct {
	row     *trial.Row
	program string   // that tries it
	own     string   // that one's cgroup
	into    []string // the other's, one after the other
	target  uint32
}

// testGroup has an operation tried, and expects that it is denied or works; the explanation of a signal must agree
// beforehand.
func (b *bench) testGroup(groups groups, try *groupTry, isProtected, isDenied bool) {
	b.t.Helper()
	dir := filepath.Join(b.Root, "group")
	target, err := trial.Begin(b.Guarded, "wait", dir)
	if err != nil {
		b.t.Fatal(err)
	}
	try.target = uint32(target.Cmd.Process.Pid)
	for _, name := range try.into {
		groups.move(target.Cmd.Process.Pid, name)
	}
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(strconv.Itoa(target.Cmd.Process.Pid)), 0o644); err != nil {
		b.t.Fatal(err)
	}
	if try.row.Name == "kill" { // it loads a program, which an emulated machine takes seconds for
		e, err := Explain(kernel.DefaultPinRoot, b.Other, target.Cmd.Process.Pid)
		if err != nil || slices.Contains(e.Process.Protected, "group") != isProtected {
			b.t.Errorf("in %q, the explanation is %+v %v", try.into, e, err)
		}
	}
	h, err := trial.Begin(try.program, try.row.Name, dir)
	if err != nil {
		b.t.Fatal(err)
	}
	groups.move(h.Cmd.Process.Pid, try.own)
	said, err := h.Attempt()
	if err != nil {
		b.t.Fatal(err)
	}
	var exit *exec.ExitError
	isEnded := errors.As(target.End(), &exit)
	want := "done"
	if isDenied && !try.row.IsSilent {
		want = fmt.Sprintf("refused %d ", cmp.Or(try.row.Errno, unix.EPERM))
	}
	if !strings.HasPrefix(said, want) || isEnded != (try.row.IsKill && !isDenied) {
		b.t.Errorf("%s by %s of %q, of a process in %q: %s, it was ended: %v; denied should be %v", try.row.Name, filepath.Base(try.program), try.own, try.into, said, isEnded, isDenied)
	}
}

// TestProcessesOfCgroups tries each operation on processes that come into a cgroup, are below it, and leave it. The cgroup is made after the
// policy, and again.
func TestProcessesOfCgroups(t *testing.T) {
	b := newBench(t)
	b.Folder("group")
	groups := newGroups(t)
	trust := policy.Trust{Programs: policy.Programs(b.Trusted, ownProgram(t))} // this process moves others into the cgroup
	rule := policy.Rule{Name: "group", Cgroup: groups.path("group"), Deny: policy.ProcessOperations, Trust: trust, Mode: policy.Deny}
	inner := policy.Rule{Name: "inner", Cgroup: groups.path("group/inner"), Deny: []string{policy.Kill}, Trust: policy.Trust{Programs: policy.Programs(ownProgram(t))}, Mode: policy.Audit}
	p := policy.Policy{Rules: []policy.Rule{inner, rule}}
	g := b.start(p)
	told := b.listen(g)
	groups.make("group", "group/inner", "group-2")
	var denied []*groupTry
	isBrief := true // in an emulated machine all operations take minutes
	try := func(name, program, own string, isProtected bool, into ...string) {
		for i := range trial.Matrix {
			r := &trial.Matrix[i]
			if !r.IsGuarded || isBrief && !slices.Contains([]string{"kill", "process_vm_writev-to-a-protected-process"}, r.Name) {
				continue
			}
			one := &groupTry{row: r, program: program, own: own, into: into}
			isDenied := isProtected && (program != b.Trusted && !strings.HasPrefix(own, "group") || r.IsNobodys)
			t.Run(name+"/"+r.Name, func(t *testing.T) {
				sub := b.with(t)
				sub.testGroup(groups, one, isProtected, isDenied)
			})
			if isDenied {
				denied = append(denied, one)
			}
		}
	}
	try("never in it", b.Other, "", false, "")
	isBrief = false
	try("comes", b.Other, "", true, "", "group")
	try("leaves", b.Other, "", false, "group", "group-2")
	isBrief = true
	try("comes, and a trusted program tries", b.Trusted, "", true, "group")
	try("comes, and one of its own tries", b.Other, "group/inner", true, "group")
	try("below", b.Other, "", true, "group/inner")
	try("beside", b.Other, "", false, "group-2")
	for _, name := range []string{"group/inner", "group"} { // as a service that starts again
		if err := os.Remove(groups.root + groups.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	try("while there is none", b.Other, "", false, "")
	groups.make("group", "group/inner")
	try("made again", b.Other, "", true, "group")
	if err := g.Apply(p); err != nil { // the other side of the maps
		t.Fatal(err)
	}
	try("after a load", b.Other, "", true, "group/inner")
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{inner}}); err != nil {
		t.Fatal(err)
	}
	try("without the rule", b.Other, "", false, "group/inner")
	attempts := told()
	for _, one := range denied {
		if !slices.ContainsFunc(attempts, func(a judge.Attempt) bool {
			return a.Denied && a.Operation == one.row.Operation && a.Program == one.program && a.Target == one.target && slices.Equal(a.Rules, []string{"group"})
		}) {
			t.Errorf("%s of process %d was denied, and no event says so", one.row.Name, one.target)
		}
	}
	if !slices.ContainsFunc(attempts, func(a judge.Attempt) bool {
		return !a.Denied && a.Operation == policy.Kill && slices.Equal(a.Rules, []string{"inner"})
	}) {
		t.Error("no event tells of a signal that is only audited")
	}
}
