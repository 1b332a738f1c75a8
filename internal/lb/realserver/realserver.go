// Package realserver makes a server fit for direct return, undoes that, and finds the reason
// when direct return fails. With direct return a packet arrives with a VIP as its
// destination, and the server answers the client with the VIP as its source:
//
//	client ──► balancer ──(MAC, IPIP or GUE)──► server: the VIP is on lo
//	   ▲                                           │
//	   └───────────────────────────────────────────┘
//
// So the server has to have the VIP without telling the network: the VIP is on lo, the server
// does not answer ARP for it, and does not use it as the sender of ARP requests.
//
// IPv6 needs no such setting. A kernel answers a neighbour solicitation only for addresses
// of the interface where it arrived (ndisc_recv_ns in net/ipv6/ndisc.c), and sends its own from
// an address of the interface that they leave by (ndisc_solicit); test/net shows both.
//
// Invariant: a change is stored before it is made, so that a later process can undo it. A
// setting that another program has changed since is left alone.
//
// It uses rtnetlink and /proc/sys/net (CAP_NET_ADMIN), in the calling thread's namespace.
package realserver

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// loopback is the interface that every network namespace has.
const loopback = "lo"

// State records changes of the host. The caller stores it until the changes are undone.
type State struct {
	// Addresses were added to lo.
	Addresses []netip.Addr   `json:"addresses"`
	Settings  []host.Setting `json:"settings"`
}

// IsZero reports whether there is nothing to undo.
func (s State) IsZero() bool { return len(s.Addresses) == 0 && len(s.Settings) == 0 }

// Prepare gives lo the VIPs, and sets the settings that keep ARP quiet about them on some interfaces. Changes
// of an earlier process (before) that are no longer wanted are undone first. store gets the state that Prepare
// will make; if store fails, nothing more is changed. Prepare returns the stored state, also
// with an error, for Restore. Repeating it changes nothing.
func Prepare(interfaces []string, vips []netip.Addr, before State, store func(State) error) (State, error) {
	for _, iface := range interfaces {
		if _, err := net.InterfaceByName(iface); err != nil {
			return before, fmt.Errorf("prepare interface %s: it does not exist; `ip link` lists the interfaces", iface)
		}
	}
	kept, gone, settings, err := divide(interfaces, vips, before)
	if err != nil {
		return before, err
	}
	if left, err := gone.Restore(); err != nil {
		return State{append(kept.Addresses, left.Addresses...), append(kept.Settings, left.Settings...)}, err
	}
	state := State{slices.Clone(kept.Addresses), slices.Clone(kept.Settings)}
	var missing []netip.Addr
	for _, vip := range vips {
		there, err := onLoopback(vip)
		if err != nil {
			return state, err
		}
		if !there {
			missing = append(missing, vip)
			if !slices.Contains(state.Addresses, vip) {
				state.Addresses = append(state.Addresses, vip)
			}
		}
	}
	for _, s := range settings {
		state.Settings = slices.DeleteFunc(state.Settings, func(old host.Setting) bool { return old.Name == s.Name })
		state.Settings = append(state.Settings, s)
	}
	if err := store(state); err != nil {
		return before, fmt.Errorf("prepare %s for the VIPs: store the changes to undo: %w", strings.Join(interfaces, ", "), err)
	}
	// ARP settings come before the addresses.
	for _, s := range settings {
		if err := s.Apply(); err != nil {
			return state, err
		}
	}
	for _, vip := range missing {
		if err := addVIP(vip); err != nil {
			return state, err
		}
	}
	return state, nil
}

// divide splits an earlier process's changes into changes to keep and changes to undo, and finds the settings that
// have to change now.
func divide(interfaces []string, vips []netip.Addr, before State) (kept, gone State, change []host.Setting, err error) {
	for _, a := range before.Addresses {
		if slices.Contains(vips, a) {
			kept.Addresses = append(kept.Addresses, a)
		} else {
			gone.Addresses = append(gone.Addresses, a)
		}
	}
	if slices.ContainsFunc(vips, netip.Addr.Is4) {
		if change, err = settingsToChange(interfaces); err != nil {
			return kept, gone, nil, err
		}
	}
	for _, s := range before.Settings {
		device := filepath.Base(filepath.Dir(s.Name))
		if device == "all" || slices.Contains(interfaces, device) {
			kept.Settings = append(kept.Settings, s)
		} else {
			gone.Settings = append(gone.Settings, s)
		}
	}
	return kept, gone, change, nil
}

