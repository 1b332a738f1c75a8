package kernel

import (
	"errors"
	"fmt"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ReceiveQueues is how many receive queues of an interface are in use, of the calling thread's network namespace. Link
// attributes have how many there are room for: a veth has one for each CPU, and uses one, if nobody has said otherwise; a network
// card uses as many as `ethtool -L` sets. A driver that does not say uses all of them.
func ReceiveQueues(dev *netlink.LinkAttrs) (int, error) {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return 0, fmt.Errorf("ask for the receive queues of %s: %w", dev.Name, err)
	}
	defer tool.Close()
	c, err := tool.GetChannels(dev.Name)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && c.CombinedCount+c.RxCount == 0 {
		return dev.NumRxQueues, nil
	}
	if err != nil {
		return 0, fmt.Errorf("ask for the receive queues of %s: %w", dev.Name, err)
	}
	return int(c.CombinedCount + c.RxCount), nil
}
