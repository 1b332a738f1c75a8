// Package command has the commands of the balancer, and the commands that cover the balancer and other products: status,
// uninstall and demo.
package command

import (
	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/node"
)

// Line makes a command line of the balancer and other products: daemon are the products that `shunt run` runs, and
// others have the others' commands. internal/commands has the line of all products. A test that needs fewer makes
// its own, so that it need not run when the code of the products that it leaves out has changed.
func Line(daemon func() []node.Product, others ...func(cli.Streams) cli.Product) func(cli.Streams) *cobra.Command {
	return func(s cli.Streams) *cobra.Command {
		var all []cli.Product
		for _, other := range others {
			all = append(all, other(s))
		}
		return cli.Root(s, daemon, append(all, product(s, daemon, all))...)
	}
}

// Alone is the line of the balancer and no other product, for tests.
func Alone(s cli.Streams) *cobra.Command {
	return Line(func() []node.Product { return []node.Product{daemon.Product(daemon.Options{})} })(s)
}

// product has the balancer's commands.
func product(s cli.Streams, daemon func() []node.Product, others []cli.Product) cli.Product {
	return cli.Product{Commands: []*cobra.Command{newStatus(s, others), newBackend(s), newOverride(s), newChain(s),
		newUninstall(s, daemon, others), newDecap(s), newDoctor(s), newDemo(s, others)}}
}
