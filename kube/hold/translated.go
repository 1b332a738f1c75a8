package hold

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// listTries is how often a list is begun anew that changed while it was read.
const listTries = 5

// Translated lists the source ports that the kernel has given to connections in the network namespace of the calling thread, as rules that
// masquerade have it do. A closed connection keeps its port until the kernel forgets it, after two minutes at most. Until then
// the kernel sends what comes from the same pod to the same port to that connection's client. It needs CAP_NET_ADMIN.
func Translated() (ports []store.SourcePort, err error) {
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := list(family)
		if err != nil {
			return nil, fmt.Errorf("list the connections that the kernel tracks: %w", err)
		}
		for _, f := range flows {
			if port, ok := translated(f.Forward, f.Reverse); ok {
				ports = append(ports, port)
			}
		}
	}
	return ports, nil
}

func list(family netlink.InetFamily) (flows []*netlink.ConntrackFlow, err error) {
	for range listTries {
		flows, err = netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return flows, err
		}
	}
	return nil, err
}

// translated is the source port of a connection whose answers do not go to where its packets come from.
func translated(forward, reverse netlink.IPTuple) (port store.SourcePort, ok bool) {
	if forward.Protocol != unix.IPPROTO_TCP && forward.Protocol != unix.IPPROTO_UDP {
		return port, false
	}
	if forward.SrcIP.Equal(reverse.DstIP) && forward.SrcPort == reverse.DstPort {
		return port, false
	}
	port = store.SourcePort{Protocol: model.Protocol(forward.Protocol), Source: addrPort(reverse.DstIP, reverse.DstPort), Backend: addrPort(reverse.SrcIP, reverse.SrcPort)}
	return port, port.Source.IsValid() && port.Backend.IsValid()
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}
