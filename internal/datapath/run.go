package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// xdpContext is struct xdp_md of linux/bpf.h.
type xdpContext struct {
	Data, DataEnd, DataMeta                     uint32
	IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// XDP's verdicts, of enum xdp_action in linux/bpf.h.
const (
	XDPAborted  = 0
	XDPDrop     = 1
	XDPPass     = 2
	XDPTx       = 3
	XDPRedirect = 4
)

// RunPacket runs shunt's program for an interface, with what is chained after it but not before,
// on a frame as if it had come from there, and returns XDP's verdict and the frame afterwards.
// Counters and flows change as if it were real; nothing is sent. The interface must be in the
// calling thread's network namespace.
func (d *Datapath) RunPacket(iface string, frame []byte) (verdict uint32, out []byte, err error) {
	d.mu.Lock()
	a := d.attached[iface]
	d.mu.Unlock()
	if a == nil {
		return 0, nil, fmt.Errorf("run a packet through the program of interface %s: shunt is not attached to it", iface)
	}
	const grow = 256 // XDP's headroom: a program cannot make the frame longer than by that
	opts := ebpf.RunOptions{
		Data: frame, DataOut: make([]byte, len(frame)+grow),
		Context: xdpContext{DataEnd: uint32(len(frame)), IngressIfindex: uint32(a.ifindex)},
	}
	verdict, err = a.program.Run(&opts)
	if err != nil {
		return 0, nil, fmt.Errorf("run a packet of %d bytes through the program of interface %s: %w", len(frame), iface, err)
	}
	return verdict, opts.DataOut, nil
}
