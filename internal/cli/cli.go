// Package cli has the commands that users type. Commands about a running data plane read the pinned maps
// or ask the daemon; none of them changes anything behind its back.
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
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/spf13/cobra"
)

// The exit codes of every command; docs/guide/commands.md has the same table.
const (
	exitOK      = 0 // done
	exitRefused = 1 // understood and refused: a fault in the file, nothing to act on, a failed claim
	exitUsage   = 2 // the command line makes no sense
	exitBusy    = 3 // waited until the deadline for what had not happened by then
	exitCuts    = 4 // planned: flows would end

	exitInterrupted = 130 // ended by Ctrl-C before it was done (128 + SIGINT)
)

const defaultConfig = start.DefaultConfig

// errSilent ends a command whose output has already said why.
var errSilent = errors.New("refused")

// errStillBusy ends a wait whose deadline has passed. The message has been printed.
var errStillBusy = errors.New("still busy")

// errCuts ends a plan that would end flows. The message has been printed.
var errCuts = errors.New("flows would end")

// usageError is a command line with wrong arguments.
type usageError struct{ error }

// streams are the input and the outputs of a command.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// Main runs the command line and returns the exit code.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	s := streams{in: in, out: out, err: errOut}
	root := newRoot(s)
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(context.Background())
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errSilent):
		return exitRefused
	case errors.Is(err, errStillBusy):
		return exitBusy
	case errors.Is(err, errCuts):
		return exitCuts
	case errors.As(err, &usage):
		fmt.Fprintf(errOut, "shunt: %v\nRun `shunt --help`, or `shunt COMMAND --help`.\n", err)
		return exitUsage
	}
	fmt.Fprintf(errOut, "shunt: %v\n", err)
	return exitRefused
}

// Command returns the command line as it is, for manual pages and completions. It prints nothing.
func Command() *cobra.Command {
	return newRoot(streams{in: strings.NewReader(""), out: io.Discard, err: io.Discard})
}

func newRoot(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "shunt",
		Short: "A layer-4 load balancer in the kernel's fast path",
		Long: `shunt balances TCP and UDP in XDP, before the kernel's network stack.

Try it first:  shunt demo        see a working balancer in network namespaces
Then:          shunt check       check the configuration
               shunt run         balance traffic`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version() + " " + runtime.Version(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("there is no command %q", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newRun(s), newCheck(s), newReload(s), newSchema(s), newStatus(s), newBackend(s), newOverride(s), newChain(s), newDetach(s), newUninstall(s),
		newDecap(s), newUDP(s), newAccelerate(s), newDiag(s), newGuard(s), newDoctor(s), newDemo(s))
	return root
}

func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q; name a file with --config FILE", args[0])}
	}
	return nil
}

// release is set by the linker in what is published; see packaging/release.
var release string

func version() string {
	if release != "" {
		return release
	}
	return start.BuildVersion()
}

func newLog(w io.Writer, format string, verbose bool) (*slog.Logger, error) {
	log, err := start.Log(w, format, verbose)
	if err != nil {
		return nil, usageError{err}
	}
	return log, nil
}

// untilStopped returns a context that ends with SIGINT or SIGTERM; a second one exits at once.
func untilStopped(parent context.Context) (context.Context, context.CancelFunc) {
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
		os.Exit(exitInterrupted)
	}()
	return ctx, cancel
}

// target is the daemon that a command asks.
type target struct{ instance, socket string }

func (t *target) flags(c *cobra.Command) {
	start.TargetFlags(c, &t.instance, &t.socket)
}

// check refuses names that no instance can have.
func (t *target) check() error { return requireInstance(t.instance) }

// asked is the instance that the command line names; "": whichever the socket's daemon runs.
func (t *target) asked(c *cobra.Command) string {
	if c.Flags().Changed("instance") {
		return t.instance
	}
	return ""
}

// client asks the daemon at the socket, which refuses if another instance is meant.
func (t *target) client(c *cobra.Command) *control.Client {
	return control.NewClient(t.socket).For(t.asked(c))
}

func outputFlag(c *cobra.Command, output *string) {
	c.Flags().StringVarP(output, "output", "o", "text", "output format: text or json")
}

func requireOutput(output string) error {
	if output != "text" && output != "json" {
		return usageError{fmt.Errorf("--output is text or json, not %q", output)}
	}
	return nil
}
