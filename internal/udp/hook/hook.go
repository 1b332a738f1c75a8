// Package hook is the UDP path's program on an interface: which datagrams are whose (leases), the
// AF_XDP sockets that they go to, and what became of them. It knows sockets by their descriptors
// alone; package xsk makes them.
//
// A lease is a number below MaxLeases. It begins with Begin, has a socket for each queue (Bind), gets
// datagrams from Serve on, and none any more when Withdraw has returned. A queue without a socket, and
// a socket whose last holder is gone, leave the datagrams to the kernel's stack; where the address has a guard
// (Guard), they are dropped, and so are datagrams that come while no lease serves it.
package hook

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/vishvananda/netlink"
)

const (
	// MaxLeases is how many leases an interface can have at once.
	MaxLeases = int(udpLeaseLimitLEASES_MAX)
	// MaxQueues is how many receive queues can have sockets; datagrams on those beyond pass.
	MaxQueues = int(udpLeaseLimitLEASE_QUEUES_MAX)
)

// Options say where the program goes.
type Options struct {
	Interface string      // of the calling thread's network namespace
	Mode      kernel.Mode // auto tries native mode first, and Hook.Reason says why it got generic
	// Kept is the folder of an earlier process's Keep. What is there is taken over with GoOn, if this version has the same
	// layout of maps, and removed otherwise. "": there is none.
	Kept string
	GoOn []Kept
}

// Hook is sh_udp on an interface, or behind the program of another product of this process. It goes with the process,
// unless Keep pins it. Methods may be called at any time from several goroutines, but Close or Leave once, and last.
type Hook struct {
	Interface string
	Ifindex   int
	MTU       int // of the interface, bytes, when it was attached
	Queues    int // receive queues that the interface has room for: see InUse

	objects *ebpf.Collection
	program *ebpf.Program // alone on the interface
	guest   *kernel.Guest
	grace   *kernel.Grace

	mu      sync.Mutex
	leases  map[int]map[netip.AddrPort]bool // the addresses and ports that each lease serves
	stamped map[int]bool                    // leases whose frames come with a time
	guards  map[netip.AddrPort]int          // addresses and ports whose datagrams do not pass -> the lease that guards them
	placed  map[uint32]netip.AddrPort       // place in sh_ud_direct -> its address and port
	kept    string                          // folder that it is pinned in; "": it is not
}

// Attach loads the program and attaches it. Without a lease every packet passes. Nothing is left
// behind when it fails. An interface that has an XDP program of others is refused with its name.
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
		leases: map[int]map[netip.AddrPort]bool{}, stamped: map[int]bool{}, guards: map[netip.AddrPort]int{}, placed: map[uint32]netip.AddrPort{},
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

// Attachment is how the program is attached; behind another one, how that is.
func (h *Hook) Attachment() kernel.Attachment { return h.guest.Attachment() }

// Hosted is whether the program is behind another product's.
func (h *Hook) Hosted() bool { return h.guest.Hosted() }

// Settle has the program be attached again where the one that it was behind has gone. It is to be called from
// time to time in the interface's network namespace.
func (h *Hook) Settle() error { return h.guest.Settle() }

// Gone reports whether the interface of that name is another one now, or none. It asks in the calling thread's network
// namespace, which must be the interface's.
func (h *Hook) Gone() bool {
	dev, err := netlink.LinkByName(h.Interface)
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing) || err == nil && dev.Attrs().Index != h.Ifindex
}

// InUse is how many receive queues the interface uses now, of the calling thread's network namespace: `ethtool -L` may change it.
func (h *Hook) InUse() (int, error) {
	dev, err := netlink.LinkByIndex(h.Ifindex)
	if err != nil {
		return 0, fmt.Errorf("ask for the receive queues of %s: %w", h.Interface, err)
	}
	return kernel.ReceiveQueues(dev.Attrs())
}

// slot is the key of sockets and counters.
func slot(lease, queue int) uint32 { return uint32(lease*MaxQueues + queue) }

func check(lease, queue int) error {
	if lease < 0 || lease >= MaxLeases {
		return fmt.Errorf("lease %d: leases are numbered 0 to %d", lease, MaxLeases-1)
	}
	if queue < 0 || queue >= MaxQueues {
		return fmt.Errorf("queue %d: queues 0 to %d can have sockets", queue, MaxQueues-1)
	}
	return nil
}

