package kernel

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/host"
)

// The kernel runs one XDP program on an interface. Two products of one process share the interface like this: the
// host's program is attached, and hands the packets that it passes to the guest's program by a tail call. A
// guest without a host is attached itself. So either may come and go, in any order:
//
//	no host:  frame ─► guest ─► the stack
//	a host:   frame ─► host ─► passes ─► guest ─► the stack
//
// A GuestHook connects hosts and guests, one for each interface; they know nothing of each other. The hook
// ends with the process: the kernel empties a prog array when no process has it open any more and no file of bpffs
// has it (prog_array_map_clear in kernel/bpf/arraymap.c). The host's program then passes packets as before. A guest
// that is kept (Keep) pins its link, or its hook. So it goes on without a process, and the next process takes it over.

// GuestHook connects an interface's host and guest. Methods may be called at any time.
type GuestHook struct {
	key   hookKey
	users int // guarded by hooks; hosts and guests that use this one

	mu    sync.Mutex // held during a whole change
	array *ebpf.Map  // the host's programs call its element 0
	after *ebpf.Map  // the chain of the host, by which the guest's program continues; nil: there is no host
	hosts int        // hosts that use the hook: one, or two while one replaces the other
	guest *Guest
}

// hookKey identifies an interface: indexes are unique within a network namespace.
type hookKey struct {
	namespace uint64 // inode
	ifindex   int
}

var hooks = struct {
	sync.Mutex
	all map[hookKey]*GuestHook
}{all: map[hookKey]*GuestHook{}}

// useHook finds or makes the GuestHook of an interface of the calling thread's network namespace.
func useHook(ifindex int) (*GuestHook, error) {
	netns, err := host.Netns()
	if err != nil {
		return nil, err
	}
	key := hookKey{netns, ifindex}
	hooks.Lock()
	defer hooks.Unlock()
	hook := hooks.all[key]
	if hook == nil {
		array, err := ebpf.NewMap(&ebpf.MapSpec{Name: GuestMap, Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			return nil, fmt.Errorf("make the hook for a guest: %w", err)
		}
		hook = &GuestHook{key: key, array: array}
		hooks.all[key] = hook
	}
	hook.users++
	return hook, nil
}

// leave undoes useHook.
func (g *GuestHook) leave() {
	hooks.Lock()
	defer hooks.Unlock()
	if g.users--; g.users == 0 {
		delete(hooks.all, g.key)
		_ = g.array.Close()
	}
}

// GuestMap is the name of the map in a host's program that a GuestHook's Array replaces.
const GuestMap = "sh_guest"

// HostGuests is for a product whose program passes packets on: it returns the GuestHook of an interface of the
// calling thread's network namespace. The caller releases it.
func HostGuests(ifindex int) (*GuestHook, error) {
	g, err := useHook(ifindex)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hosts++
	return g, nil
}

// Array is the map of which the host's programs call element 0. The GuestHook keeps ownership.
func (g *GuestHook) Array() *ebpf.Map { return g.array }

// Change runs change, with which a host attaches its program. A guest leaves the interface before change, and
// is behind the host, or on the interface again, afterwards. During this short time, packets for the guest
// pass. If the guest fails, the host does not: Guest.Settle tries again, and reports the reason.
// after is the host's chain. The calling thread is in the interface's network namespace.
func (g *GuestHook) Change(after *ebpf.Map, change func() error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	clone, err := after.Clone()
	if err != nil {
		return fmt.Errorf("keep the host's chain for a guest: %w", err)
	}
	g.forgetAfter()
	g.after = clone
	if g.guest != nil {
		_ = g.guest.goBehind() // settle tries again
		if err := g.guest.leaveInterface(); err != nil {
			return fmt.Errorf("detach the guest from interface %s, before the host's program is attached: %w", g.guest.iface, err)
		}
		defer g.guest.settle() //nolint:errcheck // Guest.Settle tells
	}
	return change()
}

func (g *GuestHook) forgetAfter() {
	if g.after != nil {
		_ = g.after.Close()
		g.after = nil
	}
}

// Release ends a host's part, after its program was detached or left to another process.
func (g *GuestHook) Release() {
	defer g.leave()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.hosts--; g.hosts > 0 {
		return
	}
	g.forgetAfter()
	if g.guest != nil {
		_ = g.guest.settle() // Guest.Settle tells
	}
}

// Guest is a product's program on an interface, attached to it or behind a host's program. Methods may be
// called at any time, but Close once, and last.
type Guest struct {
	hook    *GuestHook
	iface   string
	ifindex int
	asked   Mode
	own     *ebpf.Program                                // the caller's, for the interface
	load    func(after *ebpf.Map) (*ebpf.Program, error) // loads the same program, to run behind a host
	pins    string                                       // folder of bpffs that keeps the guest; "": it ends with the process

	// Fields guarded by hook.mu:
	at     Attachment
	link   link.Link // nil: not on the interface
	behind bool      // a host's program hands on to it
}

// HostedReason is the reason of an Attachment whose host is in generic mode.
const HostedReason = "the balancer's program, which hands packets on to it, is in generic mode"

// EnterXDP attaches a program to an interface of the calling thread's network namespace, or puts it behind the
// program of a host in this process. load loads the program once more, onto the same maps, to continue by a host's
// chain (CHAIN_AFTER). If another program is on the interface, the error has its name, and nothing is left behind.
// kept is the folder in which an earlier process has kept such a guest, which this guest replaces without a gap; "":
// there is none.
func EnterXDP(own *ebpf.Program, load func(after *ebpf.Map) (*ebpf.Program, error), iface string, ifindex int, mode Mode, kept string) (*Guest, error) {
	hook, err := useHook(ifindex)
	if err != nil {
		return nil, err
	}
	hook.mu.Lock()
	defer hook.mu.Unlock()
	g := &Guest{hook: hook, iface: iface, ifindex: ifindex, asked: mode, own: own, load: load, pins: kept, at: Attachment{Interface: iface}}
	if hook.guest != nil {
		err = errors.Join(Occupied(iface, ""), fmt.Errorf("attach to interface %s: this process has such a program there already", iface))
	} else {
		err = g.settle()
	}
	if err != nil {
		hook.leave()
		return nil, err
	}
	hook.guest = g
	return g, nil
}

func hostedMode(mode Mode) (Mode, string) {
	if mode == ModeGeneric {
		return mode, HostedReason
	}
	return mode, ""
}

// attach attaches to the interface itself.
func (g *Guest) attach() error {
	if taken, err := g.takeOver(); taken || err != nil {
		return err
	}
	if err := Occupied(g.iface, ""); err != nil {
		return err
	}
	reason, err := InMode(g.iface, g.asked, "auto, native or generic", func(m Mode) (err error) {
		g.at.Mode = m
		g.link, err = AttachXDP(g.own, g.iface, g.ifindex, m, "")
		return err
	})
	g.at.Reason = reason
	if err == nil {
		if err = g.pin(); err != nil {
			err = errors.Join(err, g.leaveInterface())
		}
	}
	return err
}

// goBehind makes a host's program pass packets to the guest, as soon as that program is attached.
func (g *Guest) goBehind() error {
	p, err := g.load(g.hook.after)
	if err == nil {
		err = errors.Join(g.hook.array.Put(uint32(0), p), p.Close())
	}
	if err != nil {
		return fmt.Errorf("put the guest behind the host's program on interface %s: %w", g.iface, err)
	}
	g.behind = true
	return g.pin()
}

// leaveInterface detaches the program from the interface. It succeeds if the program is not there.
func (g *Guest) leaveInterface() error {
	if g.link == nil {
		return nil
	}
	l := g.link
	g.link = nil
	return DropLink(l)
}

// leaveHost stops every program from passing packets to the guest. It succeeds if none does.
func (g *Guest) leaveHost() error {
	if err := g.hook.array.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the guest behind the host's program on interface %s: %w", g.iface, err)
	}
	g.behind = false
	return g.unpinHook()
}

