package command

import (
	"context"
	"fmt"
	"os"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/demo"
	"github.com/spf13/cobra"
)

func newDemo(s cli.Streams, others []cli.Product) *cobra.Command {
	var output, clean string
	var keep bool
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show a working balancer in network namespaces, with real HTTP and UDP traffic (needs root)",
		Long: `Build a network out of namespaces, start "shunt run" in it, send HTTP and UDP over IPv4 and IPv6
through XDP, take a backend away, kill the daemon, and check every claim that the demo makes.
The demo touches nothing outside its namespaces, and takes less than 20 seconds. It removes
everything at its end, also after Ctrl-C. It exits with 1 if a claim was not true.`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			if err := cli.DemoNeedsRoot(); err != nil {
				return err
			}
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the shunt binary, which the demo runs as balancer and backends: %w", err)
			}
			if clean != "" {
				return cleanDemo(c.Context(), s, others, clean, executable)
			}
			story := s.Out
			if output == "json" {
				story = s.Err
			}
			return runDemo(c.Context(), s, demo.Options{Executable: executable, Command: cli.Called(), Keep: keep, Out: story}, output)
		},
	}
	cli.OutputFlag(c, &output)
	c.Flags().BoolVar(&keep, "keep", false, "leave the demo in place at the end, and print how to look around")
	c.Flags().StringVar(&clean, "clean", "", "remove the kept or killed demo with this id; also takes the ids of shunt demo diag")
	c.AddCommand(newDemoBackend(s), newDemoMesh(s))
	for _, p := range others {
		c.AddCommand(p.Demos...)
	}
	return c
}

func runDemo(parent context.Context, s cli.Streams, options demo.Options, output string) error {
	return cli.Tell(parent, s, options.Out, output, func(ctx context.Context) (cli.Ending, error) {
		facts, err := demo.Run(ctx, options)
		return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
	}, [][2]string{
		{"demo --keep", "leaves the demo running, and prints how to look around"},
		{"demo -o json", "the same facts for a program"},
		{"schema", "shows what a configuration file may contain; `check --config FILE` tells whether yours is right"},
	})
}

func cleanDemo(ctx context.Context, s cli.Streams, others []cli.Product, id, executable string) error {
	var isOthers, removed bool
	var err error
	for _, p := range others {
		if p.CleanDemo != nil && !isOthers {
			isOthers, removed, err = p.CleanDemo(ctx, id)
		}
	}
	if !isOthers {
		removed, err = demo.Clean(ctx, id, executable)
	}
	if err != nil {
		return err
	}
	if !removed {
		return fmt.Errorf("there is nothing of demo %s: `shunt demo --keep` and `shunt demo diag` print the id that --clean takes", id)
	}
	_, err = fmt.Fprintf(s.Out, "Demo %s is gone: processes, programs, maps, namespaces and files.\n", id)
	return err
}

// newDemoBackend makes the hidden command that the demo starts in each backend's namespace.
func newDemoBackend(s cli.Streams) *cobra.Command {
	var name, lab string
	var hold bool
	c := &cobra.Command{
		Use:    "backend",
		Hidden: true,
		Short:  "Run the servers of one of the demo's backends",
		Args:   cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			in := s.In
			if hold {
				in = nil
			}
			return demo.ServeBackend(c.Context(), name, in, s.Out)
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the backend")
	c.Flags().StringVar(&lab, "lab", "", "id of the demo that starts the backend, by which the demo finds it")
	c.Flags().BoolVar(&hold, "hold", false, "stay when standard input ends")
	return c
}
