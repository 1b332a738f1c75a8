// Kernel runs Go test packages under other Linux kernels.
//
// It fetches Debian's cloud kernels, compiles the packages' tests into static binaries, packs
// them with the program in ./guest and the needed modules into an initramfs, and boots each
// kernel once in a virtual machine that runs them one package after the other:
//
//	go run ./test/kernel --kernels 6.1,6.12 --packages ./internal/lb/datapath,./test/net
//
//	 host                                    guest (2 CPUs, emulated)
//	 ────                                    ────────────────────────
//	 apt-get download, dpkg -x ─► vmlinuz ─► boots
//	 go test -c               ─► initramfs ─► /init = ./guest: mounts, modules, tests
//	 stdout, log ◄──────────── serial 0 ◄─── output of the kernel and the tests
//	 result      ◄──────────── serial 1 ◄─── one line of JSON per package, and an end
//
// Packages that load rules (withRules) get the host's iptables-restore and nft.
// Packages that need faults of a known size in the kernel (withFaults) get them from the module
// ./fault, which is built for each kernel with gcc and Debian's headers, and loaded in the guest.
//
// Emulation (tcg) needs neither /dev/kvm nor root. Times in the guest mean nothing, only
// behaviour counts, so tests run there with -test.short. The kernel "host" is the running one:
// the same binaries, as root and in full, without a virtual machine.
//
// The whole output of a kernel is kept in .tools/kernels/<kernel>.log. With --record, the passed
// packages are written to test/kernel/passed.json, which the table of README.md is made from.
//
// Exit status: 0 all passed, 1 a test failed or the guest died, 2 the machine could not be
// set up. Every kernel ends with one line for programs:
//
//	shunt-kernel: {"kernel":"6.1","release":"6.1.0-56-cloud-amd64","passed":true,…}
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/test/kernel/suite"
)

// options is the command line.
type options struct {
	kernels  []string
	packages []string
	run      string        // -test.run of every package that has none of its own
	args     []string      // more arguments for every package's tests
	timeout  time.Duration // of one package
	memory   string        // qemu's -m
	verbose  bool
	record   bool
	rest     bool   // leave out packages that rest; see rest.go
	systemd  string // a Debian release whose systemd is the guest's init; empty: ./guest is init
	files    string // folder of files for the guest
	debian   string // path of that release's root file system, packed
	keep     bool   // leave the working directory for inspection
}

// result is the line for programs.
type result struct {
	Kernel   string         `json:"kernel"`  // series: "6.1"
	Release  string         `json:"release"` // uname -r
	Short    bool           `json:"short"`   // whether tests ran with -test.short
	Passed   bool           `json:"passed"`
	Seconds  float64        `json:"seconds"`
	Packages []suite.Report `json:"packages"`
	Error    string         `json:"error,omitempty"`
}

// onHost names the running kernel.
const onHost = "host"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	passed, err := run(ctx, parseFlags())
	stop()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "test/kernel:", err)
		os.Exit(2)
	case !passed:
		os.Exit(1)
	}
}

