package attach

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// skbContext is the beginning of struct __sk_buff, of linux/bpf.h.
type skbContext struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTCI, VlanProto, Priority uint32
	IngressIfindex, Ifindex                                                               uint32
}

// Verdicts of tc, from linux/pkt_cls.h.
const (
	tcUnspecified = 0xffffffff
	tcShot        = 2
	tcRedirect    = 7
)

// RunPacket runs shunt's program for an interface, together with the program chained after it but not the one
// before, on a frame as if it had come from there. It returns the verdict, in XDP's numbers, and the frame
// afterwards. Counters and flows change as with a real packet; nothing is sent. The interface must be in the
// calling thread's network namespace.
func (d *Plane) RunPacket(iface string, frame []byte) (verdict uint32, out []byte, err error) {
	d.mu.Lock()
	a := d.attached[iface]
	d.mu.Unlock()
	if a == nil {
		return 0, nil, fmt.Errorf("run a packet through the program of interface %s: shunt is not attached to it", iface)
	}
	if a.vlan != nil {
		return 0, nil, fmt.Errorf("run a packet through the program of interface %s: its frames come in with tags by %s", iface, a.vlan.parent.Interface)
	}
	if a.Mode.AtTC() {
		return d.runSkb(a, 0, frame)
	}
	return kernel.RunXDP(a.programs[0], iface, a.ifindex, frame)
}

// RunPacketOut does the same as RunPacket for a frame that the host sends out of an interface with attach: tc.
// A frame that leaves through that interface, changed or not, has the verdict kernel.XDPPass; a frame that is
// answered or leaves elsewhere has kernel.XDPRedirect.
func (d *Plane) RunPacketOut(iface string, frame []byte) (verdict uint32, out []byte, err error) {
	d.mu.Lock()
	a := d.attached[iface]
	d.mu.Unlock()
	if a == nil || !a.Mode.AtTC() {
		return 0, nil, fmt.Errorf("run a packet through the egress program of interface %s: shunt is not attached to it with attach: tc", iface)
	}
	return d.runSkb(a, 1, frame)
}

// runSkb runs the program of one of directions.
func (d *Plane) runSkb(a *attached, at int, frame []byte) (verdict uint32, out []byte, err error) {
	const grow = 256 // more than any program of ours adds
	context := skbContext{Ifindex: uint32(a.ifindex)}
	if !directions[at].outbound {
		context.IngressIfindex = context.Ifindex
	}
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+grow), Context: context}
	verdict, err = d.programOf(a, at).Run(&opts)
	if err != nil {
		return 0, nil, fmt.Errorf("run a packet of %d bytes through %s of interface %s: %w", len(frame), directions[at].program, a.Interface, err)
	}
	switch verdict {
	case tcUnspecified:
		return kernel.XDPPass, opts.DataOut, nil
	case tcShot:
		return kernel.XDPDrop, opts.DataOut, nil
	case tcRedirect:
		return kernel.XDPRedirect, opts.DataOut, nil
	}
	return 0, nil, fmt.Errorf("%s of interface %s returned %d, which is not one of its verdicts", directions[at].program, a.Interface, verdict)
}
