package daemon

import (
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/udp/tuning"
)

// tuningRecord returns the file in which an instance writes down its changes of interfaces, for the next instance or `shunt detach`.
func tuningRecord(instance string) string {
	return filepath.Join(node.RunDirectory, instance+recordSuffix)
}

const recordSuffix = ".busypoll"

// LeftPolled returns, by instance, the interfaces whose interrupts nodes that were killed have left off. Product's Remove
// switches them on again.
func LeftPolled() (map[string][]string, error) {
	left := map[string][]string{}
	records, _ := filepath.Glob(tuningRecord("*")) // the pattern is right
	for _, path := range records {
		names, err := tuning.New(path, tuning.Net).Changed()
		if err != nil {
			return nil, err
		}
		left[strings.TrimSuffix(filepath.Base(path), recordSuffix)] = names
	}
	return left, nil
}

// tune keeps interrupts of interfaces off as the entries say, and restores interfaces that no entry polls any more.
func (d *daemon) tune(s settings) {
	wanted := map[string]time.Duration{}
	for i := range s.entries {
		if o := &s.entries[i].offer; o.BusyPoll > 0 && d.trouble[o.Name] == "" {
			wanted[o.Interface] = o.BusyPoll
		}
	}
	d.untuned = d.tuner.Keep(wanted)
}

// untunedConditions report interfaces whose settings differ from their entries.
func (d *daemon) untunedConditions() (all []condition.Condition) {
	for _, iface := range slices.Sorted(maps.Keys(d.untuned)) {
		subject := iface
		if subject == "" {
			subject = d.host.Instance
		}
		all = append(all, condition.Condition{Subject: subject, Text: d.untuned[iface].Error()})
	}
	return all
}

// remove implements node.Product. Leases go first, because busy polling serves them.
func remove(instance string, log *slog.Logger) error {
	_, _ = kernel.SharePins()
	left, err := LeftLeases()
	if err != nil {
		return err
	}
	if err := keep(instance).Remove(); err != nil {
		return fmt.Errorf("end the UDP leases of instance %s: %w", instance, err)
	}
	if path, is := left[instance]; is {
		log.Info("ended UDP leases", "instance", instance, "path", path)
	}
	names, err := tuning.New(tuningRecord(instance), tuning.Net).PutBackAll()
	if len(names) > 0 {
		log.Info("restored the interrupts from before busy polling", "interfaces", strings.Join(names, " "))
	}
	if err != nil {
		return fmt.Errorf("restore the interrupts from before busy polling: %w", err)
	}
	return nil
}
