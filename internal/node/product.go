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

// Product is one of shunt's products: its part of the configuration file, and how it comes to life.
type Product struct {
	// Name is that of the settings that Part makes. Messages, conditions and the status use it.
	Name string
	Part config.Part
	// CheckHost adds to the faults of the file what is wrong with the settings on this machine; nil:
	// there is nothing to check.
	CheckHost func(settings any, how HostCheck)
	// Describe sums up settings without faults, for `shunt check`: counts, as in "3 services,
	// 5 backends", and lines with more.
	Describe func(settings any) (counts string, lines []string)
	// Needs lists the deeds of the product that a service manager's sandbox refuses unless its unit permits them, with
	// these settings; nil: with settings that ask for nothing special. May be nil.
	Needs func(settings any) []Need
	// Open brings the product up with the settings of the file. What it has done when it fails is
	// undone. ctx is for that time alone: what it starts ends in Instance.Close.
	Open func(ctx context.Context, host *Host, settings any) (Instance, error)
	// Remove takes away what a node that was killed, or that kept it, has left of the product. The
	// caller holds the lock of the instance. Nothing there is success. May be nil.
	Remove func(instance string, log *slog.Logger) error
	// Unnamed takes away what an earlier node has left of the product, where the file of the one that starts does not name it: it
	// may keep another product from what that needs. nil: it stays until Remove.
	Unnamed func(instance string, log *slog.Logger) error
}

// HostCheck says who compares a file with this machine.
type HostCheck struct {
	Command bool // `shunt check`, beside a node that may be running
	Strict  bool // the file is meant for this machine: a setting that it does not support is an error
}

// Host is a node's offer to its products.
type Host struct {
	Instance   string
	ConfigPath string
	Log        *slog.Logger
	Conditions *condition.Set
	Events     *control.Events
	// Interrupted ends when the node is to take everything away at once, in the middle of a drain too.
	Interrupted context.Context //nolint:containedctx // a second way to be told to stop
	// Alive says that a part of the product makes progress. A part that has called it once and is silent
	// for too long keeps the node from telling the service manager that it is alive.
	Alive func(part string)
	// Scraped reports whether metrics are answered, so that what only they show is worth counting.
	Scraped func() bool
	// Summarize is to be called when Instance.Summary has changed by itself.
	Summarize func()
}

// Instance is a product that is open.
type Instance interface {
	// Refuses says why settings cannot come into force while the product is open, or is nil. Nothing is
	// changed.
	Refuses(settings any) error
	// Apply brings settings into force. After an error the settings before are in force, or the new
	// ones in part, and then the product tries again by itself; the error says which.
	Apply(ctx context.Context, settings any) (Difference, error)
	// Status adds what the product does to s, whose Daemon is there. It may be called at any time.
	Status(ctx context.Context, s *shuntv1.GetStatusResponse) error
	// Summary says in a few words what the product does, as in "forwarding 3 services". It may be called at
	// any time.
	Summary() string
	// Close ends the product. With keep, what runs in the kernel goes on for the next node to take over;
	// otherwise nothing is left. It is called once, and nothing else after it.
	Close(keep bool) error
}

// Difference lists the changes by new settings.
type Difference struct {
	Settings []value.SettingDifference
	Services *shuntv1.Difference // of the balancer
	Cuts     []*shuntv1.Cut      // flows of the balancer that end, or would
	Text     string              // in words, what is no setting's; empty: nothing
}

// Foreseer is an Instance that knows what Apply would change. Nothing is changed.
type Foreseer interface {
	Foresee(ctx context.Context, settings any) (Difference, error)
}

// HostChecker is an Instance that compares new settings with the machine as it knows it already, in
// place of Product.CheckHost.
type HostChecker interface{ CheckHost(settings any) }

// Drainer is an Instance that can end without breaking what it serves.
type Drainer interface {
	// Drain has the product take nothing new from now on.
	Drain()
	// AwaitDrained returns when what there was at Drain has ended, or when ctx ends.
	AwaitDrained(ctx context.Context)
}

// Sampler is an Instance with metrics.
type Sampler interface {
	// Sample adds the product's to s. It may be called at any time, and waits for no change.
	Sample(s *metrics.Sample) error
}

// Overrider is an Instance whose backends operators can override.
type Overrider interface{ Overridable() control.Overrides }
