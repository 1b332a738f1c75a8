package daemon

import (
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/node"
)

// needs are the permissions that the balancer needs from a service manager.
func needs(settings any) []node.Need {
	all := []node.Need{
		{Setting: node.NeedCapability, Value: "CAP_BPF", For: "loads programs, makes and reads maps"},
		{Setting: node.NeedCapability, Value: "CAP_PERFMON", For: "switches off the verifier's guards against speculation; counts refused frames at tracepoints"},
		{Setting: node.NeedCapability, Value: "CAP_NET_ADMIN", For: "attaches programs to interfaces; neighbours, multicast groups, offload, lo's forwarding"},
		{Setting: node.NeedCapability, Value: "CAP_NET_RAW", For: "asks whether a VIP is in use, announces it, asks next hops for their addresses"},
		{Setting: node.NeedFamily, Value: "AF_PACKET", For: "ARP and neighbour discovery"},
		{Setting: node.NeedFamily, Value: "AF_INET", For: "health checks, ethtool's ioctl"},
		{Setting: node.NeedFamily, Value: "AF_INET6", For: "health checks"},
		{Setting: node.NeedPath, Value: "-/proc/sys/net/ipv4/conf/lo", For: "lets the programs look up next hops"},
		{Setting: node.NeedPath, Value: "-/proc/sys/net/ipv6/conf/lo", For: "lets the programs look up next hops"},
		{Setting: node.NeedCall, Value: "bpf", For: "programs and maps"},
	}
	if settings == nil {
		return all
	}
	config := settings.(*file.Parsed).Config
	if len(config.Node.Decapsulation.From) > 0 {
		all = append(all, node.Need{Setting: node.NeedPath, Value: "-/proc/sys/net/ipv4/conf",
			For: "lets interfaces accept packets for VIPs, for decapsulation"})
	}
	if slices.ContainsFunc(config.Services, func(s model.Service) bool {
		return s.Forwarding.Direct() && slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Address.Is6() })
	}) {
		all = append(all, node.Need{Setting: node.NeedPath, Value: "-/proc/sys/net/ipv6/conf",
			For: "lets the device of health checks accept IPv6, for direct return"})
	}
	return all
}
