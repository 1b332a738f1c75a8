// Package hook is the UDP path's program on an interface: which lease has which datagrams, the
// AF_XDP sockets that they go to, and the counts of both. It knows sockets only by their descriptors;
// package xsk makes them.
//
// A lease is a number below MaxLeases. It begins with Begin, has a socket for each queue (Bind), gets
// datagrams from Serve on, and none after Withdraw has returned. If a queue has no socket, or the last
// holder of a socket is gone, the datagrams go to the kernel's stack; if the address has a guard
// (Guard), they are dropped, and so are datagrams that come while no lease serves it.
package hook

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
)

const (
	// MaxLeases is the number of leases that an interface can have at once.
	MaxLeases = int(udpLeaseLimitLEASES_MAX)
	// MaxQueues is the number of receive queues that can have sockets; datagrams on further queues pass.
	MaxQueues = int(udpLeaseLimitLEASE_QUEUES_MAX)
)

// Options select the interface and the mode of the program.
type Options struct {
	Interface string      // of the calling thread's network namespace
	Mode      kernel.Mode // auto tries native mode first; then Hook.Reason has the reason why it got generic
	// Kept is the folder of an earlier process's Keep. If the layout of its maps is this version's, they are taken over with GoOn;
	// otherwise they are removed. "": there is none.
	Kept string
	GoOn []Kept
}

// Hook is sh_udp on an interface, or behind the program of another product of this process. It ends with the process
// unless Keep pins it. Its methods may be called at any time from several goroutines, but Close or Leave only once, and last.
type Hook struct {
	Interface string
	Ifindex   int
	MTU       int // of the interface, bytes, when it was attached
	Queues    int // receive queues for which the interface has room; InUse returns those in use

	objects *ebpf.Collection
	program *ebpf.Program // if it is alone on the interface
	guest   *kernel.Guest
	grace   *kernel.Grace

	mu      sync.Mutex
	leases  map[int]map[netip.AddrPort]bool // the addresses and ports that each lease serves
	stamped map[int]bool                    // leases whose frames come with a time
	guards  map[netip.AddrPort]int          // addresses and ports whose datagrams do not pass -> the lease that guards them
	direct  map[uint32]netip.AddrPort       // bucket of sh_ud_direct -> its address and port
	seen    map[int]bool                    // leases that running programs may have found by addresses that they have no more
	kept    string                          // folder that it is pinned in; "": it is not pinned
}

// Attach loads the program and attaches it. Without a lease every packet passes. If it fails, it leaves nothing
// behind. It refuses an interface that has another product's XDP program, and names the program.
func Attach(opts Options) (*Hook, error) {
	dev, err := netlink.LinkByName(opts.Interface)
	if err != nil {
		return nil, fmt.Errorf("attach to interface %s: %w; `ip link` lists the interfaces", opts.Interface, err)
	}
	attrs := dev.Attrs()
	if len(attrs.HardwareAddr) != 6 {
		return nil, fmt.Errorf("attach to interface %s: it is not an Ethernet interface", opts.Interface)
	}
	h := &Hook{
		Interface: opts.Interface, Ifindex: attrs.Index, MTU: attrs.MTU, Queues: attrs.NumRxQueues,
		leases: map[int]map[netip.AddrPort]bool{}, stamped: map[int]bool{}, guards: map[netip.AddrPort]int{}, direct: map[uint32]netip.AddrPort{}, seen: map[int]bool{},
	}
	constants := map[string]any{udpVarInterfaceMac: kernel.MACWord(attrs.HardwareAddr)}
	pinned, err := openKept(opts.Kept)
	if err != nil {
		return nil, err
	}
	h.objects, err = load(constants, pinned)
	kernel.CloseMaps(pinned)
	if err != nil {
		return nil, err
	}
	if pinned != nil {
		h.kept = opts.Kept
	}
	h.program = h.objects.Programs[udpProgShUdp]
	if h.grace, err = kernel.NewGrace(); err == nil && h.kept != "" {
		err = h.takeOver(opts.GoOn)
	}
	if err == nil {
		h.guest, err = kernel.EnterXDP(h.program, func(after *ebpf.Map) (*ebpf.Program, error) {
			shared := maps.Clone(h.objects.Maps)
			maps.DeleteFunc(shared, func(name string, _ *ebpf.Map) bool { return strings.HasPrefix(name, ".") }) // constants
			shared[udpMapShUdChain] = after
			again, err := load(constants, shared)
			if err != nil {
				return nil, err
			}
			defer again.Close()
			return kernel.TakeProgram(again, udpProgShUdp)
		}, opts.Interface, h.Ifindex, opts.Mode, h.kept)
	}
	if err != nil {
		return nil, errors.Join(err, h.release())
	}
	return h, nil
}

func load(constants map[string]any, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	spec, err := loadUdp()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	all, err := kernel.Load(spec, constants, maps)
	if err != nil {
		return nil, fmt.Errorf("load the UDP path's program: %w", err)
	}
	return all, nil
}

// Attachment returns how the program is attached; behind another program, how that one is.
func (h *Hook) Attachment() kernel.Attachment { return h.guest.Attachment() }

// Hosted reports whether the program is behind another product's.
func (h *Hook) Hosted() bool { return h.guest.Hosted() }

// Settle attaches the program again if the program that it was behind has gone. Call it from time to time in the
// interface's network namespace.
func (h *Hook) Settle() error { return h.guest.Settle() }

// Gone reports whether the name belongs to another interface now, or to none. It asks in the calling thread's network
// namespace, which must be the interface's.
func (h *Hook) Gone() bool {
	dev, err := netlink.LinkByName(h.Interface)
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing) || err == nil && dev.Attrs().Index != h.Ifindex
}

// InUse returns the number of receive queues that the interface uses now, which `ethtool -L` may change. The interface must be in the calling thread's network namespace.
func (h *Hook) InUse() (int, error) {
	dev, err := netlink.LinkByIndex(h.Ifindex)
	if err != nil {
		return 0, fmt.Errorf("read the receive queues of %s: %w", h.Interface, err)
	}
	return kernel.ReceiveQueues(dev.Attrs())
}

// RunPacket runs the program on a frame as if it had come in by the interface's queue 0, and returns
// XDP's verdict. The program counts it, but no socket gets it. The interface must be in the calling thread's
// network namespace.
func (h *Hook) RunPacket(frame []byte) (verdict uint32, out []byte, err error) {
	return kernel.RunXDP(h.program, h.Interface, h.Ifindex, frame)
}

// release closes maps and program.
func (h *Hook) release() (err error) {
	if h.grace != nil {
		err = h.grace.Close()
	}
	h.objects.Close()
	return err
}

// Close detaches the program. All leases end with it.
func (h *Hook) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := errors.Join(h.guest.Close(), h.forget(), h.release()); err != nil {
		return fmt.Errorf("detach the UDP path's program from interface %s: %w", h.Interface, err)
	}
	return nil
}
