package baseline

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A hostile tree must not lead the check out of it, make it wait, fill the memory, or end it.
func TestHostileTrees(t *testing.T) {
	secret := filepath.Join(folder(t), "secret")
	if err := os.WriteFile(secret, []byte("PermitRootLogin no\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		make    func(file string) error
		id, has string
	}{
		"a link out of the tree": {func(file string) error { return os.Symlink(secret, file) }, "ssh-root-login", NotApplicable},
		"a link above the root":  {func(file string) error { return os.Symlink("../../../../../../../.."+secret, file) }, "ssh-root-login", NotApplicable},
		"a link to itself":       {func(file string) error { return os.Symlink("sshd_config", file) }, "ssh-root-login", CannotTell},
		"a FIFO":                 {func(file string) error { return unix.Mkfifo(file, 0o600) }, "ssh-root-login", CannotTell},
		"a folder":               {func(file string) error { return os.Mkdir(file, 0o700) }, "ssh-root-login", CannotTell},
		"a huge file": {func(file string) error {
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				return err
			}
			return os.Truncate(file, 1<<40)
		}, "ssh-root-login", CannotTell},
		"a file that includes itself": {func(file string) error {
			return os.WriteFile(file, []byte("Include sshd_config\nInclude sshd_config\n"), 0o600)
		}, "ssh-root-login", CannotTell},
		"no text": {func(file string) error {
			return os.WriteFile(file, []byte("\xff\xfe\x00\x1b[2J\nPermitRootLogin \xff\x1b[31m\n"), 0o600)
		}, "ssh-root-login", "PermitRootLogin \uFFFD"},
	} {
		t.Run(name, func(t *testing.T) {
			root := good().build(t)
			file := filepath.Join(root, "etc/ssh/sshd_config")
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if err := c.make(file); err != nil {
				t.Fatal(err)
			}
			_, found := failing(t, root)
			if text, is := found[c.id]; !is || !strings.Contains(text, c.has) || strings.ContainsRune(text, '\x1b') {
				t.Errorf("%q", text)
			}
			outcomes, journal := fix(t, root, nil) // does not fail, and leads nowhere
			_ = outcomes
			rollback(t, root, journal)
			if text, err := os.ReadFile(secret); err != nil || string(text) != "PermitRootLogin no\n" {
				t.Errorf("%q %v", text, err)
			}
		})
	}
	empty := folder(t)
	if _, err := Check(empty, debianItems(t)); err != nil {
		t.Error(err)
	}
	if _, err := Check(secret, debianItems(t)); err == nil {
		t.Error("a file was taken as a root")
	}
}

