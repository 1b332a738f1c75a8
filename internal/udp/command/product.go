// Package command has the commands of the UDP path.
package command

import (
	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Product has the UDP path's commands, and its parts of others.
func Product(in cli.Streams) cli.Product {
	return cli.Product{
		Commands: []*cobra.Command{newUDP(in)},
		Demos:    []*cobra.Command{newDemoUDP(in), newDemoUDPWorker()},
		Left:     left,
	}
}
