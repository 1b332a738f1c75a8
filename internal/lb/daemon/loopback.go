package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/record"
	"github.com/vishvananda/netns"
)

// bpf_fib_lookup, by which the programs find next hops themselves, answers questions asked from lo only if lo
// forwards. No additional packet is forwarded: no packet to be forwarded ever arrives on lo
// (docs/design/03-client-hops.md).
//
// Each instance writes down the values that it found, and a later instance writes down the values that the
// first one found. So the last instance in a network namespace switches forwarding off again.

const (
	loopbackForwarding4 = "net/ipv4/conf/lo/forwarding"
	loopbackForwarding6 = "net/ipv6/conf/lo/forwarding"
)

var loopbackForwarding = []string{loopbackForwarding4, loopbackForwarding6}

const loopbackSuffix = ".loopback"

// loopbackRecord lists the settings that one instance has to restore.
type loopbackRecord struct {
	Space string           `json:"space"` // the network namespace of the settings
	State realserver.State `json:"state"`
}

func loopbackPath(instance string) string {
	return filepath.Join(node.RunDirectory, instance+loopbackSuffix)
}

func readLoopback(path string) (r loopbackRecord, err error) {
	if err := record.Read(path, &r); err != nil {
		return loopbackRecord{}, fmt.Errorf("read the record of changed settings of lo: %w; `sysctl -a --pattern conf.lo.forwarding` shows their values now, then delete %s", err, path)
	}
	return r, nil
}

// takeTurn makes instances change lo one after the other. It then reads the record that an instance wrote;
// space is the network namespace of the caller.
func takeTurn(instance string) (r loopbackRecord, space string, done func(), err error) {
	if space, err = host.Space(); err != nil {
		return r, "", nil, err
	}
	f, err := os.Open(node.RunDirectory)
	if err != nil {
		return r, "", nil, err
	}
	done = func() { _ = f.Close() }
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		err = fmt.Errorf("lock %s: %w", node.RunDirectory, err)
	} else {
		r, err = readLoopback(loopbackPath(instance))
	}
	if err != nil {
		done()
		return r, "", nil, err
	}
	return r, space, done, nil
}

// others returns the settings that other instances have made in a network namespace.
func others(instance, space string) (made []host.Setting) {
	paths, _ := filepath.Glob(filepath.Join(node.RunDirectory, "*"+loopbackSuffix))
	for _, path := range paths {
		if r, err := readLoopback(path); err == nil && path != loopbackPath(instance) && r.Space == space {
			made = append(made, r.State.Settings...)
		}
	}
	return made
}

// forwardOnLoopback switches forwarding on lo on, and first writes down its old value.
func forwardOnLoopback(instance string) error {
	r, space, done, err := takeTurn(instance)
	if err != nil {
		return err
	}
	defer done()
	if r.Space != space {
		r = loopbackRecord{Space: space}
	}
	var missing []host.Setting
	for _, name := range loopbackForwarding {
		value, err := host.ReadNumber(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without that family
		}
		if err != nil {
			return fmt.Errorf("read whether lo forwards: %w", err)
		}
		on := host.Setting{Name: name, Before: strconv.Itoa(value), Set: "1"}
		isOn := on.Before == on.Set
		if !isOn {
			missing = append(missing, on)
		}
		same := func(s host.Setting) bool { return s.Name == name }
		if slices.ContainsFunc(r.State.Settings, same) {
			continue
		}
		made := others(instance, space)
		if i := slices.IndexFunc(made, same); i >= 0 {
			r.State.Settings = append(r.State.Settings, made[i])
		} else if !isOn {
			r.State.Settings = append(r.State.Settings, on)
		}
	}
	if !r.State.IsZero() {
		if err := record.Write(loopbackPath(instance), r); err != nil {
			return fmt.Errorf("record that lo did not forward: %w", err)
		}
	}
	for _, on := range missing {
		if on.Name == loopbackForwarding6 {
			err = withRouters(on.Apply)
		} else {
			err = on.Apply()
		}
		if err != nil {
			return fmt.Errorf("switch forwarding on for lo: %w", err)
		}
	}
	return nil
}

// loopbackForwards reports whether lo forwards in every family that the kernel has.
func loopbackForwards() bool {
	for _, name := range loopbackForwarding {
		if value, err := host.ReadNumber(name); err == nil && value == 0 {
			return false
		}
	}
	return true
}

