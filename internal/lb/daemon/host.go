package daemon

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// overridesPath returns the path of the file with an instance's overrides.
func overridesPath(instance string) string {
	return filepath.Join(node.StateDirectory(), instance+".overrides.json")
}

// requireInterfaces refuses a configuration for interfaces that do not exist. Those of pods may come later.
func requireInterfaces(interfaces []model.Interface) error {
	for _, i := range byName(interfaces) {
		if _, err := net.InterfaceByName(i.Name); err != nil {
			return fmt.Errorf("attach to interface %q: it does not exist; `ip link` lists the interfaces", i.Name)
		}
	}
	return nil
}

// localHost is this machine, together with the files that health checks need.
func localHost() file.LocalHost {
	return file.LocalHost{CA: func(path string) error {
		_, err := health.Authorities(path)
		return err
	}}
}

// followedHost is this machine; it looks routes up only if nothing follows them already.
type followedHost struct {
	file.LocalHost
	out func(netip.Addr) (iface int, onLink, ok bool)
}

// Routes implements file.Host.
func (h followedHost) Routes(to []netip.Addr) map[netip.Addr]file.Route {
	routes := make(map[netip.Addr]file.Route, len(to))
	names := map[int]string{} // empty: it has gone
	var unknown []netip.Addr
	for _, a := range to {
		index, onLink, ok := h.out(a)
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
		routes[a] = file.Route{Interface: names[index], OnLink: onLink}
	}
	maps.Copy(routes, h.LocalHost.Routes(unknown))
	return routes
}

// hostAddresses returns every address that the host itself has.
func hostAddresses() (map[netip.Addr]bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range addrs {
		// Among them are groups that announcements have joined.
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && !prefix.Addr().IsMulticast() {
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

// freePorts returns the largest range outside the ports that the host uses for its own connections, so that the
// two ranges never share a port.
func freePorts() (value.PortRange, error) {
	const setting = "net/ipv4/ip_local_port_range"
	text, err := host.ReadSetting(setting)
	if err != nil {
		return value.PortRange{}, fmt.Errorf("read the host's own port range: %w", err)
	}
	var first, last int
	if _, err := fmt.Sscan(text, &first, &last); err != nil {
		return value.PortRange{}, fmt.Errorf("read the host's own port range from %s: %w", setting, err)
	}
	below := value.PortRange{First: portFirst, Last: uint16(max(first-1, 0))}
	above := value.PortRange{First: uint16(min(last+1, portLast)), Last: portLast}
	size := func(r value.PortRange) int { return int(r.Last) - int(r.First) + 1 }
	best := below
	if size(above) > size(below) {
		best = above
	}
	if size(best) < portPoolMin {
		return value.PortRange{}, fmt.Errorf("choose NAT source ports: the host's own connections use %d to %d (%s), which leaves no range of %d; narrow that range, or say `snat: {ports: …}`", first, last, setting, portPoolMin)
	}
	return best, nil
}
