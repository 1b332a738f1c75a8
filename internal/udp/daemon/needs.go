package daemon

import (
	"slices"

	"github.com/shunt-lb/shunt/internal/node"
)

// needs lists the operations of the UDP path that a service manager has to permit.
func needs(s any) []node.Need {
	all := []node.Need{
		{Setting: node.NeedCapability, Value: "CAP_BPF", For: "loads programs, makes and reads maps"},
		{Setting: node.NeedCapability, Value: "CAP_PERFMON", For: "switches off the verifier's guards against speculation"},
		{Setting: node.NeedCapability, Value: "CAP_NET_ADMIN", For: "attaches programs to interfaces"},
		{Setting: node.NeedCapability, Value: "CAP_NET_RAW", For: "opens the sockets of leases"},
		{Setting: node.NeedFamily, Value: "AF_XDP", For: "the sockets of leases"},
		{Setting: node.NeedMemory, Value: "infinity", For: "the kernel counts the memory of leases as locked"},
		{Setting: node.NeedCall, Value: "bpf", For: "programs and maps"},
	}
	if s == nil {
		return all
	}
	all = append(all, node.NeedSocket(s.(*parsed).socket)...)
	entries := s.(*parsed).entries
	if slices.ContainsFunc(entries, func(e entry) bool { return e.offer.Kill }) {
		all = append(all, node.Need{Setting: node.NeedCapability, Value: "CAP_KILL", For: "kills processes that keep the sockets of a lease, for kill: true"})
	}
	if slices.ContainsFunc(entries, func(e entry) bool { return e.offer.BusyPoll > 0 }) {
		all = append(all, node.Need{Setting: node.NeedTunables, Value: "no", For: "switches interrupts of an interface off, for busy_poll (/sys/class/net)"})
	}
	return all
}
