// Package node is the life of `shunt run`: it reads the configuration file, runs the products that
// the file names, and answers at the control socket.
//
//	file ── config.Contents ──► node ──► products: Open, Apply, Status, Close
//	                              ▲
//	SIGHUP, --watch, the API ─────┘
//
// A product that fails is a condition, and ends no other product. The programs in the kernel do not
// need the node: killing the process at any moment loses nothing, and the next start adopts them.
package node

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/settings"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Options are set by the command line.
type Options struct {
	// Products are all products. A file that names none configures the first one.
	Products   []Product
	ConfigPath string
	Instance   string
	Socket     string           // overrides the configuration's, if set
	Watch      bool             // apply the file whenever it changes
	Hangup     <-chan os.Signal // each signal makes the node apply the file
	// OnExit decides the fate of the programs in the kernel when the node is told to stop; empty: detach.
	OnExit OnExit
	// DrainTimeout limits ExitDrain.
	DrainTimeout time.Duration
	// Interrupted, once it has ended, makes the node detach at its end, against OnExit, even during a drain. It
	// does not stop the node. May be nil: then only the API can do so.
	Interrupted context.Context //nolint:containedctx // a second way to be told to stop
	Log         *slog.Logger
	Version     string // of this build, for metrics
	// Collectors are metrics of the program, added to the node's answer.
	Collectors []metrics.Collector
	// Status adds the program's own information to the status. It may be called at any time. May be nil.
	Status func(*shuntv1.GetStatusResponse)
	// Detaching ends the program's promises to other machines. It is called before the products are removed, and not if they are
	// kept; it must end within seconds. May be nil.
	Detaching func()
	// Detached removes the program's own objects from the kernel. It is called after the products have been
	// removed, and not if they are kept. May be nil.
	Detached func() error
}

// DefaultInstance is the instance that commands use by default.
const DefaultInstance = "default"

const (
	// heartbeatInterval is the interval at which the service manager is told that the node is alive.
	heartbeatInterval = time.Second
	// retryInterval is the time after which a product that failed is tried again.
	retryInterval = 5 * time.Second
)

// The phases of a node.
const (
	runs int32 = iota
	draining
	stopping // products close
)

// node is one running instance.
type node struct {
	opts   Options
	log    *slog.Logger
	since  time.Time
	format *config.Format

	conditions *condition.Set
	events     *control.Events
	supervisor *supervisor
	server     *control.Server
	metrics    *metrics.Server
	ending     ending
	reloaded   reloaded
	phase      atomic.Int32

	// reading is held during a whole reload: the data of two large files at once would need too much memory. It
	// guards products, except for their methods that may be called at any time.
	reading  sync.Mutex
	products *products
	settings atomic.Pointer[settings.Settings] // the settings in force
}

// Run runs the node until ctx ends, and then acts as opts.OnExit says. An error before a product has been
// opened leaves a predecessor's objects unchanged.
func Run(ctx context.Context, opts Options) error {
	unlock, err := Lock(opts.Instance)
	if err != nil {
		return err
	}
	release := sync.OnceFunc(unlock)
	defer release()
	started := boundMemoryOften()
	defer started()
	var changed <-chan struct{}
	if opts.Watch { // before the file is read: a write while the products start is a change
		watching, end := context.WithCancel(ctx)
		defer end()
		changed = watchFile(watching, opts.ConfigPath, opts.Log)
	}
	format := Format(opts.Products)
	contents, err := readConfig(format, opts.Products, opts.ConfigPath, opts.Log)
	if err != nil {
		return err
	}
	n := newNode(opts, format)
	ctx = n.ending.arrange(ctx, opts.Interrupted)
	n.furnish()
	own := n.own(contents)
	if err := n.start(ctx, own, contents.Settings); err != nil {
		return err
	}
	n.log.Info("running", "instance", opts.Instance, "does", n.products.summary(), "socket", own.API.Socket, "pid", os.Getpid())
	n.supervisor.ready(n.products.summary())
	started()
	returnMemory()
	n.beside(ctx, func(ctx context.Context) { n.reloads(ctx, changed) })
	err = n.finish()
	release() // before the end is announced: another node may start at once
	n.ending.over(err)
	n.server.Wait()
	return err
}

func newNode(opts Options, format *config.Format) *node {
	events := &control.Events{}
	conditions := newConditions(opts.Log, events)
	n := &node{opts: opts, log: opts.Log, since: time.Now(), format: format, events: events, conditions: conditions,
		supervisor: newSupervisor(opts.Log)}
	n.metrics = metrics.NewServer(n.sample, opts.Log, opts.Collectors...)
	return n
}

// furnish makes the products, with their hosts.
func (n *node) furnish() {
	n.products = newProducts(n.opts.Products, &Host{
		Instance: n.opts.Instance, ConfigPath: n.opts.ConfigPath, Log: n.log, Conditions: n.conditions, Events: n.events,
		Interrupted: n.ending.interrupted, Scraped: n.metrics.Listening,
		Summarize: func() { n.supervisor.ready(n.products.summary()) },
	}, &n.supervisor.alive)
}

// own returns the settings that belong to no product, with the overrides of the command line.
func (n *node) own(c *config.Contents) settings.Settings {
	own, _ := settings.Of(c) // a file without faults has them
	if n.opts.Socket != "" {
		own.API.Socket = n.opts.Socket
	}
	return own
}

// start opens the products, and answers at the control socket. If it fails, its steps are undone.
func (n *node) start(ctx context.Context, own settings.Settings, named map[string]any) error {
	listening, err := n.metrics.Prepare(ctx, own.Metrics.Listen)
	if err != nil {
		return err
	}
	defer listening.Drop()
	n.server = &control.Server{Instance: n.opts.Instance, API: own.API, Handler: n, Events: n.events, Log: n.log}
	if err := n.server.Listen(context.WithoutCancel(ctx)); err != nil { // it answers while flows drain
		return err
	}
	n.settings.Store(&own)
	if err := n.products.start(ctx, named); err != nil {
		n.server.Stop()
		return err
	}
	n.reloaded.note(true)
	listening.Commit()
	n.server.Serve()
	return nil
}

// beside runs do until ctx ends, and meanwhile does the periodic work. It waits for everything that it began.
func (n *node) beside(ctx context.Context, do func(context.Context)) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { do(ctx) })
	heartbeat := time.NewTicker(heartbeatInterval)
	defer heartbeat.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-heartbeat.C:
			boundMemory()
			n.supervisor.live()
		}
	}
}

func newConditions(log *slog.Logger, events *control.Events) *condition.Set {
	return &condition.Set{OnChange: func(c condition.Change) {
		events.Publish(eventOf(c))
		if c.Joined {
			return // it holds; the line about all of them has reported it
		}
		if c.Cleared {
			log.Info("condition ended", "condition", c.Condition.Code, "subject", c.Condition.Subject)
			return
		}
		log.Warn(c.Condition.Text, "condition", c.Condition.Code, "subject", c.Condition.Subject, "remedy", c.Condition.Remedy)
	}}
}

// eventOf makes an event for watchers from a change of the conditions.
func eventOf(c condition.Change) *shuntv1.WatchResponse {
	event := &shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "condition", Condition: message.Conditions([]condition.Condition{c.Condition})[0]}
	if c.Cleared {
		event.Event = "condition_ended"
	}
	return event
}
