package command

import (
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/spf13/cobra"
)

// Main is shunt with these commands alone.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	return cli.Main(func(s cli.Streams) *cobra.Command { return cli.Root(s, nil, Product(s)) }, args, in, out, errOut)
}
