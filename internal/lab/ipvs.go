package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoIPVS says that the kernel has no IPVS.
var ErrNoIPVS = errors.New("this kernel has no IPVS")

// Options of linux/ip_vs.h.
const (
	ipvsBase    = 64 + 1024 + 64 // IP_VS_BASE_CTL
	ipvsAdd     = ipvsBase + 2   // IP_VS_SO_SET_ADD
	ipvsDelete  = ipvsBase + 4   // IP_VS_SO_SET_DEL
	ipvsAddDest = ipvsBase + 7   // IP_VS_SO_SET_ADDDEST
	ipvsFamily  = "IPVS"         // IPVS_GENL_NAME
	ipvsTracked = "net.ipv4.vs.conntrack"
)

// AddIPVS has the kernel's IPVS lead the packets of a service to one server and rewrite their addresses, with conntrack,
// as kube-proxy does. protocol is that of IP.
func (h *Host) AddIPVS(protocol uint16, at, to netip.AddrPort) error {
	_ = h.Run(func() error { // a question for the family loads the module, if there is one
		_, err := netlink.GenlFamilyGet(ipvsFamily)
		return err
	})
	service := ipvsService(protocol, at)
	err := h.ipvs(ipvsAdd, service)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return ErrNoIPVS
	}
	if err != nil {
		return err
	}
	return errors.Join(h.ipvs(ipvsAddDest, append(service, ipvsServer(to)...)), h.SetSysctl(ipvsTracked, "1"))
}

// DeleteIPVS removes the service again.
func (h *Host) DeleteIPVS(protocol uint16, at netip.AddrPort) error {
	return h.ipvs(ipvsDelete, ipvsService(protocol, at))
}

// ipvsService is struct ip_vs_service_user, round robin.
func ipvsService(protocol uint16, at netip.AddrPort) []byte {
	b := append(binary.NativeEndian.AppendUint16(nil, protocol), 0, 0)
	b = append(b, at.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, at.Port())
	b = append(b, make([]byte, 2+4)...) // no mark
	b = append(append(b, "rr"...), make([]byte, 14)...)
	return append(b, make([]byte, 3*4)...) // flags, timeout, netmask
}

// ipvsServer is struct ip_vs_dest_user, whose addresses are rewritten (IP_VS_CONN_F_MASQ is 0).
func ipvsServer(to netip.AddrPort) []byte {
	b := binary.BigEndian.AppendUint16(to.Addr().AsSlice(), to.Port())
	b = append(b, make([]byte, 2+4)...)
	b = binary.NativeEndian.AppendUint32(b, 1) // weight
	return append(b, make([]byte, 2*4)...)
}

// ipvs has IPVS do something in the host's namespace.
func (h *Host) ipvs(option int, value []byte) error {
	return h.Run(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing was written
		return os.NewSyscallError(fmt.Sprintf("IPVS %d", option), unix.SetsockoptString(fd, unix.IPPROTO_IP, option, string(value)))
	})
}
