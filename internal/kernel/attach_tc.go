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
	name    string // of the filter
	created bool   // the clsact qdisc is ours
}

// tcxRemedy is the remedy for a refused link of tcx.
const tcxRemedy = "`bpftool net` lists the programs there"

// tcPoint describes an attach point of tc: a direction of an interface.
func tcPoint(iface string, outbound bool) string {
	if outbound {
		return "the tc egress of interface " + iface
	}
	return "the tc ingress of interface " + iface
}

// attachTCX attaches a program to an interface of the calling thread's network namespace by a link, Linux 6.6.
func attachTCX(p *ebpf.Program, ifindex int, at ebpf.AttachType, anchor link.Anchor) (link.Link, error) {
	return link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: at, Anchor: anchor})
}

// AttachTC attaches a program to the tc ingress of an interface of the calling thread's network namespace,
// before all others: by a link of tcx, or below Linux 6.6 as AttachClsact does. A RefusedError has the reason.
func AttachTC(p *ebpf.Program, name string, ifindex int) (*TC, error) {
	l, err := attachTCX(p, ifindex, ebpf.AttachTCXIngress, link.Head())
	if errors.Is(err, ebpf.ErrNotSupported) {
		return AttachClsact(p, name, ifindex)
	}
	if err != nil {
		return nil, refused(name, tcPoint(InterfaceName(ifindex), false)+", by a link of tcx", tcxRemedy, err)
	}
	return &TC{Mode: ModeTCX, ifindex: ifindex, link: l}, nil
}

// AttachClsact attaches a program to the tc ingress by a filter of clsact, before all others of priority 1. A
// filter does not end with the process; the next one of the same name replaces it.
func AttachClsact(p *ebpf.Program, name string, ifindex int) (*TC, error) {
	t := &TC{Mode: ModeClsact, ifindex: ifindex, name: name}
	if err := t.attachClsact(p); err != nil {
		return nil, refused(name, tcPoint(InterfaceName(ifindex), false)+", by clsact", clsactRemedy(ifindex), err)
	}
	return t, nil
}

// AttachClsactOut attaches a program to the tc egress of an interface that is new and the caller's own, by a
// filter of clsact. The filter goes with the interface.
func AttachClsactOut(p *ebpf.Program, name string, ifindex int) error {
	f := clsactFilter(ifindex, netlink.HANDLE_MIN_EGRESS, name)
	f.Fd = p.FD()
	err := netlink.QdiscAdd(clsact(ifindex))
	if err != nil {
		err = fmt.Errorf("add a clsact qdisc: %w", err)
	} else {
		err = netlink.FilterAdd(f)
	}
	if err != nil {
		return refused(name, tcPoint(InterfaceName(ifindex), true)+", by clsact", clsactRemedy(ifindex), err)
	}
	return nil
}

// clsactRemedy returns the remedy for a refused filter.
func clsactRemedy(ifindex int) string {
	return fmt.Sprintf("`tc qdisc show dev %s` lists the qdiscs there: an ingress qdisc keeps clsact out", InterfaceName(ifindex))
}

// clsactParents are the parents of the filters of the two directions.
var clsactParents = [2]uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS}

// clsact is the qdisc that filters need on an interface, in both directions.
func clsact(ifindex int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// clsactFilter returns a filter of ours there, without its program.
func clsactFilter(ifindex int, parent uint32, name string) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: ifindex, Parent: parent, Priority: filterPriority, Protocol: unix.ETH_P_ALL},
		Name:        name, DirectAction: true,
	}
}

func (t *TC) attachClsact(p *ebpf.Program) error {
	err := netlink.QdiscAdd(clsact(t.ifindex))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a clsact qdisc: %w", err)
	}
	t.created = err == nil
	left, err := t.filters() // by a process that was killed
	if err != nil {
		return errors.Join(err, t.removeClsact())
	}
	// Among filters of one priority, the kernel runs the newest BPF filter first (cls_bpf_change in
	// net/sched/cls_bpf.c). The kernel chooses the handle: a handle of our choice might be in use.
	f := clsactFilter(t.ifindex, netlink.HANDLE_MIN_INGRESS, t.name)
	f.Fd = p.FD()
	if err := netlink.FilterAdd(f); err != nil {
		return errors.Join(fmt.Errorf("add a filter of priority %d to clsact: %w", filterPriority, err), t.removeClsact())
	}
	return removeFilters(left)
}

// filters returns the filters of the name.
func (t *TC) filters() (found []netlink.Filter, err error) {
	all, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: t.ifindex}}, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return nil, fmt.Errorf("list the filters of clsact: %w", err)
	}
	for _, f := range all {
		if b, is := f.(*netlink.BpfFilter); is && b.Name == t.name {
			found = append(found, f)
		}
	}
	return found, nil
}

func removeFilters(filters []netlink.Filter) error {
	var errs []error
	for _, f := range filters {
		errs = append(errs, netlink.FilterDel(f))
	}
	return errors.Join(errs...)
}

// removeClsact removes the qdisc if it is ours and has no other filter.
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

// Close detaches the program. It succeeds if the interface is gone. The calling thread is in the interface's
// network namespace.
func (t *TC) Close() error {
	if t.link != nil {
		return DropLink(t.link)
	}
	filters, err := t.filters() // none if the interface is gone
	if err == nil {
		err = removeFilters(filters)
	}
	if err == nil {
		err = t.removeClsact()
	}
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("detach a program from the tc ingress: %w", err)
	}
	return nil
}

// ForeignTC lists the programs at tc of an interface, in both directions, except for the program own: programs
// of tcx, and filters of any kind in a clsact or ingress qdisc. The interface is in the calling thread's
// network namespace.
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
	for _, parent := range clsactParents {
		filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // no such qdisc
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list the filters at tc of interface %d: %w", ifindex, err)
		}
		for _, f := range filters {
			text := fmt.Sprintf("a filter of kind %s, priority %d", f.Type(), f.Attrs().Priority)
			if b, is := f.(*netlink.BpfFilter); is {
				if slices.Contains(own, uint32(b.Id)) {
					continue
				}
				text += fmt.Sprintf(", program %d, %q", b.Id, b.Name)
			}
			found = append(found, text)
		}
	}
	return found, nil
}

// LeadsAway reports whether an interface is a veth whose other end is in another network namespace, as for a pod.
// bpf_redirect_peer needs such an interface.
func LeadsAway(l netlink.Link) bool { return l.Type() == "veth" && l.Attrs().NetNsID >= 0 }
