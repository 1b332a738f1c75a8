package kernel

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// AttachLSM attaches a program to the security hook that it was loaded for, to decide beside the other modules.
func AttachLSM(p *ebpf.Program, name string) (link.Link, error) {
	l, err := link.AttachLSM(link.LSMOptions{Program: p})
	if err != nil {
		return nil, refused(name, "its security hook", "bpf must be among the active security modules: /sys/kernel/security/lsm lists them", err)
	}
	return l, nil
}
