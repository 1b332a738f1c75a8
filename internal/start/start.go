// Package start brings up a node for a command: its flags, its log and its signals. It is for `shunt run` and
// for programs that run a node with other products or sources.
package start

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/spf13/cobra"
)

// DefaultConfig is the configuration that commands read unless told otherwise.
const DefaultConfig = "/etc/shunt/shunt.yaml"

// DefaultSocket is the socket of the daemon for commands unless told otherwise: the default of the file's
// api.socket.
const DefaultSocket = "/run/shunt/shunt.sock"

// TargetFlags has a command take the names of the daemon that it asks.
func TargetFlags(c *cobra.Command, instance, socket *string) {
	InstanceFlag(c, instance)
	c.Flags().StringVar(socket, "socket", cmp.Or(os.Getenv("SHUNT_SOCKET"), DefaultSocket), "the daemon's control socket (SHUNT_SOCKET)")
}

// InstanceFlag has a command take the name of an instance.
func InstanceFlag(c *cobra.Command, instance *string) {
	c.Flags().StringVar(instance, "instance", node.DefaultInstance, "name of the data plane, if the host has several data planes")
}

// Flags are the options that a command line gives. Products are the caller's.
type Flags struct {
	node.Options
	format  string
	verbose bool
}

// Add has the command take the flags. onExit is the default of --on-exit.
func (f *Flags) Add(c *cobra.Command, onExit node.OnExit) {
	c.Flags().StringVar(&f.ConfigPath, "config", DefaultConfig, "configuration: a file, or a directory of *.yaml")
	c.Flags().StringVar(&f.Instance, "instance", node.DefaultInstance, "name of the data plane, if the host has several data planes")
	c.Flags().StringVar(&f.Socket, "socket", os.Getenv("SHUNT_SOCKET"), "control socket, instead of the socket that the file names (SHUNT_SOCKET)")
	c.Flags().BoolVar(&f.Watch, "watch", false, "apply the file whenever it changes")
	c.Flags().StringVar((*string)(&f.OnExit), "on-exit", string(onExit), "action on SIGTERM: detach, keep or drain")
	c.Flags().DurationVar(&f.DrainTimeout, "drain-timeout", 5*time.Minute, "with --on-exit drain: time after which the remaining flows are given up")
	c.Flags().StringVar(&f.format, "log-format", "text", "log format: text (key=value) or json")
	c.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "log every next hop and every change")
}

// Check refuses flags that make no sense, and opens the log.
func (f *Flags) Check(c *cobra.Command, errOut io.Writer) error {
	err := errors.Join(node.CheckInstance(f.Instance), f.checkExit(c.Flags().Changed("drain-timeout")))
	if err == nil {
		f.Log, err = Log(errOut, f.format, f.verbose)
	}
	return err
}

// checkExit refuses unknown ways to stop; given is whether --drain-timeout was.
func (f *Flags) checkExit(given bool) error {
	switch {
	case !slices.Contains(node.OnExits, f.OnExit):
		return fmt.Errorf("--on-exit is detach, keep or drain, not %q", f.OnExit)
	case given && f.OnExit != node.ExitDrain:
		return fmt.Errorf("--drain-timeout is for --on-exit drain; with %s it has no effect", f.OnExit)
	case f.DrainTimeout <= 0:
		return fmt.Errorf("--drain-timeout %s leaves no time to drain; --on-exit detach does not wait", f.DrainTimeout)
	}
	return nil
}

// Log is a log in one of the known formats.
func Log(w io.Writer, format string, verbose bool) (*slog.Logger, error) {
	options := &slog.HandlerOptions{}
	if verbose {
		options.Level = slog.LevelDebug
	}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format is text or json, not %q", format)
}

// Obey connects signals with a node's promised reactions. The context ends when the node is to stop; exit is
// for a second Ctrl-C.
func (f *Flags) Obey(parent context.Context, exit func()) (stop context.Context) {
	// Go's HTTP client writes its complaints about odd backends to the default log.
	slog.SetDefault(f.Log)
	slog.SetLogLoggerLevel(slog.LevelDebug)
	// `shunt run | tee log`: Ctrl-C ends tee first, and shunt still has to detach.
	signal.Ignore(syscall.SIGPIPE)
	stop, f.Interrupted = node.UntilTold(parent, exit)
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	f.Hangup = hangup
	return stop
}

// Run runs the node until ctx ends. It prints the faults of the file.
func (f *Flags) Run(ctx context.Context, errOut io.Writer) error {
	err := node.Run(ctx, f.Options)
	var faults *node.FaultsError
	if errors.As(err, &faults) {
		_ = config.Render(errOut, faults.Faults)
	}
	return err
}

// BuildVersion is the version of the program's module, as Go has noted it.
func BuildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
