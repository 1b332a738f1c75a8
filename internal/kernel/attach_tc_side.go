package kernel

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/pin"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// TCSide is an attach point at tc, in one direction of an interface, for a program that outlives the process:
// by a pinned link of tcx or, before Linux 6.6, by a filter of clsact. The pin of a filter is a pin of its
// program, as a note that the filter exists. The program is nearest to the wire, where XDP would be; a filter
// shares that position with others of its priority.
type TCSide struct {
	Interface string
	Ifindex   int    // in the calling thread's network namespace
	Outbound  bool   // otherwise inbound
	Program   string // the kernel's name for it; Program/Owner is the filter's
	Owner     string // the owner's name; an owner may have several on an interface
	Handle    uint32 // of the filter; it distinguishes the filter from the owner's others, and from other filters of the priority
	Pin       string // path
	QdiscPin  string // path of the note that the clsact qdisc is the owner's, and goes with the last filter
}

// TCProgram is a program at a TCSide.
type TCProgram interface {
	Update(*ebpf.Program) error // in one step
	Drop() error                // ends it at once, and its pin; closes it
	Close() error
	Mode() Mode
}

// filterPriority is the priority of all filters of shunt. A low number runs early.
const filterPriority = 1

// Parent is the parent of filters of the direction in clsact.
func (s TCSide) Parent() uint32 {
	if s.Outbound {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// AttachType is the attach type of a program of tcx in the direction.
func (s TCSide) AttachType() ebpf.AttachType {
	if s.Outbound {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

// String returns the attach point, in words.
func (s TCSide) String() string { return tcPoint(s.Interface, s.Outbound) }

// anchor returns the program's position among the programs of tcx: nearest to the wire.
func (s TCSide) anchor() link.Anchor {
	if s.Outbound {
		return link.Tail()
	}
	return link.Head()
}

// tcxProgram is a pinned link, Linux 6.6.
type tcxProgram struct{ link.Link }

func (t tcxProgram) Drop() error { return DropLink(t.Link) }
func (t tcxProgram) Mode() Mode  { return ModeTCX }

// clsactProgram is a filter.
type clsactProgram struct{ TCSide }

func (c clsactProgram) Close() error { return nil }
func (c clsactProgram) Mode() Mode   { return ModeClsact }

// name distinguishes the owner's filters from others.
func (c clsactProgram) name() string { return c.Program + "/" + c.Owner }

func (c clsactProgram) filter() *netlink.BpfFilter {
	f := clsactFilter(c.Ifindex, c.Parent(), c.name())
	f.Handle = c.Handle
	return f
}

// find looks for the filter at the attach point, of any owner.
func (c clsactProgram) find() (*netlink.BpfFilter, error) {
	if c.Ifindex == 0 { // the kernel's error would be EINVAL, as for a wrong request
		return nil, netlink.LinkNotFoundError{}
	}
	dev, err := netlink.LinkByIndex(c.Ifindex)
	if err != nil {
		return nil, err
	}
	filters, err := netlink.FilterList(dev, c.Parent())
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); ok && bpf.Handle == c.Handle && bpf.Priority == filterPriority {
			return bpf, nil
		}
	}
	return nil, nil
}

// isThere reports whether the filter at the attach point is the owner's.
func (c clsactProgram) isThere() bool {
	there, err := c.find()
	return err == nil && there != nil && there.Name == c.name()
}

// Update replaces the program; the kernel exchanges a filter's program in one step (cls_bpf_change in
// net/sched/cls_bpf.c).
func (c clsactProgram) Update(p *ebpf.Program) error {
	const again = "`tc filter show` lists the filters there"
	there, err := c.find()
	if err != nil {
		return refused(c.Program, c.String(), again, fmt.Errorf("look for filters: %w", err))
	}
	if there != nil && there.Name != c.name() {
		return &RefusedError{c.Program, c.String(),
			fmt.Sprintf("the priority and handle of shunt's filter (%d, %#x) are taken by %q", filterPriority, c.Handle, there.Name),
			"remove that filter, or stop the instance that it belongs to", nil}
	}
	f := c.filter()
	f.Fd = p.FD()
	if err := netlink.FilterReplace(f); err != nil {
		return refused(c.Program, c.String(), again, fmt.Errorf("put a filter of priority %d into clsact: %w", filterPriority, err))
	}
	return noteFilter(p, c.Pin)
}

// noteFilter pins the program and replaces an earlier pin.
func noteFilter(p *ebpf.Program, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	another, err := p.Clone() // the library would move the pin of a pinned program
	if err != nil {
		return err
	}
	return errors.Join(another.Pin(path), another.Close())
}

// prepare makes the qdisc unless there is one; p pins a note of that.
func (c clsactProgram) prepare(p *ebpf.Program) error {
	err := netlink.QdiscAdd(clsact(c.Ifindex))
	if errors.Is(err, unix.EEXIST) { // another program's, or an earlier one of the owner
		return nil
	}
	if err != nil {
		return refused(c.Program, c.String(), fmt.Sprintf("an ingress qdisc keeps it out: see `tc qdisc show dev %s`", c.Interface), fmt.Errorf("add the clsact qdisc: %w", err))
	}
	return noteFilter(p, c.QdiscPin)
}

// clsactFilters returns an interface's filters in both directions, of any owner.
func clsactFilters(ifindex int) (all []netlink.Filter, err error) {
	for _, parent := range clsactParents {
		filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
		if err != nil {
			return nil, err
		}
		all = append(all, filters...)
	}
	return all, nil
}

// Drop removes the filter and, after the owner's last one, the qdisc if it is the owner's and has no other
// filter.
func (c clsactProgram) Drop() error {
	var errs []error
	there, err := c.find()
	var gone netlink.LinkNotFoundError
	if err != nil && !errors.As(err, &gone) {
		return fmt.Errorf("look for filters: %w", err)
	}
	if there != nil && there.Name == c.name() {
		errs = append(errs, netlink.FilterDel(c.filter()))
	}
	if err := os.Remove(c.Pin); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, c.dropQdisc())...)
}

