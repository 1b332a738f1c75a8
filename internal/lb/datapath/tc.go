package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/pin"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// direction is one of the two ways through an interface at tc.
type direction struct {
	prefix   string // of the pin's name
	name     string // part of the pin's
	program  string // the kernel's name for the program
	outbound bool
	attach   ebpf.AttachType
	anchor   link.Anchor // among other programs: nearest to the wire, where XDP would be
	parent   uint32      // in clsact
	handle   uint32      // of the filter there
}

// directions are all of them. Between the wire and the stack nobody comes before the balancer.
var directions = [2]direction{
	{tcPrefix, "in", "sh_tc_in", false, ebpf.AttachTCXIngress, link.Head(), netlink.HANDLE_MIN_INGRESS, filterHandle},
	{tcPrefix, "out", "sh_tc_out", true, ebpf.AttachTCXEgress, link.Tail(), netlink.HANDLE_MIN_EGRESS, filterHandle},
}

// tcPrefix begins the names of pins: tc-in-<interface>, tc-out-<interface>. Each is of a link or,
// with clsact, which the kernel keeps by itself, of the program, as a note that it is there.
const tcPrefix = "tc-"

// clsactPrefix begins the name of the note that the qdisc on an interface was made by us, and
// goes with us.
const clsactPrefix = "clsact-"

// Where our filters are in clsact. A low priority number runs early; the handle tells ours from
// others of that priority.
const (
	filterPriority = 1
	filterHandle   = 0x5348
)

func (d direction) path(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), d.prefix+d.name+"-"+kernel.ToPin(iface))
}

// side is a place at tc that runs a program of ours.
type side interface {
	Update(*ebpf.Program) error // in one step
	drop() error                // ends it at once, and its pin; closes it
	Close() error
}

// tcxSide is a pinned link, Linux 6.6.
type tcxSide struct{ link.Link }

func (s tcxSide) drop() error { return kernel.DropLink(s.Link) }

// clsactSide is a filter.
type clsactSide struct {
	root, instance, iface string
	ifindex               int
	direction             direction
}

func (s clsactSide) Close() error { return nil }

// name is what tells our filters from others, and from another instance's.
func (s clsactSide) name() string { return s.direction.program + "/" + s.instance }

func (s clsactSide) filter() *netlink.BpfFilter {
	f := clsactFilter(s.ifindex, s.direction.parent, s.name())
	f.Handle = s.direction.handle
	return f
}

// find looks for the filter in our place, whoever's it is.
func (s clsactSide) find() (*netlink.BpfFilter, error) {
	if s.ifindex == 0 { // the kernel calls that invalid, as if something were wrong with the question
		return nil, netlink.LinkNotFoundError{}
	}
	dev, err := netlink.LinkByIndex(s.ifindex)
	if err != nil {
		return nil, err
	}
	filters, err := netlink.FilterList(dev, s.direction.parent)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); ok && bpf.Handle == s.direction.handle && bpf.Priority == filterPriority {
			return bpf, nil
		}
	}
	return nil, nil
}

// Update puts the program there; the kernel exchanges a filter's in one step (cls_bpf_change in
// net/sched/cls_bpf.c).
func (s clsactSide) Update(p *ebpf.Program) error {
	there, err := s.find()
	if err != nil {
		return fmt.Errorf("look for filters: %w", err)
	}
	if there != nil && there.Name != s.name() {
		return fmt.Errorf("the place of shunt's filter (priority %d, handle %#x) is taken by %q: remove that filter, or stop the instance that it belongs to",
			filterPriority, s.direction.handle, there.Name)
	}
	f := s.filter()
	f.Fd = p.FD()
	if err := netlink.FilterReplace(f); err != nil {
		return err
	}
	return s.note(p, s.direction.path(s.root, s.instance, s.iface))
}

func (s clsactSide) note(p *ebpf.Program, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	another, err := p.Clone() // the library moves the pin of one that has one
	if err != nil {
		return err
	}
	return errors.Join(another.Pin(path), another.Close())
}

func (s clsactSide) qdiscPath() string {
	return filepath.Join(kernel.Directory(s.root, s.instance), clsactPrefix+kernel.ToPin(s.iface))
}

// prepare makes the qdisc unless there is one; p is what the note of that is pinned with.
func (s clsactSide) prepare(p *ebpf.Program) error {
	err := netlink.QdiscAdd(clsactQdisc(s.ifindex))
	if errors.Is(err, unix.EEXIST) { // somebody else's, or ours from before
		return nil
	}
	if err != nil {
		return fmt.Errorf("add the clsact qdisc: %w; an ingress qdisc takes its place: `tc qdisc show dev %s`", err, s.iface)
	}
	return s.note(p, s.qdiscPath())
}

// clsactQdisc is the qdisc that filters need on an interface, in both directions.
func clsactQdisc(ifindex int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// clsactFilter is a filter of ours there, without its program.
func clsactFilter(ifindex int, parent uint32, name string) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: ifindex, Parent: parent, Priority: filterPriority, Protocol: unix.ETH_P_ALL},
		Name:        name, DirectAction: true,
	}
}

