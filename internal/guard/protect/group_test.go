package protect

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// groupTry is an operation on a process of one cgroup by a process of another.
type groupTry struct {
	row     *row
	program string   // that tries it
	own     string   // that one's cgroup
	into    []string // the other's, one after the other
	target  uint32
}

// testGroup has an operation tried, and expects that it is denied or works; the explanation of a signal must agree
// beforehand.
func (b *bench) testGroup(groups groups, try *groupTry, isProtected, isDenied bool) {
	b.t.Helper()
	dir := filepath.Join(b.root, "group")
	target, err := begin(b.guarded, "wait", dir)
	if err != nil {
		b.t.Fatal(err)
	}
	try.target = uint32(target.cmd.Process.Pid)
	for _, name := range try.into {
		groups.move(target.cmd.Process.Pid, name)
	}
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(itoa(target.cmd.Process.Pid)), 0o644); err != nil {
		b.t.Fatal(err)
	}
	if try.row.name == "kill" { // it loads a program, which an emulated machine takes seconds for
		e, err := Explain(kernel.DefaultPinRoot, b.other, target.cmd.Process.Pid)
		if err != nil || slices.Contains(e.Process.Protected, "group") != isProtected {
			b.t.Errorf("in %q, the explanation is %+v %v", try.into, e, err)
		}
	}
	h, err := begin(try.program, try.row.name, dir)
	if err != nil {
		b.t.Fatal(err)
	}
	groups.move(h.cmd.Process.Pid, try.own)
	said, err := h.attempt()
	if err != nil {
		b.t.Fatal(err)
	}
	var exit *exec.ExitError
	isEnded := errors.As(target.end(), &exit)
	want := "done"
	if isDenied && !try.row.isSilent {
		want = fmt.Sprintf("refused %d ", cmp.Or(try.row.errno, unix.EPERM))
	}
	if !strings.HasPrefix(said, want) || isEnded != (try.row.isKill && !isDenied) {
		b.t.Errorf("%s by %s of %q, of a process in %q: %s, it was ended: %v; denied should be %v", try.row.name, filepath.Base(try.program), try.own, try.into, said, isEnded, isDenied)
	}
}

// TestProcessesOfCgroups tries each operation on processes that come into a cgroup, are below it, and leave it. The cgroup is made after the
// policy, and again.
func TestProcessesOfCgroups(t *testing.T) {
	b := newBench(t)
	b.folder("group")
	groups := newGroups(t)
	trust := policy.Trust{Programs: policy.Programs(b.trusted, ownProgram(t))} // this process moves others into the cgroup
	rule := policy.Rule{Name: "group", Cgroup: groups.path("group"), Deny: policy.ProcessOperations, Trust: trust, Mode: policy.Deny}
	inner := policy.Rule{Name: "inner", Cgroup: groups.path("group/inner"), Deny: []string{policy.Kill}, Trust: policy.Trust{Programs: policy.Programs(ownProgram(t))}, Mode: policy.Audit}
	p := policy.Policy{Rules: []policy.Rule{inner, rule}}
	g := b.start(p)
	told := b.listen(g)
	groups.make("group", "group/inner", "group-2")
	var denied []*groupTry
	isBrief := true // in an emulated machine all operations take minutes
	try := func(name, program, own string, isProtected bool, into ...string) {
		for i := range matrix {
			r := &matrix[i]
			if !r.isGuarded || isBrief && !slices.Contains([]string{"kill", "process_vm_writev-to-a-protected-process"}, r.name) {
				continue
			}
			one := &groupTry{row: r, program: program, own: own, into: into}
			isDenied := isProtected && (program != b.trusted && !strings.HasPrefix(own, "group") || r.isNobodys)
			t.Run(name+"/"+r.name, func(t *testing.T) {
				sub := *b
				sub.t = t
				sub.testGroup(groups, one, isProtected, isDenied)
			})
			if isDenied {
				denied = append(denied, one)
			}
		}
	}
	try("never in it", b.other, "", false, "")
	isBrief = false
	try("comes", b.other, "", true, "", "group")
	try("leaves", b.other, "", false, "group", "group-2")
	isBrief = true
	try("comes, and a trusted program tries", b.trusted, "", true, "group")
	try("comes, and one of its own tries", b.other, "group/inner", true, "group")
	try("below", b.other, "", true, "group/inner")
	try("beside", b.other, "", false, "group-2")
	for _, name := range []string{"group/inner", "group"} { // as a service that starts again
		if err := os.Remove(groups.root + groups.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	try("while there is none", b.other, "", false, "")
	groups.make("group", "group/inner")
	try("made again", b.other, "", true, "group")
	if err := g.Apply(p); err != nil { // the other side of the maps
		t.Fatal(err)
	}
	try("after a load", b.other, "", true, "group/inner")
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{inner}}); err != nil {
		t.Fatal(err)
	}
	try("without the rule", b.other, "", false, "group/inner")
	attempts := told()
	for _, one := range denied {
		if !slices.ContainsFunc(attempts, func(a Attempt) bool {
			return a.Denied && a.Operation == one.row.operation && a.Program == one.program && a.Target == one.target && slices.Equal(a.Rules, []string{"group"})
		}) {
			t.Errorf("%s of process %d was denied, and no event says so", one.row.name, one.target)
		}
	}
	if !slices.ContainsFunc(attempts, func(a Attempt) bool {
		return !a.Denied && a.Operation == policy.Kill && slices.Equal(a.Rules, []string{"inner"})
	}) {
		t.Error("no event tells of a signal that is only audited")
	}
}

func TestGroupOf(t *testing.T) {
	deep := "/" + strings.Repeat("a/", policy.CgroupDepthMax) + "b"
	if _, err := groupOf(policy.Rule{Cgroup: deep}); err == nil || !strings.Contains(err.Error(), "in the cgroup "+deep) {
		t.Error(err)
	}
	if n, err := groupOf(policy.Rule{Program: "/a"}); err != nil || n != (guardGuardNarrow{}) {
		t.Errorf("a rule without a cgroup: %+v %v", n, err)
	}
	own, err := cgroupOf(os.Getpid())
	if err != nil {
		t.Skip(err)
	}
	for path, is := range map[string]bool{own: own != "/", own + "x": false, "/a/b/c/no-such-group": false} {
		if path == "/" {
			continue // no rule can name the root
		}
		n, err := groupOf(policy.Rule{Cgroup: path})
		if err != nil {
			t.Fatal(path, err)
		}
		if got := (&narrows{3: n}).protect(os.Getpid()); got != map[bool]uint64{true: 1 << 3}[is] {
			t.Errorf("%s protects a process of %s by %b", path, own, got)
		}
	}
}
