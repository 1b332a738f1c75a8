package record

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRecord(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "default.things")
	names := []string{"as it was"}
	if err := Read(path, &names); err != nil || !slices.Equal(names, []string{"as it was"}) {
		t.Errorf("without a file: %v, %q", err, names)
	}
	for _, written := range [][]string{{"a", "b"}, {"c"}} {
		if err := Write(path, written); err != nil {
			t.Fatal(err)
		}
		names = nil
		if err := Read(path, &names); err != nil || !slices.Equal(names, written) {
			t.Errorf("wrote %q and read %q, %v", written, names, err)
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("there is %v, %v; want the file alone", files, err)
	}
	if err := os.WriteFile(path, []byte(`["a"`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Read(path, &names); err == nil {
		t.Error("half a file was read")
	}
	for range 2 {
		if err := Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// TestWriteThatFails: the old contents stay.
func TestWriteThatFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "default.things")
	if err := Write(path, []string{"a"}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path+".new", 0o700); err != nil { // where the new one is written first
		t.Fatal(err)
	}
	if err := Write(path, []string{"b"}); err == nil {
		t.Error("it was written")
	}
	var names []string
	if err := Read(path, &names); err != nil || !slices.Equal(names, []string{"a"}) {
		t.Errorf("afterwards it has %q, %v", names, err)
	}
}

// Sweep removes the files of killed writers, and no others.
func TestSweep(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"a.things", "a.things.new", "a.others.new", "ab.things.new", "b.things.new", "a.new-things"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte("[\"half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(folder, "a.folder.new"), 0o700); err != nil {
		t.Fatal(err)
	}
	Sweep(folder, "a.")
	Sweep(filepath.Join(folder, "nowhere"), "a.")
	var names []string
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"a.folder.new", "a.new-things", "a.things", "ab.things.new", "b.things.new"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("there is %q, %v; want %q", names, err, want)
	}
}