// clsactFilters are an interface's filters in both directions, whoever's they are.
func clsactFilters(ifindex int) (all []netlink.Filter, err error) {
	dev := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	for _, direction := range directions {
		filters, err := netlink.FilterList(dev, direction.parent)
		if err != nil {
			return nil, err
		}
		all = append(all, filters...)
	}
	return all, nil
}

// drop takes the filter away and, after the last one, the qdisc if it was made by us and nobody
// else uses it.
func (s clsactSide) drop() error {
	var errs []error
	there, err := s.find()
	var gone netlink.LinkNotFoundError
	if err != nil && !errors.As(err, &gone) {
		return fmt.Errorf("look for filters: %w", err)
	}
	if there != nil && there.Name == s.name() {
		errs = append(errs, netlink.FilterDel(s.filter()))
	}
	if err := os.Remove(s.direction.path(s.root, s.instance, s.iface)); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, s.dropQdisc())...)
}

// dropAnywhere is drop of a side whose interface may be in another network namespace, or gone. A
// filter can be reached only from the namespace of its interface, unlike a link.
func (s clsactSide) dropAnywhere() error {
	isHere := func() bool {
		s.ifindex = interfaceIndex(s.iface)
		there, err := s.find()
		return err == nil && there != nil && there.Name == s.name()
	}
	if isHere() {
		return s.drop()
	}
	ns := namespace.Find(func(ns netns.NsHandle) (is bool) {
		err := namespace.Inside(ns, func() error { is = isHere(); return nil })
		return is && err == nil
	})
	defer namespace.Close(ns)
	return namespace.Inside(ns, func() error { // here, if there is none
		s.ifindex = interfaceIndex(s.iface)
		return s.drop()
	})
}

// dropQdisc deletes the qdisc if it was made by us. Left is one that others have come to use; from
// then on it is theirs.
func (s clsactSide) dropQdisc() error {
	if _, err := os.Stat(s.qdiscPath()); err != nil {
		return nil
	}
	if _, err := netlink.LinkByIndex(s.ifindex); err != nil {
		return os.Remove(s.qdiscPath()) // the interface is gone, and its qdisc with it
	}
	filters, err := clsactFilters(s.ifindex)
	if err != nil {
		return fmt.Errorf("look for filters: %w", err)
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); ok && strings.HasSuffix(bpf.Name, "/"+s.instance) { // our other one
			return nil
		}
	}
	if len(filters) == 0 {
		if err := netlink.QdiscDel(clsactQdisc(s.ifindex)); err != nil {
			return fmt.Errorf("delete the clsact qdisc: %w", err)
		}
	}
	return os.Remove(s.qdiscPath())
}

// pinnedLink opens the link at path. nil when a program is pinned there: a note of a filter.
func pinnedLink(path string) (link.Link, error) {
	pinned, err := pin.Load(path, nil)
	if err != nil {
		return nil, err
	}
	_, isLink := pinned.(link.Link)
	if err := pinned.Close(); err != nil || !isLink {
		return nil, err
	}
	return link.LoadPinnedLink(path, nil) // knows its pin, as the other does not
}

// openSide finds what a pin says is there. nil without one, or when it is of no use any more: then
// it is gone.
func openSide(root, instance, iface string, ifindex int, at direction) (side, error) {
	path := at.path(root, instance, iface)
	l, err := pinnedLink(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the pin %s: %w", path, err)
	}
	if l == nil {
		return clsactSide{root, instance, iface, ifindex, at}, nil
	}
	info, err := l.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look at the link pinned at %s: %w", path, err), l.Close())
	}
	if tcx := info.TCX(); tcx == nil || int(tcx.Ifindex) != ifindex {
		return nil, kernel.DropLink(l)
	}
	return tcxSide{l}, nil
}

// makeSide has the interface run the program at a place where it has none of ours.
func (d *Datapath) makeSide(a *attached, at direction, p *ebpf.Program) (side, error) {
	path := at.path(d.root, d.instance, a.Interface)
	if !d.withoutTCX {
		l, err := link.AttachTCX(link.TCXOptions{Interface: a.ifindex, Program: p, Attach: at.attach, Anchor: at.anchor})
		if err == nil {
			if err := l.Pin(path); err != nil {
				return nil, errors.Join(fmt.Errorf("pin the link at %s: %w", path, err), l.Close())
			}
			return tcxSide{l}, nil
		}
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, err
		}
	}
	s := clsactSide{d.root, d.instance, a.Interface, a.ifindex, at}
	if err := s.prepare(p); err != nil {
		return nil, err
	}
	if err := s.Update(p); err != nil {
		return nil, errors.Join(err, s.drop())
	}
	return s, nil
}