// parseFlags reads the command line and exits on a wrong one.
func parseFlags() options {
	var o options
	kernels := flag.String("kernels", "6.1,6.12", "series of Debian's cloud kernels, comma separated; host is the running kernel")
	packages := flag.String("packages", "./test/kernel/guest", "Go packages whose tests run in the guest, comma separated; ./package=expression runs only its matching tests")
	flag.StringVar(&o.run, "run", "", "run only tests whose names match this expression")
	args := flag.String("args", "", "more arguments for the tests, separated by spaces, for example '-reloads 1000'")
	flag.DurationVar(&o.timeout, "timeout", 40*time.Minute, "stop a package's tests after this time")
	flag.StringVar(&o.memory, "memory", "2G", "memory of the guest")
	flag.BoolVar(&o.verbose, "v", false, "print the whole output of the tests")
	flag.BoolVar(&o.record, "record", false, "record the passed tests in "+recordFile)
	flag.BoolVar(&o.rest, "rest", false, "leave out packages that have passed with their present files")
	flag.StringVar(&o.systemd, "systemd", "", "run systemd of this Debian release as the guest's first process, for example bookworm; needs root")
	flag.StringVar(&o.files, "files", "", "a folder whose files are in /packages of the guest")
	flag.BoolVar(&o.keep, "keep", false, "keep the working directory and print its name")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "test/kernel: unexpected argument %q; packages go into --packages\n", flag.Arg(0))
		os.Exit(2)
	}
	o.kernels, o.packages, o.args = split(*kernels), split(*packages), strings.Fields(*args)
	if o.record && (o.run != "" || strings.Contains(*packages, "=")) {
		fmt.Fprintln(os.Stderr, "test/kernel: with --run or =expression some tests do not run, so --record would record too much: leave out --record, or the others")
		os.Exit(2)
	}
	return o
}

