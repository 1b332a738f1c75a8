package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/test/kernel/suite"
)

func TestNaturalLess(t *testing.T) {
	want := []string{
		"linux-image-6.1.0-9-cloud-amd64-unsigned",
		"linux-image-6.1.0-47-cloud-amd64-unsigned",
		"linux-image-6.1.0-56-cloud-amd64-unsigned",
		"linux-image-6.12.9+deb12-cloud-amd64-unsigned",
		"linux-image-6.12.117+deb12-cloud-amd64-unsigned",
	}
	for i := range want {
		for j := range want {
			if got := naturalLess(want[i], want[j]); got != (i < j) {
				t.Errorf("naturalLess(%q, %q) = %v", want[i], want[j], got)
			}
		}
	}
}

func TestLoadOrder(t *testing.T) {
	modules := map[string][]string{"bridge": {"stp", "llc"}, "stp": {"llc"}, "llc": nil, "veth": nil}
	got, err := loadOrder([]string{"veth", "bridge", "absent"}, func(name string) ([]string, bool, error) {
		depends, known := modules[name]
		return depends, known, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"veth", "llc", "stp", "bridge"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

func TestAbsent(t *testing.T) {
	files := map[string]string{"veth": "kernel/drivers/net/veth.ko", "nft_ct": "x"}
	got := absent([]string{"veth", "nft-ct", "xfrm_user", "netem"}, files, "kernel/net/xfrm/xfrm-user.ko\nkernel/fs/ext4/ext4.ko\n")
	if want := []string{"netem"}; !slices.Equal(got, want) {
		t.Errorf("absent are %v, want %v", got, want)
	}
}

// TestExcuse shows that a skip fails the run unless it has a reason.
func TestExcuse(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "test", "kernel"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "test", "kernel", "skips"), []byte("# comment\nTestA/one  why\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for skipped, good := range map[string]bool{"TestA/one": true, "TestA": false} {
		r := result{Passed: true, Packages: []suite.Report{{Passed: 1, Skipped: []string{skipped}}}}
		if err := excuse(root, "6.1", &r); err != nil {
			t.Fatal(err)
		}
		if r.Passed != good {
			t.Errorf("with %s skipped: passed %v, %+v", skipped, r.Passed, r.Packages)
		}
	}
}

func TestReadResults(t *testing.T) {
	for _, test := range []struct {
		name, text string
		ended      bool
		packages   int
		err        string
	}{
		{"complete", `{"package":"p","exit":1}` + "\r\nend\r\n", true, 1, ""},
		{"died", `{"package":"p","exit":0}` + "\r\n", false, 1, ""},
		{"garbled", "{\"pack\r\n", false, 0, "not a result"},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "results")
			if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			var r result
			ended, err := readResults(file, &r)
			if ended != test.ended || len(r.Packages) != test.packages {
				t.Errorf("ended %v, %d packages; want %v, %d", ended, len(r.Packages), test.ended, test.packages)
			}
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("error %v, want %q in it", err, test.err)
			}
		})
	}
}
