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
	productReading = cli.ProductReading
)

const (
	rowsMax = cli.RowsMax
)

var (
	noArguments  = cli.NoArguments
	writeMessage = cli.WriteMessage
	newTable     = cli.NewTable
	oneOf        = cli.OneOf
)
