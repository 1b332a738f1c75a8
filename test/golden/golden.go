// Package golden compares generated text with a file of the repository.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// Require fails if a file differs from the generated text. With -update it writes the file. The path
// is relative to the package's folder.
func Require(t testing.TB, path, now string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(now), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(file), now); diff != "" {
		t.Errorf("%s is not what the code gives now (-file +now); if the change is meant, run this package's tests with -update, or `make golden` for all:\n%s", path, diff)
	}
}