// putSide has the interface run the program at a place, in one step where it has one of ours already.
func (d *Datapath) putSide(a *attached, at direction, p *ebpf.Program) (s side, fresh bool, err error) {
	s, err = openSide(d.root, d.instance, a.Interface, a.ifindex, at)
	switch {
	case err == nil && s != nil:
		if err = s.Update(p); err != nil {
			err = errors.Join(err, s.Close())
		}
	case err == nil:
		s, err = d.makeSide(a, at, p)
		fresh = err == nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("attach %s to interface %s: %w", at.program, a.Interface, err)
	}
	return s, fresh, nil
}

// loadTC loads an interface's two programs.
func (d *Datapath) loadTC(a *attached) (err error) {
	for i, at := range directions {
		if a.programs[i], err = d.loadStages(a, at); err != nil {
			return errors.Join(err, a.closePrograms())
		}
	}
	return nil
}

// loadStages loads the balancer's stages at tc.
func (d *Datapath) loadStages(a *attached, at direction) (*ebpf.Program, error) {
	constants := d.constants(a)
	constants["outbound"] = asByte(at.outbound)
	constants["generic_mode"] = asByte(true)
	constants["redirect_back"] = asByte(false)
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := d.version.load(objectTC)
		if err == nil && spec.Programs[tcProgShTc] != nil {
			spec.Programs[tcProgShTc].Name = at.program
		}
		return spec, err
	}
	coll, err := d.loadOnto(nil, load, constants)
	if err != nil {
		return nil, fmt.Errorf("load %s for interface %s: %w", at.program, a.Interface, err)
	}
	defer coll.Close()
	return kernel.TakeProgram(coll, tcProgShTc)
}

// attachTC puts the programs at tc, or new ones in the place of old ones, each in one step.
func (d *Datapath) attachTC(a *attached) error {
	a.Mode = kernel.ModeTCX // for the constants; which of the two it is turns out
	if err := d.loadTC(a); err != nil {
		return err
	}
	var fresh []side
	for i, at := range directions {
		s, isFresh, err := d.putSide(a, at, a.programs[i])
		if isFresh {
			fresh = append(fresh, s)
		}
		if err != nil {
			for _, s := range fresh {
				err = errors.Join(err, s.drop())
			}
			return errors.Join(err, a.closePrograms())
		}
		a.sides[i] = s
	}
	a.Mode = sideMode(a.sides[0])
	return nil
}

func sideMode(s side) kernel.Mode {
	if _, ok := s.(tcxSide); ok {
		return kernel.ModeTCX
	}
	return kernel.ModeClsact
}

// dropTC takes the programs of a predecessor off an interface. That there are none is success.
func dropTC(root, instance, iface string, ifindex int) error {
	return dropSides(root, instance, iface, ifindex, directions)
}

func dropSides(root, instance, iface string, ifindex int, places [len(directions)]direction) error {
	var errs []error
	for _, at := range places {
		s, err := openSide(root, instance, iface, ifindex, at)
		if err == nil && s != nil {
			err = s.drop()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// pinnedSides finds the interfaces that have programs at tc, by the pins of sh_tc_in.
func pinnedSides(root, instance string) ([]string, error) {
	return pinnedAt(root, instance, directions[0])
}

// pinnedAt finds the interfaces that have a program at a place.
func pinnedAt(root, instance string, at direction) ([]string, error) {
	entries, err := os.ReadDir(kernel.Directory(root, instance))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the pins in %s: %w", kernel.Directory(root, instance), err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), at.prefix+at.name+"-"); ok {
			names = append(names, kernel.FromPin(name))
		}
	}
	return names, nil
}

// sideAttachment is what the pins say of an interface at tc, as attachmentOf does.
func sideAttachment(root, instance, iface string) (kernel.Attachment, error) {
	a := kernel.Attachment{Interface: iface}
	at := directions[0]
	l, err := pinnedLink(at.path(root, instance, iface))
	if err != nil {
		return a, fmt.Errorf("list the tc programs of interface %s: %w", iface, err)
	}
	if l == nil {
		s := clsactSide{root, instance, iface, interfaceIndex(iface), at}
		if there, err := s.find(); err == nil && there != nil && there.Name == s.name() {
			a.Mode = kernel.ModeClsact
		} else {
			a.Reason = "the interface is gone, or not in this network namespace"
		}
		return a, nil
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return a, fmt.Errorf("look at the link of interface %s: %w", iface, err)
	}
	if info.TCX() == nil || info.TCX().Ifindex == 0 {
		a.Reason = interfaceGone
		return a, nil
	}
	index := int(info.TCX().Ifindex)
	if dev, err := netlink.LinkByIndex(index); err == nil && hasLink(index, at.attach, info.ID) {
		a.Interface, a.Mode = dev.Attrs().Name, kernel.ModeTCX
	} else {
		a.Reason = interfaceElsewhere
	}
	return a, nil
}

// hasLink is whether the interface of that index, in this network namespace, has the link.
func hasLink(ifindex int, at ebpf.AttachType, id link.ID) bool {
	there, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
	return err == nil && slices.ContainsFunc(there.Programs, func(p link.AttachedProgram) bool {
		is, known := p.LinkID()
		return known && is == id
	})
}
