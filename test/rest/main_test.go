package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/test/unchanged"
)

// module is a repository in which package a has tests that pass, and sees something in each possible way: the
// packages that it imports, an embedded file, a file and a folder that it opens, a variable.
var module = map[string]string{
	"go.mod":       "module example\n\ngo 1.26\n",
	"b/b.go":       "package b\n\nimport _ \"embed\"\n\n//go:embed b.txt\nvar B string\n",
	"b/b.txt":      "embedded",
	"b/b_test.go":  "package b\n",
	"a/a.go":       "package a\n\nimport _ \"example/b\"\n",
	"a/in_test.go": "package a\n\nconst In = 1\n",
	"a/a_test.go": `package a_test

import (
	"os"
	"testing"

	_ "example/a"
)

func TestA(t *testing.T) {
	for _, name := range []string{"testdata/x", "../far/y"} {
		if _, err := os.ReadFile(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.ReadDir("../far"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("../absent"); err == nil {
		t.Error("it is there")
	}
	if os.Getenv("SHUNT_SEEN") == "bad" {
		t.Error("bad")
	}
	t.Log("a ran")
}
`,
	"a/testdata/x": "x",
	"far/y":        "y",
	"c/c.go":       "package c\n",
}

// TestMain: rest runs test binaries by starting itself.
func TestMain(m *testing.M) {
	if isChild() {
		becomeChild()
	}
	os.Exit(m.Run())
}

// put writes a file as if it had been there for a while.
func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// clone makes a repository with the files, and empty records.
func clone(t *testing.T, files ...map[string]string) string {
	t.Helper()
	cache, err := exec.Command(program(), "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOCACHE", strings.TrimSpace(string(cache)))
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("GOWORK", "off")
	return again(t, files...)
}

// again makes a repository with the files; records stay.
func again(t *testing.T, files ...map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for _, some := range files {
		for name, text := range some {
			put(t, filepath.Join(root, name), text)
		}
	}
	return root
}

// tests runs rest in a repository, and returns its output.
func tests(t *testing.T, root string, flags ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := (&session{root: root, module: root, flags: flags, out: &out}).run([]string{"./a", "./..."})
	return out.String(), err
}

func has(t *testing.T, out string, err error, want ...string) {
	t.Helper()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, text := range want {
		if strings.Count(out, text) != 1 {
			t.Errorf("%q is not there once in:\n%s", text, out)
		}
	}
}

// rests reports whether package a would rest on a machine, after a change of the session.
func rests(t *testing.T, root, here string, change func(s *session)) bool {
	t.Helper()
	s := session{root: root, module: root, flags: []string{"-v"}, out: new(bytes.Buffer), began: time.Now(), host: here}
	var err error
	if s.records, err = folder(); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&s)
	}
	packages, err := list(root, []string{"./a"})
	if err != nil {
		t.Fatal(err)
	}
	left, rested := s.resting(packages)
	if len(left)+rested != 1 {
		t.Fatalf("%d run and %d rest of one package", len(left), rested)
	}
	return rested == 1
}

