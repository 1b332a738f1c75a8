package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/offload"
	"github.com/shunt-lb/shunt/internal/record"
)

// In generic mode the kernel may merge packets before the program sees them, so merging is
// switched off while it runs. What was on is written down first: a killed daemon's
// successor, or `shunt detach`, switches it on again.

// aggregation is what an instance has switched off, written down at a path.
type aggregation struct {
	path       string
	conditions *condition.Set
	log        *slog.Logger
}

func newAggregation(instance string, conditions *condition.Set, log *slog.Logger) aggregation {
	return aggregation{filepath.Join(runDirectory, instance+".aggregation"), conditions, log}
}

func (a aggregation) read() (offload.State, error) {
	var state offload.State
	if err := record.Read(a.path, &state); err != nil {
		return offload.State{}, fmt.Errorf("read which offloads were switched off for generic mode: %w; `ethtool -K INTERFACE gro on` restores the default, then delete the file", err)
	}
	return state, nil
}

func (a aggregation) write(state offload.State) error {
	if len(state.Changes) == 0 {
		return record.Remove(a.path)
	}
	if err := record.Write(a.path, state); err != nil {
		return fmt.Errorf("write down which offloads are switched off for generic mode: %w", err)
	}
	return nil
}

// fit makes an interface's merging fit the mode it runs in.
func (a aggregation) fit(iface string, mode kernel.Mode) error {
	if mode != kernel.ModeGeneric {
		// The kernel keeps segmentation off at the other end of a veth in native mode, and
		// refuses to restore it. That stays written down until the program is gone.
		if err := a.release(iface); err != nil {
			a.log.Warn("the offloads that generic mode had switched off are restored only when shunt detaches", "interface", iface, "error", err)
		}
		return nil
	}
	state, err := a.read()
	if err != nil {
		return err
	}
	state, err = offload.Disable(iface, state, a.write)
	var unreachable *offload.PeerUnreachable
	switch {
	case errors.As(err, &unreachable):
		a.conditions.Raise(condition.Condition{Code: condition.PeerAggregates, Severity: condition.Warning, Subject: iface,
			Text: unreachable.Error(), Remedy: "run in that namespace: " + unreachable.Command() + "; or use native mode"})
	case err != nil:
		return fmt.Errorf("attach to %s in generic mode: %w", iface, err)
	}
	if changed := state.Of(iface); len(changed) > 0 {
		a.conditions.Raise(condition.Condition{Code: condition.AggregationSwitchedOff, Severity: condition.Info, Subject: iface,
			Text: "switched off until shunt detaches: " + strings.Join(changed, ", ")})
	}
	return nil
}

// release switches an interface's merging on again, if it was switched off; "" is all.
func (a aggregation) release(iface string) error {
	a.conditions.Clear(condition.AggregationSwitchedOff, iface)
	a.conditions.Clear(condition.PeerAggregates, iface)
	state, err := a.read()
	if err != nil || len(state.Changes) == 0 {
		return err
	}
	state, err = state.Restore(iface)
	return errors.Join(err, a.write(state))
}

// releaseAll switches on again what an instance has switched off, also one that was killed.
func releaseAll(instance string, log *slog.Logger) error {
	return newAggregation(instance, nil, log).release("")
}
