package daemon

import "github.com/shunt-lb/shunt/internal/node"

// needs lists the operations of the pod shortcut that a service manager has to permit.
var needs = []node.Need{
	{Setting: node.NeedCapability, Value: "CAP_BPF", For: "loads programs, makes and reads maps"},
	{Setting: node.NeedCapability, Value: "CAP_PERFMON", For: "switches off the verifier's guards against speculation"},
	{Setting: node.NeedCapability, Value: "CAP_NET_ADMIN", For: "attaches programs to interfaces, reads the packet filters"},
	{Setting: node.NeedCapability, Value: "CAP_NET_RAW", For: "the socket at which iptables-legacy's rules are read"},
	{Setting: node.NeedFamily, Value: "AF_INET", For: "that socket"},
	{Setting: node.NeedFamily, Value: "AF_INET6", For: "that socket"},
	{Setting: node.NeedCall, Value: "bpf", For: "programs and maps"},
}
