package state

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/record"
)

// memoryDisk keeps files like a machine that may lose its power: data that were not
// synchronized may be gone or torn afterwards.
type memoryDisk struct {
	files, durable map[string]*inode
	calls          int
	failAt         int  // the call that fails, from 1; 0: none
	failAfter      bool // it takes effect all the same
}

type inode struct {
	data   []byte
	synced bool
}

var errDisk = errors.New("the disk is broken")

func newMemoryDisk() *memoryDisk {
	return &memoryDisk{files: map[string]*inode{}, durable: map[string]*inode{}}
}

// call runs one operation, unless it is the one to fail.
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

func (d *memoryDisk) Create(path string) (record.File, error) {
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

// crash returns the disk after a loss of power. The kernel may have written renames without a
// request; text that was not synchronized is torn.
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

// Write takes effect by half when it fails afterwards, as on a full disk.
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
	drain(t, w, "10.0.0.2:80", Setting{Deadline: c.time.Add(time.Hour), Author: Author{By: "me"}})
	drain(t, w, "2001:db8::2", Setting{Author: Author{By: "you", UID: 1000, Client: "curl/8"}})
	set(t, w, "2001:db8::2", Setting{Kind: KindWeight})
	set(t, w, "10.0.0.4", Setting{Kind: KindHealth, Health: HealthUp})
	want := w.Overrides()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v; want it for its owner alone", info, err)
	}
	if left, _ := filepath.Glob(path + "?*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if w, err = Open(path, c.now); err != nil {
		t.Fatal(err)
	}
	if got := w.Overrides(); !slices.EqualFunc(got, want, sameOverride) {
		t.Errorf("after a restart drains are %+v, want %+v", got, want)
	}
	c.time = c.time.Add(time.Hour) // passes while no process runs
	if w, err = Open(path, c.now); err != nil {
		t.Fatal(err)
	}
	if !w.Overrides()[0].Over {
		t.Error("a deadline that passed before the start is not over")
	}
	replace(t, w, "file", service("web", "10.0.0.2:80", "2001:db8::2", "10.0.0.4"))
	expect(t, w, "web 2001:db8::2=0 10.0.0.4=5,up")
}

func sameOverride(a, b Override) bool {
	return a.Backend == b.Backend && a.Kind == b.Kind && a.Weight == b.Weight && a.Health == b.Health && a.Since.Equal(b.Since) &&
		a.Deadline.Equal(b.Deadline) && a.Author == b.Author && slices.Equal(a.Sources, b.Sources)
}

