package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// attacher attaches programs to an interface and detaches them; see datapath.Datapath.
type attacher interface {
	Attach(name string, mode model.Attach) (kernel.Attachment, error)
	AttachPod(name string) (kernel.Attachment, error)
	Detach(name string) error
	RefreshInterface(name string) error
	Attached() []string
	Parent(name string) string
	DropGoneVLANs() error
	ExpectPods(are bool) error
}

// offloader makes an interface's offloads fit the program that runs there; see offloads.
type offloader interface {
	fit(name string, mode kernel.Mode, parent bool) error
	warn(name string, mode kernel.Mode, parent bool) error
	release(name string) error
}

// interfaces keeps the programs on the interfaces that the configuration lists. One caller at a time may use
// its methods, except for list, names and hopToHost.
type interfaces struct {
	attacher   attacher
	offloads   offloader
	conditions *condition.Set
	log        *slog.Logger
	find       func(name string) (*net.Interface, error) // findInterface
	listPods   func() ([]podInterface, error)            // findPods
	notices    *podNotices
	changed    func()      // called when the result of hopToHost may have changed
	serves     func() bool // whether XDP brings packets to backends on this host

	parents map[string]bool // interfaces that take frames of VLANs

	mu       sync.Mutex
	attached map[string]kernel.Attachment
	expects  bool                    // interfaces of pods come and go
	pods     map[string]podInterface // by name, the interfaces that patterns stand for; one that refuses has index 0
}

func newInterfaces(dp attacher, o offloader, conditions *condition.Set, log *slog.Logger, changed func()) *interfaces {
	return &interfaces{attacher: dp, offloads: o, conditions: conditions, log: log, changed: changed,
		find: findInterface, listPods: findPods, notices: newPodNotices(), serves: func() bool { return false },
		parents: map[string]bool{}, attached: map[string]kernel.Attachment{}, pods: map[string]podInterface{}}
}

// list returns the attachments of the programs, sorted by interface.
func (i *interfaces) list() []kernel.Attachment {
	i.mu.Lock()
	defer i.mu.Unlock()
	var all []kernel.Attachment
	for _, name := range slices.Sorted(maps.Keys(i.attached)) {
		all = append(all, i.attached[name])
	}
	return all
}

// mode returns the mode in which an interface is attached; empty if it is not attached.
func (i *interfaces) mode(name string) kernel.Mode {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.attached[name].Mode
}

// names returns the names of the interfaces in list.
func (i *interfaces) names() (all []string) {
	for _, a := range i.list() {
		all = append(all, a.Interface)
	}
	return all
}

// listedNames returns the interfaces of list that are not a pod's. A veth of a pod has no receive ring whose losses could be counted each second.
func (i *interfaces) listedNames() []string {
	return slices.DeleteFunc(i.names(), func(name string) bool { _, is := i.pod(name); return is })
}

// indices returns the indices of the interfaces in names that exist.
func (i *interfaces) indices() map[int]bool {
	all := map[int]bool{}
	for _, name := range i.names() {
		if pod, is := i.pod(name); is {
			all[pod.index] = true
		} else if device, err := i.find(name); err == nil {
			all[device.Index] = true
		}
	}
	return all
}

// attachAll attaches to the interfaces of wanted that are not attached, or are in another mode. When one of
// them refuses, the newly attached interfaces are detached again, unless nothing was in force: then a
// predecessor's attachments may be among them, and they continue. An interface of a pod that
// refuses is a condition.
func (i *interfaces) attachAll(inForce, wanted []model.Interface) error {
	if err := i.checkParents(byName(wanted)); err != nil {
		return err
	}
	maps.Copy(i.parents, i.parentsOf(byName(wanted)))
	if err := i.attachNamed(inForce, wanted); err != nil {
		if len(inForce) > 0 {
			err = errors.Join(err, i.detachOthers(inForce))
		}
		return err
	}
	i.followPods(wanted, 0)
	return nil
}

// attachNamed attaches to the wanted interfaces that have a name, and makes the data plane expect the others.
func (i *interfaces) attachNamed(inForce, wanted []model.Interface) error {
	for _, w := range i.inOrder(byName(wanted)) {
		if slices.Contains(inForce, w) {
			continue
		}
		if err := i.attach(w); err != nil {
			return err
		}
	}
	if hasPatterns(wanted) {
		return i.expectPods(true)
	}
	return nil
}

