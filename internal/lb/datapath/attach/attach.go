package attach

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

type attached struct {
	kernel.Attachment
	asked   model.Attach
	ifindex int
	index   uint32
	// redirectBack: XDP_TX does not work on this interface (bpf/lb/config.h).
	redirectBack bool
	// programs are, at tc, one for each of directions; at XDP only the first is used.
	programs [len(directions)]*ebpf.Program
	// deliveries are loaded before the program at XDP runs, and nil once they are attached.
	deliveries [len(directions)]*ebpf.Program
	link       link.Link                         // at XDP
	sides      [len(directions)]kernel.TCProgram // at tc
	chain      *ebpf.Map                         // while it is being attached to XDP
	stopgap    *stopgap                          // while its mode changes
	vlan       *vlan                             // nil where its frames come in by itself
	guests     *kernel.GuestHook                 // at XDP: other products' programs, behind this one
	isPod      bool                              // at tc, by the programs that pods share, which are the plane's
	tunnelled  bool                              // at XDP: it has a program for packets out of tunnels
}

// String is the interface in messages.
func (a *attached) String() string {
	if a.Interface == "" {
		return "the interfaces of pods"
	}
	return "interface " + a.Interface
}

func (a *attached) closePrograms() error {
	return errors.Join(a.closeDeliveries(), closeAll(a.programs[:]))
}

// closeAll closes programs and forgets them. Some may be nil.
func closeAll(programs []*ebpf.Program) error {
	var errs []error
	for i, p := range programs {
		if p != nil {
			errs = append(errs, p.Close())
			programs[i] = nil
		}
	}
	return errors.Join(errs...)
}

func (a *attached) close() error {
	errs := []error{a.closePrograms()}
	if a.link != nil {
		errs = append(errs, a.link.Close())
	}
	for _, s := range a.sides {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

// drop detaches the programs from the interface.
func (a *attached) drop() error {
	errs := []error{a.closePrograms()}
	if a.link != nil {
		errs = append(errs, kernel.DropLink(a.link))
	}
	for _, s := range a.sides {
		if s != nil {
			errs = append(errs, s.Drop())
		}
	}
	a.releaseGuests()
	return errors.Join(errs...)
}

// releaseGuests moves other products' programs to interfaces that this program has left.
func (a *attached) releaseGuests() {
	if a.guests != nil {
		a.guests.Release()
		a.guests = nil
	}
}

const dropsPrefix = kernel.LinkPrefix + "drops-"

func linkPath(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), kernel.LinkPrefix+kernel.ToPin(iface))
}

// Attach puts the program on an interface, or replaces an old program of this instance in one step. auto tries
// native first. Attaching again with the same mode is a replacement. The name refers to the calling thread's
// network namespace.
func (d *Plane) Attach(iface string, mode model.Attach) (kernel.Attachment, error) {
	return d.attach(iface, mode, false)
}

// AttachPod does the same at tc for a veth of a pod, which comes and goes without a program being loaded anew.
func (d *Plane) AttachPod(iface string) (kernel.Attachment, error) {
	return d.attach(iface, model.AttachTC, true)
}

