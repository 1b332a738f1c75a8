package diag

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/sensor"
)

// examined fails unless each tool has reported its sensors: attached, or refused with a reason in one line.
func examined(t *testing.T, tools []Tool) (run []string) {
	t.Helper()
	for _, tool := range tools {
		if len(tool.Results) == 0 {
			t.Errorf("%s tells of no sensor: %v", tool.Name, tool.Err)
		}
		missing := false
		for _, r := range tool.Results {
			missing = missing || r.Got == nil && r.Sensor.Without == ""
			for _, f := range r.Refused {
				if f.Reason == "" || strings.Contains(f.Reason, "\n") {
					t.Errorf("%s: %v was refused with the reason %q", tool.Name, f.Way, f.Reason)
				}
			}
			if r.Got == nil && len(r.Refused) == 0 {
				t.Errorf("%s: %s is neither attached nor refused", tool.Name, r.Sensor.Name)
			}
		}
		if missing != errors.Is(tool.Err, sensor.ErrNoWay) || !missing && tool.Err != nil {
			t.Errorf("%s: a sensor is missing: %v, and the error is %v", tool.Name, missing, tool.Err)
		}
		if tool.Err == nil {
			run = append(run, tool.Name)
		}
	}
	return run
}

// TestEachToolRuns holds on every kernel that shunt supports, also without CAP_SYS_RESOURCE, which a container often lacks.
func TestEachToolRuns(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	for name, prepare := range map[string]func() error{
		"all privileges":           func() error { return nil },
		"without CAP_SYS_RESOURCE": withoutSysResource,
	} {
		done := make(chan []Tool)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends without the capability
			if err := prepare(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			done <- Examine(sensor.BTF{})
		}()
		if run := examined(t, <-done); len(run) != 7 {
			t.Errorf("%s: only %v run", name, run)
		}
	}
}

// withoutSysResource takes the capability from this thread.
func withoutSysResource() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	for _, set := range []*uint32{&data[0].Effective, &data[0].Permitted, &data[0].Inheritable} {
		*set &^= 1 << unix.CAP_SYS_RESOURCE
	}
	return unix.Capset(&header, &data[0])
}

// TestWithoutPrivileges runs itself as another user: each tool refuses in plain words, and none reports a sensor.
func TestWithoutPrivileges(t *testing.T) {
	if os.Getenv("SHUNT_TEST_UNPRIVILEGED") != "" {
		for _, tool := range Examine(sensor.BTF{}) {
			if !errors.Is(tool.Err, sensor.ErrPrivilege) || len(tool.Results) > 0 {
				t.Errorf("%s: %v, %v", tool.Name, tool.Err, tool.Results)
			}
		}
		return
	}
	self, err := os.Open("/proc/self/exe") // the folder of the test's binary may be closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	command := exec.Command("/proc/self/fd/3", "-test.run", "^TestWithoutPrivileges$", "-test.v")
	command.ExtraFiles = []*os.File{self}
	command.Dir = "/"
	command.Env = append(os.Environ(), "SHUNT_TEST_UNPRIVILEGED=1")
	if os.Geteuid() == 0 {
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := command.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestWithoutPrivileges") {
		t.Errorf("%v\n%s", err, out)
	}
}

var lockdown = flag.String("lockdown", "", "have TestUnderLockdown lock the kernel down: integrity, or confidentiality; it is for a virtual machine, as only another boot ends it")

// TestUnderLockdown locks the kernel down, until its next boot. With integrity all tools run; with confidentiality programs may not read the kernel's
// memory, so each tool says that it cannot run, and why. In a virtual machine:
//
//	go run ./test/kernel --packages './internal/diag=TestUnderLockdown' --args '-lockdown confidentiality'
func TestUnderLockdown(t *testing.T) {
	if *lockdown == "" {
		t.Skip("locks the kernel down until its next boot; -args -lockdown confidentiality runs it in a virtual machine")
	}
	const folder = "/sys/kernel/security"
	file := filepath.Join(folder, "lockdown")
	if _, err := os.Stat(file); err != nil {
		if err := unix.Mount("securityfs", folder, "securityfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, []byte(*lockdown), 0); err != nil {
		t.Fatalf("lock down: %v", err)
	}
	tools := Examine(sensor.BTF{})
	run := examined(t, tools)
	reasons := map[string]bool{}
	for _, tool := range tools {
		for _, r := range tool.Results {
			t.Logf("%s: %v", tool.Name, r)
			for _, f := range r.Refused {
				reasons[f.Reason] = true
			}
		}
	}
	t.Logf("with %s these run: %v", *lockdown, run)
	told := false
	for reason := range reasons {
		told = told || strings.Contains(reason, "locked down (confidentiality)")
	}
	isConfidential := *lockdown == "confidentiality"
	if isConfidential != told || isConfidential == slices.Contains(run, "io") {
		t.Errorf("under %s these run: %v, and that the kernel is locked down is told: %v", *lockdown, run, told)
	}
}
