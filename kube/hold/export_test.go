package hold

import (
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Listed is the number of connections of IPv4 in the kernel's list.
func Listed() (int, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer conn.Close() //nolint:errcheck // nothing was written
	flows, err := list(conn, unix.AF_INET)
	return len(flows), err
}