func (d *Plane) attach(iface string, mode model.Attach, isPod bool) (kernel.Attachment, error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return kernel.Attachment{}, fmt.Errorf("attach to interface %s: %w; `ip link` lists the interfaces", iface, err)
	}
	if dev.Attrs().HardwareAddr == nil || len(dev.Attrs().HardwareAddr) != 6 {
		return kernel.Attachment{}, fmt.Errorf("attach to interface %s: it is not an Ethernet interface; shunt balances Ethernet frames only", iface)
	}
	is, behind := d.vlanOf(dev, mode)
	if err := d.require(featuresAt(mode, behind)); err != nil {
		return kernel.Attachment{}, fmt.Errorf("attach to interface %s: %w", iface, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	unlock, err := kernel.Lock(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return kernel.Attachment{}, fmt.Errorf("attach to interface %s: %w", iface, err)
	}
	defer unlock()
	var tagged *vlan
	if behind {
		if tagged, err = d.vlanAt(iface, is); err != nil {
			return kernel.Attachment{}, err
		}
	}
	if mode == model.AttachGeneric || mode == model.AttachTC {
		if err := d.keepsVLANs(iface); err != nil {
			return kernel.Attachment{}, fmt.Errorf("attach to interface %s with `attach: %s`: %w", iface, mode, err)
		}
	}
	index, err := d.record(dev, tagged, mode, isPod)
	if err != nil {
		return kernel.Attachment{}, err
	}
	a := &attached{Attachment: kernel.Attachment{Interface: iface}, asked: mode, ifindex: dev.Attrs().Index, index: index,
		redirectBack: tagged == nil && redirectsBack(dev), vlan: tagged, isPod: isPod}
	if old := d.attached[iface]; old != nil {
		a.Reason, a.tunnelled = old.Reason, old.tunnelled && old.index == index
	}
	switch {
	case mode == model.AttachTC:
		err = d.moveToTC(a)
	case tagged != nil:
		err = d.moveToVLAN(a)
	default:
		err = d.attachXDP(a, dev, mode)
	}
	if err == nil {
		err = d.deliver(a)
	}
	if err == nil && tagged == nil { // its frames come in by itself from now on
		err = d.leaveVLAN(a)
	}
	d.lowerStopgap(a)
	if err != nil {
		a.releaseGuests()
		if old := d.attached[iface]; old == nil || old.ifindex != a.ifindex { // the old interface has gone
			err = errors.Join(err, d.ClearInterface(index, a.ifindex))
		}
		return kernel.Attachment{}, err
	}
	if old := d.attached[iface]; old != nil {
		_ = old.close()
		old.releaseGuests()
		if isPod && old.isPod && old.index != index { // it was made anew under its name
			d.clearAtTC(old.index)
			if err := d.ClearInterface(old.index, old.ifindex); err != nil {
				return kernel.Attachment{}, err
			}
		}
	}
	d.attached[iface] = a
	d.countRefusals()
	if err := d.setAtTC(index, a.Mode.AtTC()); err != nil {
		return kernel.Attachment{}, err
	}
	return a.Attachment, nil
}

// moveToTC attaches at tc and then detaches the program from XDP, if it was there: a packet that XDP has
// handled never comes to tc, so no packet is handled twice, and none is missed.
func (d *Plane) moveToTC(a *attached) error {
	a.Reason = ""
	if err := d.attachTC(a); err != nil {
		return err
	}
	// This comes first, because sh_xdp keeps forged marks from tc.
	if err := dropSides(d.opts.PinRoot, d.opts.Instance, a.Interface, a.ifindex, deliveries); err != nil {
		return err
	}
	return d.leaveXDP(a.Interface)
}

// leaveXDP detaches the program from XDP, if it is there.
func (d *Plane) leaveXDP(iface string) error {
	path := linkPath(d.opts.PinRoot, d.opts.Instance, iface)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return errors.Join(kernel.RemoveLink(path), removeChain(d.opts.PinRoot, d.opts.Instance, iface))
}

func (d *Plane) attachXDP(a *attached, dev netlink.Link, mode model.Attach) error {
	chain, fresh, err := d.openChain(a.Interface)
	if err != nil {
		return fmt.Errorf("attach to interface %s: %w", a.Interface, err)
	}
	defer chain.Close()
	a.chain = chain
	before := kernel.ModeOf(dev)
	if a.guests, err = kernel.HostGuests(a.ifindex); err == nil {
		err = a.guests.Change(chain, func() error {
			replaced, err := d.replace(a, dev, mode)
			if err == nil && !replaced {
				if err = d.attachNew(a, mode); err != nil {
					err = errors.Join(err, d.putBack(*a, before))
				}
			}
			return err
		})
	}
	if err == nil { // as moveToTC, the other way round
		return dropTC(d.opts.PinRoot, d.opts.Instance, a.Interface, a.ifindex)
	}
	if fresh {
		err = errors.Join(err, removeChain(d.opts.PinRoot, d.opts.Instance, a.Interface))
	}
	return err
}

// putBack attaches in the interface's earlier mode, after another mode was refused.
func (d *Plane) putBack(a attached, mode kernel.Mode) error {
	old := d.attached[a.Interface]
	if old == nil || old.link == nil || mode == "" {
		return nil
	}
	if err := d.attachNew(&a, model.Attach(mode)); err != nil {
		return fmt.Errorf("and it could not be put back in %s mode: %w", mode, err)
	}
	a.Reason = old.Reason
	a.guests, old.guests = old.guests, nil
	_ = old.close()
	d.attached[a.Interface] = &a
	return nil
}

// replace puts the program into the link that is pinned for the interface. It returns false if no usable link
// exists; an unusable pin has then been removed.
func (d *Plane) replace(a *attached, dev netlink.Link, mode model.Attach) (bool, error) {
	path := linkPath(d.opts.PinRoot, d.opts.Instance, a.Interface)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the link pinned at %s: %w; remove the file, which detaches it", path, err)
	}
	info, err := l.Info()
	if err != nil {
		_ = l.Close()
		return false, fmt.Errorf("look at the link pinned at %s: %w", path, err)
	}
	current := kernel.ModeOf(dev)
	usable := info.XDP() != nil && int(info.XDP().Ifindex) == a.ifindex && current != ""
	if usable && (mode == model.AttachAuto && !d.askedGeneric(a.Interface, current) || string(mode) == string(current)) {
		a.Mode = current
		err = d.load(a)
		if err == nil {
			if err = d.run(a, l.Update); err == nil {
				a.link = l
				if current == kernel.ModeGeneric && mode == model.AttachAuto && a.Reason == "" {
					a.Reason = ReasonNotTried
				}
				return true, nil
			}
			_ = a.closePrograms()
			err = fmt.Errorf("replace the program on interface %s: %w", a.Interface, err)
		}
		_ = l.Close()
		return false, err
	}
	if usable {
		if err := d.prepareChange(a, first(mode)); err != nil {
			return false, errors.Join(err, l.Close())
		}
		d.log.Warn("detaching and attaching again, which interrupts forwarding for a moment: the mode changes",
			"interface", a.Interface, "from", current, "to", mode)
	}
	return false, kernel.DropLink(l)
}

