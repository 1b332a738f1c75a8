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
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// reloads reads the file again when it changes or somebody sends SIGHUP, and tries products that
// failed again, until ctx ends. It is beside the loop, because both may take long.
func (n *node) reloads(ctx context.Context) {
	changed := make(chan struct{})
	if n.opts.Watch {
		changed = watchFile(ctx, n.opts.ConfigPath, n.log)
	}
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

// retry opens what could not be opened.
func (n *node) retry(ctx context.Context) {
	n.reading.Lock()
	defer n.reading.Unlock()
	if n.refusal.Load() == nil && n.products.retry(ctx) {
		n.supervisor.ready(n.products.summary())
	}
}

// reloadUnasked is a reload that nobody waits for: what is wrong goes into the log.
func (n *node) reloadUnasked(ctx context.Context) {
	result, err := n.Reload(ctx)
	if err == nil && result.Applied {
		return
	}
	for _, fault := range result.GetFaults() {
		n.log.Error("configuration", "fault", faultOf(fault).String())
	}
	n.log.Error("the file was not applied; the configuration before stays in force", "path", n.opts.ConfigPath, "refused", result.GetRefused(), "error", err)
}

func faultOf(f *shuntv1.Fault) config.Fault {
	return config.Fault{File: f.File, Line: int(f.Line), Column: int(f.Column), Severity: config.Severity(f.Severity),
		Path: f.Path, Text: f.Text, Message: f.Message, Suggestion: f.Suggestion}
}

// Reload reads the file again and applies it. A file with a fault, or a change that needs
// a restart, changes nothing.
func (n *node) Reload(ctx context.Context) (result *shuntv1.ReloadResponse, err error) {
	result = &shuntv1.ReloadResponse{}
	defer func() { n.reloaded.note(result.Applied) }()
	n.reading.Lock()
	defer n.reading.Unlock()
	defer returnMemory()
	contents, err := n.format.Read(n.opts.ConfigPath)
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	checkGroups(contents, HostCheck{})
	n.products.checkHost(contents.Settings)
	faults := contents.Faults.Sorted()
	result.Faults = message.Faults(faults)
	if config.HasErrors(faults) {
		result.Refused = "the file has errors; nothing was changed"
		n.conditions.Raise(condition.Condition{Code: condition.ConfigRefused, Severity: condition.Error,
			Subject: n.opts.ConfigPath, Text: "the configuration on disk has errors and was not applied",
			Remedy: "run `shunt check --config " + n.opts.ConfigPath + "`"})
		return result, nil
	}
	if refusal := n.refusal.Load(); refusal != nil {
		result.Refused = (*refusal).Error()
		return result, nil
	}
	n.supervisor.reloading()
	defer func() { n.supervisor.ready(n.products.summary()) }()
	if err := n.bring(ctx, contents, result); err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	n.conditions.Clear(condition.ConfigRefused, n.opts.ConfigPath)
	result.Applied = true
	n.log.Info("reloaded", "path", n.opts.ConfigPath, "difference", result.Text)
	return result, nil
}

// bring brings a file without faults into force, and says in result what has changed.
func (n *node) bring(ctx context.Context, contents *config.Contents, result *shuntv1.ReloadResponse) error {
	own := n.own(contents)
	changes := value.DifferentSettings(n.settings.Load().List(), own.List())
	if err := needsRestart(changes); err != nil {
		return err
	}
	if err := n.products.refuses(contents.Settings); err != nil {
		return err
	}
	listening, err := n.metrics.Prepare(ctx, own.Metrics.Listen)
	if err != nil {
		return err
	}
	defer listening.Drop()
	differences, err := n.products.apply(ctx, contents.Settings)
	if err != nil {
		return err
	}
	listening.Commit()
	n.settings.Store(&own)
	changed := len(changes) > 0
	var words []string
	for _, d := range differences {
		changes = append(changes, d.Settings...)
		if d.Services != nil {
			result.Difference = d.Services
		}
		changed = changed || !d.Empty
		if !d.Empty && d.Text != "" || len(d.Settings) == 0 {
			words = append(words, d.Text)
		}
	}
	slices.SortFunc(changes, func(a, b value.SettingDifference) int { return strings.Compare(a.Key, b.Key) })
	result.Settings = message.Settings(changes)
	result.Text = textOf(changes, words)
	if changed {
		n.events.Publish(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "changed"})
	}
	return nil
}

// nothingToChange is the text of a reload that changes nothing.
const nothingToChange = "nothing to change"

// textOf is a line for each difference, or that there is none.
func textOf(changes []value.SettingDifference, words []string) string {
	var lines []string
	for _, c := range changes {
		lines = append(lines, c.String())
	}
	for _, w := range words {
		if w != "" && w != nothingToChange {
			lines = append(lines, w)
		}
	}
	if len(lines) == 0 {
		return nothingToChange
	}
	return strings.Join(lines, "\n")
}

// needsRestart refuses other sockets under those who use them.
func needsRestart(changes []value.SettingDifference) error {
	return value.Fixed(changes, "api.", "the control socket's path and groups cannot change while it is in use; restart shunt; its connections go on if it was started with --on-exit keep")
}
