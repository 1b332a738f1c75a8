package command

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/diag/demo"
	"github.com/spf13/cobra"
)

func newDemoDiag(s cli.Streams) *cobra.Command {
	return cli.ShortDemo(s, &cobra.Command{
		Use:   "diag",
		Short: "Show how each diagnosing tool names a fault that the demo makes (needs root)",
		Long: `Make a slow disk, a slow network, a process for which the kernel keeps more and more memory, and a CPU with
too much work; let "shunt diag" io, ping, memleak and runq look at them, and check every claim of the demo
against the fault that it made. The demo uses only its own objects: a loop device in a mount namespace,
network namespaces, a cgroup, and processes; the tools show nothing else. It takes less than 20 seconds. It
removes everything at its end, also after Ctrl-C; if the demo was killed, "shunt demo --clean ID" removes
its remains. It exits with 1 if a claim was not true.`,
	}, func(ctx context.Context, out io.Writer) (cli.Ending, error) {
		executable, err := os.Executable()
		if err != nil {
			return cli.Ending{}, fmt.Errorf("find the shunt binary, which the demo runs as tools and as workers: %w", err)
		}
		facts, err := demo.Run(ctx, demo.Options{Executable: executable, Out: out})
		return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
	})
}

// newDemoDiagWorker is the hidden command that the diagnosing tools' demo starts to make its faults.
func newDemoDiagWorker(s cli.Streams) *cobra.Command {
	var order string
	c := &cobra.Command{
		Use:    "diag-worker",
		Hidden: true,
		Short:  "Make a fault of the diagnosing tools' demo",
		Args:   cli.NoArguments,
		RunE:   func(*cobra.Command, []string) error { return demo.Work(order, s.In, s.Out) },
	}
	c.Flags().StringVar(&order, "order", "", "the order, as JSON")
	return c
}