// ReasonNotTried is the reason for generic mode if an earlier process attached the program in it: the mode that
// was asked for then is not known, and trying native mode would interrupt forwarding at every start.
const ReasonNotTried = "it was attached in generic mode before this start, and native mode was not tried"

// askedGeneric reports whether an interface is in generic mode because the configuration asked for it.
func (d *Plane) askedGeneric(iface string, current kernel.Mode) bool {
	old := d.attached[iface]
	return current == kernel.ModeGeneric && old != nil && old.asked == model.AttachGeneric
}

// first returns the mode that is tried first.
func first(mode model.Attach) kernel.Mode {
	if mode == model.AttachAuto {
		return kernel.ModeNative
	}
	return kernel.Mode(mode)
}

// prepareChange does all possible work before an interface loses its program because of a change of mode, so
// that the moment without a program is short and does no harm.
func (d *Plane) prepareChange(a *attached, mode kernel.Mode) (err error) {
	a.Mode = mode
	if err := d.load(a); err != nil {
		return err
	}
	a.stopgap, err = d.raiseStopgap(a.ifindex)
	if err != nil {
		d.log.Warn("connections that send while the mode changes will be reset: the host's stack cannot be kept from answering",
			"interface", a.Interface, "error", err)
	}
	return nil
}

func (d *Plane) lowerStopgap(a *attached) {
	if a.stopgap == nil {
		return
	}
	if err := a.stopgap.lower(); err != nil {
		d.log.Warn("cannot remove the program that kept packets from the host's stack while the mode changed; it has no effect after a minute",
			"interface", a.Interface, "error", err)
	}
	a.stopgap = nil
}