// checkParents refuses a VLAN in native mode without its parent, before anything is changed.
func (i *interfaces) checkParents(wanted []model.Interface) error {
	for _, w := range wanted {
		parent := i.attacher.Parent(w.Name)
		if parent == "" || w.Attach != model.AttachNative {
			continue
		}
		if !slices.ContainsFunc(wanted, func(p model.Interface) bool {
			return p.Name == parent && (p.Attach == model.AttachNative || p.Attach == model.AttachAuto)
		}) {
			return fmt.Errorf("attach to interface %s in native mode: it is a VLAN of %s, and native mode takes its frames there; list %s among the interfaces as well, with `attach: native`, or use another `attach` for %s",
				w.Name, parent, parent, w.Name)
		}
	}
	return nil
}

// parentsOf returns the interfaces that take the frames of VLANs in native mode.
func (i *interfaces) parentsOf(list []model.Interface) map[string]bool {
	all := map[string]bool{}
	for _, w := range list {
		if parent := i.attacher.Parent(w.Name); parent != "" && w.Attach == model.AttachNative {
			all[parent] = true
		}
	}
	return all
}

// inOrder sorts interfaces into the order in which they can be attached: a VLAN that leaves native mode comes
// before its parent, which must not leave that mode earlier. A VLAN that enters native mode comes after its
// parent.
func (i *interfaces) inOrder(wanted []model.Interface) []model.Interface {
	var vlans, others, native []model.Interface
	for _, w := range wanted {
		switch {
		case i.attacher.Parent(w.Name) == "":
			others = append(others, w)
		case w.Attach == model.AttachNative:
			native = append(native, w)
		default:
			vlans = append(vlans, w)
		}
	}
	return slices.Concat(vlans, others, native)
}

func (i *interfaces) attach(wanted model.Interface) error {
	name := wanted.Name
	parent := i.attacher.Parent(name)
	if parent != "" && wanted.Attach == model.AttachNative { // it may be in force already, without VLANs
		i.parents[parent] = true
		if err := i.offloads.fit(parent, i.mode(parent), true); err != nil {
			return err
		}
	}
	a, err := i.attacher.Attach(name, wanted.Attach)
	if err != nil {
		return withUpper(wanted, err)
	}
	i.mu.Lock()
	delete(i.pods, name) // a pattern may have stood for it before
	i.mu.Unlock()
	i.note(name, a)
	switch degraded := a.Mode == kernel.ModeGeneric && wanted.Attach == model.AttachAuto; {
	case degraded && parent != "":
		i.conditions.Raise(condition.Condition{Code: condition.AttachDegraded, Severity: condition.Warning, Subject: name,
			Text:   "attached in generic mode, because the kernel has native mode for a VLAN's parent alone",
			Remedy: fmt.Sprintf("list %s among the interfaces as well, and give both `attach: native`; or accept generic mode with `attach: generic`", parent)})
	case degraded && a.Reason == attach.ReasonNotTried:
		i.conditions.Raise(condition.Condition{Code: condition.AttachDegraded, Severity: condition.Warning, Subject: name,
			Text:   "attached in generic mode: " + a.Reason,
			Remedy: "to try native mode, which interrupts forwarding for a moment, say `attach: native`; or accept generic mode with `attach: generic`"})
	case degraded:
		i.conditions.Raise(condition.Condition{Code: condition.AttachDegraded, Severity: condition.Warning, Subject: name,
			Text: "attached in generic mode, because the driver refused native mode: " + a.Reason})
	default:
		i.conditions.Clear(condition.AttachDegraded, name)
	}
	if err := i.offloads.fit(name, a.Mode, i.parents[name]); err != nil {
		return errors.Join(withUpper(wanted, err), i.detach(name))
	}
	return nil
}

// note records an attachment that was made.
func (i *interfaces) note(name string, a kernel.Attachment) {
	i.mu.Lock()
	i.attached[name] = a
	i.mu.Unlock()
	i.changed()
	i.log.Info("attached", "interface", name, "mode", a.Mode, "reason", a.Reason)
}

func (i *interfaces) detach(name string) error {
	err := errors.Join(i.attacher.Detach(name), i.offloads.release(name))
	i.mu.Lock()
	delete(i.attached, name)
	delete(i.pods, name)
	i.mu.Unlock()
	i.changed()
	for _, code := range []string{condition.AttachDegraded, condition.AttachFailed, condition.InterfaceMissing} {
		i.conditions.Clear(code, name)
	}
	i.log.Info("detached", "interface", name)
	return err
}

