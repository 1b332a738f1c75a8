package baseline

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// half has fix end while it writes its journal, and returns the folder of the journals.
func half(t *testing.T, root string) (journal string) {
	t.Helper()
	journal = folder(t)
	p, err := NewPlan(root, debianItems(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // only read
	defer func() {
		step = func(string) {}
		if e := recover(); e != any(crash{}) {
			t.Fatalf("fix did not end at its journal: %v", e)
		}
	}()
	step = func(at string) {
		if at == "half a journal" {
			panic(crash{})
		}
	}
	_, err = p.Apply(journal)
	t.Fatalf("fix wrote its journal: %v", err)
	return ""
}

func names(t *testing.T, folder string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, _ os.DirEntry, err error) error {
		if path != folder {
			name, _ := filepath.Rel(folder, path) // it is below
			all = append(all, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Half a journal can contain hashes of passwords: the next fix removes it, and so does the next rollback.
func TestHalfAJournalIsSweptUp(t *testing.T) {
	f := good()
	mutations["mode-crontab"](f)
	for name, c := range map[string]struct {
		next func(root, journal string) error
		want []string
	}{
		"fix": {func(root, journal string) error {
			p, err := NewPlan(root, debianItems(t), nil)
			if err != nil {
				return err
			}
			defer p.Close() //nolint:errcheck // only read
			_, err = p.Apply(journal)
			return err
		}, []string{"1", "1/journal.json"}},
		"rollback": {func(root, journal string) error {
			r, err := RollBack(root, journal)
			if r != nil {
				t.Errorf("something was rolled back: %+v", r)
			}
			return err
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := f.build(t)
			journal := half(t, root)
			if have := names(t, journal); !slices.Equal(have, []string{"1", "1/journal.json.new"}) {
				t.Fatalf("after fix has ended: %v", have)
			}
			if err := c.next(root, journal); err != nil {
				t.Fatal(err)
			}
			if have := names(t, journal); !slices.Equal(have, c.want) {
				t.Errorf("%v, want %v", have, c.want)
			}
		})
	}
}

// While another process writes a journal, none is swept up: the other processes wait for it.
func TestASweepWaitsForTheWriter(t *testing.T) {
	f := good()
	mutations["mode-crontab"](f)
	root, journal := f.build(t), folder(t)
	p, err := NewPlan(root, debianItems(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // only read
	swept := make(chan error, 1)
	step = func(at string) {
		if at != "half a journal" {
			return
		}
		step = func(string) {}
		go func() {
			unlock, err := lockJournals(journal)
			if err == nil {
				err = unlock()
			}
			swept <- err
		}()
		awaitWaiter(t, journal)
	}
	defer func() { step = func(string) {} }()
	if _, err := p.Apply(journal); err != nil {
		t.Errorf("while others waited to sweep: %v", err)
	}
	if err := <-swept; err != nil {
		t.Error(err)
	}
	if have := names(t, journal); !slices.Equal(have, []string{"1", "1/journal.json"}) {
		t.Errorf("%v", have)
	}
}

// awaitWaiter waits until a process waits for the lock of a folder (proc_locks(5)).
func awaitWaiter(t *testing.T, folder string) {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Stat(folder, &stat); err != nil {
		t.Fatal(err)
	}
	file := fmt.Sprintf(":%d 0 EOF", stat.Ino)
	for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(time.Millisecond) {
		text, err := os.ReadFile("/proc/locks")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "-> FLOCK") && strings.Contains(line, file) {
				return
			}
		}
	}
	t.Error("nobody waits for the lock")
}
