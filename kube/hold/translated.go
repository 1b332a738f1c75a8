package hold

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// listTries limits the readings of a list that changes while it is read.
const listTries = 5

// Of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	messageGet = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET

	attributeForward, attributeReverse, attributeStatus     = 1, 2, 3 // CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS
	attributeAddresses, attributePorts                      = 1, 2    // CTA_TUPLE_IP, CTA_TUPLE_PROTO
	attributeSource4, attributeTo4                          = 1, 2    // CTA_IP_V4_SRC, CTA_IP_V4_DST
	attributeSource6, attributeTo6                          = 3, 4    // CTA_IP_V6_SRC, CTA_IP_V6_DST
	attributeProtocol, attributeSourcePort, attributeToPort = 1, 2, 3 // CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT

	statusSourceTranslated = 1 << 4 // IPS_SRC_NAT
)

// headerSize is the size of struct nfgenmsg: family, version, and a number of a resource.
const headerSize = 4

// Translated lists the source ports of connections in the network namespace of the calling thread that rules masquerade: the port
// that the kernel has given to each, and for TCP the client's own. A closed connection keeps both until the kernel forgets it, after two
// minutes at most. Until then the kernel sends packets from the same pod to the given port to that connection's client. At a bridge
// (bridge-nf-call-iptables) a program at tc sees these packets on their way with the client's address and port, and the pod's own. It needs
// CAP_NET_ADMIN.
//
// The kernel is asked only for connections whose source it has changed; a node whose connections begin at pods has few of them. A kernel that
// does not know this filter (it came with CTA_STATUS_MASK) lists all.
func Translated() (ports []store.SourcePort, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, listError(err)
	}
	defer conn.Close() //nolint:errcheck // nothing was written
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		flows, err := list(conn, family)
		if err != nil {
			return nil, listError(err)
		}
		for _, m := range flows {
			forward, reverse, err := flow(m.Data)
			if err != nil {
				return nil, listError(err)
			}
			ports = append(ports, translated(forward, reverse)...)
		}
	}
	return ports, nil
}

func listError(err error) error {
	return fmt.Errorf("list the connections that the kernel tracks: %w", err)
}

// list returns the connections of a family whose source is translated. A list that changes each time is used as it is: the missing ones are in the next list.
func list(conn *netlink.Conn, family uint8) (flows []netlink.Message, err error) {
	attributes := netlink.NewAttributeEncoder()
	attributes.ByteOrder = binary.BigEndian
	attributes.Uint32(attributeStatus, statusSourceTranslated)
	wanted, err := attributes.Encode()
	if err != nil {
		return nil, err
	}
	question := netlink.Message{Header: netlink.Header{Type: messageGet, Flags: netlink.Request | netlink.Dump}, Data: append([]byte{family, unix.NFNETLINK_V0, 0, 0}, wanted...)}
	for range listTries {
		if flows, err = conn.Execute(question); err != nil {
			return nil, err
		}
		if !interrupted(flows) {
			break
		}
	}
	return flows, nil
}

// interrupted reports whether the list changed while it was read.
func interrupted(messages []netlink.Message) bool {
	return slices.ContainsFunc(messages, func(m netlink.Message) bool { return m.Header.Flags&netlink.DumpInterrupted != 0 })
}

// tuple is one direction of a connection.
type tuple struct {
	protocol   uint8
	source, to netip.AddrPort
}

// flow reads a message about a connection. Missing parts are zero.
func flow(data []byte) (forward, reverse tuple, err error) {
	if len(data) < headerSize {
		return forward, reverse, fmt.Errorf("a connection's message has %d bytes, and its header alone %d", len(data), headerSize)
	}
	attributes, err := netlink.NewAttributeDecoder(data[headerSize:])
	if err != nil {
		return forward, reverse, err
	}
	for attributes.Next() {
		switch attributes.Type() {
		case attributeForward:
			attributes.Nested(forward.read)
		case attributeReverse:
			attributes.Nested(reverse.read)
		}
	}
	return forward, reverse, attributes.Err()
}

func (t *tuple) read(attributes *netlink.AttributeDecoder) error {
	var source, to netip.Addr
	var sourcePort, toPort uint16
	for attributes.Next() {
		switch attributes.Type() {
		case attributeAddresses:
			attributes.Nested(func(addresses *netlink.AttributeDecoder) error {
				for addresses.Next() {
					switch addresses.Type() {
					case attributeSource4, attributeSource6:
						source, _ = netip.AddrFromSlice(addresses.Bytes())
					case attributeTo4, attributeTo6:
						to, _ = netip.AddrFromSlice(addresses.Bytes())
					}
				}
				return nil
			})
		case attributePorts:
			attributes.Nested(func(ports *netlink.AttributeDecoder) error {
				ports.ByteOrder = binary.BigEndian
				for ports.Next() {
					switch ports.Type() {
					case attributeProtocol:
						t.protocol = ports.Uint8()
					case attributeSourcePort:
						sourcePort = ports.Uint16()
					case attributeToPort:
						toPort = ports.Uint16()
					}
				}
				return nil
			})
		}
	}
	t.source, t.to = netip.AddrPortFrom(source, sourcePort), netip.AddrPortFrom(to, toPort)
	return nil
}

// translated returns the source ports towards the pod of a connection whose answers go to another address than its packets come
// from. A UDP flow of the client's does not continue in the kernel, but in shunt, and keeps the client's port.
func translated(forward, reverse tuple) (ports []store.SourcePort) {
	isTCP := forward.protocol == unix.IPPROTO_TCP
	if !isTCP && forward.protocol != unix.IPPROTO_UDP || forward.source == reverse.to {
		return nil
	}
	if !forward.source.IsValid() || !reverse.source.IsValid() || !reverse.to.IsValid() {
		return nil
	}
	from := func(source netip.AddrPort) store.SourcePort {
		return store.SourcePort{Protocol: model.Protocol(forward.protocol), Source: source, Backend: reverse.source}
	}
	if ports = append(ports, from(reverse.to)); isTCP {
		ports = append(ports, from(forward.source))
	}
	return ports
}
