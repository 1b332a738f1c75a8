package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds steps that take a second on an idle machine.
const patience = 2 * time.Minute

func (o Options) encode() (string, error) {
	text, err := json.Marshal(o)
	return string(text), err
}

// Init is process 1 of a node, in new namespaces of processes, mounts and the host's name. It ends only
// with an error.
func Init(encoded string) error {
	if os.Getpid() != 1 {
		return errors.New("this is what `kube node` starts: run that")
	}
	var o Options
	if err := json.Unmarshal([]byte(encoded), &o); err != nil {
		return fmt.Errorf("read the node's options: %w", err)
	}
	if err := unix.Sethostname([]byte(o.Name)); err != nil {
		return fmt.Errorf("name the node: %w", err)
	}
	if err := o.mount(); err != nil {
		return err
	}
	if err := o.writeFiles(); err != nil {
		return err
	}
	r := &reaper{options: o, children: map[int]*child{}}
	go r.reap()
	return r.run()
}

// secondCgroup is a second path of the node's own part of the second hierarchy, which a machine has if
// that hierarchy is mounted.
const secondCgroup = "/run/cgroup2"

// mount gives the node its own file systems.
func (o Options) mount() error {
	steps := []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{"proc", "/proc", "proc", 0},
		{"run", "/run", "tmpfs", 0},
		{"lib", "/var/lib", "tmpfs", 0},
		{"log", "/var/log", "tmpfs", 0},
		{o.in("containerd"), "/var/lib/containerd", "", unix.MS_BIND}, // layers need more room than memory has
		{cgroups, "/run/cgroup", "", unix.MS_BIND | unix.MS_REC},
		{"sysfs", "/sys", "sysfs", 0}, // shows the interfaces of the network namespace in which it is mounted
		{"/run/cgroup", cgroups, "", unix.MS_MOVE},
		{"bpf", "/sys/fs/bpf", "bpf", 0},
		{o.Second, secondCgroup, "", unix.MS_BIND},
	}
	for _, s := range steps {
		if s.flags&unix.MS_BIND != 0 {
			for _, folder := range []string{s.source, s.target} {
				if err := os.MkdirAll(folder, 0o755); err != nil {
					return err
				}
			}
		}
		if err := unix.Mount(s.source, s.target, s.kind, s.flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", s.source, s.target, err)
		}
	}
	for _, folder := range []string{"/run/netns", "/run/lock", "/run/xtables", "/var/lib/cni", "/var/lib/kubelet", "/var/log/pods", "/var/log/containers"} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	if err := o.coverSettings(); err != nil {
		return err
	}
	// Pods that mount a folder with "Bidirectional" need it shared.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the node's mounts with its pods: %w", err)
	}
	return nil
}

// coverSettings puts files over the settings that a kubelet wants to set (setupKernelTunables in
// pkg/kubelet/cm/container_manager_linux.go of Kubernetes).
func (o Options) coverSettings() error {
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join("/run/settings", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("cover the kernel's setting %s: %w", name, err)
		}
	}
	return nil
}

// reaper waits for all children of process 1: its own, and orphans.
type reaper struct {
	options  Options
	mu       sync.Mutex
	children map[int]*child
}

type child struct {
	name   string
	ended  chan struct{}
	status unix.WaitStatus // once ended
}

// reap never returns.
func (r *reaper) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if errors.Is(err, unix.ECHILD) {
			time.Sleep(10 * time.Millisecond) // there is none yet
			continue
		}
		r.mu.Lock()
		if c := r.children[pid]; err == nil && c != nil {
			c.status = status
			close(c.ended)
			delete(r.children, pid)
		}
		r.mu.Unlock()
	}
}

// start starts a program whose output goes to a file of the node's folder.
func (r *reaper) start(log, program string, arguments ...string) (*child, error) {
	file, err := os.OpenFile(r.options.in(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock() // it may end before it is in the list
	process, err := os.StartProcess(path, append([]string{program}, arguments...), &os.ProcAttr{
		Files: []*os.File{nil, file, file}, Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	c := &child{name: filepath.Base(program), ended: make(chan struct{})}
	r.children[process.Pid] = c
	return c, process.Release()
}

// run starts containerd, loads the images, starts the kubelet, and returns when one of them ends.
func (r *reaper) run() error {
	containerd, err := r.start(containerdLog, "containerd", "--config", r.options.in("containerd.toml"))
	if err != nil {
		return err
	}
	if err := r.loadImages(containerd); err != nil {
		return err
	}
	o := r.options
	var addresses []string
	for _, a := range o.Addresses {
		addresses = append(addresses, a.String())
	}
	kubelet, err := r.start(kubeletLog, o.Binary, "kubelet", "--config="+o.in("kubelet.yaml"), "--hostname-override="+o.Name,
		"--kubeconfig="+filepath.Join(o.Plane, o.Name+".kubeconfig"), "--node-ip="+strings.Join(addresses, ","))
	if err != nil {
		return err
	}
	select {
	case <-containerd.ended:
		return r.hasEnded(containerd, containerdLog)
	case <-kubelet.ended:
		return r.hasEnded(kubelet, kubeletLog)
	}
}

// loadImages waits for containerd, and imports all archives.
func (r *reaper) loadImages(containerd *child) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	const socket = "/run/containerd/containerd.sock"
	for {
		if _, err := os.Stat(socket); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		select {
		case <-containerd.ended:
			return r.hasEnded(containerd, containerdLog)
		case <-ctx.Done():
			return fmt.Errorf("containerd does not make its socket; its log ends with:\n%s", r.tail(containerdLog))
		case <-time.After(20 * time.Millisecond):
		}
	}
	archives, err := filepath.Glob(filepath.Join(r.options.Images, "*.tar"))
	if err != nil {
		return err
	}
	for _, archive := range archives {
		const log = "images.log"
		loading, err := r.start(log, "ctr", "--namespace", "k8s.io", "images", "import", archive)
		if err != nil {
			return err
		}
		<-loading.ended
		if loading.status.ExitStatus() != 0 {
			return fmt.Errorf("load %s: %w", archive, r.hasEnded(loading, log))
		}
	}
	return nil
}

func (r *reaper) hasEnded(c *child, log string) error {
	how := fmt.Sprintf("exit code %d", c.status.ExitStatus())
	if c.status.Signaled() {
		how = fmt.Sprintf("signal %d", c.status.Signal())
	}
	return fmt.Errorf("%s has ended (%s); its log ends with:\n%s", c.name, how, r.tail(log))
}

// tail is the end of a program's log.
func (r *reaper) tail(log string) string {
	text, err := os.ReadFile(r.options.in(log))
	if err != nil {
		return err.Error()
	}
	const most = 4000
	return string(text[max(0, len(text)-most):])
}
