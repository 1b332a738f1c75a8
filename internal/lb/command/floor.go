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
	usageError = cli.UsageError
	target     = cli.Target
)

const (
	answerTimeout = cli.AnswerTimeout
	rowsMax       = cli.RowsMax
	loadsPrograms = cli.LoadsPrograms
)

var (
	errSilent       = cli.ErrSilent
	errStillBusy    = cli.ErrStillBusy
	noArguments     = cli.NoArguments
	requireOutput   = cli.RequireOutput
	requireRoot     = cli.RequireRoot
	requireInstance = cli.RequireInstance
	newLog          = cli.NewLog
	untilStopped    = cli.UntilStopped
	outputFlag      = cli.OutputFlag
	writeJSON       = cli.WriteJSON
	writeMessage    = cli.WriteMessage
	writeLine       = cli.WriteLine
	newTable        = cli.NewTable
	asRoot          = cli.AsRoot
)
