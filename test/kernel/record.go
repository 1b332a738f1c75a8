package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// recordFile is the file of --record, from the root of the repository.
const recordFile = "test/kernel/passed.json"

// passedOn lists the packages that passed on a kernel, by series ("6.1").
type passedOn map[string]passedKernel

// passedKernel is a kernel in the record.
type passedKernel struct {
	Release  string                   `json:"release"`
	Short    bool                     `json:"short"`    // whether tests ran with -test.short
	Packages map[string]passedPackage `json:"packages"` // by path in the repository
}

// passedPackage is a package all of whose tests passed or skipped.
type passedPackage struct {
	Date    string   `json:"date"`   // of the run, UTC
	Passed  int      `json:"passed"` // tests and subtests
	Skipped []string `json:"skipped,omitempty"`
}

// readRecord reads the file; a missing one is an empty record.
func readRecord(file string) (passedOn, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return passedOn{}, nil
	} else if err != nil {
		return nil, err
	}
	p := passedOn{}
	if err := json.Unmarshal(text, &p); err != nil {
		return nil, fmt.Errorf("%s: %w; remove it to begin anew", file, err)
	}
	return p, nil
}

// record updates the file after a run: packages that passed are in, packages that did not are
// out, and packages that passed on another release of the series are removed.
func record(file string, r result, tests []compiled, now time.Time) error {
	p, err := readRecord(file)
	if err != nil {
		return err
	}
	k := p[r.Kernel]
	if k.Release != r.Release || k.Short != r.Short || k.Packages == nil {
		k = passedKernel{Release: r.Release, Short: r.Short, Packages: map[string]passedPackage{}}
	}
	for _, t := range tests {
		delete(k.Packages, t.name)
		for _, report := range r.Packages {
			if report.Package == t.Package && report.Good() {
				slices.Sort(report.Skipped)
				k.Packages[t.name] = passedPackage{Date: now.UTC().Format(time.DateOnly), Passed: report.Passed, Skipped: report.Skipped}
			}
		}
	}
	p[r.Kernel] = k
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetIndent("", "\t")
	if err := encoder.Encode(p); err != nil {
		return err
	}
	return os.WriteFile(file, text.Bytes(), 0o644)
}

// hostRelease is the version of the running kernel, as far as kernel.org numbers it.
func hostRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "unknown"
	}
	return regexp.MustCompile(`^[\d.]*\d`).FindString(unix.ByteSliceToString(name.Release[:]))
}

// seriesOf is the first two numbers of a release.
func seriesOf(release string) string {
	numbers := strings.SplitN(release, ".", 3)
	if len(numbers) < 2 {
		return release
	}
	return numbers[0] + "." + numbers[1]
}

// rows name the subject of a package's tests, in the order of the table.
var rows = []struct{ name, about string }{
	{"internal/lb/datapath", "load, attach in native and generic mode, adopt, count"},
	{"test/packet", "what happens to each packet"},
	{"test/net", "sockets through network namespaces"},
}

// table is the record as README.md shows it.
func (p passedOn) table() string {
	var series []string
	for s := range p {
		series = append(series, s)
	}
	sort.Slice(series, func(i, j int) bool { return naturalLess(series[i], series[j]) })
	var out strings.Builder
	head, line := "| tests |", "|---|"
	for _, s := range series {
		head += " Linux " + s + " |"
		line += "---|"
	}
	fmt.Fprintf(&out, "%s\n%s\n", head, line)
	for _, row := range rows {
		fmt.Fprintf(&out, "| `%s`: %s |", row.name, row.about)
		for _, s := range series {
			fmt.Fprintf(&out, " %s |", p[s].cell(row.name))
		}
		out.WriteString("\n")
	}
	out.WriteString("| run on |")
	for _, s := range series {
		where := "in full"
		if p[s].Short {
			where = "in a virtual machine, with `-short`"
		}
		fmt.Fprintf(&out, " %s, %s |", p[s].Release, where)
	}
	out.WriteString("\n")
	return out.String()
}

// cell is a package's cell in the table.
func (k passedKernel) cell(name string) string {
	p, ran := k.Packages[name]
	if !ran {
		return "not shown"
	}
	text := fmt.Sprintf("%d passed", p.Passed)
	if n := len(p.Skipped); n > 0 {
		text += fmt.Sprintf(", %d skipped", n)
	}
	return text + ", " + p.Date
}
