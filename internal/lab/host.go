package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Host is one namespace.
type Host struct {
	lab       *Lab
	name      string
	namespace string
	index     int // in the lab, from 1: the fifth byte of its MACs

	mu         sync.Mutex
	ns         netns.NsHandle
	handle     *netlink.Handle
	interfaces []Interface
	used       map[[2]string]bool // both ends of each UDP socket that there was
}

// Interface is one end of a veth, as the lab made it.
type Interface struct {
	Name string
	MAC  net.HardwareAddr
	IPv4 netip.Prefix // invalid where it has none
	IPv6 netip.Prefix // invalid where it has none
	Peer string       // "host/interface" at the other end
}

// Name is the host's name in the lab, "client" for example.
func (h *Host) Name() string { return h.name }

// Namespace is the name under /run/netns.
func (h *Host) Namespace() string { return h.namespace }

// Interfaces are in the order they were connected.
func (h *Host) Interfaces() []Interface {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.interfaces)
}

// Addr4 is the IPv4 address of the first interface that has one.
func (h *Host) Addr4() netip.Addr {
	for _, i := range h.Interfaces() {
		if i.IPv4.IsValid() {
			return i.IPv4.Addr()
		}
	}
	return netip.Addr{}
}

// Addr6 is the IPv6 address of the first interface that has one.
func (h *Host) Addr6() netip.Addr {
	for _, i := range h.Interfaces() {
		if i.IPv6.IsValid() {
			return i.IPv6.Addr()
		}
	}
	return netip.Addr{}
}

// Netlink is a route netlink handle in the namespace. It belongs to the lab: do not close it.
func (h *Host) Netlink() *netlink.Handle {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.handle
}

// quiet are the settings of a new namespace; "default" is for later interfaces.
var quiet = []struct{ name, value string }{
	{"net.ipv6.conf.all.accept_dad", "0"},
	{"net.ipv6.conf.default.accept_dad", "0"},
	{"net.ipv6.conf.default.accept_ra", "0"},
	{"net.ipv6.conf.default.router_solicitations", "0"},
	{"net.ipv4.conf.all.rp_filter", "0"},
	{"net.ipv4.conf.default.rp_filter", "0"},
	{"net.ipv4.conf.all.send_redirects", "0"},
	{"net.ipv4.conf.default.send_redirects", "0"},
	// A new namespace inherits IPv4 settings from the machine's (net.core.devconf_inherit_init_net).
	{"net.ipv4.ip_forward", "0"},
}

// open holds the namespace and makes it usable.
func (h *Host) open() error {
	ns, err := netns.GetFromName(h.namespace)
	if err != nil {
		return fmt.Errorf("open namespace %s: %w", h.namespace, err)
	}
	h.ns = ns
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in namespace %s: %w", h.namespace, err)
	}
	h.handle = handle
	for _, s := range quiet {
		if err := h.SetSysctl(s.name, s.value); err != nil {
			return err
		}
	}
	return h.up("lo")
}

// shut releases the namespace.
func (h *Host) shut() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.handle != nil {
		h.handle.Close()
		h.handle = nil
	}
	if h.ns > 0 {
		h.ns.Close()
		h.ns = 0
	}
}

// Run calls do on an OS thread that is in the namespace: sockets and processes made by do
// are there. Goroutines that do starts are not. Do not call testing.T's Fatal inside.
func (h *Host) Run(do func() error) error {
	h.mu.Lock()
	if h.ns <= 0 {
		h.mu.Unlock()
		return fmt.Errorf("enter namespace %s: its lab is closed", h.namespace)
	}
	ns, err := unix.FcntlInt(uintptr(h.ns), unix.F_DUPFD_CLOEXEC, 0) // so that Close does not race with setns
	h.mu.Unlock()
	if err != nil {
		return fmt.Errorf("enter namespace %s: %w", h.namespace, err)
	}
	defer unix.Close(ns)
	return onThread(func() error {
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter namespace %s: %w", h.namespace, err)
		}
		return nil
	}, do)
}

// onThread calls enter, then do, on a thread of its own, and brings the thread back to the
// namespace it came from. A thread that cannot be brought back is not used again: the
// runtime ends it with the goroutine that is still locked to it.
func onThread(enter, do func() error) error {
	result := make(chan error, 1)
	go func() {
		err := errors.New("the function left its goroutine without returning")
		defer func() { result <- err }()
		runtime.LockOSThread()
		home, openErr := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if openErr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("open the thread's own namespace: %w", openErr)
			return
		}
		defer unix.Close(home)
		if enterErr := enter(); enterErr != nil {
			err = enterErr
			return
		}
		err = do()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return <-result
}

// noKeepAlive keeps idle connections silent. By default, Go's ends ask each other every 15 s, so a slow machine
// has packets that a fast one does not have.
const noKeepAlive = time.Duration(-1)