// loopback keeps forwarding on lo switched on. One caller at a time may use it.
type loopback struct {
	instance string
	log      *slog.Logger
	kept     bool // false: it cannot be switched on, and the log says so
}

// newLoopback switches forwarding on lo on.
func newLoopback(instance string, log *slog.Logger) *loopback {
	err := forwardOnLoopback(instance)
	if err != nil {
		log.Warn("next hops cannot be looked up while the daemon is not running", "error", err)
	}
	return &loopback{instance: instance, log: log, kept: err == nil}
}

// keep switches forwarding on lo on again. A write to net.ipv4.ip_forward or net.ipv6.conf.all.forwarding, as
// `sysctl --system` makes, changes the setting of every interface.
func (l *loopback) keep() {
	if !l.kept || loopbackForwards() {
		return
	}
	if err := forwardOnLoopback(l.instance); err != nil {
		l.kept = false // once is enough
		l.log.Warn("something has switched forwarding on lo off, and it cannot be switched on again: next hops cannot be looked up while the daemon is not running", "error", err)
		return
	}
	l.log.Warn("something has switched forwarding on lo off, probably with net.ipv4.ip_forward or net.ipv6.conf.all.forwarding; shunt needs it and has switched it on again")
}

// withRouters calls f, which switches IPv6 forwarding on for some interface, and makes the kernel keep the
// routes that routers have advertised on the other interfaces. Otherwise the kernel deletes these routes of the
// whole network namespace, unless an interface takes advertisements although it forwards (accept_ra 2;
// rt6_purge_dflt_routers, net/ipv6/route.c). On an interface that does not forward, 2 means the same as 1, so
// nothing else changes, even if shunt is killed before it restores the value.
func withRouters(f func() error) error {
	const accept = "accept_ra"
	names, err := host.Settings("net/ipv6/conf/*/" + accept)
	if err != nil {
		return err
	}
	var changed []host.Setting
	for _, name := range names {
		of := strings.TrimSuffix(name, accept)
		if device := filepath.Base(of); device == "all" || device == "default" {
			continue
		}
		takes, err := host.ReadNumber(name)
		forwards, failed := host.ReadNumber(of + "forwarding")
		change := host.Setting{Name: name, Before: "1", Set: "2"}
		if err != nil || failed != nil || takes != 1 || forwards != 0 || change.Apply() != nil {
			continue // not of interest, or the interface is gone
		}
		changed = append(changed, change)
	}
	err = f()
	_, failed := host.Restore(changed)
	return errors.Join(err, failed)
}

// releaseLoopback restores the values that an instance found, unless another instance needs the present ones. A
// value that is no longer shunt's is left alone.
func releaseLoopback(instance string, log *slog.Logger) error {
	path := loopbackPath(instance)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	r, space, done, err := takeTurn(instance)
	if err != nil {
		return err
	}
	defer done()
	needed := others(instance, r.Space)
	r.State.Settings = slices.DeleteFunc(r.State.Settings, func(s host.Setting) bool { return slices.Contains(needed, s) })
	restore := func() error {
		_, err := r.State.Restore()
		return err
	}
	if !r.State.IsZero() {
		found := false
		if found, err = inSpace(r.Space, space, restore); !found {
			log.Warn("forwarding on lo stays on in another network namespace, if that namespace still exists", "namespace", r.Space)
		}
	}
	return errors.Join(err, os.Remove(path))
}

// inSpace calls f in a network namespace, for a daemon that was killed there while the calling thread is in
// another namespace, here. found is false if the namespace cannot be found.
func inSpace(space, here string, f func() error) (found bool, err error) {
	if space == here {
		return true, f()
	}
	ns := findSpace(space)
	if !ns.IsOpen() {
		return false, nil
	}
	defer namespace.Close(ns)
	return true, namespace.Inside(ns, f)
}

// findSpace opens the network namespace with the name that host.Space gives it, or returns None.
func findSpace(space string) netns.NsHandle {
	return namespace.Find(func(ns netns.NsHandle) (is bool) {
		_ = namespace.Inside(ns, func() error {
			here, err := host.Space()
			is = err == nil && here == space
			return nil
		})
		return is
	})
}
