package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// withFaults are packages whose tests cause faults with the module of ./fault.
var withFaults = []string{"internal/diag/memleak", "internal/diag/sched"}

// builders are the programs that build a module.
var builders = []program{{"gcc-12", "gcc-12"}, {"make", "make"}}

// faultModule builds the module of ./fault for a kernel, unless that has been done from the present source, and returns
// its file.
func faultModule(ctx context.Context, root string, k kernel) (string, error) {
	from := filepath.Join(root, "test", "kernel", "fault")
	kernels := filepath.Join(root, ".tools", "kernels")
	to := filepath.Join(kernels, "fault-"+k.release+".ko")
	source, err := os.ReadFile(filepath.Join(from, "fault.c"))
	if err != nil {
		return "", err
	}
	built, err := os.ReadFile(to + ".source")
	if err == nil && string(built) == string(source) {
		return to, nil
	}
	if err := needPrograms(ctx, builders); err != nil {
		return "", err
	}
	headers, err := findHeaders(ctx, kernels, k.release)
	if err != nil {
		return "", fmt.Errorf("%w; if apt has no headers of %s any more, remove the kernel %s, so that a newer one is fetched", err, k.release, k.image)
	}
	work, err := os.MkdirTemp("", "shunt-fault-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := os.CopyFS(work, os.DirFS(from)); err != nil {
		return "", err
	}
	command := exec.CommandContext(ctx, "make", "-C", headers, "M="+work, "modules")
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the module of %s for %s: %w\n%s", from, k.release, err, out)
	}
	module, err := os.ReadFile(filepath.Join(work, "fault.ko"))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(to, module, 0o644); err != nil {
		return "", err
	}
	return to, os.WriteFile(to+".source", source, 0o644)
}

// findHeaders returns the folder in which modules of a kernel are built, below dir, and fetches the headers if it does
// not exist.
func findHeaders(ctx context.Context, dir, release string) (string, error) {
	folder := "headers-" + release
	top := filepath.Join(dir, folder, "usr", "src", "linux-headers-"+release)
	if _, err := os.Stat(top); err == nil {
		return top, nil
	}
	name := "linux-headers-" + release
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", name).Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache depends %s: %w", name, err)
	}
	packages := []string{name}
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "linux-kbuild-") || strings.HasPrefix(word, "linux-headers-") && strings.HasSuffix(word, "-common") {
			packages = append(packages, word)
		}
	}
	if err := unpack(ctx, dir, folder, packages...); err != nil {
		return "", err
	}
	// The Makefile names its other half by the path of an installed package; beside itself it is found wherever the
	// repository is. With vmlinux, the module's types would be described, which needs more programs.
	makefile := filepath.Join(top, "Makefile")
	text, err := os.ReadFile(makefile)
	if err != nil {
		return "", err
	}
	text = bytes.ReplaceAll(text, []byte("/usr/src/"), []byte("../"))
	if err := os.RemoveAll(filepath.Join(top, "vmlinux")); err != nil {
		return "", err
	}
	return top, os.WriteFile(makefile, text, 0o644)
}
