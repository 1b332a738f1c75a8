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
	Short    bool                     `json:"short"`    // whether tests ran with -test.short
	Packages map[string]passedPackage `json:"packages"` // by path in the repository
}

// passedPackage is a package all of whose tests passed or skipped.
type passedPackage struct {
	Release string   `json:"release"`
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
// out. The other packages stay, with the release that they passed on: a run of all packages takes
// hours, and Debian's releases follow each other within weeks.
func record(file string, r result, tests []compiled, now time.Time) error {
	p, err := readRecord(file)
	if err != nil {
		return err
	}
	k := p[r.Kernel]
	if k.Short != r.Short || k.Packages == nil {
		k = passedKernel{Short: r.Short, Packages: map[string]passedPackage{}}
	}
	for _, t := range tests {
		delete(k.Packages, t.name)
		for _, report := range r.Packages {
			if report.Package == t.Package && report.Good() {
				slices.Sort(report.Skipped)
				k.Packages[t.name] = passedPackage{Release: r.Release, Date: now.UTC().Format(time.DateOnly), Passed: report.Passed, Skipped: report.Skipped}
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

// rows are the subjects of the tests with their packages, in the order of the table. Together they have the packages
// that `make test-kernels` runs.
var rows = []struct {
	about    string
	packages []string
}{
	{"What a kernel offers, what each packet and each operation costs", []string{"internal/kernel", "test/kernel/guest", "test/cost", "test/stamps"}},
	{"Load balancer: load, attach in native and generic mode, adopt, count", []string{
		"internal/lb/datapath", "internal/lb/datapath/abi", "internal/lb/datapath/attach", "internal/lb/datapath/store", "internal/lb/datapath/upgrade",
		"internal/lb/decap", "internal/lb/realserver",
	}},
	{"Load balancer: what happens to each packet", []string{"test/packet"}},
	{"Load balancer: sockets through network namespaces", []string{"test/net"}},
	{"Services at the socket", []string{"internal/lb/sock"}},
	{"UDP path", []string{"internal/udp/xsk", "internal/udp/hook", "internal/udp/lease", "internal/udp/broker", "internal/udp/daemon", "internal/udp/doctor"}},
	{"Pod shortcuts", []string{"internal/pod/sockets", "internal/pod/watch", "internal/pod/daemon", "internal/cgroup"}},
	{"Host guard", []string{
		"internal/guard/fanotify", "internal/guard/judge", "internal/guard/gate", "internal/guard/protect", "internal/guard/connect",
		"internal/guard/detect", "internal/guard/demo",
	}},
	{"Node diagnosis", []string{
		"sensor", "internal/event", "internal/diag", "internal/diag/io", "internal/diag/memleak", "internal/diag/ping", "internal/diag/sched",
		"internal/diag/symbol", "internal/diag/top", "internal/diag/vdisk",
	}},
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
		fmt.Fprintf(&out, "| %s |", row.about)
		for _, s := range series {
			fmt.Fprintf(&out, " %s |", p[s].cell(row.packages))
		}
		out.WriteString("\n")
	}
	out.WriteString("| run on |")
	for _, s := range series {
		where := "in full"
		if p[s].Short {
			where = "in a virtual machine, with `-short`"
		}
		fmt.Fprintf(&out, " %s, %s |", strings.Join(p[s].releases(), " and "), where)
	}
	out.WriteString("\n")
	return out.String()
}

// releases are the releases that packages passed on, in order.
func (k passedKernel) releases() (all []string) {
	for _, p := range k.Packages {
		if !slices.Contains(all, p.Release) {
			all = append(all, p.Release)
		}
	}
	sort.Slice(all, func(i, j int) bool { return naturalLess(all[i], all[j]) })
	return all
}

// cell is a kernel's cell in a row: the tests of all its packages, and the date of the oldest run.
func (k passedKernel) cell(packages []string) string {
	var passed, skipped, missing int
	var oldest string
	for _, name := range packages {
		p, ran := k.Packages[name]
		if !ran {
			missing++
			continue
		}
		passed += p.Passed
		skipped += len(p.Skipped)
		if oldest == "" || p.Date < oldest {
			oldest = p.Date
		}
	}
	if missing == len(packages) {
		return "not shown"
	}
	text := fmt.Sprintf("%d passed", passed)
	if skipped > 0 {
		text += fmt.Sprintf(", %d skipped", skipped)
	}
	if missing > 0 {
		text += fmt.Sprintf(", %d of %d packages not shown", missing, len(packages))
	}
	return text + ", " + oldest
}