// split cuts a comma separated list and drops empty parts.
func split(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

// run tests every kernel and reports whether all passed. An error means that the tests could not
// run at all.
func run(ctx context.Context, o options) (passed bool, err error) {
	root, err := moduleRoot()
	if err != nil {
		return false, err
	}
	if o.rest {
		if o, err = resting(root, o); err != nil {
			return false, err
		}
		if len(o.packages) == 0 {
			return true, nil
		}
	}
	work, err := os.MkdirTemp("", "shunt-kernel-")
	if err != nil {
		return false, fmt.Errorf("make a working directory: %w", err)
	}
	if o.keep {
		fmt.Println("working directory:", work)
	} else {
		defer os.RemoveAll(work)
	}
	tests, err := compile(ctx, root, work, o)
	if err != nil {
		return false, err
	}
	passed = true
	for _, series := range o.kernels {
		if series == onHost && os.Geteuid() != 0 {
			fmt.Println("=== host: left out, because it needs root")
			continue
		}
		r, err := runKernel(ctx, root, work, series, tests, o)
		if err != nil {
			return false, err
		}
		line, err := json.Marshal(r)
		if err != nil {
			return false, err
		}
		fmt.Printf("shunt-kernel: %s\n", line)
		passed = passed && r.Passed
		if ctx.Err() != nil {
			return false, errors.New("interrupted")
		}
		if o.rest {
			if err := recordRest(root, r, tests); err != nil {
				return false, err
			}
		}
		if o.record {
			if err := record(filepath.Join(root, recordFile), r, tests, time.Now()); err != nil {
				return false, err
			}
		}
	}
	return passed, nil
}

// runKernel runs the tests on one kernel and prints their progress.
func runKernel(ctx context.Context, root, work, series string, tests []compiled, o options) (result, error) {
	kernels := filepath.Join(root, ".tools", "kernels")
	if err := os.MkdirAll(kernels, 0o755); err != nil {
		return result{}, err
	}
	log, err := os.Create(filepath.Join(kernels, series+".log"))
	if err != nil {
		return result{}, err
	}
	defer log.Close()
	var shown io.Writer = suite.NewProgress(os.Stdout)
	if o.verbose {
		shown = os.Stdout
	}
	out := io.MultiWriter(log, shown)

	var r result
	if series == onHost {
		r = runHost(ctx, root, tests, out)
	} else if r, err = runGuest(ctx, root, work, series, tests, o, out); err != nil {
		return result{}, err
	}
	if err := excuse(root, series, &r); err != nil {
		return result{}, err
	}
	for _, p := range r.Packages {
		word := "passed"
		if !p.Good() {
			word = "FAILED"
		}
		fmt.Printf("%-7s %-32s %4d passed, %d failed, %d skipped, %.0f s %s\n",
			word, p.Package, p.Passed, len(p.Failed), len(p.Skipped), p.Seconds, p.Error)
		for _, name := range p.Skipped {
			fmt.Println("        skipped:", name)
		}
	}
	if !r.Passed {
		fmt.Printf("FAILED on %s %s: the whole output is in %s\n", r.Release, r.Error, log.Name())
	}
	return r, nil
}

// excuse fails packages with skipped tests that have no reason on file.
func excuse(root, series string, r *result) error {
	list := "test/kernel/skips"
	if series == onHost {
		list = ".ci/skips"
	}
	text, err := os.ReadFile(filepath.Join(root, list))
	if err != nil {
		return err
	}
	excused := map[string]bool{}
	for _, line := range strings.Split(string(text), "\n") {
		if name, _, _ := strings.Cut(line, " "); !strings.HasPrefix(line, "#") {
			excused[name] = true
		}
	}
	for i := range r.Packages {
		p := &r.Packages[i]
		for _, name := range p.Skipped {
			if !excused[name] && p.Error == "" {
				p.Error = name + " skipped, and " + list + " does not say why it may"
			}
		}
		r.Passed = r.Passed && p.Good()
	}
	return nil
}

// runHost runs the tests on this machine's own kernel.
func runHost(ctx context.Context, root string, tests []compiled, out io.Writer) result {
	started := time.Now()
	r := result{Release: hostRelease(), Passed: true}
	r.Kernel = seriesOf(r.Release)
	fmt.Printf("=== kernel %s (%s, this machine's), %d packages\n", r.Kernel, r.Release, len(tests))
	for _, t := range tests {
		t.Binary, t.Dir = t.host, filepath.Join(root, t.name)
		p := suite.Run(ctx, t.Test, os.Environ(), out)
		r.Packages = append(r.Packages, p)
		r.Passed = r.Passed && p.Good()
	}
	r.Seconds = time.Since(started).Round(time.Millisecond).Seconds()
	return r
}

// runGuest runs the tests in a virtual machine.
func runGuest(ctx context.Context, root, work, series string, tests []compiled, o options, out io.Writer) (result, error) {
	needed := programs
	if needRules(tests) {
		needed = append(slices.Clone(needed), rulePrograms...)
	}
	if err := needPrograms(ctx, needed); err != nil {
		return result{}, err
	}
	k, err := findKernel(ctx, filepath.Join(root, ".tools", "kernels"), series)
	if err != nil {
		return result{}, err
	}
	init := filepath.Join(work, "init")
	if err := goTool(ctx, root, "build", "-o", init, "./test/kernel/guest"); err != nil {
		return result{}, err
	}
	image := filepath.Join(work, series+".cpio")
	if o.systemd != "" {
		if o.debian, err = findRoot(ctx, filepath.Join(root, ".tools", "kernels"), o.systemd); err != nil {
			return result{}, err
		}
	}
	fault := ""
	if slices.ContainsFunc(tests, func(t compiled) bool { return slices.Contains(withFaults, t.name) }) {
		if fault, err = faultModule(ctx, root, k); err != nil {
			return result{}, err
		}
	}
	if err := writeImage(image, root, init, fault, tests, k, o); err != nil {
		return result{}, fmt.Errorf("pack the initramfs for %s: %w", k.release, err)
	}
	defer os.Remove(image) // as large as all test binaries together
	fmt.Printf("=== kernel %s (%s, emulated), %d packages\n", series, k.release, len(tests))
	m := virtual{kernel: k, image: image, results: filepath.Join(work, series+".results"), memory: o.memory,
		limit: time.Duration(len(tests))*o.timeout + bootLimit}
	r := m.run(ctx, len(tests), out)
	r.Kernel, r.Short = series, true
	return r, nil
}

// moduleRoot is the directory of go.mod.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	gomod := strings.TrimSpace(string(out))
	if gomod == "" || gomod == os.DevNull {
		return "", errors.New("not inside the Go module; run this from the repository")
	}
	return filepath.Dir(gomod), nil
}
