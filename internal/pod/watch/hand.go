package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// hand prepares conntrack for the TCP connections of pods whose packets go through the stack again. That
// there is none is success.
func (w *Watch) hand(addresses []netip.Addr) error {
	if len(addresses) == 0 {
		return nil
	}
	of := map[netip.Addr]bool{}
	families := map[netlink.InetFamily]bool{}
	for _, a := range addresses {
		of[a] = true
		families[map[bool]netlink.InetFamily{true: unix.AF_INET, false: unix.AF_INET6}[a.Is4()]] = true
	}
	var errs []error
	for family := range families {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			errs = append(errs, fmt.Errorf("list conntrack's connections: %w", err))
			continue
		}
		for _, f := range flows {
			from, to := address(f.Forward.SrcIP), address(f.Forward.DstIP)
			_, fromPod := w.states[from]
			_, toPod := w.states[to]
			if f.Forward.Protocol != unix.IPPROTO_TCP || !fromPod || !toPod || !of[from] && !of[to] {
				continue
			}
			if err := makeLiberal(f); err != nil && !errors.Is(err, unix.ENOENT) { // it has ended meanwhile
				errs = append(errs, fmt.Errorf("tell conntrack to be liberal with %s:%d to %s:%d: %w", from, f.Forward.SrcPort, to, f.Forward.DstPort, err))
			}
		}
	}
	return errors.Join(errs...)
}

func address(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// makeLiberal sets IP_CT_TCP_FLAG_BE_LIBERAL in both directions of an entry (linux/netfilter/nf_conntrack_tcp.h):
// packets outside of the window are no longer invalid.
func makeLiberal(f *netlink.ConntrackFlow) error {
	const (
		ctNew         = 0 // IPCTNL_MSG_CT_NEW, which changes an entry that is there
		tupleOriginal = 1 // CTA_TUPLE_ORIG
		flagsOriginal = 4 // CTA_PROTOINFO_TCP_FLAGS_ORIGINAL
		flagsReply    = 5 // CTA_PROTOINFO_TCP_FLAGS_REPLY
		beLiberal     = 0x08
	)
	family, sourceAttr, destinationAttr := uint8(unix.AF_INET), nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	from, to := []byte(f.Forward.SrcIP.To4()), []byte(f.Forward.DstIP.To4())
	if from == nil {
		family, sourceAttr, destinationAttr = unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
		from, to = f.Forward.SrcIP.To16(), f.Forward.DstIP.To16()
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|ctNew, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})

	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|tupleOriginal, nil)
	ip := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(sourceAttr, from)
	ip.AddRtAttr(destinationAttr, to)
	proto := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_TCP})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, f.Forward.SrcPort))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, f.Forward.DstPort))
	request.AddData(tuple)

	info := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO, nil)
	tcp := info.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO_TCP, nil)
	tcp.AddRtAttr(flagsOriginal, []byte{beLiberal, beLiberal}) // struct nf_ct_tcp_flags: flags, mask
	tcp.AddRtAttr(flagsReply, []byte{beLiberal, beLiberal})
	request.AddData(info)
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}
