package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/test/kernel/suite"
	"github.com/shunt-lb/shunt/test/unchanged"
)

// about names the files that decide the result of --rest's packages under another kernel: BPF objects,
// the code that loads and attaches them, and the tests. Paths begin at the repository's root; see
// unchanged.Rests.
var about = map[string][]string{
	"./test/kernel/guest":           nil,
	"./internal/lb/datapath/attach": {"internal/lb/datapath", "internal/packet/*.go"},
	"./internal/lb/datapath/store":  {"internal/lb/datapath"},
	"./internal/lb/datapath":        {"internal/lb/datapath", "internal/packet/*.go"},
	"./internal/lb/decap":           {"internal/lb/decap"},
	"./internal/guard/protect":      {"internal/guard/judge", "internal/guard/policy", "internal/guard/protect", "internal/guard/trial"},
	"./test/net":                    {"internal/lb/datapath", "internal/lb/decap", "test/net/*_kernel_test.go", "test/net/direct_mtu_test.go"},
}

// aboutAll names the files that decide for all of these packages.
var aboutAll = []string{"go.sum", "internal/kernel", "internal/machine", "test/kernel/*.go", "test/kernel/guest", "test/kernel/suite", "test/kernel/skips"}

// resting leaves out packages that passed under the kernels before, while the files in about are the
// same. Nothing rests if unchanged.Restless.
func resting(root string, o options) (options, error) {
	var left []string
	for _, pkg := range o.packages {
		rests := !unchanged.Restless()
		for _, series := range o.kernels {
			name, digest, err := rest(root, pkg, series)
			if err != nil {
				return o, err
			}
			passed, err := unchanged.Passed(filepath.Join(root, unchanged.Record), name, digest)
			if err != nil {
				return o, err
			}
			rests = rests && passed
		}
		if rests {
			fmt.Printf("%s rests: its files are unchanged since it passed; make test-rested runs it\n", pkg)
		} else {
			fmt.Printf("%s runs: its files have changed since it was recorded; make test-rested records that it passes\n", pkg)
			left = append(left, pkg)
		}
	}
	o.packages = left
	return o, nil
}

// recordRest records the packages that passed, if unchanged.Restless.
func recordRest(root string, r result, tests []compiled) error {
	if !unchanged.Restless() {
		return nil
	}
	for _, t := range tests {
		if !slices.ContainsFunc(r.Packages, func(p suite.Report) bool { return p.Package == t.Package && p.Good() }) {
			continue
		}
		name, digest, err := rest(root, t.asked, r.Kernel)
		if err != nil {
			return err
		}
		if err := unchanged.Write(filepath.Join(root, unchanged.Record), name, digest); err != nil {
			return err
		}
	}
	return nil
}

// rest is a package's name of --packages in the record, and the digest of its files.
func rest(root, pkg, series string) (name, digest string, err error) {
	path, only, _ := strings.Cut(pkg, "=")
	files, known := about[path]
	if !known {
		return "", "", fmt.Errorf("--rest: the table `about` in test/kernel/rest.go names no files of %s: add them", path)
	}
	digest, err = unchanged.Digest(root, append(slices.Clone(aboutAll), files...)...)
	return fmt.Sprintf("kernel/%s=%s@%s-amd64", strings.TrimPrefix(path, "./"), only, series), digest, err
}
