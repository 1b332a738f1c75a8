// Package commands puts the command line of shunt together: it lists the products that have commands.
package commands

import (
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	diag "github.com/shunt-lb/shunt/internal/diag/command"
	guard "github.com/shunt-lb/shunt/internal/guard/command"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
	pod "github.com/shunt-lb/shunt/internal/pod/command"
	"github.com/shunt-lb/shunt/internal/products"
	udp "github.com/shunt-lb/shunt/internal/udp/command"
)

// Main runs the command line and returns the exit code.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	return cli.Main(line, args, in, out, errOut)
}

// Command returns the command line as it is, for manual pages and completions. It prints nothing.
func Command() *cobra.Command {
	return line(cli.Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
}

var line = lb.Line(products.All, guard.Product, udp.Product, pod.Product, diag.Product)
