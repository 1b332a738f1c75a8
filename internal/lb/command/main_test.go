package command

import (
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Main is shunt with the balancer alone.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	return cli.Main(Alone, args, in, out, errOut)
}
