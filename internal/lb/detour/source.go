package detour

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
)

// sources finds the addresses that checks come from. The zero value is ready.
type sources struct {
	local   briefly[netip.Addr, local]
	filters briefly[int, string]
}

// local is an answer of the routing table.
type local struct {
	address netip.Addr
	err     error
}

// briefly remembers answers of the kernel for a second, because many checks ask for the same. An outdated
// answer makes a check that does not reach its backend, which is no result.
type briefly[K comparable, V any] struct {
	mu    sync.Mutex
	known map[K]V
	until time.Time
}

func (b *briefly[K, V]) get(key K, ask func() V) V {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); !now.Before(b.until) {
		b.known, b.until = map[K]V{}, now.Add(time.Second)
	}
	value, known := b.known[key]
	if !known {
		value = ask()
		b.known[key] = value
	}
	return value
}

// of returns the address that a client on this host would have: the routing table's source for the VIP, or else
// for the backend. The source for marked packets is of no use, because the device has no address.
func (s *sources) of(t Target) (netip.Addr, error) {
	vip := t.VIP.Addr()
	from, err := s.towards(vip)
	if err == nil && from == vip {
		return netip.Addr{}, notMade("this host has the address %s itself, so its own kernel would answer the checks instead of the backend: remove the address, or write health: {enabled: false} for services with dsr-* here", vip)
	}
	if err != nil && t.Backend.Is4() == vip.Is4() {
		if filter := s.filter(t); filter != "" {
			return netip.Addr{}, notMade("this host has no route to %s (%v), so it drops the backends' answers (%s): add a route to it, or set that to 0", vip, err, filter)
		}
		from, err = s.towards(t.Backend)
	}
	if err != nil {
		return netip.Addr{}, notMade("this host has no source address for checks of %s: %v", vip, err)
	}
	return from, nil
}

// towards returns the address that this host uses towards another address.
func (s *sources) towards(to netip.Addr) (netip.Addr, error) {
	found := s.local.get(to, func() local {
		address, err := localTo(to)
		return local{address, err}
	})
	return found.address, found.err
}

// filter is reversePathFilter for IPv4; IPv6 has none.
func (s *sources) filter(t Target) string {
	if !t.VIP.Addr().Is4() {
		return ""
	}
	return s.filters.get(t.Interface, func() string { return reversePathFilter(t.Interface) })
}

// reversePathFilter returns the setting that drops packets from an address without a route, at the interface
// towards the backends, or "". The kernel uses the larger of the two values
// (Documentation/networking/ip-sysctl).
func reversePathFilter(ifindex int) string {
	names := []string{"all"}
	if out, err := net.InterfaceByIndex(ifindex); err == nil {
		names = append(names, out.Name)
	}
	for _, name := range names {
		if value, err := host.ReadNumber("net/ipv4/conf/" + name + "/rp_filter"); err == nil && value != 0 {
			return fmt.Sprintf("net.ipv4.conf.%s.rp_filter = %d", name, value)
		}
	}
	return ""
}

// localTo asks the routing table, by connecting a socket that sends nothing.
func localTo(to netip.Addr) (netip.Addr, error) {
	const anyPort = 9 // discard (RFC 863); nothing is sent
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, anyPort)))
	if err != nil {
		var errno syscall.Errno
		if errors.As(err, &errno) {
			return netip.Addr{}, errno
		}
		return netip.Addr{}, err
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
