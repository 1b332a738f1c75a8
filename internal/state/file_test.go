package state

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// memoryDisk keeps files as a machine does that may lose its power: what has not been
// synchronized may be gone or torn afterwards.
type memoryDisk struct {
	files, durable map[string]*inode
	calls          int
	failAt         int  // the call that fails, from 1; 0: none
	failAfter      bool // it is carried out all the same
}

type inode struct {
	data   []byte
	synced bool
}

var errDisk = errors.New("the disk is broken")

func newMemoryDisk() *memoryDisk {
	return &memoryDisk{files: map[string]*inode{}, durable: map[string]*inode{}}
}

// call carries out one operation, unless it is the one to fail.
func (d *memoryDisk) call(operation func()) error {
	d.calls++
	fails := d.calls == d.failAt
	if !fails || d.failAfter {
		operation()
	}
	if fails {
		return errDisk
	}
	return nil
}

func (d *memoryDisk) ReadFile(path string) ([]byte, error) {
	if f, ok := d.files[path]; ok {
		return f.data, nil
	}
	return nil, fs.ErrNotExist
}

func (d *memoryDisk) MkdirAll(string) error { return d.call(func() {}) }

func (d *memoryDisk) Create(path string) (diskFile, error) {
	f := &inode{}
	if err := d.call(func() { d.files[path] = f }); err != nil {
		return nil, err
	}
	return memoryFile{d, f}, nil
}

func (d *memoryDisk) Rename(from, to string) error {
	return d.call(func() {
		d.files[to] = d.files[from]
		delete(d.files, from)
	})
}

func (d *memoryDisk) Remove(path string) error { return d.call(func() { delete(d.files, path) }) }

func (d *memoryDisk) SyncDir(string) error {
	return d.call(func() { d.durable = maps.Clone(d.files) })
}

// crash is the disk after the power was gone. The kernel may have written renames that
// nobody asked it to write; text that was not synchronized is torn.
func (d *memoryDisk) crash(renamed bool) *memoryDisk {
	after := newMemoryDisk()
	from := d.durable
	if renamed {
		from = d.files
	}
	for path, f := range from {
		data := f.data
		if !f.synced {
			data = data[:len(data)/2]
		}
		after.files[path] = &inode{data, true}
	}
	after.durable = maps.Clone(after.files)
	return after
}

type memoryFile struct {
	disk *memoryDisk
	*inode
}

// Write is carried out by half when it fails afterwards, as on a full disk.
func (f memoryFile) Write(data []byte) (int, error) {
	err := f.disk.call(func() { f.data, f.synced = append(f.data, data...), false })
	if err != nil {
		f.data = f.data[:len(f.data)/2]
		return len(f.data), err
	}
	return len(data), nil
}

func (f memoryFile) Sync() error  { return f.disk.call(func() { f.synced = true }) }
func (f memoryFile) Close() error { return f.disk.call(func() {}) }

func TestRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "overrides.json")
	c := newClock()
	w, err := Open(path, c.now)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2:80", "2001:db8::2", "10.0.0.4"))
	drain(t, w, "10.0.0.2:80", Drain{Deadline: c.time.Add(time.Hour), By: "me"})
	drain(t, w, "2001:db8::2", Drain{By: "you"})
	want := w.Drains()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v; want it for its owner alone", info, err)
	}
	if left, _ := filepath.Glob(path + "?*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if w, err = Open(path, c.now); err != nil {
		t.Fatal(err)
	}
	if got := w.Drains(); !slices.EqualFunc(got, want, sameOverride) {
		t.Errorf("after a restart drains are %+v, want %+v", got, want)
	}
	c.time = c.time.Add(time.Hour) // passes while nobody runs
	if w, err = Open(path, c.now); err != nil {
		t.Fatal(err)
	}
	if !w.Drains()[0].Over {
		t.Error("a deadline that passed before the start is not over")
	}
	replace(t, w, "file", service("web", "10.0.0.2:80", "2001:db8::2", "10.0.0.4"))
	expect(t, w, "web 2001:db8::2=0 10.0.0.4=5")
}

func sameOverride(a, b Override) bool {
	return a.Backend == b.Backend && a.Since.Equal(b.Since) && a.Deadline.Equal(b.Deadline) && a.By == b.By && slices.Equal(a.Sources, b.Sources)
}

// TestEveryFailure fails each call of a save in turn, before and after it is carried out,
// and then either goes on or loses the power.
func TestEveryFailure(t *testing.T) {
	const path = "dir/overrides"
	steps := 0
	for n, done := 1, false; !done; n++ {
		for _, after := range []bool{false, true} {
			d, c := newMemoryDisk(), newClock()
			w, err := open(path, c.now, d)
			if err != nil {
				t.Fatal(err)
			}
			replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
			drain(t, w, "10.0.0.2", Drain{})
			revision := w.Snapshot().Revision
			d.calls, d.failAt, d.failAfter = 0, n, after
			_, err = w.SetDrain("10.0.0.3", Drain{})
			done = d.calls < n // there is no n-th call
			steps = max(steps, d.calls)
			want := []string{"10.0.0.2", "10.0.0.3"}
			if err != nil {
				want = want[:1]
			}
			if err != nil != !done || err != nil && (!errors.Is(err, errDisk) || !strings.Contains(err.Error(), path)) {
				t.Errorf("call %d fails, and the drain says %v", n, err)
			}
			if got := drained(w); !slices.Equal(got, want) || err != nil && w.Snapshot().Revision != revision {
				t.Errorf("call %d (carried out: %v): drained are %v at revision %d, want %v", n, after, got, w.Snapshot().Revision, want)
			}
			for _, renamed := range []bool{false, true} {
				again, loadErr := open(path, c.now, d.crash(renamed))
				got := drained(again)
				if loadErr != nil || len(got) == 0 || err == nil && len(got) != 2 {
					t.Errorf("call %d (carried out: %v, renamed: %v), power lost: drained are %v, %v; the drain said %v", n, after, renamed, got, loadErr, err)
				}
			}
			d.failAt = 0
			if err := w.Save(); err != nil {
				t.Fatal(err)
			}
			again, err := open(path, c.now, d.crash(false))
			if got := drained(again); err != nil || !slices.Equal(got, want) {
				t.Errorf("call %d (carried out: %v), saved later: drained are %v, %v, want %v", n, after, got, err, want)
			}
		}
	}
	if steps < 7 {
		t.Errorf("a save is %d calls: something is not asked of the disk any more", steps)
	}
}

