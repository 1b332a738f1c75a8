package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestUsedIsTold: rest prints the CPU time of a package that passes.
func TestUsedIsTold(t *testing.T) {
	root := clone(t, map[string]string{"go.mod": module["go.mod"], "a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) {}\n"})
	out, err := tests(t, root)
	has(t, out, err, "s of CPU time  a\n", "compiling, linking")
}

// TestChildIsTold: signals of go test reach the binary, whose exit code is rest's.
func TestChildIsTold(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "binary")
	put(t, binary, "#!/bin/sh\ntrap 'echo told; exit 7' QUIT\nkill -QUIT $PPID\nwhile :; do read line; done\n")
	if err := os.Chmod(binary, 0o700); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		command string
		code    int
		says    string
	}{
		{binary, 7, "told"},
		{filepath.Join(dir, "absent"), 1, "rest: fork/exec"},
	} {
		var out bytes.Buffer
		run := exec.Command(self, childArgument, dir, c.command)
		run.Stdout, run.Stderr = &out, &out
		in, err := run.StdinPipe() // it stays open: the binary waits
		if err != nil {
			t.Fatal(err)
		}
		err = run.Run()
		_ = in.Close()
		if code := run.ProcessState.ExitCode(); code != c.code || !strings.Contains(out.String(), c.says) {
			t.Errorf("%s: exit code %d, %v; want %d and %q\n%s", c.command, code, err, c.code, c.says, &out)
		}
	}
}
