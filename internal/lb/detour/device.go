package detour

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// mtu is the minimum of IPv6 (RFC 8200, 5), so that a check's packets fit with any outer headers.
	mtu = 1280
	// priority is the rule's: directly after the table of the host's own addresses.
	priority = 1
	// remakeInterval is the least time between two attempts to make the device anew because checks go astray:
	// it disturbs other checks that use the device.
	remakeInterval = 10 * time.Second
)

// Device returns the name of the device with a number.
func Device(number uint8) string { return fmt.Sprintf("%s%d", realserver.CheckDevice, number) }

// peer is the name of the device's other end.
func peer(number uint8) string { return Device(number) + "p" }

// alias returns the alias of the device in `ip link`, which names its owner.
func alias(instance string) string { return "way of health checks of shunt instance " + instance }

// families are the address families of a host, as in netlink.
var families = map[string]struct {
	number  int
	anybody *net.IPNet
}{
	"IPv4": {netlink.FAMILY_V4, &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}},
	"IPv6": {netlink.FAMILY_V6, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}},
}

func familyOf(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// Prepare makes the path to VIPs, so that the first checks do not have to wait for it. Checks report its
// failures.
func (w *Detour) Prepare(vips []netip.Addr) {
	tried := map[string]bool{}
	for _, vip := range vips {
		if family := familyOf(vip); !tried[family] {
			tried[family] = true
			_, _, _ = w.lead(vip)
		}
	}
}

// lead makes marked packets to a VIP reach the program, and returns the program and the mark.
func (w *Detour) lead(vip netip.Addr) (Program, uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if family := familyOf(vip); !w.led[family] {
		if err := w.make(family); err != nil {
			return nil, 0, fmt.Errorf("prepare the path of health checks with direct return: %w", err)
		}
		w.led[family] = true
	}
	return w.program, w.options.Mark(w.number), nil
}

// make makes the missing objects of the path for a family. The caller holds mu.
func (w *Detour) make(family string) error {
	if w.program == nil {
		program, err := w.options.Load()
		if err != nil {
			return err
		}
		w.program = program
	}
	if link, err := netlink.LinkByIndex(w.device); w.device == 0 || err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		if err := w.makeDevice(); err != nil {
			return err
		}
	}
	if family == "IPv6" {
		if err := enableIPv6(Device(w.number)); err != nil {
			return err
		}
	}
	return w.makeRoutes(family)
}

// makeDevice makes the pair anew: under its earlier number, or else under the first free one.
func (w *Detour) makeDevice() error {
	clear(w.led)
	w.device = 0
	if w.number != 0 {
		if made, err := w.makePair(w.number); made || err != nil {
			return err
		}
	}
	for n := range uint8(math.MaxUint8) {
		if made, err := w.makePair(n + 1); made || err != nil {
			return err
		}
	}
	return fmt.Errorf("all names from %s to %s are taken: `ip link`", Device(1), Device(math.MaxUint8))
}

// makePair makes the pair under a number; made is false if another process has the number.
func (w *Detour) makePair(number uint8) (made bool, err error) {
	if free, err := removeDevice(w.options.Instance, number, number == w.number); err != nil || !free {
		return false, err
	}
	if w.number != 0 && w.number != number { // or its rules would be forgotten
		if err := Remove(w.options.Instance, w.number, w.options.Mark(w.number)); err != nil {
			return false, err
		}
	}
	if err := w.options.Note(number); err != nil {
		return false, err
	}
	w.number = number
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = Device(number), mtu
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerMTU = peer(number), mtu
	err = netlink.LinkAdd(pair)
	if errors.Is(err, unix.EEXIST) {
		return false, nil // another instance was faster
	}
	if err != nil {
		return false, fmt.Errorf("add the devices %s and %s, a veth pair: %w", Device(number), peer(number), err)
	}
	ifindex, err := w.setUp(number)
	if err != nil {
		_, failed := removeDevice(w.options.Instance, number, true)
		return false, errors.Join(err, failed)
	}
	w.device, w.made = ifindex, time.Now()
	return true, nil
}

// noAddress is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h: the device gets no link-local address.
const noAddress = 1

