package decoy

import (
	"archive/zip"
	"bytes"
	"errors"
	"image/jpeg"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// dying is the variable that has the test's binary make or remove decoys, and kill itself at a step: "make|remove STEP STORE FOLDER".
const dying = "SHUNT_DECOY_DIE"

func die(words []string) error {
	left, err := strconv.Atoi(words[1])
	if err != nil {
		return err
	}
	step = func(string) {
		if left--; left < 0 {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	}
	s, err := Open(words[2])
	if err != nil {
		return err
	}
	if words[0] == "make" {
		_, err = s.Make([]string{words[3]})
	} else {
		_, err = s.Remove(nil)
	}
	return err
}

func mustOpen(t *testing.T, folder string) *Store {
	t.Helper()
	s, err := Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func names(t *testing.T, folder string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// A process that is killed at any step leaves nothing that the journal does not know: its unfinished work can be
// completed, or removed.
func TestKilledAtEachStep(t *testing.T) {
	for _, what := range []string{"make", "remove"} {
		killed := 0
		for at := 0; ; at++ {
			root := t.TempDir()
			folder, store := filepath.Join(root, "data"), filepath.Join(root, "lib")
			if err := os.Mkdir(folder, 0o755); err != nil {
				t.Fatal(err)
			}
			if what == "remove" {
				s := mustOpen(t, store)
				if r, err := s.Make([]string{folder}); err != nil || len(r.Done) != perFolder {
					t.Fatal(r, err)
				}
				_ = s.Close()
			}
			c := exec.Command("/proc/self/exe")
			c.Env = append(os.Environ(), strings.Join([]string{dying + "=" + what, strconv.Itoa(at), store, folder}, " "))
			c.Stderr = t.Output()
			err := c.Run()
			if err == nil {
				break // there is no such step
			}
			if status := c.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() {
				t.Fatal(err)
			}
			killed++
			s := mustOpen(t, store)
			if at%2 == 0 && what == "make" { // it can be completed
				if r, err := s.Make([]string{folder}); err != nil || len(r.Left) > 0 {
					t.Fatal(r, err)
				}
				all, err := List(store)
				if err != nil || len(all) != perFolder || slices.ContainsFunc(all, func(d State) bool { return d.State != Stands }) || len(names(t, folder)) != perFolder {
					t.Errorf("killed at step %d, and made again: %+v, %v: %q", at, all, err, names(t, folder))
				}
			}
			if r, err := s.Remove(nil); err != nil || len(r.Left) > 0 {
				t.Fatal(r, err)
			}
			if left := names(t, folder); len(left) > 0 {
				t.Errorf("%s was killed at step %d: %q", what, at, left)
			}
		}
		if killed < perFolder {
			t.Errorf("%s was killed at %d steps only", what, killed)
		}
	}
}

// No operation overwrites or deletes files of others.
func TestFilesOfOthersStay(t *testing.T) {
	root := t.TempDir()
	folder := filepath.Join(root, "data")
	if err := os.Mkdir(folder, 0o750); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, filepath.Join(root, "lib"))
	if _, err := s.Make([]string{folder}); err != nil {
		t.Fatal(err)
	}
	replaced, linked, gone, edited := s.journal.Decoys[0].Path, s.journal.Decoys[1].Path, s.journal.Decoys[2].Path, s.journal.Decoys[4].Path
	for _, path := range []string{replaced, linked, gone} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	mine := filepath.Join(root, "mine")
	for path, text := range map[string]string{replaced: "mine\n", mine: "mine, too\n", edited: "-- 1"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(mine, linked); err != nil {
		t.Fatal(err)
	}
	r, err := s.Restore(false)
	if err != nil || !slices.Equal(r.Done, []string{gone}) || len(r.Left) != 3 {
		t.Errorf("%+v, %v", r, err)
	}
	if info, err := os.Stat(gone); err != nil || !info.ModTime().Equal(s.journal.Decoys[2].MTime) || info.Mode().Perm() != 0o640 {
		t.Errorf("%+v, %v", info, err)
	}
	if r, err = s.Remove(nil); err != nil || len(r.Done) != perFolder-3 || len(r.Left) != 3 {
		t.Errorf("%+v, %v", r, err)
	}
	for path, text := range map[string]string{replaced: "mine\n", linked: "mine, too\n", edited: "-- 1"} {
		if have, err := os.ReadFile(path); err != nil || string(have) != text {
			t.Errorf("%s: %q, %v", path, have, err)
		}
	}
	if all, err := List(filepath.Join(root, "lib")); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
}

func TestRestoreReplaces(t *testing.T) {
	root := t.TempDir()
	s := mustOpen(t, filepath.Join(root, "lib"))
	if _, err := s.Make([]string{root}); err != nil {
		t.Fatal(err)
	}
	changed := s.journal.Decoys[3].Path
	if err := os.WriteFile(changed, []byte("no zip"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := s.Restore(true); err != nil || !slices.Equal(r.Done, []string{changed}) || len(r.Left) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if state, err := s.journal.Decoys[3].state(); state != Stands || err != nil {
		t.Error(state, err)
	}
}

// A second process is refused, and one that finds a journal of another version changes nothing.
func TestOpenRefuses(t *testing.T) {
	folder := t.TempDir()
	s := mustOpen(t, folder)
	if _, err := Open(folder); !errors.Is(err, ErrBusy) {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{`{"version": 9}`: "it has version 9", "x": "read the journal"} {
		if err := os.WriteFile(journalIn(folder), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(folder); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// The file of a process that was killed while it wrote the journal is removed.
func TestOpenSweeps(t *testing.T) {
	folder := t.TempDir()
	half := journalIn(folder) + ".new"
	if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, folder)
	if _, err := os.Lstat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", half, err)
	}
}

// A journal that cannot be written has nothing made; a folder that is gone or full is named.
func TestMakeThatFails(t *testing.T) {
	root := t.TempDir()
	store := filepath.Join(root, "lib")
	s := mustOpen(t, store)
	if r, err := s.Make([]string{filepath.Join(root, "nowhere")}); err != nil || len(r.Left) != perFolder || len(r.Done) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := os.Mkdir(journalIn(store)+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	if r, err := s.Make([]string{root}); err == nil || !strings.Contains(err.Error(), "No decoy was made") || len(r.Done) > 0 || len(names(t, root)) != 1 {
		t.Errorf("%+v, %v: %q", r, err, names(t, root))
	}
}

// Decoys have the type that their names say, are first and last in their orders, and take little room.
func TestDecoysAreWhatTheySay(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"A.txt", "z last.txt", "0.txt", "\u4e2d\u6587.txt"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(strings.Repeat("x", 200)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := mustOpen(t, t.TempDir())
	if r, err := s.Make([]string{folder}); err != nil || len(r.Left) > 0 {
		t.Fatal(r, err)
	}
	var blocks int64
	var sizes, times []int64
	for _, d := range s.Decoys() {
		text, err := os.ReadFile(d.Path)
		if err != nil || int64(len(text)) != d.Size || !looksLike(d.Kind, text[:min(len(text), headBytes)]) || !strings.HasSuffix(d.Path, "."+d.Kind) {
			t.Errorf("%+v: %d bytes, %v", d, len(text), err)
		}
		switch d.Kind {
		case docx, xlsx:
			if z, err := zip.NewReader(bytes.NewReader(text), int64(len(text))); err != nil || len(z.File) != 3 {
				t.Errorf("%s: %v", d.Path, err)
			}
		case jpg:
			if _, err := jpeg.Decode(bytes.NewReader(text)); err != nil {
				t.Errorf("%s: %v", d.Path, err)
			}
		case pdf:
			if !bytes.Contains(text, []byte("startxref")) {
				t.Errorf("%s: %q", d.Path, text)
			}
		}
		if looksLike(d.Kind, scrambled(text[:min(len(text), headBytes)])) {
			t.Errorf("%s looks the same when it is encrypted", d.Path)
		}
		var st unix.Stat_t
		if err := unix.Stat(d.Path, &st); err != nil {
			t.Fatal(err)
		}
		blocks += st.Blocks * 512
		sizes, times = append(sizes, d.Size), append(times, d.MTime.Unix())
	}
	t.Logf("MEASURED a folder's decoys take %d bytes on the disk, and their sizes are %d", blocks, sum(sizes))
	if blocks > 128<<10 { // file systems have blocks of 64 KB at most; Debian's have 4 KB
		t.Errorf("they take %d bytes", blocks)
	}
	all := names(t, folder) // sorted by bytes
	for i, name := range []string{all[0], all[1], all[len(all)-2], all[len(all)-1]} {
		if want := []string{"!", "!", "\u9fa5", "\u9fa5"}[i]; !strings.HasPrefix(name, want) {
			t.Errorf("%q", all)
		}
	}
	slices.Sort(sizes)
	slices.Sort(times)
	if sizes[1] >= 200 || sizes[len(sizes)-2] < largestBytes || time.Unix(times[1], 0).Year() > 1991 || time.Unix(times[len(times)-2], 0).Year() < 2036 {
		t.Errorf("sizes %d, times %d", sizes, times)
	}
}

func sum(all []int64) (total int64) {
	for _, n := range all {
		total += n
	}
	return total
}

// Folders that programs keep for themselves have no decoys; nor have others' file systems, folders that are too deep,
// and folders behind a link.
func TestFind(t *testing.T) {
	root := t.TempDir()
	for _, folder := range []string{"a/b/c", ".cache", "work/.git", "work/in"} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/usr", filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	part := policy.Decoys{Folders: []string{root}, Depth: 2}
	found, left, err := Find([]policy.Decoys{part, {Folders: []string{filepath.Join(root, "a")}, Depth: 0}})
	var folders []string
	for _, p := range found {
		folders = append(folders, strings.TrimPrefix(p.Path, root))
	}
	if err != nil || !slices.Equal(folders, []string{"", "/a", "/a/b"}) || len(left) != 1 || !strings.Contains(left[0], "working tree of git") {
		t.Errorf("%q, %q, %v", folders, left, err)
	}
	for path, want := range map[string]string{"nowhere": "no such file", "link": "it is no folder"} {
		if _, _, err := Find([]policy.Decoys{{Folders: []string{filepath.Join(root, path)}}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	for i := range FoldersMax {
		if err := os.MkdirAll(filepath.Join(root, "many", strconv.Itoa(i)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if found, left, err = Find([]policy.Decoys{part}); err != nil || len(found) != FoldersMax || !strings.Contains(strings.Join(left, "\n"), "4 more folders") {
		t.Errorf("%d, %q, %v", len(found), left, err)
	}
}
