package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// attachMessage asks for the driver's words: a link is refused with a number alone, while
// rtnetlink (NETLINK_EXT_ACK) may say why. Empty when it has nothing to say.
func attachMessage(ifindex int, program *ebpf.Program, flags link.XDPAttachFlags) string {
	fd, err := openRoute()
	if err != nil {
		return ""
	}
	defer fd.close()
	err = fd.attachXDP(ifindex, program.FD(), uint32(flags))
	if err == nil {
		// It works after all; take it off again, the caller reports its own error.
		_ = fd.attachXDP(ifindex, -1, uint32(flags))
		return ""
	}
	var refused *routeError
	if !errors.As(err, &refused) || refused.message == "" {
		return ""
	}
	return fmt.Sprintf("%s (%s)", refused.message, refused.errno)
}
