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

	diagdemo "github.com/shunt-lb/shunt/internal/diag/demo"
	"github.com/shunt-lb/shunt/internal/lb/demo"
	"github.com/shunt-lb/shunt/internal/story"
	"github.com/spf13/cobra"
)

func newDemo(s streams) *cobra.Command {
	var output, clean string
	var keep bool
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show a working balancer in network namespaces, with real HTTP and UDP traffic (needs root)",
		Long: `Build a network out of namespaces, start "shunt run" in it, send HTTP and UDP over IPv4 and IPv6
through XDP, take a backend away, kill the daemon, and check every claim that the demo makes.
The demo touches nothing outside its namespaces, and takes less than 20 seconds. It removes
everything at its end, also after Ctrl-C. It exits with 1 if a claim was not true.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			if err := demoNeedsRoot(); err != nil {
				return err
			}
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the shunt binary, which the demo runs as balancer and backends: %w", err)
			}
			if clean != "" {
				return cleanDemo(c.Context(), s, clean, executable)
			}
			story := s.out
			if output == "json" {
				story = s.err
			}
			return runDemo(c.Context(), s, demo.Options{Executable: executable, Command: called(), Keep: keep, Out: story}, output)
		},
	}
	outputFlag(c, &output)
	c.Flags().BoolVar(&keep, "keep", false, "leave the demo in place at the end, and say how to look around")
	c.Flags().StringVar(&clean, "clean", "", "remove the kept or killed demo with this id, also one of `shunt demo diag`")
	c.AddCommand(newDemoBackend(s), newDemoUDP(s), newDemoMesh(s), newDemoAccelerate(s), newDemoUDPWorker(), newDemoGuard(s), newDemoGuardStage(s), newDemoGuardLedger(), newDemoGuardIntruder(), newDemoDiag(s), newDemoDiagWorker(s))
	return c
}

func runDemo(parent context.Context, s streams, options demo.Options, output string) error {
	return tell(parent, s, options.Out, output, func(ctx context.Context) (ending, error) {
		facts, err := demo.Run(ctx, options)
		return ending{facts, facts.Claims, facts.Seconds, facts.OK}, err
	}, [][2]string{
		{"demo --keep", "leaves the demo running, and says how to look around"},
		{"demo -o json", "the same facts for a program"},
		{"schema", "shows what a configuration file may contain; `check --config FILE` tells whether yours is right"},
	})
}

// ending is the result of a demo.
type ending struct {
	facts   any // for JSON
	claims  story.Claims
	seconds float64
	ok      bool
}

// tell runs a demo, which tells its story to out, and says how it ended and what to try next. An interruption
// ends the process after the demo has cleaned up.
func tell(parent context.Context, s streams, out io.Writer, output string, run func(context.Context) (ending, error), next [][2]string) error {
	ctx, cancel := untilStopped(parent)
	defer cancel()
	// A closed terminal, or a reader like head that has gone, must not end the demo before it has cleaned up.
	ctx, release := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGPIPE)
	defer release()
	quiet := context.AfterFunc(ctx, func() { fmt.Fprintln(s.err, "\nshunt: interrupted, cleaning up") })
	end, err := run(ctx)
	if !quiet() { // it has run
		if err = errors.Join(parent.Err(), withoutCancel(err)); err != nil {
			fmt.Fprintf(s.err, "shunt: %v\n", err)
		}
		os.Exit(exitInterrupted)
	}
	if output == "json" {
		if err := writeJSON(s.out, end.facts); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "\n%s\n", end.claims.Verdict(end.seconds))
	if len(next) > 0 {
		fmt.Fprintf(out, "\nTry next:\n")
	}
	for _, line := range next {
		fmt.Fprintf(out, "  %-50s # %s\n", called()+" "+line[0], line[1])
	}
	if err != nil {
		return err
	}
	if !end.ok {
		return errSilent
	}
	return nil
}

func demoNeedsRoot() error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("The demo makes network namespaces and loads programs into the kernel, which only root may do.\n"+
		"It touches nothing outside its own namespaces and removes everything at its end. Please run:\n\n  %s", asRoot())
}

// shortDemo completes a demo of one command, which only root may run and which keeps nothing.
func shortDemo(s streams, c *cobra.Command, run func(context.Context, io.Writer) (ending, error)) *cobra.Command {
	var output string
	c.Args = noArguments
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := requireOutput(output); err != nil {
			return err
		}
		if err := demoNeedsRoot(); err != nil {
			return err
		}
		out := s.out
		if output == "json" {
			out = s.err
		}
		return tell(c.Context(), s, out, output, func(ctx context.Context) (ending, error) { return run(ctx, out) }, nil)
	}
	outputFlag(c, &output)
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

// called returns how this program was called, for commands that a reader can paste.
func called() string {
	if !strings.Contains(os.Args[0], "/go-build") {
		return os.Args[0]
	}
	if os.Getenv("SUDO_UID") != "" {
		return "go run -exec sudo ./cmd/shunt"
	}
	return "go run ./cmd/shunt"
}

// asRoot returns the command line with root's rights.
func asRoot() string {
	arguments := strings.Join(os.Args[1:], " ")
	if strings.Contains(os.Args[0], "/go-build") {
		return "go run -exec sudo ./cmd/shunt " + arguments
	}
	return "sudo " + os.Args[0] + " " + arguments
}

func cleanDemo(ctx context.Context, s streams, id, executable string) error {
	clean := func() (bool, error) { return demo.Clean(ctx, id, executable) }
	if diagdemo.Is(id) {
		clean = func() (bool, error) { return diagdemo.Clean(ctx, id) }
	}
	removed, err := clean()
	if err != nil {
		return err
	}
	if !removed {
		return fmt.Errorf("remove demo %s: there is no demo with this id; `shunt demo --keep` and `shunt demo diag` print the id", id)
	}
	_, err = fmt.Fprintf(s.out, "Demo %s is gone: processes, programs, maps, namespaces and files.\n", id)
	return err
}

// newDemoBackend makes the hidden command that the demo starts in each backend's namespace.
func newDemoBackend(s streams) *cobra.Command {
	var name, lab string
	var hold bool
	c := &cobra.Command{
		Use:    "backend",
		Hidden: true,
		Short:  "Run the servers of one of the demo's backends",
		Args:   noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			in := s.in
			if hold {
				in = nil
			}
			return demo.ServeBackend(c.Context(), name, in, s.out)
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the backend")
	c.Flags().StringVar(&lab, "lab", "", "id of the demo that starts the backend, by which the demo finds it")
	c.Flags().BoolVar(&hold, "hold", false, "stay when standard input ends")
	return c
}