// Listen is net.Listen in the namespace; address is a literal, as in "10.0.0.2:80".
func (h *Host) Listen(network, address string) (net.Listener, error) {
	var l net.Listener
	err := h.Run(func() (err error) {
		config := net.ListenConfig{KeepAlive: noKeepAlive}
		l, err = config.Listen(context.Background(), network, address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.name, err)
	}
	return l, nil
}

// ListenPacket is net.ListenPacket in the namespace.
func (h *Host) ListenPacket(network, address string) (net.PacketConn, error) {
	var c net.PacketConn
	err := h.Run(func() (err error) {
		c, err = net.ListenPacket(network, address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.name, err)
	}
	return c, nil
}

// Dial connects from the namespace to a literal address and port.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return h.DialFrom(ctx, network, netip.AddrPort{}, address)
}

// DialFrom is Dial from a given address or port: "0.0.0.0:40000" fixes the port alone, the
// zero value nothing. The port may be one that a closed connection still holds (TIME_WAIT).
//
// Over UDP without a given port it takes one from which the host has not sent there before: a
// balancer knows flows by their ports, for minutes, while the kernel takes any port that is free.
func (h *Host) DialFrom(ctx context.Context, network string, local netip.AddrPort, address string) (net.Conn, error) {
	// A name would be looked up on another goroutine, outside the namespace.
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("host %s: dial %q: %w: give a literal address and port", h.name, address, err)
	}
	dialer := net.Dialer{ControlContext: reuse, KeepAlive: noKeepAlive}
	isUDP := strings.HasPrefix(network, "udp")
	switch {
	case !local.IsValid():
		dialer.ControlContext = nil
	case isUDP:
		dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
	default:
		dialer.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	const tries = 100 // until most ports have been used
	for try := 1; ; try++ {
		var c net.Conn
		err := h.Run(func() (err error) {
			c, err = dialer.DialContext(ctx, network, address)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("host %s: %w", h.name, err)
		}
		if !isUDP || h.firstUse(c) || local.Port() != 0 || try == tries {
			return c, nil
		}
		_ = c.Close()
	}
}

// firstUse notes that a socket is about to send, and reports whether it is the first between its two
// addresses and ports.
func (h *Host) firstUse(c net.Conn) bool {
	ends := [2]string{c.LocalAddr().String(), c.RemoteAddr().String()}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used[ends] {
		return false
	}
	h.used[ends] = true
	return true
}

// sysctlPath is the file of a setting: "net.ipv4.ip_forward" or "net/ipv4/conf/a.b/forwarding".
func sysctlPath(name string) (string, error) {
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	if !strings.HasPrefix(name, "net/") || strings.Contains(name, "..") {
		return "", fmt.Errorf("sysctl %s: only net.* belongs to a network namespace", name)
	}
	return filepath.Join("/proc/sys", name), nil
}

// SetSysctl writes a net.* setting of the namespace.
func (h *Host) SetSysctl(name, value string) error {
	path, err := sysctlPath(name)
	if err != nil {
		return fmt.Errorf("host %s: %w", h.name, err)
	}
	// /proc/sys/net shows the namespace of the thread that opens it (proc(5)).
	if err := h.Run(func() error { return os.WriteFile(path, []byte(value), 0o644) }); err != nil {
		return fmt.Errorf("host %s: set %s to %q: %w", h.name, name, value, err)
	}
	return nil
}

// Sysctl reads a net.* setting of the namespace.
func (h *Host) Sysctl(name string) (string, error) {
	path, err := sysctlPath(name)
	if err != nil {
		return "", fmt.Errorf("host %s: %w", h.name, err)
	}
	var b []byte
	err = h.Run(func() (err error) {
		b, err = os.ReadFile(path)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("host %s: read %s: %w", h.name, name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// SetForwarding makes the host a router, or no longer one.
func (h *Host) SetForwarding(on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	return errors.Join(h.SetSysctl("net.ipv4.ip_forward", value), h.SetSysctl("net.ipv6.conf.all.forwarding", value))
}

// features are short names for the features that ethtool(8) groups in the same way.
var features = map[string][]string{
	"tx":  {"tx-checksum-ip-generic"},
	"tso": {"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation"},
	"gso": {"tx-generic-segmentation"},
	"gro": {"rx-gro"},
	"lro": {"rx-lro"},
}

// SetOffload switches features on or off: "tx" (checksums), "tso", "gso", "gro", or the kernel's own
// names. The kernel may refuse to switch off a feature that it needs: Offload returns the features
// that are on.
func (h *Host) SetOffload(iface string, want map[string]bool) error {
	change := map[string]bool{}
	for name, on := range want {
		names, short := features[name]
		if !short {
			names = []string{name}
		}
		for _, n := range names {
			change[n] = on
		}
	}
	err := h.Run(func() error {
		tool, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer tool.Close()
		return tool.Change(iface, change)
	})
	if err != nil {
		return fmt.Errorf("host %s: set offload of %s to %v: %w", h.name, iface, want, err)
	}
	return nil
}

// SetQueue gives an interface a transmit queue of a kind that needs no options: "pfifo" for example
// (tc-pfifo(8)). A veth has none when it is made.
func (h *Host) SetQueue(iface, kind string) error {
	index, err := h.InterfaceIndex(iface)
	if err != nil {
		return err
	}
	err = h.handle.QdiscReplace(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
		QdiscType:  kind,
	})
	if err != nil {
		return fmt.Errorf("host %s: give %s a %s queue: %w", h.name, iface, kind, err)
	}
	return nil
}

// Offload is the state of every feature that has a name, by the kernel's and, where all of
// a group are alike, the short one.
func (h *Host) Offload(iface string) (map[string]bool, error) {
	var on map[string]bool
	err := h.Run(func() error {
		tool, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer tool.Close()
		on, err = tool.Features(iface)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: read offload of %s: %w", h.name, iface, err)
	}
	for short, names := range features {
		first := on[names[0]]
		if !slices.ContainsFunc(names, func(name string) bool { return on[name] != first }) {
			on[short] = first
		}
	}
	return on, nil
}
