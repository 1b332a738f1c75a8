package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestImageNeedsStaticPrograms: anything else would be "no such file" in a pod.
func TestImageNeedsStaticPrograms(t *testing.T) {
	folder := t.TempDir()
	text := filepath.Join(folder, "text")
	ok(t, os.WriteFile(text, []byte(strings.Repeat("no program", 20)), 0o755))
	for program, says := range map[string]string{"/bin/sh": "linked dynamically", text: "bad magic", filepath.Join(folder, "none"): "no such file"} {
		if err := writeImages(filepath.Join(folder, "x.tar"), nil, program); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", program, err, says)
		}
	}
}
