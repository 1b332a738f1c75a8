package tidy

import (
	"flag"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/compiled.txt")

// TestWhatFirstContactCompiles lists the libraries that first contact (go run ./cmd/shunt demo) compiles from
// empty caches: the modules, and the packages of the standard library that shunt itself imports. A library
// that is not in the list costs every newcomer seconds: `go build -a -debug-actiongraph=FILE ./cmd/shunt`
// says how many. Code that is worth them is added with -update; other code goes into a module of its own, as
// in kube/.
func TestWhatFirstContactCompiles(t *testing.T) {
	const list = "testdata/compiled.txt"
	format := `{{if .Module}}{{if .Module.Main}}{{range .Imports}}import {{.}}
{{end}}{{else}}module {{.Module.Path}}{{end}}{{end}}`
	command := exec.Command("go", "list", "-deps", "-f", format, "./cmd/shunt")
	command.Dir, command.Env = "../..", append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0")
	output, err := command.Output()
	if err != nil {
		t.Fatalf("list the packages that cmd/shunt is built of: %v", err)
	}
	var is []string
	for _, line := range strings.Split(string(output), "\n") {
		name, isImport := strings.CutPrefix(line, "import ")
		first, _, _ := strings.Cut(name, "/")
		if line != "" && !(isImport && strings.Contains(first, ".")) { // an import of a module, or of shunt itself
			is = append(is, line)
		}
	}
	slices.Sort(is)
	is = slices.Compact(is)
	if *update {
		if err := os.WriteFile(list, []byte(strings.Join(is, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for _, one := range is {
		if !slices.Contains(want, one) {
			t.Errorf("%s is compiled into shunt, and is not in test/tidy/%s: if it is worth what it costs a first build, run go test ./test/tidy -run %s -update", one, list, t.Name())
		}
	}
	for _, one := range want {
		if !slices.Contains(is, one) {
			t.Errorf("%s is in test/tidy/%s, and nothing of shunt needs it: take it out with -update", one, list)
		}
	}
}
