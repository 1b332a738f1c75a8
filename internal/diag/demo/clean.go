package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	kernelprocess "github.com/shunt-lb/shunt/internal/process"
)

// idPattern matches the id of a run: diag and the number of its process, which is part of all names that the run makes.
var idPattern = regexp.MustCompile(`^diag([1-9][0-9]{0,9})$`)

// Is reports whether an id belongs to this demo.
func Is(id string) bool { return idPattern.MatchString(id) }

// variable is set in the environment of each process that the demo starts.
const variable = "SHUNT_DEMO"

// Clean removes the remains of a run that was killed. If there are none, that is success; removed reports whether there
// were any. It refuses to clean up a run that is still at work.
func Clean(ctx context.Context, id string) (removed bool, err error) {
	if goesOn(id) {
		return false, fmt.Errorf("clean up demo %s: it still runs, and cleans up at its end; `kill -INT %s` ends it", id, strings.TrimPrefix(id, "diag"))
	}
	left, err := Left(id)
	if err != nil || len(left) == 0 {
		return false, err
	}
	for _, pid := range processesOf(id) {
		_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
	}
	for end := time.Now().Add(endsWithin); len(processesOf(id)) > 0 && ctx.Err() == nil && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	errs := []error{ctx.Err(), lab.Sweep(id), removeGroup(id)}
	for _, folder := range foldersOf(id) {
		errs = append(errs, os.RemoveAll(folder))
	}
	if err = errors.Join(errs...); err != nil {
		return true, fmt.Errorf("clean up demo %s: %w", id, err)
	}
	if left, err = Left(id); err == nil && len(left) > 0 {
		err = fmt.Errorf("clean up demo %s: left behind: %s", id, strings.Join(left, ", "))
	}
	return true, err
}

// goesOn reports whether the run's own process exists: another process may have its number by now.
func goesOn(id string) bool {
	text, err := os.ReadFile("/proc/" + strings.TrimPrefix(id, "diag") + "/cmdline")
	return err == nil && bytes.Contains(text, []byte("\x00demo\x00diag\x00"))
}

// Left names all remains of a run. Its disk goes with its last user.
func Left(id string) (left []string, err error) {
	if !Is(id) {
		return nil, fmt.Errorf("look for demo %q: an id is diag and a number, as the demo printed it", id)
	}
	for _, pid := range processesOf(id) {
		left = append(left, fmt.Sprintf("process %d", pid))
	}
	names, err := filepath.Glob("/run/netns/shunt-" + id + "-*")
	if err != nil {
		return nil, err
	}
	left = append(append(left, names...), foldersOf(id)...)
	root, unmount, err := lab.MountCgroup2()
	if err != nil {
		return nil, err
	}
	if group := filepath.Join(root, "shunt-"+id); exists(group) {
		left = append(left, group)
	}
	return left, unmount()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// foldersOf returns the folders of a run's slow disk.
func foldersOf(id string) []string {
	folders, _ := filepath.Glob(filepath.Join(os.TempDir(), "shunt-"+id+"-*")) // the pattern is correct, unless TMPDIR is odd
	return folders
}

// removeGroup removes a run's cgroup.
func removeGroup(id string) error {
	root, unmount, err := lab.MountCgroup2()
	if err != nil {
		return err
	}
	return errors.Join(removeEmptied(func() error {
		if err := os.Remove(filepath.Join(root, "shunt-"+id)); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}), unmount())
}

// processesOf returns the processes that a run has started.
func processesOf(id string) (pids []int) {
	all, err := kernelprocess.All()
	if err != nil {
		return nil
	}
	for _, pid := range all {
		// A process that cannot be read has ended.
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(append(append([]byte{0}, text...), 0), []byte("\x00"+variable+"="+id+"\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids
}