// attachNew makes a new link and pins it.
func (d *Plane) attachNew(a *attached, mode model.Attach) error {
	err := kernel.Occupied(a.Interface, chainAdvice(a.Interface))
	if err != nil {
		return err
	}
	a.Reason, err = kernel.InMode(a.Interface, kernel.Mode(mode), "auto, native, generic or tc", func(m kernel.Mode) error { return d.attachMode(a, m) })
	if err != nil {
		return err
	}
	path := linkPath(d.opts.PinRoot, d.opts.Instance, a.Interface)
	if err := a.link.Pin(path); err != nil {
		return errors.Join(fmt.Errorf("pin the link at %s: %w", path, err), a.close())
	}
	return nil
}

// load loads the interface's own copy of the program.
func (d *Plane) load(a *attached) error {
	if err := d.loadProgram(a, nil); err != nil {
		return err
	}
	err := d.loadDeliveries(a)
	if err == nil {
		err = putNext(a.chain, a.programs[0], a.Interface)
	}
	if err == nil && d.features&abi.FEATURE_VLAN != 0 && a.Mode == kernel.ModeNative {
		err = d.loadTagged(a)
	}
	if err != nil {
		return errors.Join(err, a.closePrograms())
	}
	return nil
}

// loadProgram does the same as load, without a position in the chain, and with maps in addition to the
// instance's.
func (d *Plane) loadProgram(a *attached, more map[string]*ebpf.Map) error {
	return d.loadProgramWith(a, more, func(*ebpf.CollectionSpec) {})
}

// loadProgramWith does the same as loadProgram, after changing the object.
func (d *Plane) loadProgramWith(a *attached, more map[string]*ebpf.Map, change func(*ebpf.CollectionSpec)) error {
	own := map[string]*ebpf.Map{}
	if a.chain != nil {
		own[chainMap] = a.chain
	}
	if a.guests != nil {
		own[kernel.GuestMap] = a.guests.Array()
	}
	maps.Copy(own, more)
	if d.stampsProbes() {
		maps.Copy(own, d.stamps)
	}
	coll, err := d.LoadOnto(own, func() (*ebpf.CollectionSpec, error) {
		spec, err := d.opts.Version.Spec(abi.ObjectXDP)
		if err == nil {
			change(spec)
			err = d.fitStamps(spec, abi.ProgramXDP, abi.ProgramXDPStamps, d.stampsProbes())
		}
		return spec, err
	}, d.constants(a))
	if err != nil {
		return fmt.Errorf("load the program for interface %s: %w", a.Interface, err)
	}
	defer coll.Close()
	a.programs[0], err = kernel.TakeProgram(coll, abi.ProgramXDP)
	return err
}

// putNext puts a program into a chain as shunt's program.
func putNext(chain *ebpf.Map, program *ebpf.Program, iface string) error {
	if err := chain.Put(uint32(abi.CHAIN_NEXT), program); err != nil {
		return fmt.Errorf("put the program for interface %s into its chain: %w", iface, err)
	}
	return nil
}

// run makes the interface run the programs of its chain, using attach.
func (d *Plane) run(a *attached, attach func(*ebpf.Program) error) error {
	return runFirst(a.chain, a.programs[0], PositionBefore.path(d.opts.PinRoot, d.opts.Instance, a.Interface), attach)
}

// runFirst makes an interface run the programs of its chain, with program as shunt's, using attach. before is
// the path at which the program before is pinned.
func runFirst(chain *ebpf.Map, program *ebpf.Program, before string, attach func(*ebpf.Program) error) error {
	first, err := firstProgram(chain, program, before)
	if err != nil {
		return err
	}
	return errors.Join(attach(first), first.Close())
}

func (d *Plane) attachMode(a *attached, mode kernel.Mode) error {
	if a.programs[0] == nil { // prepareChange has loaded it
		a.Mode = mode
		if err := d.load(a); err != nil {
			return err
		}
	}
	err := d.run(a, func(p *ebpf.Program) (err error) {
		a.link, err = kernel.AttachXDP(p, a.Interface, a.ifindex, mode, chainAdvice(a.Interface))
		return err
	})
	if err != nil {
		_ = a.closePrograms()
	}
	return err
}

// redirectsBack reports whether XDP_TX does not work on the interface.
func redirectsBack(dev netlink.Link) bool { return dev.Type() == "veth" || dev.Type() == "bond" }

