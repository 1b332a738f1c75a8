package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// GuestOf opens the program to which a host's program passes packets, in any process; nil: there is none. It
// needs CAP_SYS_ADMIN. The caller closes it.
func GuestOf(host *ebpf.Program) (*ebpf.Program, error) {
	info, err := host.Info()
	if err != nil {
		return nil, fmt.Errorf("look at the host's program: %w", err)
	}
	maps, _ := info.MapIDs()
	for _, id := range maps {
		p, err := guestIn(id)
		if err != nil {
			return nil, fmt.Errorf("look for a guest of program %q: %w", info.Name, err)
		}
		if p != nil {
			return p, nil
		}
	}
	return nil, nil
}

// guestIn returns the program in a map, if the map is an array for guests and has one.
func guestIn(id ebpf.MapID) (*ebpf.Program, error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil || info.Name != GuestMap || m.Type() != ebpf.ProgramArray {
		return nil, err
	}
	var p *ebpf.Program
	err = m.Lookup(uint32(0), &p)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	return p, err
}

// GuestBehind returns the name of the program behind the host's on an interface of the calling thread's network
// namespace, as this process has put it there; "": none. It needs no privilege.
func GuestBehind(iface string) (name string, id uint32, err error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return "", 0, fmt.Errorf("look for a guest on interface %s: %w", iface, err)
	}
	hook, err := useHook(dev.Attrs().Index)
	if err != nil {
		return "", 0, err
	}
	defer hook.leave()
	hook.mu.Lock()
	defer hook.mu.Unlock()
	if hook.guest == nil || !hook.guest.behind {
		return "", 0, nil
	}
	info, err := hook.guest.own.Info()
	if err != nil {
		return "", 0, fmt.Errorf("look at the guest on interface %s: %w", iface, err)
	}
	if err := hook.array.Lookup(uint32(0), &id); err != nil {
		return "", 0, fmt.Errorf("look for a guest on interface %s: %w", iface, err)
	}
	return info.Name, id, nil
}
