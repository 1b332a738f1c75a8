package connect

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// attachTypes are the attach types of programs at a cgroup.
var attachTypes = map[string]ebpf.AttachType{
	connectProgShConnect4: ebpf.AttachCGroupInet4Connect, connectProgShConnect6: ebpf.AttachCGroupInet6Connect,
	connectProgShSendmsg4: ebpf.AttachCGroupUDP4Sendmsg, connectProgShSendmsg6: ebpf.AttachCGroupUDP6Sendmsg,
	connectProgShBind4: ebpf.AttachCGroupInet4Bind, connectProgShBind6: ebpf.AttachCGroupInet6Bind,
	connectProgShSock: ebpf.AttachCGroupInetSockCreate,
}

// attachOne attaches a program to its hook; where is the cgroup, for programs at cgroups.
func attachOne(p *ebpf.Program, name, where string) (link.Link, error) {
	switch p.Type() {
	case ebpf.LSM:
		return kernel.AttachLSM(p, name)
	case ebpf.Tracing:
		return kernel.AttachTracing(p, name)
	case ebpf.CGroupSockAddr, ebpf.CGroupSock:
		return kernel.AttachCgroup(p, name, where, attachTypes[name])
	}
	return nil, fmt.Errorf("attach %s: shunt cannot attach a program of type %v; this is a fault in shunt", name, p.Type())
}
