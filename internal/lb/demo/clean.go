package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/namespace"
	kernelprocess "github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/story"
)

// instanceOf names the data plane of a demo.
func instanceOf(id string) string { return "demo-" + id }

// folderOf is where a demo's configuration, socket and log are. It is the same for every
// environment, so that a later process finds it and cleans up.
func folderOf(id string) string { return "/tmp/shunt-demo-" + id }

// recordDirectories are the folders in which a daemon keeps files that are named after its instance. Overrides
// go into the demo's folder (startDaemon), except for a daemon that another program starts.
var recordDirectories = []string{"/run/shunt", "/var/lib/shunt"}

// recordsOf returns those files: the lock that a killed daemon leaves, settings to restore, and overrides.
func recordsOf(id string) (paths []string) {
	for _, directory := range recordDirectories {
		found, _ := filepath.Glob(filepath.Join(directory, instanceOf(id)+".*")) // no instance's name has a dot
		paths = append(paths, found...)
	}
	return paths
}

// removeRecords is called when the recorded changes are undone, or gone with their namespace.
func removeRecords(id string) error {
	var errs []error
	for _, path := range recordsOf(id) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// takeDown ends and removes everything, then checks that. After an interruption claims are not read.
func (d *demo) takeDown(claim bool) error {
	if d.top == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	d.endFlows()
	var errs []error
	if d.daemon != nil && !d.daemon.ended() {
		if err := d.daemon.terminate(ctx); err != nil {
			d.daemon.kill()
		}
	}
	if len(pinsOf(d.facts.Instance)) > 0 { // it was killed, or could not detach
		errs = append(errs, detach(d.facts.ID, d.opts.Executable))
	}
	for _, kid := range d.kids {
		kid.kill()
	}
	errs = append(errs, d.top.Close(), os.RemoveAll(d.folder), removeRecords(d.facts.ID))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w; `shunt demo --clean %s` tries again", err, d.facts.ID)
	}
	left, err := Left(d.facts.ID)
	if claim {
		d.Begin("Cleaning up")
		d.Claim(err == nil && len(left) == 0, "namespaces, pins, processes and files of this demo are gone%s", story.Found(left))
		return err
	}
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("clean up: left behind: %s", strings.Join(left, ", ")))
	}
	return err
}

// Clean removes the remains of a demo, kept with --keep or killed. It succeeds if there are none; removed
// reports whether there were any.
func Clean(ctx context.Context, id, executable string) (removed bool, err error) {
	left, err := Left(id)
	if err != nil || len(left) == 0 {
		return false, err
	}
	for _, pid := range processesOf(id, "run") {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	waitErr := until(ctx, patience, "the balancer has ended", func() (bool, error) { return len(processesOf(id, "run")) == 0, nil })
	for _, pid := range processesOf(id, "") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	waitErr = errors.Join(waitErr, until(ctx, patience, "the processes have ended", func() (bool, error) { return len(processesOf(id, "")) == 0, nil }))
	var detachErr error
	if len(pinsOf(instanceOf(id))) > 0 {
		detachErr = detach(id, executable)
	}
	err = errors.Join(waitErr, detachErr, lab.Sweep(id), os.RemoveAll(folderOf(id)), removeRecords(id))
	if err != nil {
		return true, fmt.Errorf("clean up demo %s: %w", id, err)
	}
	if left, err = Left(id); err == nil && len(left) > 0 {
		err = fmt.Errorf("clean up demo %s: left behind: %s", id, strings.Join(left, ", "))
	}
	return true, err
}

// Left names the remains of a demo.
func Left(id string) (left []string, err error) {
	if len(id) == 0 || strings.ContainsFunc(id, func(r rune) bool { return !strings.ContainsRune("0123456789abcdefghijklmnopqrstuvwxyz", r) }) {
		return nil, fmt.Errorf("look for demo %q: an id is lower-case letters and digits, as the demo printed it", id)
	}
	names, err := filepath.Glob("/run/netns/shunt-" + id + "-*")
	if err != nil {
		return nil, err
	}
	left = append(names, pinsOf(instanceOf(id))...)
	for _, pid := range processesOf(id, "") {
		left = append(left, fmt.Sprintf("process %d", pid))
	}
	if _, err := os.Lstat(folderOf(id)); err == nil {
		left = append(left, folderOf(id))
	}
	return append(left, recordsOf(id)...), nil
}

// pinsOf returns all pins of an instance.
func pinsOf(instance string) (paths []string) {
	root := kernel.Directory(kernel.DefaultPinRoot, instance)
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			paths = append(paths, path)
		}
		return nil // an unreadable folder is gone, or its removal fails later
	})
	return paths
}

// processesOf returns the demo's children that play a part ("run" or "demo"; any if empty).
func processesOf(id, part string) (pids []int) {
	all, err := kernelprocess.All()
	if err != nil {
		return nil
	}
	for _, pid := range all {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			continue
		}
		if isPart(strings.Split(strings.TrimRight(string(text), "\x00"), "\x00"), id, part) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// isPart recognises a child by its command line, whole arguments only.
func isPart(args []string, id, part string) bool {
	if len(args) < 2 || part != "" && args[1] != part {
		return false
	}
	has := func(flag, value string) bool {
		i := slices.Index(args, flag)
		return i > 1 && i+1 < len(args) && args[i+1] == value
	}
	return args[1] == "run" && has("--instance", instanceOf(id)) ||
		args[1] == "demo" && len(args) > 2 && args[2] == "backend" && has("--lab", id)
}

// detach runs `shunt detach` in the balancer's namespace, which has the neighbours. If the namespace is gone,
// so are they, and only the pins are removed.
func detach(id, executable string) error {
	ns, err := netns.GetFromName("shunt-" + id + "-lb")
	if err != nil {
		return attach.Remove(instanceOf(id), slog.New(slog.NewTextHandler(io.Discard, nil)))
	}
	defer ns.Close() //nolint:errcheck // only used to enter
	return namespace.Inside(ns, func() error {
		out, err := exec.Command(executable, "detach", "--instance", instanceOf(id)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("run `shunt detach`: %w: %s", err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}

// sayHowToLookAround is the end of a demo that is kept.
func (d *demo) sayHowToLookAround() {
	shunt, id := d.opts.Command, d.facts.ID
	d.Say("\n── It is still running. Look around:\n\n")
	inside := func(host *lab.Host) string { return "nsenter --net=/run/netns/" + host.Namespace() }
	vip := targets[0].vip
	for _, line := range [][2]string{
		{"ask the web service", fmt.Sprintf("%s curl -s http://%s/", inside(d.top.Client), vip.Addr())},
		{"ask without curl", fmt.Sprintf(`%s bash -c 'exec 3<>/dev/tcp/%s/%d; printf "GET / HTTP/1.0\r\n\r\n" >&3; cat <&3'`, inside(d.top.Client), vip.Addr(), vip.Port())},
		{"a shell in the balancer", inside(d.top.Balancer) + " bash"},
		{"what it counts", fmt.Sprintf("%s status --instance %s --socket %s", shunt, d.facts.Instance, d.socket())},
		{"change the file, then", fmt.Sprintf("%s reload --socket %s    # the file: %s", shunt, d.socket(), d.configPath())},
		{"the daemon's log", d.logPath()},
		{"REMOVE IT ALL", fmt.Sprintf("%s demo --clean %s", shunt, id)},
	} {
		d.Say("  %-24s %s\n", line[0], line[1])
	}
}