func settingName(device, name string) string { return "net/ipv4/conf/" + device + "/" + name }

// settingsToChange finds the settings that direct return needs to be different. Of each setting the larger
// value of "all" and the interface applies (Documentation/networking/ip-sysctl).
func settingsToChange(interfaces []string) (change []host.Setting, err error) {
	for _, device := range append([]string{"all"}, interfaces...) {
		for _, want := range []struct {
			name  string
			least int
		}{{"arp_ignore", arpIgnoreLeast}, {"arp_announce", arpAnnounceLeast}} {
			name := settingName(device, want.name)
			value, err := host.ReadNumber(name)
			if err != nil {
				return nil, err
			}
			if value < want.least {
				change = append(change, host.Setting{Name: name, Before: strconv.Itoa(value), Set: strconv.Itoa(want.least)})
			}
		}
	}
	all, err := host.ReadNumber(settingName("all", "rp_filter"))
	if err != nil {
		return nil, err
	}
	for _, iface := range interfaces {
		own, err := host.ReadNumber(settingName(iface, "rp_filter"))
		if err != nil {
			return nil, err
		}
		if max(all, own) == reversePathStrict {
			change = append(change, host.Setting{Name: settingName(iface, "rp_filter"), Before: strconv.Itoa(own), Set: strconv.Itoa(reversePathLoose)})
		}
	}
	return change, nil
}

// Restore undoes the changes in the state, and returns the rest: nothing, or the changes that failed. A value
// that is no longer the one that was set belongs to another program by now, and is left alone.
func (s State) Restore() (State, error) {
	var left State
	var errs []error
	for _, a := range s.Addresses {
		if err := removeVIP(a); err != nil {
			left.Addresses = append(left.Addresses, a)
			errs = append(errs, err)
		}
	}
	var err error
	left.Settings, err = host.Restore(s.Settings)
	errs = append(errs, err)
	return left, errors.Join(errs...)
}

func onLoopback(vip netip.Addr) (bool, error) {
	lo, err := netlink.LinkByName(loopback)
	if err != nil {
		return false, fmt.Errorf("look for %s on %s: %w", vip, loopback, err)
	}
	list, err := netlink.AddrList(lo, family(vip))
	if err != nil {
		return false, fmt.Errorf("look for %s on %s: %w", vip, loopback, err)
	}
	return slices.ContainsFunc(list, func(a netlink.Addr) bool { return a.IP.Equal(vip.AsSlice()) }), nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

func whole(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// addVIP gives lo an address that the host's own connections do not use: scope host excludes an IPv4 address
// from the choice, and being deprecated an IPv6 address (RFC 6724, rule 3).
func addVIP(vip netip.Addr) error {
	lo, err := netlink.LinkByName(loopback)
	if err != nil {
		return fmt.Errorf("add %s to %s: %w", vip, loopback, err)
	}
	address := &netlink.Addr{IPNet: whole(vip)}
	if vip.Is4() {
		address.Scope = unix.RT_SCOPE_HOST
	} else {
		const forever = 0xffffffff // INFINITY_LIFE_TIME of net/addrconf.h
		address.Flags, address.ValidLft, address.PreferedLft = unix.IFA_F_NODAD, forever, 0
	}
	err = netlink.AddrAdd(lo, address)
	switch {
	case errors.Is(err, unix.EEXIST):
		return nil
	case errors.Is(err, unix.EACCES) && vip.Is6():
		return fmt.Errorf("add %s to %s: %w; IPv6 is switched off there; switch it on with `sysctl -w net.ipv6.conf.lo.disable_ipv6=0`", vip, loopback, err)
	case err != nil:
		return fmt.Errorf("add %s to %s: %w", vip, loopback, err)
	}
	return nil
}

func removeVIP(vip netip.Addr) error {
	lo, err := netlink.LinkByName(loopback)
	if err == nil {
		err = netlink.AddrDel(lo, &netlink.Addr{IPNet: whole(vip)})
	}
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("take %s off %s: %w", vip, loopback, err)
	}
	return nil
}
