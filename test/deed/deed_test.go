package deed

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	Work()
	os.Exit(m.Run())
}

// Each deed can be done, takes time, and leaves its folder as it was.
func TestDeeds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	folder := t.TempDir()
	if err := Prepare(folder); err != nil {
		t.Fatal(err)
	}
	w, err := Start("/proc/self/exe", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range All {
		for n := 3; n <= 4; n++ {
			if took, err := w.Do(d.Name, n, folder, false); err != nil || took <= 0 {
				t.Errorf("%s: %v, %v", d.Name, took, err)
			}
		}
	}
	left, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil || len(left) != 3 {
		t.Errorf("%v, %v", left, err)
	}
	for _, c := range []struct {
		name, folder string
		denied       bool
		want         string
	}{
		{"open", folder, true, "it should be denied, and is not"}, {"open", folder + "/x", false, "no such file"}, {"open", folder + "/x", true, "no such file"},
		{"exec", folder + "/x", false, "no such file"}, {"dance", folder, false, `there is no deed "dance"`},
	} {
		if _, err := w.Do(c.name, 1, c.folder, c.denied); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
