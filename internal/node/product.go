package node

import (
	"context"
	"log/slog"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/value"
)

// Product is one of shunt's products: its part of the configuration file, and the functions that start and stop
// it.
type Product struct {
	// Name is the name of the settings that Part makes. Messages, conditions and the status use it.
	Name string
	Part config.Part
	// CheckHost adds to the faults of the file the faults of the settings on this machine; nil: there is
	// nothing to check.
	CheckHost func(settings any, how HostCheck)
	// Describe sums up settings without faults, for `shunt check`: counts, as in "3 services,
	// 5 backends", and lines with more.
	Describe func(settings any) (counts string, lines []string)
	// Needs lists the actions of the product, with these settings, that a service manager's sandbox refuses
	// unless its unit permits them; nil: with default settings. May be nil.
	Needs func(settings any) []Need
	// Open starts the product with the settings of the file. If it fails, its steps are undone. ctx is for the
	// start alone: Instance.Close ends everything that Open starts.
	Open func(ctx context.Context, host *Host, settings any) (Instance, error)
	// Remove removes the objects of the product that a killed node, or one that kept them, has left. The caller
	// holds the lock of the instance. It succeeds if there are none. May be nil.
	Remove func(instance string, log *slog.Logger) error
	// Left names the instances of which objects are left, or at work, that Remove would remove. May be nil.
	Left func() (instances []string, err error)
	// Unnamed removes the objects that an earlier node has left of the product, if the file of the starting
	// node does not name it: they may block another product. nil: they stay until Remove.
	Unnamed func(instance string, log *slog.Logger) error
}

// Blocked is an error of Product.Open for a lack of room that another product may make when it opens.
type Blocked interface {
	error
	// Freed reports whether there may be room now.
	Freed() bool
}

// HostCheck describes the command that compares a file with this machine.
type HostCheck struct {
	Command bool // `shunt check`, beside a node that may be running
	Strict  bool // the file is meant for this machine: a setting that it does not support is an error
}

// Host is the node's interface for its products.
type Host struct {
	Instance   string
	ConfigPath string
	Log        *slog.Logger
	Conditions *condition.Set
	Events     *control.Events
	// Interrupted ends when the node has to remove everything at once, even during a drain.
	Interrupted context.Context //nolint:containedctx // a second way to be told to stop
	// Alive reports that a part of the product makes progress. A part that has called it once and is silent for
	// too long keeps the node from telling the service manager that it is alive.
	Alive func(part string)
	// Scraped reports whether metrics are served, so that values for metrics alone are worth counting.
	Scraped func() bool
	// Summarize must be called when Instance.Summary has changed by itself.
	Summarize func()
}

// Instance is a product that is open.
type Instance interface {
	// Refuses returns the reason why settings cannot come into force while the product is open, or nil. Nothing
	// is changed.
	Refuses(settings any) error
	// Apply puts settings into force. After an error the earlier settings are in force, or the new ones in
	// part, and then the product tries again by itself; the error tells which.
	Apply(ctx context.Context, settings any) (Difference, error)
	// Status adds the product's information to s, whose Daemon is set. It may be called at any time.
	Status(ctx context.Context, s *shuntv1.GetStatusResponse) error
	// Summary describes the product's work in a few words, such as "forwarding 3 services". It may be called at
	// any time.
	Summary() string
	// Close ends the product. With keep, its programs in the kernel continue for the next node to take over;
	// otherwise nothing is left. It is called once, and nothing else after it.
	Close(keep bool) error
}

// Difference lists the changes that new settings make.
type Difference struct {
	Settings []value.SettingDifference
	Services *shuntv1.Difference // of the balancer
	Cuts     []*shuntv1.Cut      // flows of the balancer that end, or would
	Text     string              // changes that are no setting's, in words; empty: none
}

// Foreseer is an Instance that can tell the changes that Apply would make. Nothing is changed.
type Foreseer interface {
	Foresee(ctx context.Context, settings any) (Difference, error)
}

// HostChecker is an Instance that compares new settings with its present knowledge of the machine, instead of
// Product.CheckHost.
type HostChecker interface{ CheckHost(settings any) }

// Drainer is an Instance that can end without breaking flows in use.
type Drainer interface {
	// Drain makes the product take nothing new from now on.
	Drain()
	// AwaitDrained returns when everything in use at Drain has ended, or when ctx ends.
	AwaitDrained(ctx context.Context)
}

// Sampler is an Instance with metrics.
type Sampler interface {
	// Sample adds the product's values to s. It may be called at any time, and does not wait for a change.
	Sample(s *metrics.Sample) error
}

// Overrider is an Instance whose backends operators can override.
type Overrider interface{ Overridable() control.Overrides }
