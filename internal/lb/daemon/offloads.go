package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/offload"
	"github.com/shunt-lb/shunt/internal/record"
)

// In generic mode the kernel may merge packets before the program sees them, so merging is switched off while
// the program runs. A VLAN's parent in native mode must not put tags beside the frame, where the program does
// not see them. The offloads that were on are written down first, so that a killed daemon's successor, or
// `shunt detach`, switches them on again.

// offloads are the offloads that an instance has switched off, written down at a path.
type offloads struct {
	path       string
	conditions *condition.Set
	log        *slog.Logger
	vlans      string // lists the namespace's VLANs
}

func newOffloads(instance string, conditions *condition.Set, log *slog.Logger) offloads {
	return offloads{filepath.Join(node.RunDirectory, instance+".aggregation"), conditions, log, "/proc/thread-self/net/vlan/config"}
}

func (o offloads) read() (offload.State, error) {
	var state offload.State
	if err := record.Read(o.path, &state); err != nil {
		return offload.State{}, fmt.Errorf("read the record of offloads that are off: %w; `ethtool -K INTERFACE gro on rxvlan on` restores the defaults, then delete %s", err, o.path)
	}
	return state, nil
}

func (o offloads) write(state offload.State) error {
	if len(state.Changes) == 0 {
		return record.Remove(o.path)
	}
	if err := record.Write(o.path, state); err != nil {
		return fmt.Errorf("record the offloads that are off: %w", err)
	}
	return nil
}

// reason says why offloads of an interface are switched off.
type reason struct {
	offload.Purpose
	doing       string // in an error
	off, hidden string // the conditions: offloads are off; offloads of a veth's other end cannot be switched off
	remedy      string // for the second, beside the command
}

var (
	forGeneric = reason{offload.Merging, "attach to %s in generic mode", condition.AggregationSwitchedOff, condition.PeerAggregates, "; or use native mode"}
	forVLANs   = reason{offload.Tags, "take frames of VLANs at %s", condition.TagOffloadSwitchedOff, condition.PeerHidesTags, "; or use `attach: tc` for the VLANs"}
)

// fit makes an interface's offloads fit its mode and its role: parent of VLANs or not.
func (o offloads) fit(iface string, mode kernel.Mode, parent bool) error {
	for _, c := range []struct {
		why   reason
		holds bool
	}{{forGeneric, mode == kernel.ModeGeneric}, {forVLANs, parent}} {
		if c.holds {
			if err := o.switchOff(iface, c.why); err != nil {
				return err
			}
			continue
		}
		// The kernel keeps segmentation off at the other end of a veth in native mode, and refuses to restore
		// it. The record keeps it until the program is gone.
		if err := o.restore(iface, c.why); err != nil {
			o.log.Warn("the offloads that were switched off are restored only when shunt detaches", "interface", iface, "error", err)
		}
	}
	return nil
}

// warn raises a condition if an interface in an XDP mode has VLANs whose tags the program does not see. It is
// called every second, so it is cheap when there are none.
func (o offloads) warn(iface string, mode kernel.Mode, parent bool) error {
	var vlans, hiding []string
	var err error
	if !mode.AtTC() && !parent {
		vlans, err = o.vlansOf(iface)
	}
	if len(vlans) > 0 {
		hiding, err = offload.Tags.On(iface)
		var unreachable *offload.Unreachable
		if errors.As(err, &unreachable) { // it does, unless it was switched off there
			hiding, err = append(hiding, fmt.Sprintf("the ends %s, it seems, in a network namespace that shunt cannot enter", unreachable.Where)), nil
		}
	}
	if len(hiding) == 0 {
		o.conditions.Clear(condition.TagsHidden, iface)
		return err
	}
	o.conditions.Raise(condition.Condition{Code: condition.TagsHidden, Severity: condition.Warning, Subject: iface,
		Text: fmt.Sprintf("the program sees frames of %s without their tags, because these are on: %s", strings.Join(vlans, ", "), strings.Join(hiding, "; "))})
	return err
}

// vlansOf returns the VLANs directly above an interface. The list has lines such as "eth0.100 | 100 | eth0",
// after two header lines (net/8021q/vlanproc.c); the file does not exist while the kernel has no VLANs.
func (o offloads) vlansOf(iface string) (names []string, err error) {
	list, err := os.ReadFile(o.vlans)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the VLANs of %s: %w", iface, err)
	}
	for line := range strings.Lines(string(list)) {
		if parts := strings.Split(line, "|"); len(parts) == 3 && strings.TrimSpace(parts[2]) == iface {
			names = append(names, strings.TrimSpace(parts[0]))
		}
	}
	return names, nil
}

func (o offloads) switchOff(iface string, why reason) error {
	state, err := o.read()
	if err != nil {
		return err
	}
	state, err = why.Disable(iface, state, o.write)
	var unreachable *offload.Unreachable
	switch {
	case errors.As(err, &unreachable):
		o.conditions.Raise(condition.Condition{Code: why.hidden, Severity: condition.Warning, Subject: iface,
			Text: unreachable.Error(), Remedy: "run in that namespace: " + unreachable.Command() + why.remedy})
	case err != nil:
		return fmt.Errorf("%s: %w", fmt.Sprintf(why.doing, iface), err)
	default:
		o.conditions.Clear(why.hidden, iface)
	}
	if changed := state.Of(iface, why.Purpose); len(changed) > 0 {
		o.conditions.Raise(condition.Condition{Code: why.off, Severity: condition.Info, Subject: iface,
			Text: "switched off until shunt detaches: " + strings.Join(changed, ", ")})
	}
	return nil
}

// restore switches the offloads on again that were switched off for a reason.
func (o offloads) restore(iface string, why reason) error {
	o.conditions.Clear(why.off, iface)
	o.conditions.Clear(why.hidden, iface)
	state, err := o.read()
	if err != nil || len(state.Changes) == 0 {
		return err
	}
	state, err = state.Restore(iface, why.Purpose)
	return errors.Join(err, o.write(state))
}

// release calls restore for all reasons.
func (o offloads) release(iface string) error {
	o.conditions.Clear(condition.TagsHidden, iface)
	return errors.Join(o.restore(iface, forGeneric), o.restore(iface, forVLANs))
}

// releaseAll switches the offloads on again that an instance has switched off, also a killed instance.
func releaseAll(instance string, log *slog.Logger) error {
	o := newOffloads(instance, nil, log)
	state, err := o.read()
	if err != nil || len(state.Changes) == 0 {
		return err
	}
	state, err = state.RestoreAll()
	return errors.Join(err, o.write(state))
}
