// Package doctor finds faults of an interface, its driver and the CPUs that keep datagrams from a program of the UDP path, or
// slow them down. It changes nothing.
//
//	Look ─► Facts ─► Examine ─► Findings, each with the command that fixes it
package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// Facts describe an interface of this machine. A fact that could not be read is left out, and Unknown has the reason.
type Facts struct {
	Interface  string
	Driver     string // "": none
	MTU        int
	Queues     int    // receive queues that are in use
	Program    string // id of the XDP program that is attached; "": none
	Own        string // name of shunt's program, if it is one; "": it is another product's
	Features   map[string]bool
	XDP        *uint64           // NETDEV_A_DEV_XDP_FEATURES (linux/netdev.h)
	Hash       map[string]uint64 // RXH_* (linux/ethtool.h) by "udp4" and "udp6"
	CPUs       int               // online
	Isolated   string            // list of CPUs that the scheduler leaves alone
	Governors  map[string]int    // CPUs by frequency governor
	Interrupts []Interrupt       // of the interface
	Node       int               // NUMA node of the interface; NoNode: none
	Nodes      map[int][]int     // CPUs of each node
	Workers    []Worker          // with a CPU; Look finds none, because only the daemon knows them
	Unknown    []string
}

// Interrupt is an interrupt of an interface, and the CPUs that may handle it.
type Interrupt struct {
	Number   int
	Name     string
	Affinity string // effective_affinity_list, or smp_affinity_list if there is none
	Queue    int    // from its name; -1: none
}

// Finding is a fault with its remedy.
type Finding struct {
	Code   string `json:"code"`
	Fault  bool   `json:"fault"` // true: until it is fixed, there is no lease, or datagrams do not come; false: it costs time
	Text   string `json:"text"`
	Why    string `json:"why"`
	Remedy string `json:"remedy"`
}

const (
	queuesMax = 64   // hook.MaxQueues
	mtuMax    = 3818 // xsk.FrameSize

	// linux/netdev.h: enum netdev_xdp_act.
	xdpBasic    = 1 << 0
	xdpZeroCopy = 1 << 3

	// linux/ethtool.h: RXH_L4_B_0_1 and RXH_L4_B_2_3, the two ports.
	hashPorts = 1<<6 | 1<<7
)

// Examine judges the facts.
func Examine(f Facts) []Finding {
	all := []Finding{}
	find := func(code string, fault bool, text, why, remedy string) {
		all = append(all, Finding{code, fault, text, why, remedy})
	}
	f.packets(find)
	f.driver(find)
	f.spread(find)
	f.cpus(find)
	f.workers(find)
	return all
}

// packets checks the properties that a frame must have.
func (f *Facts) packets(find func(string, bool, string, string, string)) {
	if f.MTU > mtuMax {
		find("mtu", true, fmt.Sprintf("the MTU of %s is %d bytes", f.Interface, f.MTU),
			fmt.Sprintf("a packet must fit into one frame of 4096 bytes with the kernel's headroom: the MTU may be up to %d", mtuMax),
			fmt.Sprintf("ip link set dev %s mtu %d", f.Interface, mtuMax))
	}
	for _, o := range []struct{ name, short string }{{"rx-lro", "lro"}, {"rx-gro-hw", "rx-gro-hw"}} {
		if f.Features[o.name] {
			find("merging", true, fmt.Sprintf("%s merges received packets (%s)", f.Interface, o.name),
				"while it does, most drivers refuse XDP, and the other drivers hand over merged packets, which are larger than a frame",
				fmt.Sprintf("ethtool -K %s %s off", f.Interface, o.short))
		}
	}
}