// Begin takes a free lease, with all counters zero.
func (h *Hook) Begin() (lease int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for lease := range MaxLeases {
		if h.leases[lease] != nil {
			continue
		}
		zero := make([]udpLeaseCount, ebpf.MustPossibleCPU())
		for queue := range MaxQueues {
			if err := h.objects.Maps[udpMapShUdCounts].Put(slot(lease, queue), zero); err != nil {
				return 0, fmt.Errorf("set the counters of lease %d to zero: %w", lease, err)
			}
		}
		h.leases[lease] = map[netip.AddrPort]bool{}
		return lease, nil
	}
	return 0, fmt.Errorf("begin a lease on interface %s: it has %d, which is the most; end one first", h.Interface, MaxLeases)
}

// Stamp has each frame of a lease come with the time at which the program saw it: CLOCK_MONOTONIC, in nanoseconds, in
// the 8 bytes in front of the frame. It is of what is served from now on.
func (h *Hook) Stamp(lease int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stamped[lease] = true
}

// Bind has a queue's datagrams of a lease go to an AF_XDP socket, which must be bound to that queue of
// this interface. It replaces an earlier one.
func (h *Hook) Bind(lease, queue, socket int) error {
	if err := check(lease, queue); err != nil {
		return fmt.Errorf("bind a socket: %w", err)
	}
	if err := h.objects.Maps[udpMapShUdSockets].Put(slot(lease, queue), uint32(socket)); err != nil {
		return fmt.Errorf("bind a socket to lease %d, queue %d of interface %s: %w", lease, queue, h.Interface, err)
	}
	return nil
}

// Unbind has a queue's datagrams pass to the stack. That it has no socket is success.
func (h *Hook) Unbind(lease, queue int) error {
	if err := check(lease, queue); err != nil {
		return fmt.Errorf("take a socket off: %w", err)
	}
	if err := h.objects.Maps[udpMapShUdSockets].Delete(slot(lease, queue)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("take the socket of lease %d, queue %d of interface %s off: %w", lease, queue, h.Interface, err)
	}
	return nil
}

// key is an address and port as sh_ud_leases has them, and its check.
func key(address netip.AddrPort) (k udpLeaseKey, check uint32) {
	k.Address.High, k.Address.Low = kernel.AddrWords(address.Addr())
	k.Port = kernel.ToWire(address.Port())
	words := k.Address.High ^ k.Address.Low
	return k, uint32(words) ^ uint32(words>>32) ^ uint32(k.Port)
}

// Serve has the datagrams to an address and port go to a lease. Another lease that has them is an error.
func (h *Hook) Serve(lease int, address netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
	switch {
	case h.leases[lease] == nil:
		return fmt.Errorf("serve %s: there is no lease %d", address, lease)
	case !address.IsValid() || address.Addr().IsUnspecified() || address.Port() == 0:
		return fmt.Errorf("serve %s: an address and a port are needed", address)
	}
	for other, served := range h.leases {
		if served[address] && other != lease {
			return fmt.Errorf("serve %s on interface %s: lease %d has it", address, h.Interface, other)
		}
	}
	h.leases[lease][address] = true
	if err := h.settle(address); err != nil {
		delete(h.leases[lease], address)
		return errors.Join(fmt.Errorf("serve %s on interface %s: %w", address, h.Interface, err), h.settle(address))
	}
	return nil
}

// Guard makes a lease without sockets the guard of addresses and ports: their datagrams that no socket takes are dropped in place
// of passing. While another lease serves an address, that one counts them; else the guard does. Unguard has them pass again.
func (h *Hook) Guard(guard int, addresses ...netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leases[guard] == nil {
		return fmt.Errorf("guard %v: there is no lease %d", addresses, guard)
	}
	for _, address := range addresses {
		address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		if other, guarded := h.guards[address]; guarded && other != guard {
			return fmt.Errorf("guard %s on interface %s: lease %d does", address, h.Interface, other)
		}
		h.guards[address] = guard
		if err := h.settle(address); err != nil {
			delete(h.guards, address)
			return errors.Join(fmt.Errorf("guard %s on interface %s: %w", address, h.Interface, err), h.settle(address))
		}
	}
	return nil
}

// Unguard has the datagrams pass again whose guard a lease is. When it returns, the guard counts nothing any more; what it has counted
// stays until End. That it guards none is success.
func (h *Hook) Unguard(guard int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.unguard(guard); err != nil {
		return err
	}
	return h.grace.Wait()
}

func (h *Hook) unguard(guard int) error {
	for address, by := range h.guards {
		if by != guard {
			continue
		}
		delete(h.guards, address)
		if err := h.settle(address); err != nil {
			h.guards[address] = by
			return fmt.Errorf("end the guard of %s on interface %s: %w", address, h.Interface, err)
		}
	}
	return nil
}

// owner is the lease that has an address and port: one that serves it, or else its guard. The caller holds mu.
func (h *Hook) owner(address netip.AddrPort) (lease int, owned bool) {
	for lease, served := range h.leases {
		if served[address] {
			return lease, true
		}
	}
	lease, owned = h.guards[address]
	return lease, owned
}