// settle attaches the guest to the interface or puts it behind the host. While there is a host, a program on
// the interface is the host's, or one that the host runs before its own. A guest stays behind a host's program
// that outlives the host.
func (g *Guest) settle() error {
	if g.link != nil {
		return nil
	}
	dev, err := netlink.LinkByIndex(g.ifindex)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		return nil // the guest goes with the interface
	case err != nil:
		return fmt.Errorf("look at interface %s: %w", g.iface, err)
	}
	mode := ModeOf(dev)
	if mode != "" && g.hook.after != nil && !g.behind {
		err = g.goBehind()
	}
	if err == nil && mode != "" && g.behind {
		g.at.Mode, g.at.Reason = hostedMode(mode)
		return nil
	}
	if err == nil {
		err = g.attach()
	}
	if err != nil {
		return err
	}
	return g.leaveHost()
}

// Attachment describes how the program is attached; behind a host's program it has that program's mode.
func (g *Guest) Attachment() Attachment {
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	return g.at
}

// Hosted reports whether the guest is behind another product's program.
func (g *Guest) Hosted() bool {
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	return g.behind
}

// Settle attaches a guest to the interface if its host has gone without a call, as after `shunt detach` of a balancer.
// Call it from time to time, in the interface's network namespace.
func (g *Guest) Settle() error {
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	return g.settle()
}

// Close detaches the program.
func (g *Guest) Close() error {
	defer g.hook.leave()
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	g.hook.guest = nil
	return errors.Join(g.leaveInterface(), g.leaveHost())
}
