package command

import (
	"context"
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/udp/demo"
	"github.com/spf13/cobra"
)

func newDemoUDP(s cli.Streams) *cobra.Command {
	return cli.ShortDemo(s, &cobra.Command{
		Use:   "udp",
		Short: "Show a UDP server without any rights behind AF_XDP, beside the kernel's sockets (needs root)",
		Long: `Build two network namespaces, let XDP hand the datagrams of one address and port to AF_XDP sockets,
and give the sockets to a server that runs as nobody, without any capability. Compare it in the same run with
recvfrom, blocking and spinning, and check every claim that the demo makes; figures of speed are shown
and not claimed. The demo touches nothing outside its namespaces, and takes less than 20 seconds. It
removes everything at its end, also after Ctrl-C. It exits with 1 if a claim was not true.`,
	}, func(ctx context.Context, out io.Writer) (cli.Ending, error) {
		facts, err := demo.Run(ctx, demo.Options{Out: out})
		return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
	})
}

// newDemoUDPWorker is the hidden command that the UDP demo starts as nobody.
func newDemoUDPWorker() *cobra.Command {
	return &cobra.Command{
		Use:    "udp-worker",
		Hidden: true,
		Short:  "Run the server of the UDP demo, which sends it orders at descriptor 3",
		Args:   cli.NoArguments,
		RunE:   func(*cobra.Command, []string) error { return demo.Work() },
	}
}
