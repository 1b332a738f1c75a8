package main

import (
	goflag "flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	table("| Linux 6.1 |", "namespaces | 7 passed, 1970-01-01 |", "each packet | 9 passed, 1 skipped, 1970-01-01 |", "| not shown |", "| 6.1.5, in a virtual")
	network.Splats = 1
	run("6.1.5", network, packets)
	table("namespaces | not shown |", "each packet | 9 passed, 1 skipped")
	run("6.1.6", packets) // the guest died before it came to the other package
	table("namespaces | not shown |", "each packet | 9 passed, 1 skipped", "| 6.1.6, in a virtual")
	tests = tests[:1]
	network.Splats = 0
	run("6.1.10", network) // one package alone: the other one stays
	table("namespaces | 7 passed", "each packet | 9 passed, 1 skipped", "| 6.1.6 and 6.1.10, in a virtual")
	run("6.1.10")
	table("namespaces | not shown |", "each packet | 9 passed", "| 6.1.6, in a virtual")
}

// TestRowsHaveAllPackages compares the rows of README.md's table with the Makefile's list.
func TestRowsHaveAllPackages(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?m)^KERNEL_PACKAGES \?= (.*)$`).FindSubmatch(text)
	if list == nil {
		t.Fatal("the Makefile has no KERNEL_PACKAGES ?=")
	}
	run := strings.Split(strings.ReplaceAll(string(list[1]), "./", ""), ",")
	var shown []string
	for _, row := range rows {
		shown = append(shown, row.packages...)
	}
	slices.Sort(run)
	slices.Sort(shown)
	if diff := cmp.Diff(shown, run); diff != "" {
		t.Errorf("the rows of record.go do not have the packages of the Makefile (-rows +Makefile):\n%s", diff)
	}
}

func TestCellOfSeveralPackages(t *testing.T) {
	k := passedKernel{Packages: map[string]passedPackage{"a": {Date: "2026-02-03", Passed: 4}, "b": {Date: "2026-01-09", Passed: 30, Skipped: []string{"TestX", "TestY"}}}}
	for want, packages := range map[string][]string{
		"34 passed, 2 skipped, 2026-01-09":                            {"a", "b"},
		"34 passed, 2 skipped, 1 of 3 packages not shown, 2026-01-09": {"a", "b", "c"},
		"not shown": {"c", "d"},
	} {
		if got := k.cell(packages); got != want {
			t.Errorf("%v: %q, want %q", packages, got, want)
		}
	}
}
