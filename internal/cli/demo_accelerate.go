package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/shunt-lb/shunt/internal/pod/demo"
	"github.com/spf13/cobra"
)

func newDemoAccelerate(s streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "accelerate",
		Short: "Show the shortcut between two pods of one host, beside the host's own path (needs root)",
		Long: `Build two network namespaces as pods and a third as their host, with netfilter rules as kube-proxy and
Calico write them, and have packets go from one pod to the other past the host's stack. Compare a
stream, requests, connections and datagrams by the plain path and by the shortcut in the same run, and
check every claim that the demo makes; figures of speed are shown and not claimed. The demo touches
nothing outside its namespaces, and takes less than 20 seconds. It removes everything at its end, also
after Ctrl-C. It exits with 1 if a claim was not true.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return fmt.Errorf("the demo makes network namespaces and loads programs into the kernel, which only root may do.\n"+
					"It touches nothing outside its own namespaces and removes everything at its end. Please run:\n\n  %s", asRoot())
			}
			return runDemoAccelerate(c.Context(), s, output)
		},
	}
	outputFlag(c, &output)
	return c
}

func runDemoAccelerate(parent context.Context, s streams, output string) error {
	out := s.out
	if output == "json" {
		out = s.err
	}
	return tell(parent, s, out, output, func(ctx context.Context) (ending, error) {
		facts, err := demo.Run(ctx, demo.Options{Out: out})
		return ending{facts, facts.Claims, facts.Seconds, facts.OK}, err
	}, nil)
}