// TestReplaceAndABrokenDisk has an override that ends while the file cannot be written.
func TestReplaceAndABrokenDisk(t *testing.T) {
	d, c := newMemoryDisk(), newClock()
	w, err := open("dir/overrides", c.now, d)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
	drain(t, w, "10.0.0.2", Drain{})
	d.failAt = d.calls + 1
	replace(t, w, "file", service("web", "10.0.0.3"))
	if got := drained(w); len(got) != 0 {
		t.Errorf("drained are %v, want none", got)
	}
	d.failAt = d.calls + 1
	if err := w.Save(); !errors.Is(err, errDisk) {
		t.Errorf("Save says %v", err)
	}
	if err := w.Save(); err != nil {
		t.Errorf("Save says %v of a disk that works again", err)
	}
	calls := d.calls
	if err := w.Save(); err != nil || d.calls != calls {
		t.Errorf("a file that is right was written again (%v)", err)
	}
	if again, err := open("dir/overrides", c.now, d); err != nil || len(again.Drains()) != 0 {
		t.Errorf("the file has %v, %v", again.Drains(), err)
	}
}

// TestReplaceWrites has an override that ends: it does not come back with a restart.
func TestReplaceWrites(t *testing.T) {
	d, c := newMemoryDisk(), newClock()
	w, err := open("dir/overrides", c.now, d)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
	drain(t, w, "10.0.0.2", Drain{})
	replace(t, w, "file", service("web", "10.0.0.3"))
	if w, err = open("dir/overrides", c.now, d); err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
	expect(t, w, "web 10.0.0.2=5 10.0.0.3=5")
}

// TestCorruptFile cuts a good file everywhere, and has others that are not to be read.
func TestCorruptFile(t *testing.T) {
	const good = `{"version": 1, "drains": [{"address": "10.0.0.2", "port": 80, "since": "2026-01-02T03:04:05Z", "by": "me", "sources": ["file"]}]}`
	texts := []string{
		"\x00\x00\x00\x00", good + good, good + "x", "[]", "null", `"text"`,
		strings.Replace(good, "1,", "2,", 1),
		strings.Replace(good, `"drains"`, `"weights"`, 1),
		strings.Replace(good, "10.0.0.2", "", 1),
		strings.Replace(good, "10.0.0.2", "web", 1),
		strings.Replace(good, "10.0.0.2", "::ffff:10.0.0.2", 1),
		strings.Replace(good, "10.0.0.2", "fe80::1%eth0", 1),
		strings.Replace(good, "80", "65536", 1),
		strings.Replace(good, "2026", "26", 1),
		strings.Replace(good, `["file"]`, "[]", 1),
		strings.Replace(good, "]}", `, {"address": "10.0.0.2", "port": 80, "since": "2026-01-02T03:04:05Z", "by": "", "sources": ["file"]}]}`, 1),
	}
	for i := range good {
		texts = append(texts, good[:i])
	}
	c := newClock()
	for _, text := range texts {
		d := newMemoryDisk()
		d.files["dir/overrides"] = &inode{[]byte(text), true}
		w, err := open("dir/overrides", c.now, d)
		var load *LoadError
		if !errors.As(err, &load) || !strings.Contains(err.Error(), "dir/overrides") || len(w.Drains()) != 0 {
			t.Errorf("of %q: %v, drains are %v", text, err, w.Drains())
			continue
		}
		if got, _ := d.ReadFile("dir/overrides"); string(got) != text {
			t.Errorf("a corrupt file was changed to %q", got)
		}
		replace(t, w, "file", service("web", "10.0.0.2")) // it can be used
		drain(t, w, "10.0.0.2", Drain{})
		if again, err := open("dir/overrides", c.now, d); err != nil || len(again.Drains()) != 1 {
			t.Errorf("the next drain did not replace the file: %v", err)
		}
	}
	d := newMemoryDisk()
	d.files["dir/overrides"] = &inode{[]byte(good), true}
	if w, err := open("dir/overrides", c.now, d); err != nil || len(w.Drains()) != 1 {
		t.Errorf("of the good file: %v, %v", w.Drains(), err)
	}
}

// TestUnreadable has a folder in the file's place.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	w, err := Open(dir, time.Now)
	var load *LoadError
	if !errors.As(err, &load) || load.Path != dir {
		t.Errorf("opening a folder says %v", err)
	}
	replace(t, w, "file", service("web", "10.0.0.2"))
	if _, err := w.SetDrain("10.0.0.2", Drain{}); err == nil {
		t.Error("a drain that cannot be kept was taken")
	}
	expect(t, w, "web 10.0.0.2=5")
}