// owned are all addresses and ports that some lease has. The caller holds mu.
func (h *Hook) owned() iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		for _, served := range h.leases {
			for address := range served {
				if !yield(address) {
					return
				}
			}
		}
		for address := range h.guards {
			if !yield(address) {
				return
			}
		}
	}
}

// settle has the maps say who has an address and port now. The caller holds mu.
func (h *Hook) settle(address netip.AddrPort) error {
	k, _ := key(address)
	lease, owned := h.owner(address)
	if !owned {
		if err := h.clearPlace(address); err != nil {
			return err
		}
		if err := h.objects.Maps[udpMapShUdLeases].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("take its entry out: %w", err)
		}
		return errors.Join(h.markPort(address.Port(), h.portOwned(address.Port())), h.fillPlace(address.Port()))
	}
	if err := h.markPort(address.Port(), true); err != nil {
		return err
	}
	if err := h.objects.Maps[udpMapShUdLeases].Put(k, h.entry(lease, address)); err != nil {
		return fmt.Errorf("%w; there is room for %d addresses and ports", err, udpLeaseLimitLEASE_FRONTENDS_MAX)
	}
	if at := place(address.Port()); h.placed[at] == address {
		return h.putPlace(at, address)
	}
	return h.fillPlace(address.Port())
}

// place is the place of a port in sh_ud_direct.
func place(port uint16) uint32 { return uint32(port) % uint32(udpLeaseLimitLEASE_DIRECT_MAX) }

// putPlace puts an address and port that some lease has into a place. The caller holds mu.
func (h *Hook) putPlace(at uint32, address netip.AddrPort) error {
	k, _ := key(address)
	lease, _ := h.owner(address)
	if err := h.objects.Maps[udpMapShUdDirect].Put(at, udpLeaseDirect{Key: k, Lease: h.entry(lease, address)}); err != nil {
		return fmt.Errorf("note %s on interface %s by its port: %w", address, h.Interface, err)
	}
	h.placed[at] = address
	return nil
}

// fillPlace gives the place of a port to an address and port that some lease has, unless one is in it. The caller holds mu.
func (h *Hook) fillPlace(port uint16) error {
	at := place(port)
	if h.placed[at].IsValid() {
		return nil
	}
	for address := range h.owned() {
		if place(address.Port()) == at {
			return h.putPlace(at, address)
		}
	}
	return nil
}

// clearPlace takes an address and port off the place of its port, if it is there. The caller holds mu.
func (h *Hook) clearPlace(address netip.AddrPort) error {
	at := place(address.Port())
	if h.placed[at] != address {
		return nil
	}
	if err := h.objects.Maps[udpMapShUdDirect].Put(at, udpLeaseDirect{Lease: udpLease{Index: uint32(udpLeaseLimitLEASES_MAX)}}); err != nil {
		return fmt.Errorf("take %s of interface %s off the place of its port: %w", address, h.Interface, err)
	}
	delete(h.placed, at)
	return nil
}

// entry is a lease's entry in the maps for an address and port.
func (h *Hook) entry(lease int, address netip.AddrPort) udpLease {
	_, sum := key(address)
	index := uint32(lease)
	if h.stamped[lease] {
		index |= uint32(udpLeaseLimitLEASE_STAMPED)
	}
	if _, guarded := h.guards[address]; guarded {
		index |= uint32(udpLeaseLimitLEASE_DROP)
	}
	return udpLease{Index: index, Check: sum}
}

// portOwned is whether some lease has a port, at whatever address.
func (h *Hook) portOwned(port uint16) bool {
	for address := range h.owned() {
		if address.Port() == port {
			return true
		}
	}
	return false
}

// markPort says whether the program has to look for leases of a port.
func (h *Hook) markPort(port uint16, served bool) error {
	var word uint64
	index, bit := uint32(port)/64, uint64(1)<<(port%64)
	err := h.objects.Maps[udpMapShUdPorts].Lookup(index, &word)
	if err == nil && (word&bit != 0) != served {
		err = h.objects.Maps[udpMapShUdPorts].Put(index, word^bit)
	}
	if err != nil {
		return fmt.Errorf("note whether port %d of interface %s has a lease: %w", port, h.Interface, err)
	}
	return nil
}

// Withdraw has the datagrams to addresses and ports pass to the stack, or be dropped where there is a guard. When it returns, no
// program runs any more that has seen them as the lease's. That it has none of them is success.
func (h *Hook) Withdraw(lease int, addresses ...netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.withdraw(lease, addresses...)
}