// TestAPackageRestsUntilSomethingItSeesChanges: a package that passed rests, also in another clone, and prints
// the same; after each change of something that it can see it runs, until the change is undone.
func TestAPackageRestsUntilSomethingItSeesChanges(t *testing.T) {
	root := clone(t, module)
	out, err := tests(t, root, "-v")
	has(t, out, err, "a ran", "ok  \texample/a\t", "2 of 2 packages passed and are recorded", "0 packages rest")
	root = again(t, module)
	out, err = tests(t, root, "-v")
	has(t, out, err, "a ran", "--- PASS: TestA", "ok  \texample/a\t(rests)", "2 packages rest")
	if strings.Count(out, "example/c") != 1 {
		t.Errorf("a package without tests is not built:\n%s", out)
	}
	var dry bytes.Buffer
	err = (&session{root: root, module: root, dry: true, out: &dry}).run([]string{"./a"}) // without -v
	has(t, dry.String(), err, "example/a: there is no record that it passed", "0 packages rest")

	here, err := host(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"a/a.go": module["a/a.go"] + "// changed\n", "a/in_test.go": module["a/in_test.go"] + "// changed\n", "a/a_test.go": module["a/a_test.go"] + "// changed\n",
		"a/more_test.go": "package a\n", "a/more.go": "package a\n",
		"b/b.go": module["b/b.go"] + "// changed\n", "b/b.txt": "other", "b/more.go": "package b\n", "go.mod": "module example\n\ngo 1.25\n",
		"a/testdata/x": "z", "far/y": "z", "far/more": "", "absent": "",
	} {
		put(t, filepath.Join(root, name), text)
		if rests(t, root, here, nil) {
			t.Errorf("with another %s it rests", name)
		}
		if before, was := module[name]; was {
			put(t, filepath.Join(root, name), before)
		} else if err := os.Remove(filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
		if !rests(t, root, here, nil) {
			t.Errorf("with %s as it was it does not rest", name)
		}
	}
	for name, change := range map[string]func(*session){
		"another kernel":   func(s *session) { s.host = strings.Replace(s.host, kernelRelease(t), "1.2.3", 1) },
		"other flags":      func(s *session) { s.flags = append(s.flags, "-short") },
		"-all":             func(s *session) { s.all = true },
		"a later day":      func(s *session) { s.began = s.began.Add(life) },
		"a clock set back": func(s *session) { s.began = s.began.Add(-life) },
		"a variable":       func(*session) { t.Setenv("SHUNT_SEEN", "1") },
	} {
		if rests(t, root, here, change) {
			t.Errorf("with %s it rests", name)
		}
		os.Unsetenv("SHUNT_SEEN")
	}
	for variable, value := range map[string]string{"GOAMD64": "v2", "GODEBUG": "madvdontneed=1", "GOFLAGS": "-tags=x"} {
		t.Run(variable, func(t *testing.T) {
			t.Setenv(variable, value)
			here, err := host(root)
			if err != nil {
				t.Fatal(err)
			}
			if rests(t, root, here, nil) {
				t.Errorf("with another %s it rests", variable)
			}
		})
	}
	put(t, filepath.Join(root, "b/b_test.go"), "package b // another test\n")
	put(t, filepath.Join(root, "c/c.go"), "package c // changed\n")
	if !rests(t, root, here, nil) {
		t.Error("it does not rest though only others' tests and a package that it does not import have changed")
	}
}

func kernelRelease(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// TestNotRecorded: a package is not recorded if it failed, if it changed while it ran, if its tests start a
// program that reads files unseen, or if the log of its tests is missing.
func TestNotRecorded(t *testing.T) {
	quick := func(imports, text string) map[string]string {
		return map[string]string{"go.mod": module["go.mod"], "a/a_test.go": "package a\n\nimport (\n\t\"testing\"\n" + imports + ")\n\nfunc TestA(t *testing.T) {\n" + text + "\n}\n"}
	}
	for name, one := range map[string]struct {
		files map[string]string
		want  string
		fails bool
	}{
		"failed":  {quick("", "t.Error(1)"), "0 of 1 packages passed", true},
		"source":  {quick("\t\"os/exec\"\n", "if exec.Command(\"sh\", \"-c\", \"echo >a_test.go\").Run() != nil { t.Error(1) }"), "a/a_test.go was changed while it ran", false},
		"opened":  {quick("\t\"os\"\n\t\"os/exec\"\n", "_, err := os.ReadFile(\"../go.mod\"); if err != nil || exec.Command(\"sh\", \"-c\", \"echo >>../go.mod\").Run() != nil { t.Error(err) }"), "go.mod was changed while it ran", false},
		"program": {quick("\t\"os/exec\"\n", "if exec.Command(\"go\", \"version\").Run() != nil { t.Error(1) }"), "it starts go, which may read any file", false},
		"no log":  {map[string]string{"go.mod": module["go.mod"], "a/a_test.go": "package a\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestMain(m *testing.M) { os.Exit(0) }\n"}, "read the log of its tests", false},
	} {
		t.Run(name, func(t *testing.T) {
			root := clone(t, one.files)
			out, err := tests(t, root)
			if one.fails != (err != nil) || !strings.Contains(out, one.want) {
				t.Errorf("want %q and an error: %v; have %v\n%s", one.want, one.fails, err, out)
			}
			if dir, err := folder(); err != nil {
				t.Error(err)
			} else if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
				t.Errorf("recorded: %v, %v", entries, err)
			}
		})
	}
}

func TestFlagsWithWhichNothingRests(t *testing.T) {
	for want, flags := range map[string][]string{
		"":              {"-timeout", "20m", "-p", "4", "-parallel=6", "-v", "-vet=off", "-run", "^TestX$", "-short", "-test.v"},
		"-count=5":      {"-v", "-count=5"},
		"-update":       {"-run", "X", "-update"},
		"-coverprofile": {"-coverprofile", "x"},
	} {
		if have := other(flags); have != want {
			t.Errorf("of %q: %q, want %q", flags, have, want)
		}
	}
}

func TestNever(t *testing.T) {
	for dir := range never {
		if _, err := os.Stat(filepath.Join("../..", dir)); err != nil {
			t.Errorf("it never rests, and is not there: %v", err)
		}
		s := session{root: "/repository"}
		if _, err := s.key(&testee{Dir: filepath.Join(s.root, dir)}); err == nil {
			t.Errorf("%s rests", dir)
		}
	}
}

// TestStarts: the log lacks the files that a program reads which a test starts; the map starts lists them.
func TestStarts(t *testing.T) {
	for folder, names := range starts {
		if _, err := unchanged.Digest("../..", append(names, folder)...); err != nil {
			t.Errorf("what programs read that are started by %s: %v", folder, err)
		}
	}
	root := t.TempDir()
	put(t, filepath.Join(root, "udp/deep/x"), "x")
	log := filepath.Join(t.TempDir(), "log")
	compiler := filepath.Join(t.TempDir(), "gcc")
	put(t, compiler, "")
	if err := os.Chmod(compiler, 0o700); err != nil {
		t.Fatal(err)
	}
	put(t, log, "# test log\ngetenv PATH\nstat /nowhere/go\nstat "+compiler+"\n")
	s := session{root: root}
	all, err := s.look(log, filepath.Join(root, "udp"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range all {
		if all[i].Digest, err = s.now(all[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.changed(&record{Seen: all}); err != nil {
		t.Errorf("nothing has changed: %v", err)
	}
	put(t, filepath.Join(root, "udp/deep/x"), "y")
	if err := s.changed(&record{Seen: all}); err == nil || !strings.Contains(err.Error(), "all of udp") {
		t.Errorf("udp/deep/x has changed: %v", err)
	}
	if _, err := s.look(log, filepath.Join(root, "other")); err == nil || !strings.Contains(err.Error(), "starts gcc") {
		t.Errorf("another package that starts a compiler: %v", err)
	}
}

func TestPasses(t *testing.T) {
	const out = "=== RUN TestX\nok then\nPASS\nok  \te/a\t1.2s\n?   \te/b\t[no test files]\n--- FAIL: TestY\nFAIL\nFAIL\te/c\t0.1s\nPASS\nok  \te/d\t0.2s\nFAIL\te/f [build failed]\nFAIL\n"
	var have []string
	if err := passes(strings.NewReader(out), func(path, output string) { have = append(have, path, output) }); err != nil {
		t.Fatal(err)
	}
	if want := []string{"e/a", "=== RUN TestX\nok then\nPASS\n", "e/d", "PASS\n"}; !slices.Equal(have, want) {
		t.Errorf("%q, want %q", have, want)
	}
}