// setUp configures the ends of the pair, and returns the index of the end to which packets are led. The program
// is attached before a packet can leave.
func (w *Detour) setUp(number uint8) (ifindex int, err error) {
	for _, name := range []string{peer(number), Device(number)} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return 0, fmt.Errorf("find the device %s: %w", name, err)
		}
		_ = netlink.LinkSetIP6AddrGenMode(link, noAddress) // a kernel without IPv6 has no such setting
		errs := []error{netlink.LinkSetAlias(link, alias(w.options.Instance)), netlink.LinkSetARPOff(link)}
		if name == Device(number) {
			ifindex = link.Attrs().Index
			errs = append(errs, w.program.Attach(ifindex))
		}
		if err := errors.Join(append(errs, netlink.LinkSetUp(link))...); err != nil {
			return 0, fmt.Errorf("set up the device %s: %w", name, err)
		}
	}
	return ifindex, nil
}

// makeRoutes leads marked packets of a family to the device, or to no destination if the device is gone: any
// other route would lead them to any backend.
func (w *Detour) makeRoutes(family string) error {
	f := families[family]
	mark := w.options.Mark(w.number)
	table := int(mark)
	routes := []*netlink.Route{
		{Family: f.number, Table: table, Dst: f.anybody, LinkIndex: w.device, Scope: netlink.SCOPE_LINK},
		{Family: f.number, Table: table, Dst: f.anybody, Type: unix.RTN_UNREACHABLE, Priority: math.MaxInt32},
	}
	for _, route := range routes {
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("add an %s route to table %d: %w", family, table, err)
		}
	}
	rule, mask := netlink.NewRule(), uint32(math.MaxUint32)
	rule.Family, rule.Table, rule.Priority = f.number, table, priority
	rule.Mark, rule.Mask = mark, &mask
	if err := netlink.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add an %s rule for mark %#x: %w", family, rule.Mark, err)
	}
	return nil
}

// Close ends the checks that are under way, and closes the program. Remove removes the rest.
func (w *Detour) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.program == nil {
		return nil
	}
	err := w.program.Close()
	w.program, w.led = nil, map[string]bool{}
	return err
}

// Remove removes the objects of an instance under a number. It succeeds if there are none, or if another
// instance has the number by now.
func Remove(instance string, number uint8, mark uint32) error {
	mine, err := removeDevice(instance, number, true)
	if err != nil || !mine {
		return err
	}
	var errs []error
	for family, f := range families {
		rules, err := netlink.RuleListFiltered(f.number, &netlink.Rule{Table: int(mark)}, netlink.RT_FILTER_TABLE)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue // a kernel without that family
		}
		for i := range rules {
			err = errors.Join(err, unlessGone(netlink.RuleDel(&rules[i])))
		}
		routes, failed := netlink.RouteListFiltered(f.number, &netlink.Route{Table: int(mark)}, netlink.RT_FILTER_TABLE)
		err = errors.Join(err, unlessGone(failed)) // there may be no such table
		for i := range routes {
			err = errors.Join(err, unlessGone(netlink.RouteDel(&routes[i])))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the %s rule and routes of table %d: %w", family, mark, err))
		}
	}
	return errors.Join(errs...)
}

// unlessGone returns an error of removing an object, unless the object is gone.
func unlessGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// removeDevice deletes the device of a number if it is the instance's. noted: the number is known to be the
// instance's, so a device without an alias was being made by a killed process.
func removeDevice(instance string, number uint8, noted bool) (removed bool, err error) {
	link, err := netlink.LinkByName(Device(number))
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return true, nil
	}
	if err == nil {
		whose := link.Attrs().Alias
		if whose != alias(instance) && (whose != "" || !noted) {
			return false, nil
		}
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return false, fmt.Errorf("delete the device %s: %w", Device(number), err)
	}
	return true, nil
}

// enableIPv6 gives a device IPv6, which new devices may lack.
func enableIPv6(device string) error {
	on := host.Setting{Name: "net/ipv6/conf/" + device + "/disable_ipv6", Set: "0"}
	if now, err := host.ReadNumber(on.Name); err == nil && now == 0 {
		return nil
	}
	if err := on.Apply(); err != nil {
		return fmt.Errorf("enable IPv6 on %s: %w; set net.ipv6.conf.default.disable_ipv6 = 0, so that the device has IPv6 from the start", device, err)
	}
	return nil
}
