// Package command has the commands of the pod shortcut.
package command

import (
	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Product has the pod shortcut's commands, and its parts of others.
func Product(in cli.Streams) cli.Product {
	return cli.Product{
		Commands:    []*cobra.Command{newAccelerate(in)},
		Demos:       []*cobra.Command{newDemoAccelerate(in)},
		PrintStatus: printAcceleration,
		Left:        left,
	}
}
