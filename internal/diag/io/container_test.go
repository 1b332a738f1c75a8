package io

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
)

// Work and environment of a process with a root of its own: the mount below that root, and its type.
const (
	doesElsewhere = "elsewhere"

	elsewhereSource = "SHUNT_TEST_SOURCE"
	elsewhereType   = "SHUNT_TEST_TYPE" // "": the source is a folder, which is there too
	elsewhereRoot   = "SHUNT_TEST_ROOT" // a folder
)

// elsewhereFile is the file that the process writes, by the path that it has there.
const elsewhereFile = "/data/file of the container"

// workElsewhere mounts as a container does, in the mount namespace of this process alone, writes a file, and stays until
// nobody writes to it any more.
func workElsewhere() error {
	flags := uintptr(0)
	if os.Getenv(elsewhereType) == "" {
		flags = unix.MS_BIND
	}
	root := os.Getenv(elsewhereRoot)
	data := filepath.Join(root, filepath.Dir(elsewhereFile))
	for _, do := range []func() error{
		func() error { return unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount("none", root, "tmpfs", 0, "") },
		func() error { return os.Mkdir(data, 0o755) },
		func() error {
			return unix.Mount(os.Getenv(elsewhereSource), data, os.Getenv(elsewhereType), flags, "")
		},
		func() error { return unix.Chroot(root) },
		func() error { return os.Chdir("/") },
	} {
		if err := do(); err != nil {
			return fmt.Errorf("mount %s: %w", os.Getenv(elsewhereSource), err)
		}
	}
	f, err := os.Create(elsewhereFile)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, fileBytes))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	fmt.Println("written")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// container is a cgroup with a name as Docker gives it.
func container(t *testing.T) (id string, group *os.File) {
	t.Helper()
	root := cgroup.Root()
	if root == "" {
		t.Fatal("the second cgroup hierarchy is mounted nowhere")
	}
	id = fmt.Sprintf("%064x", time.Now().UnixNano())
	folder := filepath.Join(root, "docker-"+id+".scope")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	group, err := os.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = group.Close()
		// The kernel takes a process that has ended out of its cgroup a little later.
		var err error
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
			if err = os.Remove(folder); err == nil {
				return
			}
		}
		t.Error(err)
	})
	return id, group
}

// TestAContainerWithItsOwnMounts has a process in a cgroup and a mount namespace of its own write a file, which has another
// path there, or none here.
func TestAContainerWithItsOwnMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	for _, test := range []struct {
		name   string
		source func(*testing.T) (source, fileSystem string)
	}{
		{"a folder that is here too", func(t *testing.T) (string, string) { return folder(t), "" }},
		{"a file system that is nowhere else", func(t *testing.T) (string, string) { return loopWithFiles(t), "ext2" }},
	} {
		t.Run(test.name, func(t *testing.T) {
			source, fileSystem := test.source(t)
			id, group := container(t)
			root := t.TempDir()
			c := watch(t, 0)
			process := exec.Command("/proc/self/exe", "-test.run", "^$")
			process.Env = append(os.Environ(), "SHUNT_TEST_IO="+doesElsewhere, elsewhereSource+"="+source, elsewhereType+"="+fileSystem, elsewhereRoot+"="+root)
			process.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			process.Stderr = os.Stderr
			stdin, err1 := process.StdinPipe()
			stdout, err2 := process.StdoutPipe()
			if err := errors.Join(err1, err2, process.Start()); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(stdout).ReadString('\n')
			i := interval(t, c)
			if err := errors.Join(err, stdin.Close(), process.Wait()); err != nil || line != "written\n" {
				t.Fatalf("%q, %v", line, err)
			}
			written := uint64(0)
			for _, r := range i.Rows {
				if int(r.PID) != process.Process.Pid || r.WriteBytes < fileBytes/2 { // the rest is the file system's own
					continue
				}
				written += r.WriteBytes
				if r.Path != elsewhereFile || r.Container != id {
					t.Errorf("got %s in the container %q, want %s in %s", r.Path, r.Container, elsewhereFile, id)
				}
			}
			if written < fileBytes {
				t.Errorf("%d bytes of %d are told: %+v", written, fileBytes, i.Rows)
			}
		})
	}
}
