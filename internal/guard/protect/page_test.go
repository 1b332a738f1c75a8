package protect

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
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

func page() string {
	var b strings.Builder
	denied := 0
	for _, r := range matrix {
		if r.notCovered == "" {
			denied++
		}
	}
	fmt.Fprintf(&b, `# What the guard denies

This page is made from the [test](../../internal/guard/protect/rows_test.go) that tries each operation:

- A program that is not trusted tries the operation on protected files. The kernel has to refuse it with EPERM (EACCES where the kernel
  turns EPERM into EACCES), nothing may have changed, and an event has to report the attempt.
- A trusted program tries the same operation. The operation has to succeed, and to change something.
- The first program tries the operation on files that are not protected. The operation has to succeed, and to change something.

The last two attempts show that the operation works at all. Of %d operations %d are denied.

The files are on ext4. The inodes of files that are not open have left the kernel's memory once before the attempts. "Before" means before the
policy was loaded. The rule has all operations in its list: %s.

The last column is for a kernel without BPF LSM and a policy with `+"`degraded: allow`"+`. Only opens are refused there, while `+"`shunt guard run`"+` is running
([test](../../internal/guard/protect/gate_test.go)): %d of these operations are denied.

| operation | kind | result | without BPF LSM |
|---|---|---|---|
`, len(matrix), denied, strings.Join(policy.Operations, ", "), opens(matrix))
	for _, r := range matrix {
		result := "denied, as " + r.operation
		if r.notCovered != "" {
			result = "**not covered**: " + r.notCovered
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.name, r.group, result, byOpen(r))
	}
	covered := 0
	for _, r := range reads {
		if r.notCovered == "" {
			covered++
		}
	}
	fmt.Fprintf(&b, `
## Reading

These ways are tried under a rule that denies nothing but `+"`read`"+`, so a program may first link, move and mount the files elsewhere. A program
that is not denied has to see the contents ([test](../../internal/guard/protect/reads_test.go)). Of %d ways %d are denied, and %d without BPF LSM.

| way | kind | result | without BPF LSM |
|---|---|---|---|
`, len(reads), covered, opens(reads))
	for _, r := range reads {
		result := "denied, as read"
		if r.notCovered != "" {
			result = "**not covered**: " + r.notCovered
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.name, r.group, result, byOpen(r))
	}
	fmt.Fprintf(&b, `
## Files of cgroups

These ways are tried under a rule of processes that names a cgroup and denies `+"`kill` and `move`"+`. A program that is not trusted is refused with
EPERM, and nothing changes. A trusted program is not refused ([test](../../internal/guard/protect/control_test.go)). All %d ways are denied, and none
without BPF LSM.

| way | kind | result |
|---|---|---|
`, len(controls))
	for _, c := range controls {
		fmt.Fprintf(&b, "| %s | %s | denied, as %s |\n", c.name, c.group, c.operation)
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
func byOpen(r row) string {
	switch {
	case r.name == createRow:
		return "denied as write; an empty file stays"
	case byOpens[r.name]:
		return "denied"
	}
	return "passes"
}

func opens(rows []row) (denied int) {
	for _, r := range rows {
		if byOpens[r.name] {
			denied++
		}
	}
	return denied
}
