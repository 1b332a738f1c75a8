package protect

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

var update = flag.Bool("update", false, "write the page of the matrix")

const pageFile = "../../../docs/reference/guard-matrix.md"

// TestPage compares the page with the matrix that TestMatrix tries.
func TestPage(t *testing.T) {
	want := page()
	if *update {
		if err := os.WriteFile(pageFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Errorf("%s is not what the matrix says: run `go test ./internal/guard/protect -run TestPage -update`", pageFile)
	}
}

// untried lists known ways around the protection that are not denied. No test tries them.
var untried = []struct{ name, why string }{
	{"/etc/ld.so.preload, and libraries that a trusted program loads or a script that it starts", "a program that can write these files decides what the trusted program does. Protect them, too"},
	{"a copy of an interpreter, or an interpreter under a name that shunt does not know", "with children: true it is a program like any other. Protect the folders from which trusted programs start programs"},
	{"prctl(PR_SET_MM_EXE_FILE) before a policy is loaded", "shunt recognises running processes by /proc/PID/exe, which root can have changed"},
	{"cgroup.kill, cgroup.freeze and memory.max, for processes that a rule names by `program` or `pid-file`", "a file belongs to a cgroup, and no hook says which processes are in it. Name their `cgroup` in another rule that denies `kill` and `move`"},
	{"moving a process out of the rule's cgroup, and then ending it, under a rule without `move`", "no hook says which process moves. `move` denies it, and with it the moves of other processes through a cgroup above the rule's"},
	{"moving a process among those of a rule with `cgroup` that does not deny `kill`", "the processes of a rule may do everything to each other. Deny `kill`, too"},
	{"freezer and memory in a cgroup v1 hierarchy", "the kernel calls no hook when a process moves there. Mount no such hierarchy, and deny mounts by a rule of `detect` with `action: deny`"},
	{"other limits of a cgroup above the rule's (cpu.max, memory.high, memory.swap.max, pids.max, hugetlb.*.max)", "the processes become slow, cannot start others, or end when they need more. Programs that make containers write to these files"},
	{"/proc/sysrq-trigger, the kernel's want of memory, reboot", "no hook says which process asks for it. Only mode and owner protect these files"},
	{"sched_setaffinity, ionice on a protected process", "the process becomes slow, and does not end"},
	{"a rename between folders of two rules in the moment when a policy is loaded", "the file may lack the second rule until the next load. Only trusted programs can do this"},
	{"the block device below the file system, written or read raw", "the kernel does not ask the file system. Protect the device's node, and take CAP_SYS_RAWIO and CAP_MKNOD away"},
	{"the layers of an overlay file system", "a file has one inode in the overlay and another inode in the layer. Protect the layer's folders, too"},
	{"a file's length, times, owner, extended attributes, names (stat, getxattr, readlink)", "`read` covers contents, and the names in a folder when the folder is listed"},
	{"a core dump of a trusted process, which any program may cause by a signal", "the dump holds the data that the process has read. Protect the process from `kill`, or set its limit of core dumps to 0"},
	{"FICLONE and FIDEDUPERANGE by a descriptor from before", "the kernel checks them as it checks `old-read`, on file systems that share blocks (btrfs, XFS), and no test has such a file system. With a new descriptor, the open is denied"},
	{"a file server (NFS, a FUSE program) or another machine with the same disk", "another kernel or another program does the writing"},
	{"kexec, modules, another BPF program, /dev/mem", "root changes the kernel itself. Switch on lockdown, or deny modules and BPF programs by a rule of `detect` with `action: deny`"},
	{"`shunt guard stop`, or removing the pins", "self: true protects the process, and does not protect the pins yet"},
}

func page() string {
	var b strings.Builder
	denied := 0
	for _, r := range trial.Matrix {
		if r.NotCovered == "" {
			denied++
		}
	}
	fmt.Fprintf(&b, `# What the guard denies

This page is made from a [list](../../internal/guard/trial/matrix.go) of operations, and a [test](../../internal/guard/protect/matrix_test.go) tries each:

- A program that is not trusted tries the operation on protected files. The kernel has to refuse it with EPERM (EACCES where the kernel
  turns EPERM into EACCES), nothing may have changed, and an event has to report the attempt.
- A trusted program tries the same operation. The operation has to succeed, and to change something.
- The first program tries the operation on files that are not protected. The operation has to succeed, and to change something.

The last two attempts show that the operation works at all. Of %d operations %d are denied.

The files are on ext4. The inodes of files that are not open have left the kernel's memory once before the attempts. "Before" means before the
policy was loaded. The rule has all operations in its list: %s.

The last column is for a kernel without BPF LSM and a policy with `+"`degraded: allow`"+`. Only opens are refused there, while `+"`shunt guard run`"+` is running
([test](../../internal/guard/gate/gate_test.go)): %d of these operations are denied.

| operation | kind | result | without BPF LSM |
|---|---|---|---|
`, len(trial.Matrix), denied, strings.Join(policy.Operations, ", "), opens(trial.Matrix))
	for _, r := range trial.Matrix {
		result := "denied, as " + r.Operation
		if r.NotCovered != "" {
			result = "**not covered**: " + r.NotCovered
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.Name, r.Group, result, byOpen(r))
	}
	covered := 0
	for _, r := range trial.Reads {
		if r.NotCovered == "" {
			covered++
		}
	}
	fmt.Fprintf(&b, `
## Reading

These ways are tried under a rule that denies nothing but `+"`read`"+`, so a program may first link, move and mount the files elsewhere. A program
that is not denied has to see the contents ([test](../../internal/guard/protect/reads_test.go)). Of %d ways %d are denied, and %d without BPF LSM.

| way | kind | result | without BPF LSM |
|---|---|---|---|
`, len(trial.Reads), covered, opens(trial.Reads))
	for _, r := range trial.Reads {
		result := "denied, as read"
		if r.NotCovered != "" {
			result = "**not covered**: " + r.NotCovered
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.Name, r.Group, result, byOpen(r))
	}
	fmt.Fprintf(&b, `
## Files of cgroups

These ways are tried under a rule of processes that names a cgroup and denies `+"`kill` and `move`"+`. A program that is not trusted is refused with
EPERM, and nothing changes. A trusted program is not refused ([test](../../internal/guard/protect/control_test.go)). All %d ways are denied, and none
without BPF LSM.

| way | kind | result |
|---|---|---|
`, len(trial.Controls))
	for _, c := range trial.Controls {
		fmt.Fprintf(&b, "| %s | %s | denied, as %s |\n", c.Name, c.Group, c.Operation)
	}
	b.WriteString(`
## Known and not covered

No test tries these ways, because nothing stops them:

| way | why it is open, and what to do |
|---|---|
`)
	for _, u := range untried {
		fmt.Fprintf(&b, "| %s | %s |\n", u.name, u.why)
	}
	return b.String()
}

// byOpen is the result where only opens are refused.
func byOpen(r trial.Row) string {
	switch {
	case r.Name == trial.CreateRow:
		return "denied as write; an empty file stays"
	case trial.ByOpens[r.Name]:
		return "denied"
	}
	return "passes"
}

func opens(rows []trial.Row) (denied int) {
	for _, r := range rows {
		if trial.ByOpens[r.Name] {
			denied++
		}
	}
	return denied
}