// RefreshInterface writes an interface's hardware address, addresses and MTU again, after
// they have changed.
func (d *Plane) RefreshInterface(iface string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return fmt.Errorf("read the addresses of interface %s: %w", iface, err)
	}
	if _, ok := d.IndexOf(dev.Attrs().Index); !ok {
		return fmt.Errorf("read the addresses of interface %s: shunt is not attached to it", iface)
	}
	var tagged *vlan
	if a := d.attached[iface]; a != nil {
		tagged = a.vlan
	}
	_, err = d.PutInterface(dev, tagged.port(dev))
	return err
}

// Attached lists the interfaces that have the program, sorted: the interfaces of this process and of the
// process before.
func (d *Plane) Attached() []string {
	found, err := pinnedLinks(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		d.log.Error("cannot list the attached interfaces", "error", err)
	}
	sides, err := pinnedSides(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		d.log.Error("cannot list the attached interfaces", "error", err)
	}
	for _, name := range sides {
		found[name] = ""
	}
	vlans, err := d.TakenVLANs()
	if err != nil {
		d.log.Error("cannot list the attached interfaces", "error", err)
	}
	for _, t := range vlans {
		if a := vlanAttachment(t); a.Mode != "" { // one that has gone is DropGoneVLANs'
			found[a.Interface] = ""
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for name := range d.attached {
		found[name] = ""
	}
	return slices.Sorted(maps.Keys(found))
}

// Detach detaches the program from an interface. It succeeds if there is none.
func (d *Plane) Detach(iface string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	unlock, err := kernel.Lock(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return fmt.Errorf("detach from interface %s: %w", iface, err)
	}
	defer unlock()
	if err := d.keepsVLANs(iface); err != nil {
		return fmt.Errorf("detach from interface %s: %w", iface, err)
	}
	ifindex := kernel.InterfaceIndex(iface)
	errs := []error{dropSides(d.opts.PinRoot, d.opts.Instance, iface, ifindex, deliveries)} // while sh_xdp keeps forged marks from them
	if a := d.attached[iface]; a != nil {
		d.clearAtTC(a.index)
		errs = append(errs, a.drop(), d.ClearInterface(a.index, a.ifindex))
		delete(d.attached, iface)
	} else if l, err := link.LoadPinnedLink(linkPath(d.opts.PinRoot, d.opts.Instance, iface), nil); err == nil {
		if info, err := l.Info(); err == nil && info.XDP() != nil {
			if index, ok := d.IndexOf(int(info.XDP().Ifindex)); ok {
				errs = append(errs, d.ClearInterface(index, int(info.XDP().Ifindex)))
			}
		}
		errs = append(errs, kernel.DropLink(l))
	} else if !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	if d.attached[iface] == nil {
		if index, ok := d.IndexOf(ifindex); ok && ifindex != 0 {
			d.clearAtTC(index)
			errs = append(errs, d.ClearInterface(index, ifindex))
		}
		errs = append(errs, dropTC(d.opts.PinRoot, d.opts.Instance, iface, ifindex))
	}
	errs = append(errs, removeChain(d.opts.PinRoot, d.opts.Instance, iface))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach from interface %s: %w", iface, err)
	}
	return nil
}

// pinnedLinks finds the pinned links of interfaces: name -> path.
func pinnedLinks(root, instance string) (map[string]string, error) {
	dir := kernel.Directory(root, instance)
	entries, err := os.ReadDir(dir)
	found := map[string]string{}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return found, fmt.Errorf("list the links pinned in %s: %w", dir, err)
	}
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), kernel.LinkPrefix); ok && !isDropsLink(e.Name()) {
			found[kernel.FromPin(name)] = filepath.Join(dir, e.Name())
		}
	}
	return found, nil
}

// chainAdvice says how another program can run beside shunt's.
func chainAdvice(iface string) string {
	return fmt.Sprintf("take it off, start shunt, and have its program run before or after shunt's with `shunt chain set --interface %s`; `shunt chain --help` lists what the program needs", iface)
}
