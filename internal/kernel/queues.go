package kernel

import (
	"errors"
	"fmt"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ReceiveQueues returns the number of receive queues that an interface of the calling thread's network
// namespace uses. Link attributes have only the maximum: a veth has one for each CPU, and uses one by
// default; a network card uses as many as `ethtool -L` sets. A driver without this information uses all of
// them.
func ReceiveQueues(dev *netlink.LinkAttrs) (int, error) {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return 0, fmt.Errorf("read the receive queues of %s: %w", dev.Name, err)
	}
	defer tool.Close()
	c, err := tool.GetChannels(dev.Name)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && c.CombinedCount+c.RxCount == 0 {
		return dev.NumRxQueues, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the receive queues of %s: %w", dev.Name, err)
	}
	return int(c.CombinedCount + c.RxCount), nil
}
