package protect

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

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
	if err := os.WriteFile(filepath.Join(folder, "cgroup.procs"), []byte(strconv.Itoa(id)), 0o644); err != nil {
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
	if err := os.Chmod(filepath.Dir(filepath.Dir(b.Root)), 0o755); err != nil { // which the trial.Stranger has to get through
		t.Fatal(err)
	}
	groups := newGroups(t)
	groups.make("group", "group/inner", "group/inner/most", "group-2")
	trust := policy.Trust{Programs: policy.Programs(b.Trusted)}
	var rules []policy.Rule
	add := func(name string, change func(*policy.Trust)) {
		path := filepath.Join(b.Root, "of-"+name)
		if err := errors.Join(os.WriteFile(path, []byte("kept"), 0o666), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
		r := policy.Rule{Name: name, Paths: []string{path}, Deny: []string{policy.Write}, Trust: trust, Mode: policy.Deny}
		change(&r.Trust)
		rules = append(rules, r)
	}
	add("all", func(*policy.Trust) {})
	add("root", func(t *policy.Trust) { t.User = "0" })
	add("stranger", func(t *policy.Trust) { t.User, t.Children = strconv.Itoa(trial.Stranger), true })
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
			b.Expect(!has(c.may, r.Name), b.Trusted, c.operation, r.Paths[0], "the file of "+r.Name)
		}
	}
	b.Expect(true, b.Other, "write-as-stranger", rules[2].Paths[0], "the file of "+rules[2].Name)
	t.Run("root of a user namespace", func(t *testing.T) {
		for _, r := range rules {
			h, err := trial.BeginAs(b.Trusted, "write-path", r.Paths[0], &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: trial.Stranger, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
				Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true}}) // root there, trial.Stranger here
			if err != nil {
				t.Fatal(err)
			}
			if said, err := h.Attempt(); err != nil || (said == "done") != has("all stranger", r.Name) {
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
			h, err := trial.Begin(b.Trusted, "write-path", r.Paths[0])
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range c.into {
				groups.move(h.Cmd.Process.Pid, name)
			}
			e, err := Explain(kernel.DefaultPinRoot, r.Paths[0], h.Cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			said, err := h.Attempt()
			if err != nil || (said == "done") != has(c.may, r.Name) {
				t.Errorf("in %q, the file of %s: %s %v", c.into, r.Name, said, err)
			}
			if (trial.AnswerOf(e, policy.Write).Verdict == judge.Allowed) != (said == "done") || !strings.Contains(trial.WhyOf(e, r.Name), whyNarrowed(said, r)) {
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
		return fmt.Sprintf("the rule trusts its program as user %d, but its real user is 0 and its effective user 0", trial.Stranger)
	}
	return "the rule trusts its program in cgroup " + r.Trust.Cgroup + ", but it is in /"
}
