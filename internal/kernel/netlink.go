package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// routeSocket is an rtnetlink socket that requests the kernel's messages with its errors.
type routeSocket int

// routeError is a refusal.
type routeError struct {
	errno   syscall.Errno
	message string
}

func (e *routeError) Error() string { return fmt.Sprintf("%s: %s", e.errno, e.message) }

func openRoute() (routeSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	if err != nil {
		_ = unix.Close(fd)
		return 0, err
	}
	return routeSocket(fd), nil
}

func (s routeSocket) close() { _ = unix.Close(int(s)) }

// attachXDP sets an interface's program; -1 takes it off.
func (s routeSocket) attachXDP(ifindex, program int, flags uint32) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(ifindex)
	req.AddData(msg)
	if program >= 0 {
		flags |= nl.XDP_FLAGS_UPDATE_IF_NOEXIST
	}
	xdp := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	xdp.AddRtAttr(nl.IFLA_XDP_FD, binary.NativeEndian.AppendUint32(nil, uint32(int32(program))))
	xdp.AddRtAttr(nl.IFLA_XDP_FLAGS, binary.NativeEndian.AppendUint32(nil, flags))
	req.AddData(xdp)
	if err := unix.Sendto(int(s), req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buffer := make([]byte, 8192)
	n, _, err := unix.Recvfrom(int(s), buffer, 0)
	if err != nil {
		return err
	}
	return parseAck(buffer[:n])
}

// parseAck reads an NLMSG_ERROR (linux/netlink.h): the number, and NLMSGERR_ATTR_MSG.
func parseAck(b []byte) error {
	const attrMessage = 1 // NLMSGERR_ATTR_MSG
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil || len(messages) == 0 || messages[0].Header.Type != unix.NLMSG_ERROR || len(messages[0].Data) < 4 {
		return errors.New("rtnetlink gave an answer that shunt does not understand")
	}
	data := messages[0].Data
	errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(data)))
	if errno == 0 {
		return nil
	}
	refused := &routeError{errno: errno}
	if messages[0].Header.Flags&unix.NLM_F_ACK_TLVS == 0 || len(data) < 4+unix.NLMSG_HDRLEN {
		return refused
	}
	attrs, err := nl.ParseRouteAttr(data[4+unix.NLMSG_HDRLEN:])
	if err != nil {
		return refused
	}
	for _, a := range attrs {
		if a.Attr.Type == attrMessage && len(a.Value) > 0 {
			refused.message = string(a.Value[:len(a.Value)-1])
		}
	}
	return refused
}