// A rollback leaves and names the objects that somebody changed after fix, and restores the others. It can be tried again.
func TestRollbackLeavesWhatChangedSince(t *testing.T) {
	f := good()
	mutations["ssh-max-auth-tries"](f)
	mutations["mode-crontab"](f)
	mutations["sysctl-dmesg"](f)
	root := f.build(t)
	before := picture(t, root)
	_, journal := fix(t, root, nil)
	file := filepath.Join(root, "etc/ssh/sshd_config")
	fixed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(fixed, "# mine\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := RollBack(root, journal)
	if err != nil || len(r.Left) != 1 || !strings.HasPrefix(r.Left[0], "/etc/ssh/sshd_config: somebody changed it since") || !slices.Contains(r.Restored, "/etc/crontab") {
		t.Fatalf("%+v %v", r, err)
	}
	if text, _ := os.ReadFile(file); string(text) != string(fixed)+"# mine\n" {
		t.Errorf("%q", text)
	}
	if err := os.WriteFile(file, fixed, 0o600); err != nil {
		t.Fatal(err)
	}
	rollback(t, root, journal)
	same(t, before, picture(t, root))
	if r, err := RollBack(root, journal); r != nil || err != nil {
		t.Errorf("a second time: %+v %v", r, err)
	}
}

// A file that cannot be changed is named, and the others are changed.
func TestFixGoesOn(t *testing.T) {
	f := good()
	mutations["login-umask"](f)
	mutations["sysctl-dmesg"](f)
	mutations["mode-crontab"](f)
	root := f.build(t)
	if err := os.Link(filepath.Join(root, "etc/login.defs"), filepath.Join(root, "etc/other")); err != nil {
		t.Fatal(err)
	}
	p, err := NewPlan(root, debianItems(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // only read
	if diff := p.Diff(); !strings.Contains(diff, "-kernel.dmesg_restrict = 7\n+kernel.dmesg_restrict = 1\n") || !strings.Contains(diff, "-mode 0666, owner 0, group 0\n+mode 0600, owner 0, group 0\n") {
		t.Errorf("%s", diff)
	}
	if err := os.Remove(filepath.Join(root, "etc/sysctl.d/99-own.conf")); err != nil { // meanwhile
		t.Fatal(err)
	}
	if _, err := p.Apply(folder(t)); err != nil {
		t.Fatal(err)
	}
	have := map[string]string{}
	for _, o := range p.Outcomes {
		have[o.ID] = o.ByHand + o.Error
		if o.Fixed != (o.ID == "mode-crontab") {
			t.Errorf("%+v", o)
		}
	}
	if !strings.Contains(have["login-umask"], "2 names (hard links)") || !strings.Contains(have["sysctl-dmesg"], "another program changed it meanwhile") || len(have) != 3 {
		t.Errorf("%v", have)
	}
}

func TestTemplates(t *testing.T) {
	for text, want := range map[string]string{
		"baseline: {change: [{id: ssh-max-auth-tries, max: 6, write: '6'}, {id: no-cups, off: true}, {id: mode-crontab, at-most: '0644'}, {id: pam-history, min: 10}]}": "",
		"baseline: {change: [{id: ssh-max-auth-trys, max: 6}]}":      `:1:26: error: baseline.change[0].id: the template of Debian has no item "ssh-max-auth-trys"; did you mean "ssh-max-auth-tries"?`,
		"baseline: {change: [{id: ssh-max-auth-tries, max: 3}]}":     `fix would write "4", but the right value is 1 to 3`,
		"baseline: {change: [{id: no-cups, max: 3}]}":                "no-cups has no value that can be changed",
		"baseline: {change: [{id: no-cups, maxx: 3}]}":               `unknown key "maxx"`,
		"baseline: {base: none, change: [{id: no-cups, off: true}]}": "change needs a base",
		"baseline: {base: none}":                                     "the template has no item",
		"other: 1":                                                   `unknown key "other"`,
		"baseline: {items: [{id: a, title: a, section: audit, clause: 8.1.4.1 a, absent: {paths: [b]}}]}":          `the section audit is clause 8.1.4.3`,
		"baseline: {items: [{id: a, title: a, section: audit, clause: 8.1.4.3 a, absent: {paths: [b]}}]}":          `the path "b" is not absolute`,
		"baseline: {items: [{id: a, title: a, section: audit, clause: 8.1.4.3 a}]}":                                "it has 0 checks, want one",
		"baseline: {items: [{id: a, title: a, section: audit, clause: 8.1.4.3 a, line: {files: /a, match: '('}}]}": "missing closing )",
		"baseline: {items: [{id: a, title: a, section: audit, clause: 8.1.4.3 a, absent: {paths: [/b]}}]}":         "",
	} {
		file := filepath.Join(t.TempDir(), "own.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		items, faults, err := Load(file)
		if err != nil {
			t.Fatal(err)
		}
		all := ""
		for _, f := range faults {
			all += f.String() + "\n"
		}
		if want == "" && (all != "" || len(items) < 60) || !strings.Contains(all, want) {
			t.Errorf("%s: %d items\n%s\nwant %s", text, len(items), all, want)
		}
	}
	if !strings.Contains(string(Schema()), "at-most") {
		t.Error("the schema lacks a key")
	}
}

// An entry without a name is no entry of NIS: repairing those must not delete it.
func TestNamelessEntryStays(t *testing.T) {
	f := good()
	f.edit("etc/passwd", "ada:", ":x:2000:1000::/:/bin/false\nada:")
	mutations["accounts-no-network"](f)
	root := f.build(t)
	fix(t, root, nil)
	text, err := os.ReadFile(filepath.Join(root, "etc/passwd"))
	if err != nil || !strings.Contains(string(text), "\n:x:2000:") || strings.Contains(string(text), "+") {
		t.Errorf("%v: %s", err, text)
	}
}

// oddFiles are files that parsers read.
var oddFiles = []string{"etc/ssh/sshd_config", "etc/login.defs", "etc/pam.d/common-auth", "etc/pam.d/common-password", "etc/fstab", "etc/passwd", "etc/shadow", "etc/group", "etc/sysctl.d/99-own.conf",
	"etc/systemd/journald.conf", "etc/profile", "etc/audit/rules.d/audit.rules", "etc/security/faillock.conf"}

const oddText = "a\xff=\"\n[\n]\nauth [x pam_unix.so nullok nullok\n/ /tmp \v x\r\nUMASK\nTMOUT=\n:::\n+"

// TestOddFiles has files that make little sense repaired, and taken back.
func TestOddFiles(t *testing.T) {
	for _, name := range oddFiles {
		t.Run(path.Base(name), func(t *testing.T) {
			tree := good()
			tree[name] = object{content: oddText, mode: 0o644}
			root := tree.build(t)
			before := picture(t, root)
			_, journal := fix(t, root, nil)
			rollback(t, root, journal)
			same(t, before, picture(t, root))
		})
	}
}

// FuzzFiles plans repairs of any contents of a file, in memory: a run for the disk takes a hundred times as long.
func FuzzFiles(f *testing.F) {
	for i, name := range oddFiles {
		f.Add(uint8(i), []byte(good()[name].content))
		f.Add(uint8(i), []byte(oddText))
	}
	root, items := good().build(f), debianItems(f)
	readers := map[string][]string{} // ids of the items that read a file: items that find something else if it says nothing, or nonsense
	for _, name := range oddFiles {
		readers[name] = readersOf(f, root, name, items)
	}
	f.Fuzz(func(t *testing.T, which uint8, content []byte) {
		name := oddFiles[int(which)%len(oddFiles)]
		file := filepath.Join(root, name)
		defer func() {
			if err := os.WriteFile(file, []byte(good()[name].content), 0o644); err != nil {
				t.Fatal(err)
			}
		}()
		if err := os.WriteFile(file, content, 0o644); err != nil {
			t.Fatal(err)
		}
		p, err := NewPlan(root, items, readers[name])
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close() //nolint:errcheck // only read
		_ = p.Diff()
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, content) {
			t.Errorf("a plan has changed %s: %q, %v", name, now, err)
		}
	})
}

func readersOf(t testing.TB, root, name string, items []Item) (ids []string) {
	t.Helper()
	statuses := func(content string) map[string]string {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		results, err := Check(root, items)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for _, r := range results {
			all[r.ID] = string(r.Status) + r.Found
		}
		return all
	}
	full := statuses(good()[name].content)
	for _, other := range []string{"", oddText, "root::0:0::/:/bin/sh\nother::0:0::/:/bin/sh\n"} {
		for id, status := range statuses(other) {
			if status != full[id] && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	_ = statuses(good()[name].content)
	if len(ids) == 0 {
		t.Fatalf("no item reads %s", name)
	}
	return ids
}
