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

// TestWriteThatFails leaves what was there.
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
