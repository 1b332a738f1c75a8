package unchanged

import (
	"os"
	"path/filepath"
	"testing"
)

func TestDigestChangesWithAnyFile(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]string{}
	differs := func(what string) {
		t.Helper()
		digest, err := Digest(dir, "*.c", "below")
		if err != nil {
			t.Fatal(err)
		}
		if before, ok := seen[digest]; ok {
			t.Errorf("%s: the digest is as %s", what, before)
		}
		seen[digest] = what
	}
	put("a.c", "1")
	put("below/deep/b.h", "2")
	differs("two files")
	put("a.c", "12")
	differs("a longer one")
	put("below/deep/b.h", "3")
	differs("another one below")
	put("below/c.h", "")
	differs("an empty one more")
	if err := os.Rename(filepath.Join(dir, "below/c.h"), filepath.Join(dir, "below/d.h")); err != nil {
		t.Fatal(err)
	}
	differs("another name")
	if _, err := Digest(dir, "*.c", "gone/*.c"); err == nil {
		t.Error("a pattern that names nothing is no error")
	}
}

func TestRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "passed.txt")
	if err := Write(path, "a/TestX", "1"); err == nil {
		t.Error("a record that is not there is no error")
	}
	if err := os.WriteFile(path, []byte(head), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, one := range [][2]string{{"b/TestY", "1"}, {"a/TestX", "2"}, {"b/TestY", "3"}} {
		if err := Write(path, one[0], one[1]); err != nil {
			t.Fatal(err)
		}
	}
	for _, one := range []struct {
		name, digest string
		want         bool
	}{{"a/TestX", "2", true}, {"b/TestY", "3", true}, {"b/TestY", "1", false}, {"c/TestZ", "2", false}} {
		if passed, err := Passed(path, one.name, one.digest); passed != one.want || err != nil {
			t.Errorf("%s with %s passed: %v, %v", one.name, one.digest, passed, err)
		}
	}
	if err := os.WriteFile(path, []byte("a/TestX\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Passed(path, "a/TestX", "1"); err == nil {
		t.Error("a line without a digest is no error")
	}
}
