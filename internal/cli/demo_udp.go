package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/shunt-lb/shunt/internal/udp/demo"
	"github.com/spf13/cobra"
)

func newDemoUDP(s streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "udp",
		Short: "Show a UDP server behind AF_XDP that has no rights, beside the kernel's sockets (needs root)",
		Long: `Build two network namespaces, have XDP hand the datagrams of one address and port to AF_XDP sockets,
and give these to a server that runs as nobody, without any capability. Compare it in the same run with
recvfrom, blocking and spinning, and check every claim that the demo makes; figures of speed are shown
and not claimed. The demo touches nothing outside its namespaces, and takes less than 20 seconds. It
removes everything at its end, also after Ctrl-C. It exits with 1 if a claim was not true.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return fmt.Errorf("the demo makes network namespaces and loads programs into the kernel, which only root may do.\n"+
					"It touches nothing outside its own namespaces and removes everything at its end. Please run:\n\n  %s", asRoot())
			}
			return runDemoUDP(c.Context(), s, output)
		},
	}
	outputFlag(c, &output)
	return c
}

func runDemoUDP(parent context.Context, s streams, output string) error {
	story := s.out
	if output == "json" {
		story = s.err
	}
	ctx, cancel := untilStopped(parent)
	defer cancel()
	// As in runDemo: nothing ends it before it has cleaned up.
	ctx, release := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGPIPE)
	defer release()
	quiet := context.AfterFunc(ctx, func() { fmt.Fprintln(s.err, "\nshunt: interrupted, cleaning up") })
	facts, err := demo.Run(ctx, demo.Options{Out: story})
	if !quiet() { // it has run
		if err = errors.Join(parent.Err(), withoutCancel(err)); err != nil {
			fmt.Fprintf(s.err, "shunt: %v\n", err)
		}
		os.Exit(exitInterrupted)
	}
	if output == "json" {
		if err := writeJSON(s.out, facts); err != nil {
			return err
		}
	}
	verdict := fmt.Sprintf("All %d claims were true", len(facts.Claims))
	if n := facts.Untrue(); n > 0 {
		verdict = fmt.Sprintf("%d of %d claims were NOT TRUE", n, len(facts.Claims))
	}
	fmt.Fprintf(story, "\n%s, in %.1f s.\n", verdict, facts.Seconds)
	if err != nil {
		return err
	}
	if !facts.OK {
		return errSilent
	}
	return nil
}

// newDemoUDPWorker is what the UDP demo starts as nobody.
func newDemoUDPWorker() *cobra.Command {
	return &cobra.Command{
		Use:    "udp-worker",
		Hidden: true,
		Short:  "Run the server of the UDP demo, which hands it its sockets at descriptor 3",
		Args:   noArguments,
		RunE:   func(*cobra.Command, []string) error { return demo.Work() },
	}
}