// dropAnywhere does the same as Drop for a filter whose interface may be in another network namespace, or gone.
// Unlike a link, a filter can be reached only from the namespace of its interface.
func (c clsactProgram) dropAnywhere() error {
	isHere := func() bool {
		c.Ifindex = InterfaceIndex(c.Interface)
		return c.isThere()
	}
	if isHere() {
		return c.Drop()
	}
	ns := namespace.Find(func(ns netns.NsHandle) (is bool) {
		err := namespace.Inside(ns, func() error { is = isHere(); return nil })
		return is && err == nil
	})
	defer namespace.Close(ns)
	return namespace.Inside(ns, func() error { // here, if there is none
		c.Ifindex = InterfaceIndex(c.Interface)
		return c.Drop()
	})
}

// dropQdisc deletes the qdisc if it is the owner's. A qdisc that others use by now stays, and is theirs from
// then on.
func (c clsactProgram) dropQdisc() error {
	if _, err := os.Stat(c.QdiscPin); err != nil {
		return nil
	}
	if _, err := netlink.LinkByIndex(c.Ifindex); err != nil {
		return os.Remove(c.QdiscPin) // the interface is gone, and its qdisc with it
	}
	filters, err := clsactFilters(c.Ifindex)
	if err != nil {
		return fmt.Errorf("look for filters: %w", err)
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); ok && strings.HasSuffix(bpf.Name, "/"+c.Owner) { // another filter of the owner
			return nil
		}
	}
	if len(filters) == 0 {
		err := netlink.QdiscDel(clsact(c.Ifindex))
		gone := errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) // with its interface, which may be another one by now
		if err != nil && !gone {
			return fmt.Errorf("delete the clsact qdisc: %w", err)
		}
	}
	return os.Remove(c.QdiscPin)
}

// pinnedLink opens the link at path. It returns nil if a program is pinned there: a note of a filter.
func pinnedLink(path string) (link.Link, error) {
	pinned, err := pin.Load(path, nil)
	if err != nil {
		return nil, err
	}
	_, isLink := pinned.(link.Link)
	if err := pinned.Close(); err != nil || !isLink {
		return nil, err
	}
	return link.LoadPinnedLink(path, nil) // this one knows its pin, and the first one does not
}

// Open finds the object that the pin describes. It returns nil without a pin, or if the pin is useless by now:
// then it has been removed.
func (s TCSide) Open() (TCProgram, error) {
	l, err := pinnedLink(s.Pin)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the pin %s: %w", s.Pin, err)
	}
	if l == nil {
		return clsactProgram{s}, nil
	}
	info, err := l.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look at the link pinned at %s: %w", s.Pin, err), l.Close())
	}
	if tcx := info.TCX(); tcx == nil || int(tcx.Ifindex) != s.Ifindex {
		return nil, DropLink(l)
	}
	return tcxProgram{l}, nil
}

