package judge

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func TestProgramsAreExamined(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256([]byte("program"))
	if err := examine(policy.Program{Path: file, SHA256: hex.EncodeToString(digest[:])}, trustOfScripts); err != nil {
		t.Error(err)
	}
	for want, p := range map[string]policy.Program{"is not the program that the policy trusts: its SHA-256 is " + hex.EncodeToString(digest[:]): {Path: file, SHA256: "00"},
		"is not a regular file": {Path: t.TempDir()}, "no such file": {Path: file + "x"}} {
		if err := examine(p, trustOfScripts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := examine(policy.Program{Path: file}, trustOfScripts); err == nil || !strings.Contains(err.Error(), "is a script") {
		t.Error(err)
	}
	p := policy.Policy{Rules: []policy.Rule{{Name: "a", Program: file, At: "guard.yaml:3:7"}, {Name: "b", Paths: []string{"/srv"}, Trust: policy.Trust{Programs: policy.Programs(file, file+"x")}},
		{Name: "c", Program: "/proc/self/exe"}}}
	scripts := Scripts(p)
	if len(scripts) != 2 || scripts[0] != (Script{"guard.yaml:3:7", "rule \"a\": " + file + " is a script, and the program that runs is its interpreter, which opens the script by its name", processOfScript}) ||
		scripts[1].Remedy != trustOfScripts {
		t.Errorf("%v", scripts)
	}
	if err := NewReading(nil).guarded(1, p.Rules[0]); !errors.Is(err, errScript) || !strings.Contains(err.Error(), "pid-file") {
		t.Errorf("a script as the program of processes: %v", err)
	}
	all := interpreters(nil)
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil || !slices.Contains(all, shell) || slices.Contains(interpreters([]string{shell}), shell) {
		t.Errorf("the shell %s of %v: %v", shell, all, err)
	}
}

func TestOtherNamespacesAreRefused(t *testing.T) {
	if err := firstNamespaces(t.TempDir()); err == nil || !strings.Contains(err.Error(), "identify the pid namespace") {
		t.Error(err)
	}
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "pid"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := firstNamespaces(folder); err == nil || !strings.Contains(err.Error(), "not the machine's initial pid namespace") {
		t.Error(err)
	}
}

// A condition of detection is about one file: a folder in its place would deny everything below it.
func TestFoldersOfDetectionAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		rule    policy.Rule
		refused bool
	}{
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{dir}}, true},
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{file}, By: []string{dir}}, true},
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{file}, By: []string{file}}, false},
		{policy.Rule{Name: "a", Paths: []string{dir}}, false},
	} {
		if err := onlyFiles(c.rule); (err != nil) != c.refused || c.refused && !strings.Contains(err.Error(), dir+" is a folder") {
			t.Errorf("%+v: %v", c.rule, err)
		}
	}
}
