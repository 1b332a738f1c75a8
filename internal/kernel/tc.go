package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TC is a program at the tc ingress of an interface.
type TC struct {
	Mode Mode

	link    link.Link // of tcx, which ends with the process; nil with clsact
	ifindex int
	handle  uint32 // of the filter
	created bool   // the clsact qdisc is ours
}

// AttachTC attaches a program to the tc ingress of an interface of the calling thread's network namespace,
// before all others: by a link of tcx, or below Linux 6.6 by a filter of clsact. A filter does not end with
// the process; the next AttachTC of the same name takes its place.
func AttachTC(p *ebpf.Program, name string, ifindex int) (*TC, error) {
	t := &TC{Mode: ModeTCX, ifindex: ifindex}
	var err error
	t.link, err = link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.link, t.Mode = nil, ModeClsact
		err = t.attachClsact(p, name)
	}
	if err != nil {
		return nil, fmt.Errorf("attach %s to the tc ingress: %w", name, err)
	}
	return t, nil
}

func clsact(ifindex int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

func (t *TC) attachClsact(p *ebpf.Program, name string) error {
	err := netlink.QdiscAdd(clsact(t.ifindex))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a clsact qdisc: %w", err)
	}
	t.created = err == nil
	t.handle = 1
	if err := netlink.FilterReplace(t.filter(p.FD(), name)); err != nil {
		return errors.Join(fmt.Errorf("add a filter of priority 1 to clsact: %w", err), t.removeClsact())
	}
	return nil
}

func (t *TC) filter(fd int, name string) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: t.ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: t.handle, Protocol: unix.ETH_P_ALL, Priority: 1},
		Fd:          fd, Name: name, DirectAction: true,
	}
}

// removeClsact takes the qdisc away if it is ours and nobody else has a filter there.
func (t *TC) removeClsact() error {
	if !t.created {
		return nil
	}
	foreign, err := ForeignTC(t.ifindex)
	if err != nil || len(foreign) > 0 {
		return err
	}
	return netlink.QdiscDel(clsact(t.ifindex))
}

// Close takes the program off. That the interface is gone is success. The calling thread is in the
// interface's network namespace.
func (t *TC) Close() error {
	if t.link != nil {
		return DropLink(t.link)
	}
	err := netlink.FilterDel(t.filter(-1, ""))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = t.removeClsact()
	}
	if err != nil {
		return fmt.Errorf("take a program off the tc ingress: %w", err)
	}
	return nil
}

// ForeignTC is what stands at tc of an interface, in and out, beside the program own: programs of tcx, and
// filters of any kind in a clsact or ingress qdisc. The interface is one of the calling thread's network
// namespace.
func ForeignTC(ifindex int, own ...uint32) (found []string, err error) {
	for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		result, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
		if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) { // before Linux 6.6
			break
		}
		if err != nil {
			return nil, fmt.Errorf("list the programs at tc of interface %d: %w", ifindex, err)
		}
		for _, p := range result.Programs {
			if !slices.Contains(own, uint32(p.ID)) {
				found = append(found, fmt.Sprintf("program %d at %s", p.ID, at))
			}
		}
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // no such qdisc
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list the filters at tc of interface %d: %w", ifindex, err)
		}
		for _, f := range filters {
			if b, is := f.(*netlink.BpfFilter); !is || !slices.Contains(own, uint32(b.Id)) {
				found = append(found, fmt.Sprintf("a filter of kind %s, priority %d", f.Type(), f.Attrs().Priority))
			}
		}
	}
	return found, nil
}
