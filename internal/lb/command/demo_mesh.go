package command

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/demo/mesh"
	"github.com/spf13/cobra"
)

func newDemoMesh(s cli.Streams) *cobra.Command {
	return cli.ShortDemo(s, &cobra.Command{
		Use:   "mesh",
		Short: "Show machines that are balancers and servers at once, behind a router with ECMP (needs root)",
		Long: `Build a client, a router that spreads packets over several paths (ECMP), and machines that each run
"shunt run" and a web server. Hundreds of connections stay open while the router's paths change, a
machine is added, a server is drained, and a machine dies. The demo shows which machine balanced and
which one served, and checks every claim that it makes: only connections of the dead machine's server
break. The demo touches nothing outside its namespaces, and takes about half a minute. It removes
everything at its end, also after Ctrl-C. It exits with 1 if a claim was not true.`,
	}, func(ctx context.Context, out io.Writer) (cli.Ending, error) {
		executable, err := os.Executable()
		if err != nil {
			return cli.Ending{}, fmt.Errorf("find the shunt binary, which the demo runs on each machine: %w", err)
		}
		facts, err := mesh.Run(ctx, mesh.Options{Executable: executable, Out: out})
		return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
	})
}
