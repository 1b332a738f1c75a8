// Package lab builds networks out of network namespaces on one machine: the demo, the
// tests and the benchmarks run in the same ones. It speaks netlink and ethtool itself and
// starts no other program.
//
//	Lab ── Host (a namespace) ── Interface (one end of a veth)
//	 │
//	 └── Topology: a lab laid out as client, router, balancer, switch and backends
//
// All needs root (CAP_NET_ADMIN for links, CAP_SYS_ADMIN for namespaces). Namespaces are
// called shunt-<id>-<host> and stand under /run/netns, so `ip netns exec` works on them.
// Nothing is ever created outside them: both ends of a veth are made where they belong.
package lab

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// directory is the folder in which iproute2 looks for named namespaces.
const directory = namespace.Names

// prefix starts the name of every namespace of every lab.
const prefix = "shunt-"

// idPattern keeps ids apart from host names and out of trouble as file names.
var idPattern = regexp.MustCompile(`^[a-z0-9]{1,16}$`)

// hostPattern: a host's name is also the name of its switch port, which has 15 characters.
var hostPattern = regexp.MustCompile(`^[a-z][a-z0-9]{0,14}$`)

// Lab is a set of hosts that live and die together. Its methods may be called at the same
// time from several goroutines.
type Lab struct {
	id string

	mu     sync.Mutex
	closed bool
	hosts  []*Host
	ending []func() error // functions to call before the namespaces go, last first
}

// New is an empty lab. An empty id is replaced by a random one; an id that has namespaces
// already is refused, because they may be somebody's: Sweep removes them.
func New(id string) (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("make a lab: network namespaces need root: run it with sudo")
	}
	if id == "" {
		b := make([]byte, 3)
		rand.Read(b)
		id = hex.EncodeToString(b)
	}
	if !idPattern.MatchString(id) {
		return nil, fmt.Errorf("make lab %q: an id has 1 to 16 lower-case letters and digits", id)
	}
	names, err := leftovers(id)
	if err != nil {
		return nil, fmt.Errorf("make lab %q: %w", id, err)
	}
	if len(names) > 0 {
		return nil, fmt.Errorf("make lab %q: %s already exists: sweep the lab or choose another id", id, names[0])
	}
	return &Lab{id: id}, nil
}

// ID is the lab's name, for Sweep.
func (l *Lab) ID() string { return l.id }

// Hosts are in the order they were made.
func (l *Lab) Hosts() []*Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.hosts)
}

// AddHost makes a namespace with loopback up, duplicate address detection, router solicitations,
// redirects and reverse path filters off: addresses are ready at once and the wire carries only the
// test's own packets.
func (l *Lab) AddHost(name string) (*Host, error) {
	if !hostPattern.MatchString(name) {
		return nil, fmt.Errorf("add host %q: a name has 1 to 15 lower-case letters and digits and starts with a letter", name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("add host %s: the lab is closed", name)
	}
	h := &Host{lab: l, name: name, namespace: prefix + l.id + "-" + name, index: len(l.hosts) + 1, used: map[[2]string]bool{}}
	if err := createNamespace(h.namespace); err != nil {
		return nil, fmt.Errorf("add host %s: %w", name, err)
	}
	l.hosts = append(l.hosts, h) // from here on Close removes it
	if err := h.open(); err != nil {
		return nil, fmt.Errorf("add host %s: %w", name, err)
	}
	return h, nil
}

// Ready waits until every interface of every host passes packets. A veth that has just been connected
// drops packets until the kernel has made its carrier known, which may take a second.
func (l *Lab) Ready(ctx context.Context) error {
	for _, h := range l.Hosts() {
		if err := h.ready(ctx); err != nil {
			return err
		}
	}
	return nil
}

// atClose registers a function to call before the namespaces go.
func (l *Lab) atClose(stop func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ending = append(l.ending, stop)
}

// Close stops servers, captures and child processes that were started through the lab, and removes
// links and namespaces. It is safe after a failure half-way and when called again.
func (l *Lab) Close() error {
	l.mu.Lock()
	l.closed = true
	ending, hosts := l.ending, l.hosts
	l.ending, l.hosts = nil, nil
	l.mu.Unlock()
	var errs []error
	for _, stop := range slices.Backward(ending) {
		errs = append(errs, stop())
	}
	for _, h := range hosts {
		errs = append(errs, removeNamespace(h.namespace))
		h.shut()
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close lab %s: %w", l.id, err)
	}
	return nil
}

// Sweep removes the links and namespaces of a lab whose process is gone. Processes that
// still run in them are left alone, without a network. Nothing to remove is success.
func Sweep(id string) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("sweep lab %q: an id has 1 to 16 lower-case letters and digits", id)
	}
	names, err := leftovers(id)
	if err != nil {
		return fmt.Errorf("sweep lab %s: %w", id, err)
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, removeNamespace(name))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep lab %s: %w", id, err)
	}
	return nil
}

// IDs are the labs that have a namespace on this machine, this process's or another's.
func IDs() ([]string, error) {
	entries, err := os.ReadDir(directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var ids []string
	for _, e := range entries {
		rest, ours := strings.CutPrefix(e.Name(), prefix)
		id, host, two := strings.Cut(rest, "-")
		if ours && two && idPattern.MatchString(id) && hostPattern.MatchString(host) && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// leftovers are the namespaces that carry a lab's id.
func leftovers(id string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(directory, prefix+id+"-*"))
	var names []string
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	return names, err
}

// createNamespace makes a namespace and binds it to its name, as `ip netns add` does.
func createNamespace(name string) error {
	if err := namespace.PrepareNames(); err != nil {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	path := filepath.Join(directory, name)
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	file.Close()
	err = onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() error {
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	return nil
}

// removeNamespace deletes the links first: a namespace whose name is gone lives on while a
// socket or a process holds it, and its links with it.
func removeNamespace(name string) error {
	path := filepath.Join(directory, name)
	linksErr := deleteLinks(path)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", path, err)
	}
	return linksErr
}

// deleteLinks deletes the veths and bridges of the namespace at path. A path that is no
// namespace (a crash between file and mount) has none.
func deleteLinks(path string) error {
	var kind unix.Statfs_t
	if err := unix.Statfs(path, &kind); err != nil || kind.Type != unix.NSFS_MAGIC {
		return nil
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open namespace %s: %w", path, err)
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in namespace %s: %w", path, err)
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if err != nil {
		return fmt.Errorf("list links in namespace %s: %w", path, err)
	}
	var errs []error
	for _, link := range links {
		if kind := link.Type(); kind != "veth" && kind != "bridge" {
			continue
		}
		err := handle.LinkDel(link)
		if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) { // gone with its peer
			errs = append(errs, fmt.Errorf("delete link %s in namespace %s: %w", link.Attrs().Name, path, err))
		}
	}
	return errors.Join(errs...)
}

// wait tries ready until it is true or ctx ends.
func wait(ctx context.Context, what string, ready func() (bool, error)) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ready()
		if errors.Is(err, netlink.ErrDumpInterrupted) { // the list changed as it was read
			ok, err = false, nil
		}
		if err != nil {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}
