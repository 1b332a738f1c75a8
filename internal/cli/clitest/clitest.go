// Package clitest runs the commands of one product in its tests.
package clitest

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Main returns a function that runs a command line with a product's commands and no daemon, and returns the exit code.
func Main(product func(cli.Streams) cli.Product) func(args []string, in io.Reader, out, errOut io.Writer) int {
	line := func(s cli.Streams) *cobra.Command { return cli.Root(s, nil, product(s)) }
	return func(args []string, in io.Reader, out, errOut io.Writer) int {
		return cli.Main(line, args, in, out, errOut)
	}
}
