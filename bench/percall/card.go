package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/bench/bed"
)

// addCard puts a tap in the place of one of the balancer's interfaces, with its MAC, addresses and
// neighbours. A tap sends back by XDP_TX, as a network card does, where a veth has to redirect, which
// costs a helper call (redirect_back in bpf/lb/config.h). No host is behind it: nothing leaves in a test
// run.
func addCard(b *bed.Bed, name string, addresses []netip.Prefix, mac net.HardwareAddr, neighbours []netip.Addr) (remove func() error, err error) {
	host := b.Host(bed.Balancer)
	before, err := host.Netlink().LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find interface %s: %w", name, err)
	}
	if err := host.DeleteInterface(name); err != nil {
		return nil, err
	}
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_NO_PI, Queues: 1}
	err = host.Run(func() error { return netlink.LinkAdd(tap) })
	if err != nil {
		return nil, fmt.Errorf("add the tap %s: %w", name, err)
	}
	remove = func() (err error) {
		for _, queue := range tap.Fds {
			err = errors.Join(err, queue.Close())
		}
		return err
	}
	errs := []error{host.SetMAC(name, before.Attrs().HardwareAddr), host.SetUp(name, true), host.SetSysctl("net.ipv6.conf."+name+".disable_ipv6", "0")}
	for _, address := range addresses {
		errs = append(errs, host.AddAddress(name, address))
	}
	index, err := host.InterfaceIndex(name)
	errs = append(errs, err)
	for _, address := range neighbours {
		errs = append(errs, host.Netlink().NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: address.AsSlice(), HardwareAddr: mac}))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the tap %s: %w", name, err), remove())
	}
	return remove, nil
}
