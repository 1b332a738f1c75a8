// Package cli is the command line without a product: the commands about the daemon and its file, and the parts
// that all commands share, from errors with their exit codes to tables. Each product's commands are in its folder
// (internal/lb/command and others), and internal/commands puts them together. Commands about a running data plane
// read the pinned maps or ask the daemon; none of them changes anything behind its back.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/spf13/cobra"
)

// The exit codes of every command; docs/guide/commands.md has the same table.
const (
	ExitOK      = 0 // done
	ExitRefused = 1 // understood and refused: a fault in the file, nothing to act on, a failed claim
	ExitUsage   = 2 // the command line makes no sense
	ExitBusy    = 3 // the deadline came before the awaited state
	ExitCuts    = 4 // planned: flows would end

	ExitInterrupted = 130 // ended by Ctrl-C before it was done (128 + SIGINT)
)

// ErrSilent ends a command whose output has already said why.
var ErrSilent = errors.New("refused")

// ErrStillBusy ends a wait whose deadline has passed. The message has been printed.
var ErrStillBusy = errors.New("still busy")

// errCuts ends a plan that would end flows. The message has been printed.
var errCuts = errors.New("flows would end")

// UsageError is a command line with wrong arguments.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e UsageError) Unwrap() error { return e.Err }

// Streams are the input and the outputs of a command.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Main runs a command line, for example `shunt run` of os.Args[1:], and returns the exit code.
func Main(line func(Streams) *cobra.Command, args []string, in io.Reader, out, errOut io.Writer) int {
	root := line(Streams{In: in, Out: out, Err: errOut})
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(context.Background())
	var usage UsageError
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, ErrSilent):
		return ExitRefused
	case errors.Is(err, ErrStillBusy):
		return ExitBusy
	case errors.Is(err, errCuts):
		return ExitCuts
	case errors.As(err, &usage):
		fmt.Fprintf(errOut, "shunt: %v\nRun `shunt --help`, or `shunt COMMAND --help`.\n", err)
		return ExitUsage
	}
	fmt.Fprintf(errOut, "shunt: %v\n", err)
	return ExitRefused
}

// Product has the commands of one product, and its part of the commands that are about several.
type Product struct {
	Commands []*cobra.Command
	// Demos are below `shunt demo`.
	Demos []*cobra.Command
	// CleanDemo removes the remains of a demo for `shunt demo --clean`. isIts: the id is one of this product's
	// demos. May be nil: its demos leave nothing.
	CleanDemo func(ctx context.Context, id string) (isIts, removed bool, err error)
	// PrintStatus prints the product's part of `shunt status`, if the status has any. May be nil.
	PrintStatus func(w io.Writer, st *shuntv1.GetStatusResponse, all bool)
	// Left lists the product's traces on the machine, for `shunt uninstall`. May be nil.
	Left func() ([]Trace, error)
}

// Trace is one thing that a product has left on the machine, and the function that removes it.
type Trace struct {
	Kind, What string // as `shunt uninstall` lists them
	Remove     func() error
}

// Root makes a command line: the commands of products, and those about a daemon that may run all of daemon.
func Root(s Streams, daemon func() []node.Product, products ...Product) *cobra.Command {
	root := &cobra.Command{
		Use:   "shunt",
		Short: "A layer-4 load balancer in the kernel's fast path",
		Long: `shunt balances TCP and UDP in XDP, before the kernel's network stack.

Try it first:  shunt demo        see a working balancer in network namespaces
Then:          shunt check       check the configuration
               shunt run         balance traffic`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       Version() + " " + runtime.Version(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return UsageError{Err: fmt.Errorf("there is no command %q", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return UsageError{Err: err} })
	root.AddCommand(newRun(s, daemon), newCheck(s, daemon), newReload(s), newSchema(s, daemon), newDetach(s, daemon))
	for _, p := range products {
		root.AddCommand(p.Commands...)
	}
	return root
}

// Group completes a command that only has others below it: it shows its help, and refuses a command that it has not.
func Group(c *cobra.Command) *cobra.Command {
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return UsageError{Err: fmt.Errorf("there is no command %q of `%s`", args[0], c.CommandPath())}
		}
		return nil
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	return c
}

// NoArguments refuses arguments.
func NoArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return UsageError{Err: fmt.Errorf("unexpected argument %q; name a file with --config FILE", args[0])}
	}
	return nil
}

// release is set by the linker in published binaries; see packaging/release.
var release string

// Version is the version of this build.
func Version() string {
	if release != "" {
		return release
	}
	return start.BuildVersion()
}

// NewLog is start.Log for a command line.
func NewLog(w io.Writer, format string, verbose bool) (*slog.Logger, error) {
	log, err := start.Log(w, format, verbose)
	if err != nil {
		return nil, UsageError{Err: err}
	}
	return log, nil
}

// UntilStopped returns a context that ends with SIGINT or SIGTERM; a second one exits at once.
func UntilStopped(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
		<-signals
		os.Exit(ExitInterrupted)
	}()
	return ctx, cancel
}

// Target is the daemon that a command asks.
type Target struct{ Instance, Socket string }

// Flags has a command take the target's flags.
func (t *Target) Flags(c *cobra.Command) {
	start.TargetFlags(c, &t.Instance, &t.Socket)
}

// Check refuses names that no instance can have.
func (t *Target) Check() error { return RequireInstance(t.Instance) }

// Asked is the instance that the command line names; "": the one that the socket's daemon runs.
func (t *Target) Asked(c *cobra.Command) string {
	if c.Flags().Changed("instance") {
		return t.Instance
	}
	return ""
}

// Client asks the daemon at the socket, which refuses if another instance is meant.
func (t *Target) Client(c *cobra.Command) *control.Client {
	return control.NewClient(t.Socket).For(t.Asked(c))
}

// AnswerTimeout is for questions that the daemon answers from memory.
const AnswerTimeout = 5 * time.Second

// Read asks at the socket, or at the read-only socket if this user may open only that one.
func (t *Target) Read(c *cobra.Command, ask func(*control.Client) error) error {
	return control.Read(t.Socket, t.Asked(c), ask)
}

// OutputFlag has a command take --output.
func OutputFlag(c *cobra.Command, output *string) {
	c.Flags().StringVarP(output, "output", "o", "text", "output format: text or json")
}

// RequireOutput refuses unknown formats.
func RequireOutput(output string) error {
	if output != "text" && output != "json" {
		return UsageError{Err: fmt.Errorf("--output is text or json, not %q", output)}
	}
	return nil
}
