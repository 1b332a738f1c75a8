package main

import (
	goflag "flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/test/kernel/suite"
)

var update = goflag.Bool("update", false, "write the table of README.md instead of comparing it")

// The table of README.md lies between these lines.
const (
	tableBegin = "<!-- The table is made from test/kernel/passed.json by `go test ./test/kernel -update`. -->\n"
	tableEnd   = "<!-- End of the table. -->\n"
)

// TestREADMEShowsWhatPassed compares the table with the record of runs.
func TestREADMEShowsWhatPassed(t *testing.T) {
	root := filepath.Join("..", "..")
	p, err := readRecord(filepath.Join(root, recordFile))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "README.md")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	shown, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("README.md has no lines %q and %q", tableBegin, tableEnd)
	}
	want := "\n" + p.table() + "\n"
	if *update {
		if err := os.WriteFile(file, []byte(before+tableBegin+want+tableEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(shown, want); diff != "" {
		t.Errorf("README.md does not show what passed (-README +%s); run `go test ./test/kernel -update`:\n%s", recordFile, diff)
	}
}

func TestRecord(t *testing.T) {
	file := filepath.Join(t.TempDir(), "passed.json")
	tests := []compiled{{name: "test/net"}, {name: "test/packet"}}
	tests[0].Package, tests[1].Package = "p/test/net", "p/test/packet"
	run := func(release string, reports ...suite.Report) {
		t.Helper()
		if err := record(file, result{Kernel: "6.1", Release: release, Short: true, Packages: reports}, tests, time.Unix(0, 0)); err != nil {
			t.Fatal(err)
		}
	}
	table := func(wants ...string) {
		t.Helper()
		p, err := readRecord(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range wants {
			if !strings.Contains(p.table(), want) {
				t.Errorf("%q is missing in\n%s", want, p.table())
			}
		}
	}
	network, packets := suite.Report{Package: "p/test/net", Passed: 7}, suite.Report{Package: "p/test/packet", Passed: 9, Skipped: []string{"TestX"}}
	run("6.1.5", network, packets)
	table("| Linux 6.1 |", "namespaces | 7 passed, 1970-01-01 |", "packet | 9 passed, 1 skipped, 1970-01-01 |", "| not shown |", "| 6.1.5, in a virtual")
	network.Splats = 1
	run("6.1.5", network, packets)
	table("namespaces | not shown |", "packet | 9 passed, 1 skipped")
	run("6.1.6", packets) // the guest died before it came to the other package
	table("namespaces | not shown |", "packet | 9 passed, 1 skipped", "| 6.1.6, in a virtual")
	tests = tests[:1]
	run("6.1.7")
	table("packet | not shown |")
}
