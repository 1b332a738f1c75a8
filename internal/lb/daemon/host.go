package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/record"
	"github.com/shunt-lb/shunt/internal/value"
)

const runDirectory = "/run/shunt"

// stateDirectory is where the service manager says (systemd.exec(5), StateDirectory=), or else a
// folder that survives a reboot.
func stateDirectory() string {
	folder, _, _ := strings.Cut(os.Getenv("STATE_DIRECTORY"), ":")
	return cmp.Or(folder, "/var/lib/shunt")
}

// overridesPath is the file that keeps an instance's overrides.
func overridesPath(instance string) string {
	return filepath.Join(stateDirectory(), instance+".overrides.json")
}

func lockPath(instance string) string { return filepath.Join(runDirectory, instance+".lock") }

// Holder is the process that runs an instance, or 0. A daemon that stops removes its note of
// that; one that was killed leaves it, so the process is looked for.
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

// RunsError says that a daemon runs the instance.
type RunsError struct {
	Instance string
	Process  string // its number
}

// Error says what could be meant instead.
func (e *RunsError) Error() string {
	return fmt.Sprintf("instance %q is already run by process %s; stop that process, or choose another instance with --instance", e.Instance, e.Process)
}

// lock makes this process the only one of its instance. The kernel releases the lock with
// the process, however it ends.
func lock(instance string) (unlock func(), err error) {
	if err := os.MkdirAll(runDirectory, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", runDirectory, err)
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
	// The holder removes the file before it lets go: who waited on the old one tries again.
	mine, err1 := f.Stat()
	there, err2 := os.Stat(path)
	if err1 != nil || err2 != nil || !os.SameFile(mine, there) {
		_ = f.Close()
		return lock(instance)
	}
	return func() { _ = os.Remove(path); _ = f.Close() }, nil
}

// requireInterfaces refuses a configuration for interfaces that are not here.
func requireInterfaces(interfaces []model.Interface) error {
	for _, i := range interfaces {
		if _, err := net.InterfaceByName(i.Name); err != nil {
			return fmt.Errorf("attach to interface %q: it does not exist; `ip link` lists the interfaces", i.Name)
		}
	}
	return nil
}

// followedHost is this machine, asked for routes only where nobody follows them already.
type followedHost struct {
	file.LocalHost
	out func(netip.Addr) (iface int, ok bool)
}

// Routes is file.Host's.
func (h followedHost) Routes(to []netip.Addr) map[netip.Addr]file.Route {
	routes := make(map[netip.Addr]file.Route, len(to))
	names := map[int]string{} // empty: it has gone
	var unknown []netip.Addr
	for _, a := range to {
		index, ok := h.out(a)
		if name, seen := names[index]; ok && !seen {
			if i, err := net.InterfaceByIndex(index); err == nil {
				name = i.Name
			}
			names[index] = name
		}
		if !ok || names[index] == "" {
			unknown = append(unknown, a)
			continue
		}
		routes[a] = file.Route{Interface: names[index]}
	}
	maps.Copy(routes, h.LocalHost.Routes(unknown))
	return routes
}

// hostAddresses is every address the host itself has.
func hostAddresses() (map[netip.Addr]bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range addrs {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			own[prefix.Addr().Unmap()] = true
		}
	}
	return own, nil
}

const (
	portFirst = 1024 // below are the well-known ports, RFC 6335
	portLast  = 65535
	// A pool smaller than this is exhausted by a busy client of one backend in seconds.
	portPoolMin = 1024
)

// freePorts is the largest range outside those the host takes for its own connections, so
// that the two can never use the same one.
func freePorts() (value.PortRange, error) {
	const path = "/proc/sys/net/ipv4/ip_local_port_range"
	text, err := os.ReadFile(path)
	if err != nil {
		return value.PortRange{}, fmt.Errorf("read the host's own port range: %w", err)
	}
	var first, last int
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		return value.PortRange{}, fmt.Errorf("read the host's own port range from %s: %w", path, err)
	}
	below := value.PortRange{First: portFirst, Last: uint16(max(first-1, 0))}
	above := value.PortRange{First: uint16(min(last+1, portLast)), Last: portLast}
	size := func(r value.PortRange) int { return int(r.Last) - int(r.First) + 1 }
	best := below
	if size(above) > size(below) {
		best = above
	}
	if size(best) < portPoolMin {
		return value.PortRange{}, fmt.Errorf("choose NAT source ports: the host's own connections use %d to %d (%s), which leaves no range of %d; narrow that range, or say `snat: {ports: …}`", first, last, path, portPoolMin)
	}
	return best, nil
}
