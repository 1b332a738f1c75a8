// Package moving finds and removes the nftables table that `shunt-kube run --moving` makes, for programs that do not need the rest of
// nftables, such as `shunt uninstall`. kube/hold makes the table, and explains its purpose.
package moving

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Table is the table's name, in the family inet.
const Table = "shunt-moving"

// Left reports whether the table is in the network namespace of the calling thread. It needs CAP_NET_ADMIN. A kernel without nf_tables
// has none.
func Left() (bool, error) {
	_, err := about(unix.NFT_MSG_GETTABLE, 0).Execute(unix.NETLINK_NETFILTER, 0)
	if isAbsent(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the nftables table inet %s: %w", Table, err)
	}
	return true, nil
}

// Remove removes the table from the network namespace of the calling thread, and reports whether there was one. It needs
// CAP_NET_ADMIN.
func Remove() (was bool, err error) {
	switch err := remove(); {
	case err == nil:
		return true, nil
	case isAbsent(err):
		return false, nil
	default:
		return false, fmt.Errorf("remove the nftables table inet %s: %w: `nft delete table inet %s` does it", Table, err, Table)
	}
}

// isAbsent is for a kernel that has no such table, or no nf_tables.
func isAbsent(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.EINVAL}, func(e error) bool { return errors.Is(err, e) })
}

// about is a message of nf_tables about the table (linux/netfilter/nf_tables.h).
func about(kind, flags int) *nl.NetlinkRequest {
	m := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	m.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET})
	m.AddData(nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(Table)))
	return m
}

// remove sends a batch, as nf_tables wants changes: its begin, the change and its end in one datagram (nfnetlink_rcv_batch of Linux).
func remove() error {
	change := about(unix.NFT_MSG_DELTABLE, unix.NLM_F_ACK)
	var batch []byte
	for _, m := range []*nl.NetlinkRequest{bound(unix.NFNL_MSG_BATCH_BEGIN), change, bound(unix.NFNL_MSG_BATCH_END)} {
		batch = append(batch, m.Serialize()...)
	}
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer socket.Close()
	if err := socket.SetReceiveTimeout(&unix.Timeval{Sec: answerSeconds}); err != nil {
		return err
	}
	if err := unix.Sendto(socket.GetFd(), batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	for {
		answers, _, err := socket.Receive()
		if err != nil {
			return err
		}
		for _, a := range answers {
			if a.Header.Type != unix.NLMSG_ERROR || len(a.Data) < 4 {
				continue
			}
			if code := int32(binary.NativeEndian.Uint32(a.Data)); code != 0 {
				return syscall.Errno(-code)
			}
			if a.Header.Seq == change.Seq {
				return nil
			}
		}
	}
}

// answerSeconds is for an answer that the kernel gives at once.
const answerSeconds = 10

// bound is a batch's begin or end. Its resource is the subsystem, in wire order.
func bound(kind int) *nl.NetlinkRequest {
	m := nl.NewNetlinkRequest(kind, 0)
	var resource [2]byte
	binary.BigEndian.PutUint16(resource[:], unix.NFNL_SUBSYS_NFTABLES)
	m.AddData(&nl.Nfgenmsg{ResId: binary.NativeEndian.Uint16(resource[:])})
	return m
}
