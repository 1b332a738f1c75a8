package node

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/record"
)

// RunDirectory is the folder of files that shunt keeps until the machine's next start.
const RunDirectory = "/run/shunt"

// StateDirectory returns the folder that the service manager names (systemd.exec(5), StateDirectory=), or otherwise a
// folder that survives a reboot.
func StateDirectory() string {
	folder, _, _ := strings.Cut(os.Getenv("STATE_DIRECTORY"), ":")
	return cmp.Or(folder, "/var/lib/shunt")
}

func lockPath(instance string) string { return filepath.Join(RunDirectory, instance+".lock") }

// Holder returns the process that runs an instance, or 0. A daemon that stops removes its note; a killed one
// leaves it, so the process is checked.
func Holder(instance string) int {
	text, err := os.ReadFile(lockPath(instance))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 0 || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return 0
	}
	return pid
}

// RunsError means that a daemon runs the instance.
type RunsError struct {
	Instance string
	Process  string // its number
}

// Error names the remedies.
func (e *RunsError) Error() string {
	return fmt.Sprintf("instance %q is already run by process %s; stop that process, or choose another instance with --instance", e.Instance, e.Process)
}

// Lock makes this process the only one of its instance, and removes the files that a process left which was killed while
// it wrote a record of the instance. The kernel releases the lock with the process, however it ends.
func Lock(instance string) (unlock func(), err error) {
	if err := os.MkdirAll(RunDirectory, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", RunDirectory, err)
	}
	path := lockPath(instance)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of instance %q: %w", instance, err)
	}
	err = record.Hold(f)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		holder := record.Holder(f)
		_ = f.Close()
		return nil, &RunsError{Instance: instance, Process: holder}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	// The holder removes the file before it releases the lock: a process that waited for the old file tries
	// again.
	mine, err1 := f.Stat()
	there, err2 := os.Stat(path)
	if err1 != nil || err2 != nil || !os.SameFile(mine, there) {
		_ = f.Close()
		return Lock(instance)
	}
	for _, folder := range []string{RunDirectory, StateDirectory()} {
		record.Sweep(folder, instance+".")
	}
	return func() { _ = os.Remove(path); _ = f.Close() }, nil
}

var instanceName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// CheckInstance keeps a name from leading out of the folders in which it is used.
func CheckInstance(name string) error {
	if !instanceName.MatchString(name) {
		return fmt.Errorf("--instance %q: a name is 1 to 32 of a-z, 0-9 and -, and does not begin with -", name)
	}
	return nil
}
