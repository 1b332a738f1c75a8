package protect

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// stranger is a user that no other test has.
const stranger = 4242

// asUser has the other operation done by a real and an effective user, of all threads.
func asUser(real, effective int, then func(*work) error) func(*work) error {
	return func(w *work) error {
		if err := syscall.Setresuid(real, effective, 0); err != nil {
			return err
		}
		return then(w)
	}
}

func writePath(w *work) error { return openWrite(w.dir, unix.O_WRONLY) }

// asUsers are operations on any path, as other users.
var asUsers = []row{
	{name: "write-as-stranger", attempt: asUser(stranger, stranger, writePath)},
	{name: "write-as-set-user-ID-of-root", attempt: asUser(stranger, 0, writePath)},
	{name: "write-as-root-that-lends-itself", attempt: asUser(0, stranger, writePath)},
	{name: "start-other-as-stranger", attempt: asUser(stranger, stranger, func(w *work) error { return startNext(w, "other") })},
}

// groups are cgroups of the test's own.
type groups struct {
	t    *testing.T
	root string // of the second hierarchy
}

func (g groups) path(name string) string { return "/shunt-narrow-" + name }

func (g groups) make(names ...string) {
	g.t.Helper()
	for _, name := range names {
		if err := os.Mkdir(g.root+g.path(name), 0o755); err != nil {
			g.t.Fatal(err)
		}
		g.t.Cleanup(func() { _ = os.Remove(g.root + g.path(name)) }) // a test may have removed it
	}
}

// move takes a process into a group; "": the root.
func (g groups) move(id int, name string) {
	g.t.Helper()
	folder := g.root
	if name != "" {
		folder += g.path(name)
	}
	if err := os.WriteFile(filepath.Join(folder, "cgroup.procs"), []byte(itoa(id)), 0o644); err != nil {
		g.t.Fatal(err)
	}
}

// newGroups mounts the second hierarchy for the test.
func newGroups(t *testing.T) groups {
	t.Helper()
	root := t.TempDir()
	if err := unix.Mount("cgroup2", root, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return groups{t, root}
}

// TestTrustOfUsersAndCgroups has a trusted program write as other users, and in other cgroups, to files of rules that trust it as one user or
// in one cgroup only.
func TestTrustOfUsersAndCgroups(t *testing.T) {
	b := newBench(t)
	if err := os.Chmod(filepath.Dir(filepath.Dir(b.root)), 0o755); err != nil { // which the stranger has to get through
		t.Fatal(err)
	}
	groups := newGroups(t)
	groups.make("group", "group/inner", "group/inner/most", "group-2")
	trust := policy.Trust{Programs: policy.Programs(b.trusted)}
	var rules []policy.Rule
	add := func(name string, change func(*policy.Trust)) {
		path := filepath.Join(b.root, "of-"+name)
		if err := errors.Join(os.WriteFile(path, []byte("kept"), 0o666), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
		r := policy.Rule{Name: name, Paths: []string{path}, Deny: []string{policy.Write}, Trust: trust, Mode: policy.Deny}
		change(&r.Trust)
		rules = append(rules, r)
	}
	add("all", func(*policy.Trust) {})
	add("root", func(t *policy.Trust) { t.User = "0" })
	add("stranger", func(t *policy.Trust) { t.User, t.Children = itoa(stranger), true })
	add("group", func(t *policy.Trust) { t.Cgroup = groups.path("group") })
	add("inner", func(t *policy.Trust) { t.User, t.Cgroup = "0", groups.path("group/inner") })
	b.start(policy.Policy{Rules: rules})
	for _, c := range []struct {
		operation string
		may       string // which files
	}{
		{"write-path", "all root"}, {"write-as-stranger", "all stranger"}, {"write-as-set-user-ID-of-root", "all"}, {"write-as-root-that-lends-itself", "all"},
		{"start-other-as-stranger", "stranger"}, {"start-other", ""},
	} {
		for _, r := range rules {
			b.expect(!has(c.may, r.Name), b.trusted, c.operation, r.Paths[0], "the file of "+r.Name)
		}
	}
	b.expect(true, b.other, "write-as-stranger", rules[2].Paths[0], "the file of "+rules[2].Name)
	t.Run("root of a user namespace", func(t *testing.T) {
		for _, r := range rules {
			h, err := beginAs(b.trusted, "write-path", r.Paths[0], &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: stranger, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
				Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true}}) // root there, stranger here
			if err != nil {
				t.Fatal(err)
			}
			if said, err := h.attempt(); err != nil || (said == "done") != has("all stranger", r.Name) {
				t.Errorf("the file of %s: %s %v", r.Name, said, err)
			}
		}
	})
	t.Run("cgroups", func(t *testing.T) { b.testCgroups(t, groups, rules[2:]) })
}

// has reports whether a text has a word.
func has(text, word string) bool { return strings.Contains(" "+text+" ", " "+word+" ") }

func (b *bench) testCgroups(t *testing.T, groups groups, rules []policy.Rule) {
	again := func() { // as a service that starts again
		for _, name := range []string{"group/inner/most", "group/inner", "group"} {
			if err := os.Remove(groups.root + groups.path(name)); err != nil {
				t.Fatal(err)
			}
		}
		groups.make("group", "group/inner")
	}
	for _, c := range []struct {
		into []string // one after the other
		may  string
		then func()
	}{
		{[]string{"group"}, "group", nil}, {[]string{"group/inner"}, "group inner", nil}, {[]string{"group/inner/most"}, "group inner", nil},
		{[]string{"group-2"}, "", nil}, {[]string{"group", ""}, "", again}, {[]string{"", "group/inner"}, "group inner", nil},
	} {
		for _, r := range rules {
			h, err := begin(b.trusted, "write-path", r.Paths[0])
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range c.into {
				groups.move(h.cmd.Process.Pid, name)
			}
			e, err := Explain(kernel.DefaultPinRoot, r.Paths[0], h.cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			said, err := h.attempt()
			if err != nil || (said == "done") != has(c.may, r.Name) {
				t.Errorf("in %q, the file of %s: %s %v", c.into, r.Name, said, err)
			}
			if (e.of(policy.Write).Verdict == Allowed) != (said == "done") || !strings.Contains(whyOf(e, r.Name), whyNarrowed(said, r)) {
				t.Errorf("in %q, the file of %s: %s, and the explanation is %+v", c.into, r.Name, said, e)
			}
		}
		if c.then != nil {
			c.then()
		}
	}
}

// whyNarrowed is the text that an explanation has to have in it.
func whyNarrowed(said string, r policy.Rule) string {
	switch {
	case said == "done":
		return "the rule names its executable"
	case r.Name == "stranger":
		return fmt.Sprintf("the rule trusts its program as user %d, but its real user is 0 and its effective user 0", stranger)
	}
	return "the rule trusts its program in cgroup " + r.Trust.Cgroup + ", but it is in /"
}
