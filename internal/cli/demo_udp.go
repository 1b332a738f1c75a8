package cli

import (
	"context"
	"fmt"
	"os"

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
	out := s.out
	if output == "json" {
		out = s.err
	}
	return tell(parent, s, out, output, func(ctx context.Context) (ending, error) {
		facts, err := demo.Run(ctx, demo.Options{Out: out})
		return ending{facts, facts.Claims, facts.Seconds, facts.OK}, err
	}, nil)
}

// newDemoUDPWorker is what the UDP demo starts as nobody.
func newDemoUDPWorker() *cobra.Command {
	return &cobra.Command{
		Use:    "udp-worker",
		Hidden: true,
		Short:  "Run the server of the UDP demo, which tells it what to do at descriptor 3",
		Args:   noArguments,
		RunE:   func(*cobra.Command, []string) error { return demo.Work() },
	}
}
