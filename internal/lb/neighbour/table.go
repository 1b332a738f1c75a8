package neighbour

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// protocol marks our entries (NDA_PROTOCOL, from the routing protocol numbers of
// linux/rtnetlink.h, where 115 is nobody's). `ip neighbour show` prints "proto 115".
const protocol = 115

// ndaProtocol is NDA_PROTOCOL of linux/neighbour.h, a byte.
const ndaProtocol = 12

// userHZ is the number of the kernel's clock ticks per second, as programs see them, on the
// architectures that shunt is built for.
const userHZ = 100

// usable are the states in which the kernel itself would send to the entry.
const usable = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE |
	netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE

// fixed are the states that need no upkeep. Making such an entry managed would remove its state (__neigh_update
// in net/core/neighbour.c).
const fixed = netlink.NUD_PERMANENT | netlink.NUD_NOARP

// key names a neighbour entry.
type key struct {
	iface int
	addr  netip.Addr
}

func (k key) String() string { return fmt.Sprintf("%s on interface %d", k.addr, k.iface) }

// entry is the kernel's entry of a neighbour.
type entry struct {
	state    int // NUD_*
	mac      net.HardwareAddr
	managed  bool
	learned  bool // by another program, which keeps it (NTF_EXT_LEARNED)
	protocol uint8
	// confirmed is the time since the kernel last had a confirmation, at the time of reading.
	confirmed time.Duration
}

// kept reports whether the entry is kept as it is, or fresh, by the kernel or a user.
func (e entry) kept() bool { return e.state&fixed != 0 || e.managed || e.learned }

// parseEntry reads the payload of RTM_NEWNEIGH or RTM_DELNEIGH. The library's own reader
// leaves NDA_PROTOCOL out. False: not an IP neighbour.
func parseEntry(b []byte) (key, entry, bool) {
	var msg netlink.Ndmsg
	if len(b) < msg.Len() {
		return key{}, entry{}, false
	}
	family := b[0]
	k := key{iface: int(binary.NativeEndian.Uint32(b[4:8]))}
	e := entry{state: int(binary.NativeEndian.Uint16(b[8:10]))}
	if family != unix.AF_INET && family != unix.AF_INET6 || b[10]&netlink.NTF_PROXY != 0 {
		return key{}, entry{}, false
	}
	e.learned = b[10]&netlink.NTF_EXT_LEARNED != 0
	attrs, err := nl.ParseRouteAttr(b[msg.Len():])
	if err != nil {
		return key{}, entry{}, false
	}
	for _, a := range attrs {
		switch a.Attr.Type {
		case netlink.NDA_DST:
			k.addr, _ = netip.AddrFromSlice(a.Value)
		case netlink.NDA_LLADDR:
			e.mac = net.HardwareAddr(a.Value)
		case netlink.NDA_FLAGS_EXT:
			e.managed = len(a.Value) >= 4 && binary.NativeEndian.Uint32(a.Value)&netlink.NTF_EXT_MANAGED != 0
		case unix.NDA_CACHEINFO: // struct nda_cacheinfo of linux/neighbour.h
			if len(a.Value) >= 4 {
				e.confirmed = time.Duration(binary.NativeEndian.Uint32(a.Value)) * time.Second / userHZ
			}
		case ndaProtocol:
			if len(a.Value) >= 1 {
				e.protocol = a.Value[0]
			}
		}
	}
	return k, e, k.addr.IsValid()
}

// neighbours is a socket for the neighbour table of one namespace.
type neighbours struct {
	socket        *nl.SocketHandle
	refuseManaged bool
	full          func() bool // nil: the kernel says so itself
}

func openNeighbours(ns netns.NsHandle, refuseManaged bool) (*neighbours, error) {
	s, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket for the neighbour table: %w", err)
	}
	return &neighbours{socket: &nl.SocketHandle{Socket: s}, refuseManaged: refuseManaged}, nil
}

func (n *neighbours) close() { n.socket.Close() }

func (n *neighbours) request(command, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(command, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: n.socket}
	return req
}

// list reads the whole table, both families.
func (n *neighbours) list() (map[key]entry, error) {
	var msgs [][]byte
	var err error
	for range 5 { // a table that changes while it is dumped is dumped again
		req := n.request(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
		req.AddData(&netlink.Ndmsg{})
		msgs, err = req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	// A dump that stays interrupted may lack entries; notifications follow for them.
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("read the neighbour table: %w", err)
	}
	table := make(map[key]entry, len(msgs))
	for _, m := range msgs {
		if k, e, ok := parseEntry(m); ok {
			table[k] = e
		}
	}
	return table, nil
}

// about returns a request about one entry.
func (n *neighbours) about(k key, command, flags int) (*nl.NetlinkRequest, *netlink.Ndmsg) {
	req := n.request(command, flags)
	msg := &netlink.Ndmsg{Family: unix.AF_INET6, Index: uint32(k.iface)}
	if k.addr.Is4() {
		msg.Family = unix.AF_INET
	}
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(netlink.NDA_DST, k.addr.AsSlice()))
	return req, msg
}

// probe makes the kernel find out at once whether one of its entries is still right, by asking the hardware
// address in it (neigh_timer_handler in net/core/neighbour.c). It changes nothing else in an entry that
// nobody keeps.
func (n *neighbours) probe(k key) error {
	req, msg := n.about(k, unix.RTM_NEWNEIGH, unix.NLM_F_ACK)
	msg.State = netlink.NUD_PROBE
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("make the kernel probe neighbour %s: %w", k, err)
	}
	return nil
}

// ask creates the entry if it is missing and makes the kernel ask for its hardware
// address. With managed the kernel also goes on asking by itself; a kernel before 5.16
// ignores that attribute, which only reading the entry shows.
func (n *neighbours) ask(k key, managed bool) error {
	req, msg := n.about(k, unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	req.AddData(nl.NewRtAttr(ndaProtocol, []byte{protocol}))
	if managed && !n.refuseManaged {
		req.AddData(nl.NewRtAttr(netlink.NDA_FLAGS_EXT, nl.Uint32Attr(netlink.NTF_EXT_MANAGED)))
	} else {
		msg.Flags = netlink.NTF_USE
	}
	var err error
	if n.full != nil && n.full() {
		err = unix.ENOBUFS
	} else {
		_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	}
	if errors.Is(err, unix.ENOBUFS) {
		return fmt.Errorf("the kernel's table of neighbours has no room for %s: %w", k, err)
	}
	if err != nil {
		return fmt.Errorf("make the kernel resolve neighbour %s: %w", k, err)
	}
	return nil
}

// remove deletes an entry; one that is not there is fine.
func (n *neighbours) remove(k key) error {
	req, _ := n.about(k, unix.RTM_DELNEIGH, unix.NLM_F_ACK)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	// ENODEV: the interface went, and the entry with it.
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove neighbour %s: %w", k, err)
	}
	return nil
}

// Left lists the entries in the calling thread's namespace that a watcher made, of this
// process or of another, "10.0.0.2 dev eth0" each.
func Left() ([]string, error) {
	n, err := openNeighbours(netns.None(), false)
	if err != nil {
		return nil, err
	}
	defer n.close()
	table, err := n.list()
	if err != nil {
		return nil, err
	}
	var left []string
	for k, e := range table {
		if !e.managed || e.protocol != protocol || e.state&fixed != 0 {
			continue
		}
		device := fmt.Sprint("interface ", k.iface)
		if link, err := net.InterfaceByIndex(k.iface); err == nil {
			device = link.Name
		}
		left = append(left, k.addr.String()+" dev "+device)
	}
	slices.Sort(left)
	return left, nil
}