// TestEveryFailure fails each call of a save in turn, before and after it takes effect,
// and then either goes on or loses the power. The override is in force all the same.
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
			drain(t, w, "10.0.0.2", Setting{})
			d.calls, d.failAt, d.failAfter = 0, n, after
			drain(t, w, "10.0.0.3", Setting{})
			done = d.calls < n // there is no n-th call
			steps = max(steps, d.calls)
			unsaved := w.Unsaved()
			if unsaved != nil != !done || unsaved != nil && (!errors.Is(unsaved, errDisk) || !strings.Contains(unsaved.Error(), path)) {
				t.Errorf("call %d fails, and Unsaved says %v", n, unsaved)
			}
			want := []string{"10.0.0.2", "10.0.0.3"}
			if got := drained(w); !slices.Equal(got, want) {
				t.Errorf("call %d (in effect: %v): drained are %v, want %v", n, after, got, want)
			}
			expect(t, w, "web 10.0.0.2=0 10.0.0.3=0")
			for _, renamed := range []bool{false, true} {
				again, loadErr := open(path, c.now, d.crash(renamed))
				got := drained(again)
				if loadErr != nil || len(got) == 0 || unsaved == nil && len(got) != 2 {
					t.Errorf("call %d (in effect: %v, renamed: %v), power lost: drained are %v, %v; Unsaved said %v", n, after, renamed, got, loadErr, unsaved)
				}
			}
			d.failAt = 0
			if err := w.Save(); err != nil || w.Unsaved() != nil {
				t.Fatal(err, w.Unsaved())
			}
			again, err := open(path, c.now, d.crash(false))
			if got := drained(again); err != nil || !slices.Equal(got, want) {
				t.Errorf("call %d (in effect: %v), saved later: drained are %v, %v, want %v", n, after, got, err, want)
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
	drain(t, w, "10.0.0.2", Setting{})
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
	if again, err := open("dir/overrides", c.now, d); err != nil || len(again.Overrides()) != 0 {
		t.Errorf("the file has %v, %v", again.Overrides(), err)
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
	drain(t, w, "10.0.0.2", Setting{})
	replace(t, w, "file", service("web", "10.0.0.3"))
	if w, err = open("dir/overrides", c.now, d); err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
	expect(t, w, "web 10.0.0.2=5 10.0.0.3=5")
}

// document returns a file with these overrides and the right checksum.
func document(overrides string) string {
	return fmt.Sprintf(`{"version": 2, "sha256": %q, "overrides": %s}`, sum([]byte(overrides)), overrides)
}

// TestCorruptFile cuts a good file everywhere, changes each of its bytes, and has other unreadable
// files. Each is moved aside, and the writer can be used.
func TestCorruptFile(t *testing.T) {
	const records = `[{"address": "10.0.0.2", "port": 80, "kind": "weight", "weight": 3, "since": "2026-01-02T03:04:05Z", "by": "me", "uid": 0, "client": "shunt", "sources": ["file"]}]`
	good := document(records)
	without := func(old, now string) string { return document(strings.Replace(records, old, now, 1)) }
	texts := []string{
		"\x00\x00\x00\x00", good + good, good + "x", "[]", "null", `"text"`, "{}",
		strings.Replace(good, ": 2,", ": 1,", 1),
		strings.Replace(good, `"overrides"`, `"drains"`, 1),
		document(`{}`), document(`[{}]`), document(`"text"`),
		without("10.0.0.2", ""), without("10.0.0.2", "web"), without("10.0.0.2", "::ffff:10.0.0.2"), without("10.0.0.2", "fe80::1%eth0"),
		without("80", "65536"), without("2026", "26"), without(`["file"]`, "[]"),
		without(": 3", ": 70000"), without(`, "weight": 3`, ""), without(`"weight", "weight": 3`, `"health"`),
		without(`"weight", "weight": 3`, `"health", "health": "well"`), without(": 3", `: 3, "health": "up"`),
		without(`"weight", "weight": 3`, `"mood"`), without(`"weight", "weight": 3`, `"drain", "weight": 3`),
		document("[" + records[1:len(records)-1] + ", " + records[1:]),
	}
	for i := range good {
		texts = append(texts, good[:i])
		if good[i] != ' ' { // white space has no meaning, and the checksum is without
			texts = append(texts, good[:i]+string(good[i]^1)+good[i+1:])
		}
	}
	c := newClock()
	for _, text := range texts {
		d := newMemoryDisk()
		d.files["dir/overrides"] = &inode{[]byte(text), true}
		w, err := open("dir/overrides", c.now, d)
		var load *LoadError
		if !errors.As(err, &load) || !strings.Contains(err.Error(), "dir/overrides") || len(w.Overrides()) != 0 {
			t.Errorf("of %q: %v, overrides are %v", text, err, w.Overrides())
			continue
		}
		if got, _ := d.ReadFile(load.Aside); string(got) != text {
			t.Errorf("a corrupt file is not kept aside, there is %q", got)
		}
		replace(t, w, "file", service("web", "10.0.0.2")) // it can be used
		drain(t, w, "10.0.0.2", Setting{})
		if again, err := open("dir/overrides", c.now, d); err != nil || len(again.Overrides()) != 1 {
			t.Errorf("the next override was not kept: %v", err)
		}
		if got, _ := d.ReadFile(load.Aside); string(got) != text {
			t.Errorf("a corrupt file was overwritten by the next override: %q", got)
		}
	}
	d := newMemoryDisk()
	d.files["dir/overrides"] = &inode{[]byte(good), true}
	if w, err := open("dir/overrides", c.now, d); err != nil || len(w.Overrides()) != 1 || w.Overrides()[0].Weight != 3 {
		t.Errorf("of the good file: %v, %v", w.Overrides(), err)
	}
}

// TestUnreadable has a folder in the file's place: the folder is moved aside, and overrides are saved again.
func TestUnreadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "overrides")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	w, err := Open(path, time.Now)
	var load *LoadError
	if !errors.As(err, &load) || load.Aside != path+".damaged" {
		t.Errorf("opening a folder says %v", err)
	}
	replace(t, w, "file", service("web", "10.0.0.2"))
	drain(t, w, "10.0.0.2", Setting{})
	if err := w.Unsaved(); err != nil {
		t.Error(err)
	}
	expect(t, w, "web 10.0.0.2=0")
}

// TestNothingCanBeMoved has a disk that reads the file, and refuses each change.
func TestNothingCanBeMoved(t *testing.T) {
	d := newMemoryDisk()
	d.files["overrides"] = &inode{[]byte("{"), true}
	d.failAt = 1
	w, err := open("overrides", newClock().now, d)
	var load *LoadError
	if !errors.As(err, &load) || load.Aside != "" || !errors.Is(err, errDisk) {
		t.Errorf("opening says %v", err)
	}
	replace(t, w, "file", service("web", "10.0.0.2"))
	d.failAt = d.calls + 1
	drain(t, w, "10.0.0.2", Setting{})
	if err := w.Unsaved(); !errors.Is(err, errDisk) {
		t.Errorf("Unsaved says %v", err)
	}
	expect(t, w, "web 10.0.0.2=0")
}

// FuzzDecode reads any text: overrides that are accepted are written again as they were read.
func FuzzDecode(f *testing.F) {
	f.Add(`[]`)
	f.Add(`[{"address": "10.0.0.2", "kind": "drain", "since": "2026-01-02T03:04:05Z", "by": "me", "uid": 1, "client": "", "sources": ["file"]}]`)
	f.Add(`[{"address": "2001:db8::2", "port": 80, "kind": "health", "health": "up", "deadline": "2026-01-02T03:04:05.5+01:00", "sources": ["b", "a", "a"]}]`)
	f.Fuzz(func(t *testing.T, records string) {
		overrides, err := decode([]byte(document(records)))
		if err != nil {
			return
		}
		text, err := encode(overrides)
		if err != nil {
			t.Fatalf("%q cannot be written: %v", records, err)
		}
		again, err := decode(text)
		if err != nil || !slices.EqualFunc(listed(again), listed(overrides), sameOverride) {
			t.Errorf("%q is read as %+v, then as %+v, %v", records, overrides, again, err)
		}
	})
}
