package command

import (
	"context"
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/pod/demo"
	"github.com/spf13/cobra"
)

func newDemoAccelerate(s cli.Streams) *cobra.Command {
	return cli.ShortDemo(s, &cobra.Command{
		Use:   "accelerate",
		Short: "Show the shortcut between two pods of one host, beside the host's own path (needs root)",
		Long: `Build two network namespaces as pods and a third as their host, with netfilter rules as kube-proxy and
Calico write them, and send packets from one pod to the other past the host's stack. Compare a
stream, requests, connections and datagrams by the plain path and by the shortcut in the same run, and
check every claim that the demo makes; figures of speed are shown and not claimed. The demo touches
nothing outside its namespaces, and takes less than 20 seconds. It removes everything at its end, also
after Ctrl-C. It exits with 1 if a claim was not true.`,
	}, func(ctx context.Context, out io.Writer) (cli.Ending, error) {
		facts, err := demo.Run(ctx, demo.Options{Out: out})
		return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
	})
}
