// Package command has the commands of diagnosis.
package command

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/diag/demo"
)

// Product has the commands of diagnosis, and its parts of others.
func Product(in cli.Streams) cli.Product {
	return cli.Product{
		Commands: []*cobra.Command{newDiag(in)},
		Demos:    []*cobra.Command{newDemoDiag(in), newDemoDiagWorker(in)},
		CleanDemo: func(ctx context.Context, id string) (isIts, removed bool, err error) {
			if !demo.Is(id) {
				return false, false, nil
			}
			removed, err = demo.Clean(ctx, id)
			return true, removed, err
		},
	}
}
