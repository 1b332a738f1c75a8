package baseline

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

var debianOnce = sync.OnceValues(func() ([]Item, error) {
	items, faults, err := Load(Debian)
	if err == nil && len(faults) > 0 {
		err = fmt.Errorf("%v", faults)
	}
	return items, err
})

func debianItems(t testing.TB) []Item {
	t.Helper()
	items, err := debianOnce()
	if err != nil {
		t.Fatal(err)
	}
	return items
}

// failing lists the items of a root that do not pass, with the state found.
func failing(t testing.TB, root string) (ids []string, found map[string]string) {
	t.Helper()
	results, err := Check(root, debianItems(t))
	if err != nil {
		t.Fatal(err)
	}
	found = map[string]string{}
	for _, r := range results {
		if r.Status != Passes {
			ids = append(ids, r.ID)
			found[r.ID] = r.Status + ": " + r.Found + "; " + r.Remedy
		}
	}
	return ids, found
}

func TestGoodSystemPasses(t *testing.T) {
	if _, found := failing(t, good().build(t)); len(found) > 0 {
		t.Errorf("%v", found)
	}
	for _, section := range Sections {
		if !slices.ContainsFunc(debianItems(t), func(i Item) bool { return i.Section == section.Word }) {
			t.Errorf("no item of %s", section.Word)
		}
	}
}

// Each changed setting makes exactly its own item fail. fix repairs it if the item is repairable, and rollback restores
// everything.
func TestOneSettingFlipsOneItem(t *testing.T) {
	for _, item := range debianItems(t) {
		t.Run(item.ID, func(t *testing.T) {
			mutate := mutations[item.ID]
			if mutate == nil {
				t.Fatal("no test changes a setting of this item")
			}
			f := good()
			mutate(f)
			root := f.build(t)
			ids, found := failing(t, root)
			if !slices.Equal(ids, []string{item.ID}) {
				t.Fatalf("%v", found)
			}
			before := picture(t, root)
			outcomes, journal := fix(t, root, nil)
			if len(outcomes) != 1 || outcomes[0].Fixed != item.Repairs() || outcomes[0].Error != "" {
				t.Fatalf("%+v", outcomes)
			}
			if ids, found := failing(t, root); len(ids) > 0 == item.Repairs() {
				t.Errorf("after fix: %v", found)
			}
			rollback(t, root, journal)
			same(t, before, picture(t, root))
		})
	}
	if len(mutations) != len(debianItems(t)) {
		t.Errorf("%d mutations, %d items", len(mutations), len(debianItems(t)))
	}
}

// fix applies all repairs, and returns the journals' folder.
func fix(t testing.TB, root string, only []string) ([]Outcome, string) {
	t.Helper()
	p, err := NewPlan(root, debianItems(t), only)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // only read
	journal := folder(t)
	if _, err := p.Apply(journal); err != nil {
		t.Fatal(err)
	}
	return p.Outcomes, journal
}

func rollback(t testing.TB, root, journal string) {
	t.Helper()
	r, err := RollBack(root, journal)
	if err != nil {
		t.Fatal(err)
	}
	if r != nil && len(r.Left) > 0 {
		t.Fatalf("left: %v", r.Left)
	}
}

// picture is everything of a tree that a rollback restores: names, contents, modes, owners, attributes, and times of
// files.
func picture(t testing.TB, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	tr, err := openTree(root)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close() //nolint:errcheck // only read
	err = filepath.WalkDir(root, func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		s, err := tr.full(strings.TrimPrefix(name, root), true)
		if err != nil {
			return err
		}
		text := fmt.Sprintf("%s %q %s %o %d %d %v", s.Kind, s.Content, s.Target, s.Mode, s.UID, s.GID, s.Xattrs)
		if s.Kind == kindFile {
			text += fmt.Sprint(s.Modified)
		}
		all[strings.TrimPrefix(name, root)] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func same(t testing.TB, want, have map[string]string) {
	t.Helper()
	for name := range want {
		if want[name] != have[name] {
			t.Errorf("%s was\n%s\nand is\n%s", name, want[name], have[name])
		}
	}
	for name := range have {
		if _, is := want[name]; !is {
			t.Errorf("%s is new", name)
		}
	}
}

type crash struct{}

// Random subsets of settings are wrong; fix is ended at a random step, and perhaps rollback too. Then the tree is as
// before.
func TestCrashAtAnyStep(t *testing.T) {
	ids := slices.Sorted(maps.Keys(mutations))
	rapid.Check(t, func(r *rapid.T) {
		f := good()
		for _, id := range rapid.SliceOfNDistinct(rapid.SampledFrom(ids), 1, 12, rapid.ID[string]).Draw(r, "ids") {
			func() {
				defer func() { _ = recover() }() // another mutation has taken its text
				mutations[id](f)
			}()
		}
		root, journal := f.build(t), folder(t)
		_ = unix.Setxattr(filepath.Join(root, "etc/ssh/sshd_config"), "user.note", []byte("kept"), 0) // where the file system has them
		before := picture(t, root)
		until := func(steps int, do func()) {
			defer func() {
				step = func(string) {}
				if e := recover(); e != nil && e != any(crash{}) {
					panic(e)
				}
			}()
			step = func(string) {
				if steps--; steps < 0 {
					panic(crash{})
				}
			}
			do()
		}
		until(rapid.IntRange(0, 60).Draw(r, "steps of fix"), func() {
			p, err := NewPlan(root, debianItems(t), nil)
			if err != nil {
				r.Fatal(err)
			}
			defer p.Close() //nolint:errcheck // only read
			if _, err := p.Apply(journal); err != nil {
				r.Fatal(err)
			}
		})
		until(rapid.IntRange(0, 60).Draw(r, "steps of rollback"), func() {
			if _, err := RollBack(root, journal); err != nil {
				r.Fatal(err)
			}
		})
		rollback(t, root, journal)
		same(t, before, picture(t, root))
		if err := os.RemoveAll(root); err != nil {
			r.Fatal(err)
		}
	})
}
