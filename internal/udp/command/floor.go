package command

import (
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
)

// streams are cli.Streams, by the names that these commands use.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

func streamsOf(s cli.Streams) streams { return streams{s.In, s.Out, s.Err} }

// The floor's parts, by the names that these commands use.
type (
	usageError     = cli.UsageError
	productReading = cli.ProductReading
)

var (
	errSilent     = cli.ErrSilent
	noArguments   = cli.NoArguments
	requireOutput = cli.RequireOutput
	untilStopped  = cli.UntilStopped
	writeJSON     = cli.WriteJSON
	writeMessage  = cli.WriteMessage
	writeLine     = cli.WriteLine
	newTable      = cli.NewTable
	oneOf         = cli.OneOf
)