func (h *Hook) withdraw(lease int, addresses ...netip.AddrPort) error {
	for _, address := range addresses {
		address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		if !h.leases[lease][address] {
			continue
		}
		delete(h.leases[lease], address)
		if err := h.settle(address); err != nil {
			h.leases[lease][address] = true
			return fmt.Errorf("withdraw %s from lease %d of interface %s: %w", address, lease, h.Interface, err)
		}
	}
	return h.grace.Wait()
}

// End withdraws all that a lease serves or guards, takes its sockets off, and makes its number free. That there
// is no such lease is success.
func (h *Hook) End(lease int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	served, ok := h.leases[lease]
	if !ok {
		return nil
	}
	if err := h.unguard(lease); err != nil {
		return err
	}
	var addresses []netip.AddrPort
	for address := range served {
		addresses = append(addresses, address)
	}
	if err := h.withdraw(lease, addresses...); err != nil {
		return err
	}
	for queue := range MaxQueues {
		if err := h.Unbind(lease, queue); err != nil {
			return err
		}
	}
	delete(h.leases, lease)
	delete(h.stamped, lease)
	return nil
}

// Count counts a lease's datagrams on one queue: Matched is PassedNoSocket, DroppedNoSocket and
// all that the queue's socket was given.
type Count struct {
	Matched         uint64 `json:"matched"`
	PassedNoSocket  uint64 `json:"passed_no_socket"`
	DroppedNoSocket uint64 `json:"dropped_no_socket"`
}

// Add adds another one's.
func (c *Count) Add(o Count) {
	c.Matched += o.Matched
	c.PassedNoSocket += o.PassedNoSocket
	c.DroppedNoSocket += o.DroppedNoSocket
}

// NoSocket is how many no socket took: they passed, or were dropped.
func (c Count) NoSocket() uint64 { return c.PassedNoSocket + c.DroppedNoSocket }

// Counts are those of a lease on a queue, since Begin.
func (h *Hook) Counts(lease, queue int) (sum Count, err error) {
	if err := check(lease, queue); err != nil {
		return sum, fmt.Errorf("read counters: %w", err)
	}
	var each []udpLeaseCount
	if err := h.objects.Maps[udpMapShUdCounts].Lookup(slot(lease, queue), &each); err != nil {
		return sum, fmt.Errorf("read the counters of lease %d, queue %d: %w", lease, queue, err)
	}
	for _, one := range each {
		sum.Add(Count{one.Matched, one.PassedNoSocket, one.DroppedNoSocket})
	}
	return sum, nil
}

// Sum is Counts over all queues of the interface but some.
func (h *Hook) Sum(lease int, but ...int) (sum Count, err error) {
	for queue := range min(h.Queues, MaxQueues) {
		if slices.Contains(but, queue) {
			continue
		}
		c, err := h.Counts(lease, queue)
		if err != nil {
			return sum, err
		}
		sum.Add(c)
	}
	return sum, nil
}

// passedNames are the words for enum lease_pass.
var passedNames = map[udpLeasePass]string{
	udpLeasePassPASSED_FRAGMENT:  "fragment",
	udpLeasePassPASSED_OPTIONS:   "options",
	udpLeasePassPASSED_MALFORMED: "malformed",
	udpLeasePassPASSED_LARGE:     "large",
	udpLeasePassPASSED_QUEUE:     "queue",
	udpLeasePassPASSED_UNSTAMPED: "unstamped",
}

// Passed counts packets that the program left to the stack, by reason: fragments of any protocol, UDP behind
// options, malformed packets, and datagrams to a lease that are too large, on a queue beyond MaxQueues, or cannot have the
// time that the lease is to have.
func (h *Hook) Passed() (map[string]uint64, error) {
	sums := map[string]uint64{}
	for why, name := range passedNames {
		var each []uint64
		if err := h.objects.Maps[udpMapShUdPassed].Lookup(uint32(why), &each); err != nil {
			return nil, fmt.Errorf("read the counter of passed packets (%s): %w", name, err)
		}
		for _, one := range each {
			sums[name] += one
		}
	}
	return sums, nil
}

// RunPacket runs the program on a frame as if it had come in by the interface's queue 0, and returns
// XDP's verdict. It counts; no socket gets anything. The interface must be in the calling thread's
// network namespace.
func (h *Hook) RunPacket(frame []byte) (verdict uint32, out []byte, err error) {
	return kernel.RunXDP(h.program, h.Interface, h.Ifindex, frame)
}

// release lets go of maps and program.
func (h *Hook) release() (err error) {
	if h.grace != nil {
		err = h.grace.Close()
	}
	h.objects.Close()
	return err
}

// Close takes the program off. All leases end with it.
func (h *Hook) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := errors.Join(h.guest.Close(), h.forget(), h.release()); err != nil {
		return fmt.Errorf("take the UDP path's program off interface %s: %w", h.Interface, err)
	}
	return nil
}
