package node

import (
	"context"
	"slices"
	"strings"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/settings"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// reloads reads the file again when it has changed or on SIGHUP, and tries failed products again, until ctx
// ends. It runs beside the loop, because both may take long.
func (n *node) reloads(ctx context.Context, changed <-chan struct{}) {
	retry := time.NewTicker(retryInterval)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
			n.retry(ctx)
			continue
		case <-changed:
		case <-n.opts.Hangup:
		}
		n.reloadUnasked(ctx)
	}
}

// retry opens the products that could not be opened.
func (n *node) retry(ctx context.Context) {
	n.reading.Lock()
	defer n.reading.Unlock()
	if n.refuses() == nil && n.products.retry(ctx) {
		n.supervisor.ready(n.products.summary())
	}
}

// reloadUnasked is a reload without a caller that waits: faults go to the log.
func (n *node) reloadUnasked(ctx context.Context) {
	result, faults := n.reload(ctx)
	if result.Applied {
		return
	}
	for _, fault := range faults {
		n.log.Error("configuration", "fault", fault.String())
	}
	n.log.Error("the file was not applied; the earlier configuration stays in force", "path", n.opts.ConfigPath, "refused", result.Refused)
}

// Reload implements control.Handler.
func (n *node) Reload(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	result, faults := n.reload(ctx)
	result.Faults = message.Faults(faults)
	return result, nil
}

// reload reads the file again and applies it. A file with a fault, or a change that needs
// a restart, changes nothing. The faults are the file's; result has none.
func (n *node) reload(ctx context.Context) (result *shuntv1.ReloadResponse, faults []config.Fault) {
	result = &shuntv1.ReloadResponse{}
	defer func() { n.reloaded.note(result.Applied) }()
	n.reading.Lock()
	defer n.reading.Unlock()
	defer returnMemory()
	contents, err := n.readFile()
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	faults = contents.Faults.Sorted()
	if config.HasErrors(faults) {
		result.Refused = "the file has errors; nothing was changed"
		n.conditions.Raise(condition.Condition{Code: condition.ConfigRefused, Severity: condition.Error,
			Subject: n.opts.ConfigPath, Text: "the configuration on disk has errors and was not applied",
			Remedy: "run `shunt check --config " + n.opts.ConfigPath + "`"})
		return result, faults
	}
	if refusal := n.refuses(); refusal != nil {
		result.Refused = refusal.Error()
		return result, faults
	}
	n.supervisor.reloading()
	defer func() { n.supervisor.ready(n.products.summary()) }()
	if err := n.bring(ctx, n.own(contents), contents.Settings, result); err != nil {
		result.Refused = err.Error()
		return result, faults
	}
	n.conditions.Clear(condition.ConfigRefused, n.opts.ConfigPath)
	result.Applied = true
	n.log.Info("reloaded", "path", n.opts.ConfigPath, "difference", result.Text)
	return result, faults
}

// readFile reads the file and compares it with this machine. The caller holds n.reading.
func (n *node) readFile() (*config.Contents, error) {
	contents, err := n.format.Read(n.opts.ConfigPath)
	if err != nil {
		return nil, err
	}
	checkSettings(contents, HostCheck{})
	n.products.checkHost(contents.Settings)
	return contents, nil
}

// changesTo returns the changes of settings that a file without faults makes. The error is the reason why they
// cannot be made now.
func (n *node) changesTo(own settings.Settings, named map[string]any) ([]value.SettingDifference, error) {
	changes := value.DifferentSettings(n.settings.Load().List(), own.List())
	if err := needsRestart(changes); err != nil {
		return nil, err
	}
	return changes, n.products.refuses(named)
}

// bring puts a file without faults into force, and writes the changes to result.
func (n *node) bring(ctx context.Context, own settings.Settings, named map[string]any, result *shuntv1.ReloadResponse) error {
	changes, err := n.changesTo(own, named)
	if err != nil {
		return err
	}
	listening, err := n.metrics.Prepare(ctx, own.Metrics.Listen)
	if err != nil {
		return err
	}
	defer listening.Drop()
	differences, err := n.products.apply(ctx, named)
	if err != nil {
		return err
	}
	listening.Commit()
	n.settings.Store(&own)
	if describe(changes, differences, result) {
		n.events.Publish(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "changed"})
	}
	return nil
}

// describe writes the actual or possible changes to result. It reports whether there are any.
func describe(changes []value.SettingDifference, differences []Difference, result *shuntv1.ReloadResponse) bool {
	var lines []string
	for _, d := range differences {
		changes = append(changes, d.Settings...)
		if d.Services != nil {
			result.Difference = d.Services
		}
		result.Cuts = append(result.Cuts, d.Cuts...)
		if d.Text != "" {
			lines = append(lines, d.Text)
		}
	}
	slices.SortFunc(changes, func(a, b value.SettingDifference) int { return strings.Compare(a.Key, b.Key) })
	result.Settings = message.Settings(changes)
	for i, c := range changes {
		lines = slices.Insert(lines, i, c.String())
	}
	result.Text = strings.Join(lines, "\n")
	if result.Text == "" {
		result.Text = "nothing to change"
		return false
	}
	return true
}

// needsRestart refuses other sockets while the present ones are in use.
func needsRestart(changes []value.SettingDifference) error {
	return value.Fixed(changes, "api.", "the control socket's path and groups cannot change while the socket is in use; restart shunt; connections through shunt go on if it was started with --on-exit keep")
}
