package kernel

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// XDP's verdicts, of enum xdp_action in linux/bpf.h.
const (
	XDPAborted  = 0
	XDPDrop     = 1
	XDPPass     = 2
	XDPTx       = 3
	XDPRedirect = 4
)

// xdpContext is struct xdp_md of linux/bpf.h.
type xdpContext struct {
	Data, DataEnd, DataMeta                     uint32
	IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// RunXDP runs a program on a frame as if it had come in by an interface, which must be in the calling
// thread's network namespace, and returns the verdict and the frame afterwards. Maps change as if
// the packet were real; nothing is sent.
func RunXDP(p *ebpf.Program, iface string, ifindex int, frame []byte) (verdict uint32, out []byte, err error) {
	const grow = 256 // XDP's headroom: a program cannot make the frame longer than by that
	opts := ebpf.RunOptions{
		Data: frame, DataOut: make([]byte, len(frame)+grow),
		Context: xdpContext{DataEnd: uint32(len(frame)), IngressIfindex: uint32(ifindex)},
	}
	verdict, err = p.Run(&opts)
	if err != nil {
		return 0, nil, fmt.Errorf("run a packet of %d bytes through the program of interface %s: %w", len(frame), iface, err)
	}
	return verdict, opts.DataOut, nil
}