// detachOthers detaches from all interfaces except these, also where a predecessor had attached. A VLAN comes
// before its parent, which then gets its offloads back.
func (i *interfaces) detachOthers(wanted []model.Interface) error {
	var errs []error
	var vlans, others []string
	for _, name := range slices.Compact(slices.Sorted(slices.Values(append(i.names(), i.attacher.Attached()...)))) {
		switch {
		case i.isWanted(name, wanted):
		case i.attacher.Parent(name) != "":
			vlans = append(vlans, name)
		default:
			others = append(others, name)
		}
	}
	for _, name := range slices.Concat(vlans, others) {
		errs = append(errs, i.detach(name))
	}
	// An interface may have stopped being a parent, and restored offloads may matter to another interface.
	i.parents = i.parentsOf(byName(wanted))
	for _, a := range i.list() {
		if _, err := i.find(a.Interface); err == nil {
			errs = append(errs, i.offloads.fit(a.Interface, a.Mode, i.parents[a.Interface]))
		}
	}
	return errors.Join(append(errs, i.expectPods(hasPatterns(wanted)))...)
}

// isWanted reports whether an interface is one of the list, by its name or as a pod's interface.
func (i *interfaces) isWanted(name string, list []model.Interface) bool {
	if slices.ContainsFunc(list, func(w model.Interface) bool { return w.Name == name }) {
		return true
	}
	_, followed := i.pod(name)
	return followed && patternOf(list, name) != ""
}

// refresh follows changes of MAC address and addresses of the attached interfaces, and attaches again to an
// interface that was removed and made anew under the same name. anew reports whether there was one: next hops
// and announcements still name the old one. Interfaces of pods belong to followPods.
func (i *interfaces) refresh(inForce []model.Interface) (anew bool) {
	if err := i.attacher.DropGoneVLANs(); err != nil {
		i.log.Error("cannot remove the traces of VLANs that are gone", "error", err)
	}
	for _, w := range i.inOrder(byName(inForce)) {
		if _, err := i.find(w.Name); err != nil {
			i.conditions.Clear(condition.AttachFailed, w.Name)
			i.conditions.Raise(condition.Condition{Code: condition.InterfaceMissing, Severity: condition.Error, Subject: w.Name,
				Text: "the interface, which the configuration lists, does not exist", Remedy: "bring the interface back; shunt then attaches to it by itself"})
			continue
		}
		err := i.attacher.RefreshInterface(w.Name)
		if err != nil {
			err = i.attach(w)
			anew = anew || err == nil
		}
		if err != nil {
			i.conditions.Raise(condition.Condition{Code: condition.AttachFailed, Subject: w.Name, Text: err.Error()})
		} else {
			if err := i.offloads.warn(w.Name, i.mode(w.Name), i.parents[w.Name]); err != nil {
				i.log.Warn("cannot read whether the program sees the tags of VLANs", "interface", w.Name, "error", err)
			}
			i.conditions.Clear(condition.AttachFailed, w.Name)
		}
		i.conditions.Clear(condition.InterfaceMissing, w.Name)
	}
	return anew
}

// hopToHost returns the interface for backends that are this host. It prefers an interface where their answers are
// seen (ok), and no pod's interface, which may go at any time. Otherwise it returns any interface, which suffices for
// direct return, and then ok reports whether this host's servers have the VIPs.
func (i *interfaces) hopToHost() (index int, mac net.HardwareAddr, ok bool) {
	index, mac, best := i.bestHop()
	return index, mac, best < hopUnmet || index != 0 && i.serves()
}

// meetsAnswers reports whether what backends on this host answer is seen.
func (i *interfaces) meetsAnswers() bool {
	_, _, best := i.bestHop()
	return best < hopUnmet
}

func (i *interfaces) bestHop() (index int, mac net.HardwareAddr, best int) {
	best = hopNone
	for _, a := range i.list() {
		kind := i.hopBy(a)
		if kind >= best {
			continue
		}
		if device, err := i.find(a.Interface); err == nil {
			best, index, mac = kind, device.Index, device.HardwareAddr
		}
	}
	return index, mac, best
}

// The ways in which packets reach this host through an attachment, the best first.
const (
	hopAtTC  = iota
	hopAtXDP // sh_tc_out is beside the program, because pods are expected
	hopOfPod
	hopUnmet // the answers are not seen there
	hopNone
)

func (i *interfaces) hopBy(a kernel.Attachment) int {
	_, ofPod := i.pod(a.Interface)
	switch {
	case ofPod:
		return hopOfPod
	case a.Mode.AtTC():
		return hopAtTC
	case a.Mode == kernel.ModeNative && i.expecting():
		return hopAtXDP
	}
	return hopUnmet
}
