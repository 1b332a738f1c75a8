// Package node runs a node of a Kubernetes cluster for tests: containerd and a kubelet, in namespaces of
// their own.
//
//	Run (the caller's network namespace)
//	 └─ Init: process 1 of a PID namespace; also mounts and host name of its own
//	     ├─ containerd ── shims ── pods, each in a network namespace that CNI makes
//	     └─ kubelet
//
// The node sees /run, /var/lib, /var/log, /sys and /sys/fs/bpf of its own, and of /etc, /usr and /dev the
// machine's. All processes of the node end with Init, and with them its mounts; Init ends with Run,
// however Run ends. Then only a cgroup in each hierarchy is left, which Run removes, and the files in the
// node's folder.
//
// A kubelet sets some of the kernel's settings for the whole machine. It finds them set already, in files
// that lie over them, and changes nothing.
package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options of a node. They go to Init as JSON.
type Options struct {
	Binary    string // of the components, as `kube COMPONENT FLAGS`
	Folder    string // exists; for the node's files; not below /run, /var/lib or /var/log
	Plane     string // the folder of the control plane, with the node's keys
	Images    string // a folder with images in archives, *.tar
	Name      string
	Cgroup    string // its name in each hierarchy
	Second    string // its path in the second hierarchy; Run finds it
	Addresses []netip.Addr
	Pods      []netip.Prefix // the ranges of pods' addresses, one prefix a family
	CNI       string         // the plugin that connects pods to the node, one of CNIs
	GVisor    string         // gVisor's runsc, which runs pods of the handler "runsc"; empty: none does
}

// InitArgument is the component of `kube` that runs Init. The options are the next argument.
const InitArgument = "node-init"

const (
	kubeletLog    = "kubelet.log"
	containerdLog = "containerd.log"
	pidFile       = "init.pid"
	hidden        = "/run /var/lib /var/log" // the node has its own
	cgroups       = "/sys/fs/cgroup"
)

// Run runs a node until ctx ends. If containerd or the kubelet ends by itself, Run returns an error with
// the end of its log.
func Run(ctx context.Context, o Options) (err error) {
	// The kernel ends Init when this thread ends, not the process (prctl(2), PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := o.check(); err != nil {
		return err
	}
	paths, err := o.makeCgroups()
	defer func() { err = errors.Join(err, removeCgroups(paths)) }()
	if err != nil {
		return err
	}
	o.Second = paths[len(paths)-1]
	own, err := os.Open(o.Second)
	if err != nil {
		return err
	}
	defer own.Close()
	text, err := o.encode()
	if err != nil {
		return err
	}
	command := exec.Command(o.Binary, InitArgument, text)
	command.Stderr = os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL,
		Cloneflags:  syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS,
		UseCgroupFD: true, CgroupFD: int(own.Fd())}
	if err := command.Start(); err != nil {
		return fmt.Errorf("start node %s in namespaces of its own: %w", o.Name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	stop := func() {
		_ = command.Process.Kill() // the kernel kills all others of the PID namespace before it is gone
		<-ended
	}
	if err := os.WriteFile(o.in(pidFile), fmt.Appendf(nil, "%d\n", command.Process.Pid), 0o644); err != nil {
		stop()
		return err
	}
	select {
	case <-ctx.Done():
		stop()
		return nil
	case err := <-ended:
		return fmt.Errorf("node %s has ended (%w)", o.Name, err)
	}
}

func (o Options) in(name string) string { return filepath.Join(o.Folder, name) }

// check looks for the things that a node needs and cannot make.
func (o Options) check() error {
	for folder := range strings.FieldsSeq(hidden) {
		for _, used := range []string{o.Folder, o.Plane, o.Images, o.Binary, o.GVisor} {
			if strings.HasPrefix(used, folder+"/") {
				return fmt.Errorf("run a node: %s is below %s, of which a node has its own: use another folder", used, folder)
			}
		}
	}
	for _, program := range []string{"containerd", "ctr", "runc"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("run a node: %w: install the packages containerd and runc", err)
		}
	}
	if o.GVisor != "" {
		if _, err := os.Stat(o.GVisor); err != nil {
			return fmt.Errorf("run a node with gVisor: %w: test/kube/gvisor builds it", err)
		}
	}
	if !slices.Contains(CNIs, o.CNI) {
		return fmt.Errorf("run a node: %q is none of CNI's plugins %s", o.CNI, strings.Join(CNIs, ", "))
	}
	if _, err := os.Stat(filepath.Join(plugins, o.CNI)); err != nil {
		return fmt.Errorf("run a node: %w: install the package containernetworking-plugins", err)
	}
	return nil
}

// makeCgroups makes the node's cgroup in each hierarchy that is mounted, the second one's last.
func (o Options) makeCgroups() (paths []string, err error) {
	entries, err := os.ReadDir(cgroups)
	if err != nil {
		return nil, fmt.Errorf("look for the cgroup hierarchies: %w", err)
	}
	second := ""
	for _, entry := range entries {
		root := filepath.Join(cgroups, entry.Name())
		switch kind, err := fileSystem(root); {
		case err != nil:
			return paths, err
		case entry.Type()&fs.ModeSymlink != 0: // cpu and cpuacct may be names of one
		case kind == unix.CGROUP2_SUPER_MAGIC:
			second = root
		case kind == unix.CGROUP_SUPER_MAGIC:
			if paths, err = makeCgroup(paths, root, o.Cgroup); err != nil {
				return paths, err
			}
		}
	}
	if second == "" || len(paths) == 0 {
		return paths, fmt.Errorf("%s has not both kinds of cgroups: this node needs the controllers in the first hierarchy, and the second one mounted beside them", cgroups)
	}
	return makeCgroup(paths, second, o.Cgroup)
}

func fileSystem(path string) (magic int64, err error) {
	var about unix.Statfs_t
	if err := unix.Statfs(path, &about); err != nil {
		return 0, fmt.Errorf("look at %s: %w", path, err)
	}
	return about.Type, nil
}

// makeCgroup adds the cgroup to paths, also if it fails afterwards.
func makeCgroup(paths []string, root, name string) ([]string, error) {
	path := filepath.Join(root, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return paths, fmt.Errorf("make the node's cgroup: %w", err)
	}
	paths = append(paths, path)
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // empty in a new cgroup, and then nothing can run in it
		text, err := os.ReadFile(filepath.Join(root, file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(path, file), text, 0o644)
		}
		if err != nil {
			return paths, fmt.Errorf("set up the node's cgroup: %w", err)
		}
	}
	return paths, nil
}

// removeCgroups removes cgroups with all below them. Their processes have been killed.
func removeCgroups(paths []string) error {
	var failures []error
	for _, path := range paths {
		failures = append(failures, RemoveCgroup(path))
	}
	return errors.Join(failures...)
}

// RemoveCgroup removes a cgroup with all below it. A process that has just been killed may be in it for
// some milliseconds more. Nothing to remove is success.
func RemoveCgroup(path string) error {
	var folders []string
	err := filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			folders = append(folders, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the cgroup %s: %w", path, err)
	}
	end := time.Now().Add(10 * time.Second)
	for i := len(folders) - 1; i >= 0; {
		err := unix.Rmdir(folders[i])
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			i--
		case !errors.Is(err, unix.EBUSY) || time.Now().After(end):
			return fmt.Errorf("remove the cgroup %s: %w", folders[i], err)
		default:
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}
