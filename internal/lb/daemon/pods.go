package daemon

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Interfaces of pods come and go with the pods. The configuration has patterns for them (docs/design/53-interfaces-of-pods.md):
//
//	netlink's notices ─► podNotices ─► loop ─► followPods ─► Attach, Detach
//
// If the daemon cannot attach to an interface of a pod, that is a condition and no reason to refuse a configuration: the interface may be
// gone already.

const (
	// podBatch is the time to wait for further notices: CNI causes several for each pod.
	podBatch = 10 * time.Millisecond
	// podRounds is the number of heartbeats between two looks without a notice, which try failed interfaces again.
	podRounds = 10
	// podTime is the time for which the loop attaches to interfaces of pods at once. The data plane needs the loop's heartbeat.
	podTime = 500 * time.Millisecond
)

// podInterface is an interface of a pod.
type podInterface struct {
	name    string
	index   int
	mac     string
	mtu     int
	pattern string // the pattern that stands for it
}

// findPods lists the veths that lead into another network namespace and are at no bridge.
func findPods() ([]podInterface, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // the change that interrupted the dump causes a notice, too
		return nil, fmt.Errorf("list the interfaces of pods: %w", err)
	}
	var all []podInterface
	for _, l := range links {
		if a := l.Attrs(); kernel.LeadsAway(l) && a.MasterIndex == 0 {
			all = append(all, podInterface{name: a.Name, index: a.Index, mac: a.HardwareAddr.String(), mtu: a.MTU})
		}
	}
	return all, nil
}

// patternOf returns the first pattern that stands for an interface; "" if the interface is in the list by its name.
func patternOf(list []model.Interface, name string) string {
	if slices.ContainsFunc(list, func(i model.Interface) bool { return i.Name == name }) {
		return ""
	}
	at := slices.IndexFunc(list, func(i model.Interface) bool { return i.IsPattern() && i.Means(name) })
	if at < 0 {
		return ""
	}
	return list[at].Name
}

// showPatterns adds the patterns of pods' interfaces to a status.
func (i *interfaces) showPatterns(attached []*shuntv1.Attachment) {
	for _, a := range attached {
		if p, is := i.pod(a.Interface); is {
			a.Pattern = p.pattern
		}
	}
}

// byName returns the entries that are no patterns.
func byName(list []model.Interface) []model.Interface {
	return slices.DeleteFunc(slices.Clone(list), model.Interface.IsPattern)
}

// hasPatterns reports whether the list has interfaces of pods.
func hasPatterns(list []model.Interface) bool {
	return slices.ContainsFunc(list, model.Interface.IsPattern)
}

// expectPods tells the data plane whether interfaces of pods will come, and begins or ends the notices of their coming and going.
func (i *interfaces) expectPods(are bool) error {
	if are == i.expecting() {
		return nil
	}
	if are { // before the first look, so that nothing is missed
		i.notices.start(i.log)
	} else {
		i.notices.stop()
	}
	if err := i.attacher.ExpectPods(are); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.expects = are
	return nil
}

func (i *interfaces) expecting() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.expects
}

// followPods attaches to each new interface of a pod that a pattern of the list stands for, also to one that was made anew under its name. It
// removes the traces of interfaces that have gone. anew reports whether it has attached to one. After the time atMost, the remaining interfaces
// wait for the next call, which comes soon; 0: no interface waits.
func (i *interfaces) followPods(list []model.Interface, atMost time.Duration) (anew bool) {
	if !hasPatterns(list) {
		return false
	}
	begun, waits := time.Now(), false
	touched, all := i.notices.take()
	found, err := i.listPods()
	if err != nil {
		i.log.Warn("cannot follow the interfaces of pods; trying again", "error", err)
		return false
	}
	slices.SortStableFunc(found, func(a, b podInterface) int { return i.refusals(a) - i.refusals(b) })
	there := map[string]bool{}
	for _, p := range found {
		if p.pattern = patternOf(list, p.name); p.pattern == "" {
			continue
		}
		there[p.name] = true
		before, attached := i.pod(p.name)
		switch {
		case !attached || before.index != p.index:
			if waits {
				continue
			}
			anew = i.attachPod(p) || anew
			if waits = atMost != 0 && time.Since(begun) >= atMost; waits {
				i.notices.again()
			}
		case before != p || all || touched[p.index]:
			if err := i.attacher.RefreshInterface(p.name); err != nil {
				i.log.Debug("cannot follow an interface of a pod", "interface", p.name, "error", err)
				continue
			}
			i.putPod(p)
		}
	}
	for _, name := range i.podNames() {
		if there[name] {
			continue
		}
		if err := i.detach(name); err != nil {
			i.log.Warn("cannot remove the traces of an interface of a pod that is gone", "interface", name, "error", err)
		}
	}
	return anew
}

// attachPod attaches to the interface of a pod, if that is there.
func (i *interfaces) attachPod(p podInterface) (ok bool) {
	a, err := i.attacher.AttachPod(p.name)
	if err == nil {
		i.putPod(p)
		i.note(p.name, a)
		i.conditions.Clear(condition.AttachFailed, p.name)
		return true
	}
	if _, gone := i.find(p.name); gone != nil {
		i.log.Debug("an interface of a pod has gone before it was attached to", "interface", p.name, "error", err)
		return false
	}
	i.mu.Lock()
	delete(i.attached, p.name)
	i.mu.Unlock()
	i.putPod(podInterface{name: p.name, pattern: p.pattern}) // without index: it is tried again, and a predecessor's programs there stay
	i.conditions.Raise(condition.Condition{Code: condition.AttachFailed, Subject: p.name, Text: err.Error()})
	return false
}

// refusals returns 1 for an interface that has refused, so that it comes after the others and none waits for it.
func (i *interfaces) refusals(p podInterface) int {
	if before, followed := i.pod(p.name); followed && before.index == 0 {
		return 1
	}
	return 0
}

// pod returns the followed interface of a pod.
func (i *interfaces) pod(name string) (podInterface, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	p, ok := i.pods[name]
	return p, ok
}

func (i *interfaces) putPod(p podInterface) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.pods[p.name] = p
}

// podNames returns the names of the followed interfaces of pods, sorted.
func (i *interfaces) podNames() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Sorted(maps.Keys(i.pods))
}

// findInterface does the same as net.InterfaceByName without listing all interfaces.
func findInterface(name string) (*net.Interface, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return nil, err
	}
	a := l.Attrs()
	return &net.Interface{Index: a.Index, MTU: a.MTU, Name: a.Name, HardwareAddr: a.HardwareAddr, Flags: a.Flags}, nil
}
