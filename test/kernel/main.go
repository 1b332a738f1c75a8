// Kernel runs Go test packages under other Linux kernels.
//
// It fetches Debian's cloud kernels, compiles the packages' tests into static
// binaries, packs them with the program in ./guest and the needed modules into an
// initramfs, and boots each kernel in a virtual machine that runs them:
//
//	go run ./test/kernel --kernels 6.1,6.12 --packages ./internal/datapath,./test/net
//
//	 host                                    guest (2 CPUs, emulated)
//	 ────                                    ────────────────────────
//	 apt-get download, dpkg -x ─► vmlinuz ─► boots
//	 go test -c               ─► initramfs ─► /init = ./guest: mounts, modules, tests
//	 stdout      ◄──────────── serial 0 ◄─── what the kernel and the tests say
//	 result      ◄──────────── serial 1 ◄─── one line of JSON per package, and an end
//
// Emulation (tcg) needs neither /dev/kvm nor root. Times in the guest mean nothing,
// behaviour does. Exit status: 0 all passed, 1 a test failed or the guest died, 2 the
// machine could not be set up. Every kernel ends with one line for programs:
//
//	shunt-kernel: {"kernel":"6.1","release":"6.1.0-56-cloud-amd64","passed":true,…}
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// options is the command line.
type options struct {
	kernels  []string
	packages []string
	run      string        // -test.run of every package
	timeout  time.Duration // of one kernel, boot included
	memory   string        // qemu's -m
	verbose  bool
	keep     bool // leave the working directory for a look
}

// result is the line for programs.
type result struct {
	Kernel   string          `json:"kernel"`  // as asked for: "6.1"
	Release  string          `json:"release"` // uname -r
	Passed   bool            `json:"passed"`
	Seconds  float64         `json:"seconds"`
	Packages []packageResult `json:"packages"`
	Error    string          `json:"error,omitempty"`
}

// packageResult is what the guest reports of one package.
type packageResult struct {
	Package string  `json:"package"`
	Exit    int     `json:"exit"` // the test binary's; 124 when it was stopped for time
	Seconds float64 `json:"seconds"`
	Splats  int     `json:"splats"` // warnings and oopses in the kernel's log meanwhile
	Error   string  `json:"error,omitempty"`
}

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
	kernels := flag.String("kernels", "6.1,6.12", "kernel series of Debian's cloud kernels, comma separated")
	packages := flag.String("packages", "./test/kernel/guest", "Go packages whose tests run in the guest, comma separated")
	flag.StringVar(&o.run, "run", "", "run only tests that match this expression")
	flag.DurationVar(&o.timeout, "timeout", 20*time.Minute, "stop a kernel after this long")
	flag.StringVar(&o.memory, "memory", "2G", "memory of the guest")
	flag.BoolVar(&o.verbose, "v", false, "let tests print their log")
	flag.BoolVar(&o.keep, "keep", false, "keep the working directory and print its name")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "test/kernel: unexpected argument %q; packages go into --packages\n", flag.Arg(0))
		os.Exit(2)
	}
	o.kernels, o.packages = split(*kernels), split(*packages)
	return o
}

// split cuts a comma separated list and drops empty parts.
func split(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

// run tests every kernel and reports whether all passed. An error means that the
// tests could not be run at all.
func run(ctx context.Context, o options) (passed bool, err error) {
	root, err := moduleRoot()
	if err != nil {
		return false, err
	}
	if err := needPrograms(ctx); err != nil {
		return false, err
	}
	work, err := os.MkdirTemp("", "shunt-kernel-")
	if err != nil {
		return false, fmt.Errorf("making a working directory: %w", err)
	}
	if o.keep {
		fmt.Println("working directory:", work)
	} else {
		defer os.RemoveAll(work)
	}
	init, tests, err := buildGuest(ctx, root, work, o)
	if err != nil {
		return false, err
	}
	passed = true
	for _, series := range o.kernels {
		k, err := findKernel(ctx, filepath.Join(root, ".tools", "kernels"), series)
		if err != nil {
			return false, err
		}
		image := filepath.Join(work, series+".cpio")
		if err := writeImage(image, root, init, tests, k); err != nil {
			return false, fmt.Errorf("packing the initramfs for %s: %w", k.release, err)
		}
		fmt.Printf("=== kernel %s (%s), %d packages\n", series, k.release, len(tests))
		r := boot(ctx, o, k, image, filepath.Join(work, series+".results"), len(tests))
		r.Kernel = series
		os.Remove(image) // as large as all test binaries together
		line, err := json.Marshal(r)
		if err != nil {
			return false, err
		}
		fmt.Printf("shunt-kernel: %s\n", line)
		passed = passed && r.Passed
		if ctx.Err() != nil {
			return false, errors.New("interrupted")
		}
	}
	return passed, nil
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