// driver checks whether XDP and AF_XDP work, and how.
func (f *Facts) driver(find func(string, bool, string, string, string)) {
	if f.Own != "" {
		find("occupied", false, fmt.Sprintf("%s has %s (program %s)", f.Interface, f.Own, f.Program),
			"within one daemon this is in order: its leases and its balancer share the interface. A lease of another daemon is refused",
			"shunt udp list # shows which process has which lease; to have both products on one interface, put udp and interfaces into one file")
	} else if f.Program != "" {
		find("occupied", true, fmt.Sprintf("%s has an XDP program already (id %s)", f.Interface, f.Program),
			"an interface can have one XDP program, so a lease fails; and an XDP program that does not know the lease's sockets is the usual cause of \"AF_XDP receives nothing\"",
			fmt.Sprintf("bpftool prog show id %s # then end the process that attached it, or: ip link set dev %s xdp off", f.Program, f.Interface))
	}
	switch {
	case f.XDP == nil:
	case *f.XDP&xdpBasic == 0:
		find("generic", false, fmt.Sprintf("the driver of %s (%s) has no XDP", f.Interface, f.Driver),
			"in native mode the driver refuses the XDP program. In generic mode the kernel makes an sk_buff of each packet first, and that is most of the work that a lease saves",
			"mode: generic # in the entry of udp; or use an interface whose driver has XDP")
	case *f.XDP&xdpZeroCopy == 0:
		find("copy", false, fmt.Sprintf("the driver of %s (%s) has no zero-copy", f.Interface, f.Driver),
			"mode auto falls back to copy, in which the kernel copies each packet, and the program does not notice",
			"mode: copy # in the entry of udp, to say that this is intended; or use an interface whose driver has zero-copy. `shunt udp show` shows the mode that a lease got")
	}
}

// spread checks which queue datagrams come in by, and which CPU handles it.
func (f *Facts) spread(find func(string, bool, string, string, string)) {
	switch {
	case f.Queues > queuesMax:
		find("queues", true, fmt.Sprintf("%s has %d receive queues", f.Interface, f.Queues),
			fmt.Sprintf("%d queues can have sockets; datagrams on the other queues go to the kernel's socket", queuesMax), fmt.Sprintf("ethtool -L %s combined %d", f.Interface, min(queuesMax, f.CPUs)))
	case f.Queues > f.CPUs:
		find("queues", false, fmt.Sprintf("%s has %d receive queues, and the machine %d CPUs", f.Interface, f.Queues, f.CPUs),
			"each queue needs a worker with a CPU. A worker with several queues looks at them in turn, so a datagram may wait as long as the max_queue_delay of all its queues together",
			fmt.Sprintf("ethtool -L %s combined %d", f.Interface, f.CPUs))
	}
	for _, flow := range []string{"udp4", "udp6"} {
		if bits, known := f.Hash[flow]; known && f.Queues > 1 && bits&hashPorts != hashPorts {
			find("hash", false, fmt.Sprintf("%s spreads %s over its queues by addresses alone", f.Interface, flow),
				"all datagrams between two hosts arrive on one queue, so one worker gets them all",
				fmt.Sprintf("ethtool -N %s rx-flow-hash %s sdfn", f.Interface, flow))
		}
	}
	var where []string
	for _, i := range f.Interrupts {
		where = append(where, i.Affinity)
	}
	slices.Sort(where)
	if len(where) > 1 && len(slices.Compact(where)) == 1 && f.CPUs > 1 && !strings.ContainsAny(where[0], ",-") {
		second := f.Interrupts[1]
		find("irq", false, fmt.Sprintf("all %d interrupts of %s are handled by CPU %s", len(f.Interrupts), f.Interface, where[0]),
			"this CPU does the kernel's work for all queues",
			fmt.Sprintf("echo %d > /proc/irq/%d/smp_affinity_list # for %s; give each of the other interrupts a CPU, too, and stop irqbalance first", 1, second.Number, second.Name))
	}
}

// cpus checks how quickly and how steadily the CPUs work.
func (f *Facts) cpus(find func(string, bool, string, string, string)) {
	slow := 0
	for governor, n := range f.Governors {
		if governor != "performance" {
			slow += n
		}
	}
	if slow > 0 {
		find("governor", false, fmt.Sprintf("%d of %d CPUs change their frequency with the load", slow, f.CPUs),
			"a CPU that was idle still runs slowly when a datagram comes", "cpupower frequency-set -g performance")
	}
	if f.Isolated == "" && f.CPUs > 1 {
		find("isolated", false, "no CPU is kept free of other tasks",
			"the scheduler stops a worker for other tasks, for milliseconds, and no size of a ring limits this delay",
			fmt.Sprintf("add isolcpus=%d nohz_full=%d to the kernel's command line, reboot, and start the program with: taskset -c %d", f.CPUs-1, f.CPUs-1, f.CPUs-1))
	}
}
