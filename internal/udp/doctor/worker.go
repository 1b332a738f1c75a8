package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// Worker describes a program's work on one queue, from the daemon.
type Worker struct {
	Lease    string
	Queue    int
	CPU      int  // that the entry names
	Pinned   bool // a thread of the program runs there and nowhere else
	BusyPoll bool // whether the program makes the driver work, in place of interrupts
}

// NoNode is the NUMA node of an interface without one: a virtual interface, or a machine with a single node.
const NoNode = -1

// queueName matches the end of the name of a receive queue's interrupt: ice-eth0-TxRx-3, eth0-rx-3, mlx5_comp3@pci:…, virtio2-input.3.
var queueName = regexp.MustCompile(`(?i)(?:rx|input|comp)[-.]?(\d+)(?:@.*)?$`)

// queueOf returns the number of the queue in an interrupt's name; -1: none.
func queueOf(name string) int {
	parts := queueName.FindStringSubmatch(name)
	if parts == nil {
		return -1
	}
	n, err := strconv.Atoi(parts[1])
	if err != nil {
		return -1
	}
	return n
}

// device reads which interrupts belong to the interface's hardware, and its NUMA node.
func (f *Facts) device(root string, read func(string) string) (own map[int]bool) {
	own = map[int]bool{}
	device := "sys/class/net/" + f.Interface + "/device"
	for _, folder := range []string{device + "/msi_irqs", device + "/../msi_irqs"} { // the second one: of virtio, on PCI
		entries, err := os.ReadDir(filepath.Clean(root) + "/" + folder) // Join would take .. for the folder above the link
		if err != nil {
			continue
		}
		for _, e := range entries {
			if n, err := strconv.Atoi(e.Name()); err == nil {
				own[n] = true
			}
		}
	}
	f.Node = NoNode
	for _, path := range []string{device + "/numa_node", device + "/../numa_node"} {
		text, err := os.ReadFile(filepath.Clean(root) + "/" + path)
		if n, numberErr := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && numberErr == nil {
			f.Node = n
			break
		}
	}
	f.Nodes = map[int][]int{}
	folders, _ := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*")) // the pattern is right
	for _, folder := range folders {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(folder), "node"))
		if err != nil {
			continue
		}
		if cpus, err := kernel.ParseCPUs(read("sys/devices/system/node/" + filepath.Base(folder) + "/cpulist")); err == nil {
			f.Nodes[n] = cpus
		}
	}
	return own
}

// nodeOf returns the NUMA node of a CPU; NoNode: not known.
func (f *Facts) nodeOf(cpu int) int {
	for n, cpus := range f.Nodes {
		if slices.Contains(cpus, cpu) {
			return n
		}
	}
	return NoNode
}

// handler returns the only CPU that handles a queue's interrupt, and the interrupt.
func (f *Facts) handler(queue int) (cpu int, by *Interrupt) {
	for i := range f.Interrupts {
		one := &f.Interrupts[i]
		if one.Queue != queue {
			continue
		}
		if cpus, err := kernel.ParseCPUs(one.Affinity); err == nil && len(cpus) == 1 {
			return cpus[0], one
		}
	}
	return 0, nil
}

// workers compares the CPUs of programs with the CPUs of interrupts, and with the interface's NUMA node.
func (f *Facts) workers(find func(string, bool, string, string, string)) {
	for _, w := range f.Workers {
		if !w.Pinned {
			find("pinned", false, fmt.Sprintf("the lease %s names CPU %d for queue %d, but no thread of its program is pinned to this CPU", w.Lease, w.CPU, w.Queue),
				"the scheduler moves the program's threads, each time to a CPU with cold caches",
				fmt.Sprintf("taskset -c %d PROGRAM # or call Queue.Pin, in C shunt_udp_pin, in the thread that serves the queue", w.CPU))
		}
		f.near(w, find)
		cpu, by := f.handler(w.Queue)
		if by == nil {
			continue
		}
		fix := func(cpu int) string {
			return fmt.Sprintf("echo %d > /proc/irq/%d/smp_affinity_list # for %s; stop irqbalance first", cpu, by.Number, by.Name)
		}
		other, found := f.beside(w.CPU)
		switch {
		case w.BusyPoll && cpu != w.CPU:
			find("polled", false, fmt.Sprintf("CPU %d handles the interrupt of queue %d, and the lease %s polls it on CPU %d", cpu, w.Queue, w.Lease, w.CPU),
				"each time that interrupts take over from polling, the driver's data move to the other CPU, and back", fix(w.CPU))
		case !w.BusyPoll && cpu == w.CPU && found:
			find("shared", false, fmt.Sprintf("CPU %d handles the interrupt of queue %d, and also runs the program of the lease %s", cpu, w.Queue, w.Lease),
				"the kernel's work on each datagram interrupts the program; use `busy_poll` to have both on one CPU", fix(other))
		case !w.BusyPoll && f.nodeOf(cpu) != f.nodeOf(w.CPU) && found:
			find("apart", false, fmt.Sprintf("CPU %d handles the interrupt of queue %d, but CPU %d, which runs the program of the lease %s, is on another NUMA node", cpu, w.Queue, w.CPU, w.Lease),
				"each datagram crosses from one node's caches to the other's", fix(other))
		}
	}
}

// near reports a worker whose CPU is far from the card.
func (f *Facts) near(w Worker, find func(string, bool, string, string, string)) {
	node := f.nodeOf(w.CPU)
	cpus := f.Nodes[f.Node]
	if f.Node == NoNode || node == NoNode || node == f.Node || len(cpus) == 0 {
		return
	}
	find("numa", false, fmt.Sprintf("%s is on NUMA node %d, but CPU %d, which the lease %s names for queue %d, is on node %d", f.Interface, f.Node, w.CPU, w.Lease, w.Queue, node),
		"each datagram crosses the link between the nodes",
		fmt.Sprintf("cpu: [%d] # in the entry %s of udp, for this queue; the CPUs of node %d are %s", cpus[w.Queue%len(cpus)], w.Lease, f.Node, strings.Trim(strings.ReplaceAll(fmt.Sprint(cpus), " ", ","), "[]")))
}

// beside returns another CPU of the same node that no worker has, if there is one.
func (f *Facts) beside(cpu int) (other int, found bool) {
	for _, c := range f.Nodes[f.nodeOf(cpu)] {
		if c != cpu && !slices.ContainsFunc(f.Workers, func(w Worker) bool { return w.CPU == c }) {
			return c, true
		}
	}
	return 0, false
}

// uncompared reports which comparisons were not possible.
func (f *Facts) uncompared() {
	if len(f.Interrupts) == 0 {
		text := fmt.Sprintf("which CPU handles the queues of %s: the driver (%s) has no interrupt of its own", f.Interface, f.Driver)
		if f.Driver == "veth" {
			text += ", and does its work on the sender's CPU"
		}
		f.Unknown = append(f.Unknown, text)
	}
	if f.Node == NoNode && len(f.Nodes) > 1 {
		f.Unknown = append(f.Unknown, fmt.Sprintf("the NUMA node of %s: it has none", f.Interface))
	}
}
