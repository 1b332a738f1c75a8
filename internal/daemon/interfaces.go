package daemon

import (
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/model"
)

// attacher is what the data plane does for an interface; datapath.Datapath says how.
type attacher interface {
	Attach(name string, mode model.Attach) (kernel.Attachment, error)
	Detach(name string) error
	RefreshInterface(name string) error
	Attached() []string
}

// merger has an interface merge packets, or not; aggregation says when.
type merger interface {
	fit(name string, mode kernel.Mode) error
	release(name string) error
}

// interfaces keeps the programs on the interfaces that the configuration lists. Its methods are
// for one caller at a time, but for list, names and wayToHost.
type interfaces struct {
	attacher   attacher
	merger     merger
	conditions *condition.Set
	log        *slog.Logger
	find       func(name string) (*net.Interface, error) // net.InterfaceByName
	changed    func()                                    // told that wayToHost may say something else

	mu       sync.Mutex
	attached map[string]kernel.Attachment
}

func newInterfaces(dp attacher, m merger, conditions *condition.Set, log *slog.Logger, changed func()) *interfaces {
	return &interfaces{attacher: dp, merger: m, conditions: conditions, log: log, changed: changed,
		find: net.InterfaceByName, attached: map[string]kernel.Attachment{}}
}

// list is what the programs are attached to, sorted by name.
func (i *interfaces) list() []kernel.Attachment {
	i.mu.Lock()
	defer i.mu.Unlock()
	var all []kernel.Attachment
	for _, name := range slices.Sorted(maps.Keys(i.attached)) {
		all = append(all, i.attached[name])
	}
	return all
}

// names are those of list.
func (i *interfaces) names() (all []string) {
	for _, a := range i.list() {
		all = append(all, a.Interface)
	}
	return all
}

// attachAll attaches to those of wanted that are not in force, or in another mode. When one
// refuses, those that are not in force are detached again, unless nothing is in force: then a
// predecessor's may be among them, and goes on.
func (i *interfaces) attachAll(inForce, wanted []model.Interface) error {
	for _, w := range wanted {
		if slices.Contains(inForce, w) {
			continue
		}
		if err := i.attach(w); err != nil {
			if len(inForce) > 0 {
				err = errors.Join(err, i.detachOthers(inForce))
			}
			return err
		}
	}
	return nil
}

func (i *interfaces) attach(wanted model.Interface) error {
	name := wanted.Name
	a, err := i.attacher.Attach(name, wanted.Attach)
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.attached[name] = a
	i.mu.Unlock()
	i.changed()
	i.log.Info("attached", "interface", name, "mode", a.Mode, "reason", a.Reason)
	if a.Mode == kernel.ModeGeneric && wanted.Attach == model.AttachAuto {
		i.conditions.Raise(condition.Condition{Code: condition.AttachDegraded, Severity: condition.Warning, Subject: name,
			Text: "attached in generic mode, because the driver refused native mode: " + a.Reason})
	} else {
		i.conditions.Clear(condition.AttachDegraded, name)
	}
	if err := i.merger.fit(name, a.Mode); err != nil {
		return errors.Join(err, i.detach(name))
	}
	return nil
}

func (i *interfaces) detach(name string) error {
	err := errors.Join(i.attacher.Detach(name), i.merger.release(name))
	i.mu.Lock()
	delete(i.attached, name)
	i.mu.Unlock()
	i.changed()
	for _, code := range []string{condition.AttachDegraded, condition.AttachFailed, condition.InterfaceMissing} {
		i.conditions.Clear(code, name)
	}
	i.log.Info("detached", "interface", name)
	return err
}

// detachOthers detaches from all but these, also where a predecessor had attached.
func (i *interfaces) detachOthers(wanted []model.Interface) error {
	var errs []error
	for _, name := range slices.Compact(slices.Sorted(slices.Values(append(i.names(), i.attacher.Attached()...)))) {
		if !slices.ContainsFunc(wanted, func(w model.Interface) bool { return w.Name == name }) {
			errs = append(errs, i.detach(name))
		}
	}
	return errors.Join(errs...)
}

// refresh follows changes of MAC and addresses of those in force, and attaches again to one that
// was removed and made anew under its name. anew is whether there was such a one: hops and
// announcements still name the one before.
func (i *interfaces) refresh(inForce []model.Interface) (anew bool) {
	for _, w := range inForce {
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
			i.conditions.Clear(condition.AttachFailed, w.Name)
		}
		i.conditions.Clear(condition.InterfaceMissing, w.Name)
	}
	return anew
}

// wayToHost is the way to backends that are this host: an interface that has attach: tc, where
// their answers are met (ok); else any, which is enough for direct return.
func (i *interfaces) wayToHost() (index int, mac net.HardwareAddr, ok bool) {
	for _, a := range i.list() {
		device, err := i.find(a.Interface)
		if err != nil || index != 0 && !a.Mode.AtTC() {
			continue
		}
		index, mac = device.Index, device.HardwareAddr
		if a.Mode.AtTC() {
			return index, mac, true
		}
	}
	return index, mac, false
}
