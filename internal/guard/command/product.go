// Package command has the commands of the guard.
package command

import (
	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Product has the guard's commands, and its parts of others.
func Product(in cli.Streams) cli.Product {
	return cli.Product{
		Commands: []*cobra.Command{newGuard(in)},
		Demos:    []*cobra.Command{newDemoGuard(in), newDemoGuardStage(in), newDemoGuardLedger(), newDemoGuardIntruder()},
		Left:     left,
	}
}
