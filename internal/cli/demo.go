package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/story"
)

// Ending is the result of a demo.
type Ending struct {
	Facts   any // for JSON
	Claims  story.Claims
	Seconds float64
	OK      bool
}

// Tell runs a demo, which tells its story to out, and prints its result and the commands to try next. An
// interruption ends the process after the demo has cleaned up.
func Tell(parent context.Context, s Streams, out io.Writer, output string, run func(context.Context) (Ending, error), next [][2]string) error {
	ctx, cancel := UntilStopped(parent)
	defer cancel()
	// A closed terminal, or a reader like head that has gone, must not end the demo before it has cleaned up.
	ctx, release := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGPIPE)
	defer release()
	quiet := context.AfterFunc(ctx, func() { fmt.Fprintln(s.Err, "\nshunt: interrupted, cleaning up") })
	end, err := run(ctx)
	if !quiet() { // it has run
		if err = errors.Join(parent.Err(), withoutCancel(err)); err != nil {
			fmt.Fprintf(s.Err, "shunt: %v\n", err)
		}
		os.Exit(ExitInterrupted)
	}
	if output == "json" {
		if err := WriteJSON(s.Out, end.Facts); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "\n%s\n", end.Claims.Verdict(end.Seconds))
	if len(next) > 0 {
		fmt.Fprintf(out, "\nTry next:\n")
	}
	for _, line := range next {
		fmt.Fprintf(out, "  %-50s # %s\n", Called()+" "+line[0], line[1])
	}
	if err != nil {
		return err
	}
	if !end.OK {
		return ErrSilent
	}
	return nil
}

// DemoNeedsRoot refuses a demo without root early, before the kernel refuses its steps.
func DemoNeedsRoot() error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("the demo makes network namespaces and loads programs into the kernel, which only root may do.\n"+
		"It touches nothing outside its own namespaces and removes everything at its end. Please run:\n\n  %s", AsRoot())
}

// ShortDemo completes a demo of one command, which only root may run and which keeps nothing.
func ShortDemo(s Streams, c *cobra.Command, run func(context.Context, io.Writer) (Ending, error)) *cobra.Command {
	var output string
	c.Args = NoArguments
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := RequireOutput(output); err != nil {
			return err
		}
		if err := DemoNeedsRoot(); err != nil {
			return err
		}
		out := s.Out
		if output == "json" {
			out = s.Err
		}
		return Tell(c.Context(), s, out, output, func(ctx context.Context) (Ending, error) { return run(ctx, out) }, nil)
	}
	OutputFlag(c, &output)
	return c
}

// withoutCancel returns the error without the cancellation.
func withoutCancel(err error) error {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		var rest []error
		for _, one := range all.Unwrap() {
			rest = append(rest, withoutCancel(one))
		}
		return errors.Join(rest...)
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Called returns how this program was called, for commands that a reader can paste.
func Called() string {
	if !strings.Contains(os.Args[0], "/go-build") {
		return os.Args[0]
	}
	if os.Getenv("SUDO_UID") != "" {
		return "go run -exec sudo ./cmd/shunt"
	}
	return "go run ./cmd/shunt"
}

// AsRoot returns the command line with root's rights.
func AsRoot() string {
	arguments := strings.Join(os.Args[1:], " ")
	if strings.Contains(os.Args[0], "/go-build") {
		return "go run -exec sudo ./cmd/shunt " + arguments
	}
	return "sudo " + os.Args[0] + " " + arguments
}
