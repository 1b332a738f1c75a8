package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// withFaults are packages whose tests make faults with the module of ./fault.
var withFaults = []string{"internal/diag/memleak", "internal/diag/sched"}

// faultModule builds the module of ./fault for a kernel, if that has not been done since its source was changed, and
// returns its file. Its headers are those of Debian's package, which is installed as root, and asked for otherwise.
func faultModule(ctx context.Context, root string, k kernel) (string, error) {
	from := filepath.Join(root, "test", "kernel", "fault")
	to := filepath.Join(filepath.Dir(k.modules), "fault-"+k.release+".ko")
	source, err := os.ReadFile(filepath.Join(from, "fault.c"))
	if err != nil {
		return "", err
	}
	built, err := os.ReadFile(to + ".source")
	if err == nil && string(built) == string(source) {
		return to, nil
	}
	headers := "/lib/modules/" + k.release + "/build"
	if _, err := os.Stat(headers); err != nil {
		if err := install(ctx, []string{"linux-headers-" + k.release, "gcc-12", "make"}); err != nil {
			return "", fmt.Errorf("%w; if apt has no headers of %s any more, remove the kernel %s, so that a newer one is fetched", err, k.release, k.image)
		}
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
