package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// prepare makes conntrack liberal with connections that ask for the shortcut, until the watch is closed.
func (w *Watch) prepare() {
	tick := time.NewTicker(preparePeriod)
	defer tick.Stop()
	for {
		select {
		case <-w.end:
			return
		case <-tick.C:
		}
		flows, err := w.short.Asking()
		if len(flows) > 0 {
			err = errors.Join(err, w.in(func() error { return makeAllLiberal(flows) }))
		}
		if len(flows) > 0 || err != nil {
			w.mu.Lock()
			w.untold = err
			w.mu.Unlock()
		}
	}
}

func makeAllLiberal(flows []shortcut.Flow) error {
	var errs []error
	for _, f := range flows {
		if err := makeLiberal(f); err != nil && !errors.Is(err, unix.ENOENT) { // ENOENT: the connection has ended meanwhile
			errs = append(errs, fmt.Errorf("tell conntrack to be liberal with %s to %s: %w", f.From, f.To, err))
		}
	}
	return errors.Join(errs...)
}

// makeLiberal sets IP_CT_TCP_FLAG_BE_LIBERAL in both directions of an entry (linux/netfilter/nf_conntrack_tcp.h):
// packets outside of the window are no longer invalid. A packet of either direction may name the connection.
func makeLiberal(f shortcut.Flow) error {
	const (
		ctNew         = 0 // IPCTNL_MSG_CT_NEW, which changes an existing entry
		tupleOriginal = 1 // CTA_TUPLE_ORIG
		flagsOriginal = 4 // CTA_PROTOINFO_TCP_FLAGS_ORIGINAL
		flagsReply    = 5 // CTA_PROTOINFO_TCP_FLAGS_REPLY
		beLiberal     = 0x08
	)
	family, sourceAttr, destinationAttr := uint8(unix.AF_INET), nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if f.From.Addr().Is6() {
		family, sourceAttr, destinationAttr = unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|ctNew, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})

	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|tupleOriginal, nil)
	ip := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(sourceAttr, f.From.Addr().AsSlice())
	ip.AddRtAttr(destinationAttr, f.To.Addr().AsSlice())
	proto := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_TCP})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, f.From.Port()))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, f.To.Port()))
	request.AddData(tuple)

	info := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO, nil)
	tcp := info.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO_TCP, nil)
	tcp.AddRtAttr(flagsOriginal, []byte{beLiberal, beLiberal}) // struct nf_ct_tcp_flags: flags, mask
	tcp.AddRtAttr(flagsReply, []byte{beLiberal, beLiberal})
	request.AddData(info)
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}
