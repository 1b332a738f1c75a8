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

// Interfaces of pods come and go with these. The configuration has patterns for them (docs/design/53-interfaces-of-pods.md):
//
//	netlink's notices ─► podNotices ─► loop ─► followPods ─► Attach, Detach
//
// One that cannot be attached to is a condition and no reason to refuse a configuration: it may be gone by then.

const (
	// podBatch is how long one waits for further notices: CNI makes several of each pod.
	podBatch = 10 * time.Millisecond
	// podRounds is the number of heartbeats between two looks that no notice asks for, for what failed.
	podRounds = 10
	// podTime is how long the loop attaches to interfaces of pods at a time. The data plane counts on its heartbeat.
	podTime = 500 * time.Millisecond
)

// podInterface is an interface of a pod.
type podInterface struct {
	name    string
	index   int
	mac     string
	mtu     int
	pattern string // that stands for it
}

// findPods lists the veths that lead into another network namespace and are at no bridge.
func findPods() ([]podInterface, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // what interrupted it is told, too
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

// patternOf is the first pattern that stands for an interface; none where the interface is in the list by its name.
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

// byName are the entries that are no patterns.
func byName(list []model.Interface) []model.Interface {
	return slices.DeleteFunc(slices.Clone(list), model.Interface.IsPattern)
}

// hasPatterns is whether the list has interfaces of pods.
func hasPatterns(list []model.Interface) bool {
	return slices.ContainsFunc(list, model.Interface.IsPattern)
}

// expectPods has the data plane expect interfaces of pods or not, and their coming and going told or not.
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

// followPods attaches to each interface of a pod that the list stands for and that has come, or was made anew under its name, and takes away the
// traces of interfaces that have gone. anew is whether one was attached to. Once the call has taken as long as atMost, the others wait for
// the next one, which is soon; 0: none waits.
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
	i.putPod(podInterface{name: p.name, pattern: p.pattern}) // of no index: it is tried again, and what a predecessor has there stays
	i.conditions.Raise(condition.Condition{Code: condition.AttachFailed, Subject: p.name, Text: err.Error()})
	return false
}

// refusals is 1 for one that has refused, for others not to wait behind it.
func (i *interfaces) refusals(p podInterface) int {
	if before, followed := i.pod(p.name); followed && before.index == 0 {
		return 1
	}
	return 0
}

// pod is the interface of a pod that is followed.
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

// podNames are the interfaces of pods that are followed, sorted.
func (i *interfaces) podNames() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Sorted(maps.Keys(i.pods))
}

// findInterface is net.InterfaceByName without a list of all interfaces.
func findInterface(name string) (*net.Interface, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return nil, err
	}
	a := l.Attrs()
	return &net.Interface{Index: a.Index, MTU: a.MTU, Name: a.Name, HardwareAddr: a.HardwareAddr, Flags: a.Flags}, nil
}