// Put makes the interface run the program at the attach point, and replaces a program of the owner in one step;
// fresh reports that there was none. withoutTCX uses a filter, as on Linux before 6.6, even if the kernel has
// tcx. A RefusedError means that the program was refused.
func (s TCSide) Put(p *ebpf.Program, withoutTCX bool) (t TCProgram, fresh bool, err error) {
	t, err = s.Open()
	if err != nil {
		return nil, false, err
	}
	c, isFilter := t.(clsactProgram)
	if isFilter && !c.isThere() { // the interface was made anew under its name, and has no qdisc
		t, withoutTCX = nil, true
	}
	if t == nil {
		t, err = s.attach(p, withoutTCX)
		return t, err == nil, err
	}
	if err := t.Update(p); err != nil {
		var no *RefusedError
		if !errors.As(err, &no) {
			err = refused(s.Program, s.String(), "", err)
		}
		return nil, false, errors.Join(err, t.Close())
	}
	return t, false, nil
}

// attach makes the interface run the program at an attach point without a program of the owner.
func (s TCSide) attach(p *ebpf.Program, withoutTCX bool) (TCProgram, error) {
	if !withoutTCX {
		l, err := attachTCX(p, s.Ifindex, s.AttachType(), s.anchor())
		if err == nil {
			if err := PinLink(l, s.Pin); err != nil {
				return nil, err
			}
			return tcxProgram{l}, nil
		}
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, refused(s.Program, s.String()+", by a link of tcx", tcxRemedy, err)
		}
	}
	c := clsactProgram{s}
	if err := c.prepare(p); err != nil {
		return nil, err
	}
	if err := c.Update(p); err != nil {
		return nil, errors.Join(err, c.Drop())
	}
	return c, nil
}

// Drop detaches the program that the pin describes from an interface in the calling thread's network namespace.
// It succeeds if there is none.
func (s TCSide) Drop() error {
	t, err := s.Open()
	if err != nil || t == nil {
		return err
	}
	return t.Drop()
}

// DropAnywhere detaches the program that the pin describes, wherever an interface of the name is by now;
// Ifindex is not used. A pin that cannot be opened is removed. It succeeds if there is none.
func (s TCSide) DropAnywhere() error {
	l, err := pinnedLink(s.Pin)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return os.Remove(s.Pin)
	case l != nil:
		return DropLink(l)
	}
	return clsactProgram{s}.dropAnywhere()
}

// The reasons of an Attachment without a mode. An index of another network namespace often belongs to another
// interface in this namespace, so the existence of an interface proves nothing.
const (
	InterfaceGone      = "the interface is gone"
	InterfaceElsewhere = "the interface is not in this network namespace"
)

// Attachment describes the attach point by its pin. The name is that of the pin, unless the interface is
// visible here and has been renamed. Ifindex is not used.
func (s TCSide) Attachment() (Attachment, error) {
	a := Attachment{Interface: s.Interface}
	l, err := pinnedLink(s.Pin)
	if err != nil {
		return a, fmt.Errorf("list the tc programs of interface %s: %w", s.Interface, err)
	}
	if l == nil {
		s.Ifindex = InterfaceIndex(s.Interface)
		if (clsactProgram{s}).isThere() {
			a.Mode = ModeClsact
		} else {
			a.Reason = "the interface is gone, or not in this network namespace"
		}
		return a, nil
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return a, fmt.Errorf("look at the link of interface %s: %w", s.Interface, err)
	}
	if info.TCX() == nil || info.TCX().Ifindex == 0 {
		a.Reason = InterfaceGone
		return a, nil
	}
	index := int(info.TCX().Ifindex)
	if dev, err := netlink.LinkByIndex(index); err == nil && hasLink(index, s.AttachType(), info.ID) {
		a.Interface, a.Mode = dev.Attrs().Name, ModeTCX
	} else {
		a.Reason = InterfaceElsewhere
	}
	return a, nil
}

// hasLink reports whether the interface of that index, in this network namespace, has the link.
func hasLink(ifindex int, at ebpf.AttachType, id link.ID) bool {
	there, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
	return err == nil && slices.ContainsFunc(there.Programs, func(p link.AttachedProgram) bool {
		is, known := p.LinkID()
		return known && is == id
	})
}
